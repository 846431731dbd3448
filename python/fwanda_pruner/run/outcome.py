"""What comes out of a run: its record, and warnings of a result that was not asked for or is of little use."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch
from torch import nn

from ..allocate.search import Choice
from ..config import PruneConfig
from ..engine.all_weights import count_weights, count_zeros
from ..engine.engine import Engine
from ..engine.loop import PassRecord
from ..evaluate.perplexity import check_pruned, perplexity_of
from ..measure.statistics import Statistics
from ..model.shares import own_part
from ..model.targets import Skipped
from ..notes import warn
from ..report.record import MatrixRow, Report, first_backends, versions
from ..text.windows import tokens_sha256
from .energy import EnergyMeter
from .stage import Stages
from .texts import Texts

FEW_ZEROS = 0.0005  # share of the weights


@dataclass(frozen=True)
class Pruned:
    """What the stages from calibration to the comparison found.

    Attributes:
        config: the settings, with the allocation that a search chose.
        statistics: measured or given; None if the method needs none.
        choice: of the search; None without one.
        passes: how calibration ran; None without calibration.
        floored_rows, row_histogram, refit, domains: as in Report.
        rows: of the record, one for each pruned matrix.
    """

    config: PruneConfig
    statistics: Statistics | None
    choice: Choice | None
    passes: PassRecord | None
    floored_rows: int | None
    rows: list[MatrixRow]
    row_histogram: list[int]
    refit: dict | None
    domains: list[dict]


def perplexity(texts: Texts, dense: dict[str, float], pruned: dict[str, float], tokenizer) -> list[dict]:
    """Report.perplexity."""
    return [
        {"source": source, "dense": dense[source], "pruned": pruned[source]} | texts.protocol_of(source, tokenizer)
        for source in texts.evaluation
    ]


def skipped_row(engine: Engine, item: Skipped) -> MatrixRow:
    """The row of the record for a matrix that is not pruned."""
    size = sum(p.numel() for p in item.parameters)
    shared = [p for p in item.parameters if own_part(p) is not p]
    with nullcontext() if item.block is None else engine.block(item.block):
        zeros = sum(count_zeros(p for p in item.parameters if own_part(p) is p))
    if shared:
        zeros += sum(engine.ranks.gather(sum(count_zeros(map(own_part, shared)))))
    return MatrixRow(item.name, item.shape, size, size, zeros, skipped=item.reason)


def report(
    stage: Stages,
    engine: Engine,
    config: PruneConfig,
    texts: Texts,
    pruned: Pruned,
    rows: list[MatrixRow],
    perplexity: list[dict],
    energy: EnergyMeter,
    sampling_energy: dict,
) -> Report:
    """The record of a run whose model is pruned."""
    energy_details, counts = energy.to_dict(), count_weights(engine)
    energy_details["phases"] = sampling_energy | energy_details["phases"]
    chosen = None if pruned.choice is None else pruned.choice.to_dict()
    return Report(
        config={**_described(engine.model, config, engine), "chosen": chosen},
        matrices=rows,
        block_parameters=counts.block_parameters,
        model_parameters=counts.parameters,
        model_zeros=counts.zeros,
        perplexity=perplexity,
        seconds=dict(stage.seconds),
        peak_memory_bytes=max(engine.ranks.gather(_peak_memory(stage, engine.device))),
        energy=energy.result,
        energy_details=energy_details,
        versions=versions(engine.device),
        tokens_sha256=_calibration_sha256(texts, pruned.statistics),
        bos=_bos(texts, pruned.statistics),
        warnings=list(stage.notes),
        omega_floored_rows=pruned.floored_rows,
        domains=pruned.domains,
        passes=None if pruned.passes is None else asdict(pruned.passes),
        refit=pruned.refit,
        row_histogram=pruned.row_histogram,
        backends=first_backends(engine.device),
        ranks=engine.ranks.size,
        engine=engine.name,
        segment=engine.segment,
        bytes_loaded=engine.bytes_loaded,
    )


def warn_of_zeros(rows: Sequence[MatrixRow], asked: float) -> None:
    """Warns where zeros that were there before make the result sparser than was asked.

    Args:
        rows: of the pruned matrices.
        asked: share of the weights to remove, in [0, 1].
    """
    numel = sum(row.numel for row in rows)
    before = sum(row.zeros_before for row in rows) / numel
    found = sum(row.zeros for row in rows) / numel
    if before >= FEW_ZEROS and found - asked >= FEW_ZEROS:
        warn(
            f"{found:.2%} of the weights of the pruned matrices are 0, and {asked:.2%} were asked for: {before:.2%} "
            f"were 0 before, zeros stay 0, and some rows, groups or matrices held more of them than they should lose"
        )


def warn_of_damage(config: PruneConfig, model: nn.Module, perplexity: Sequence[dict], domains: Sequence[dict]) -> None:
    """Warns of a pruned model that is much worse than the dense one: on the evaluation texts, else on the domains.

    Args:
        config: of the run.
        model: the model.
        perplexity, domains: as in Report.
    """
    measured = {text["source"]: (text["dense"], text["pruned"]) for text in perplexity}
    if not measured:
        measured = {d["source"]: (perplexity_of(d["dense"]), perplexity_of(d["pruned"])) for d in domains}
    if note := check_pruned(measured, model.config.get_text_config().vocab_size, config):
        warn(note)


def _described(model: nn.Module, config: PruneConfig, engine: Engine) -> dict:
    """The settings of a run, with its model, and with the device and dtype that it used in place of "auto"."""
    dtype = str(engine.targets[0].module.weight.dtype).removeprefix("torch.")
    name = model.config.name_or_path
    return {"model": name, **config.to_dict(), "device": str(engine.device), "dtype": dtype}


def _calibration_sha256(texts: Texts, statistics: Statistics | None) -> str | None:
    if texts.calibration is not None:
        return tokens_sha256(texts.calibration)
    return None if statistics is None else statistics.tokens_sha256


def _bos(texts: Texts, statistics: Statistics | None) -> bool | None:
    return statistics.bos if texts.bos is None and statistics is not None else texts.bos


def _peak_memory(stage: Stages, device: torch.device) -> int:
    if device.type == "cuda":
        return stage.peak_bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
