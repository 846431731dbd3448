"""One run, from a dense model and a text to a pruned model and its record.

text -> windows -> engine -> sums -> budgets or masks -> block loop -> record
"""

from __future__ import annotations

import resource
import warnings
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor, nn

from ..allocate.budgets import ScoreScales, count_floored_rows
from ..allocate.search import Choice
from ..config import CALIBRATION, PruneConfig
from ..engine.all_weights import WeightCounts, check_finite, count_weights, count_zeros
from ..engine.device import device_rules, evaluating, model_device
from ..engine.engine import Engine, make_engine
from ..errors import UserError
from ..evaluate.perplexity import engine_perplexity
from ..measure.statistics import Statistics
from ..methods.job import Inputs
from ..model.targets import Skipped, Target, check_model, find_targets, select_targets
from ..report.record import MatrixRow, Report, first_backends, versions
from ..text.windows import tokens_sha256
from . import stages
from .energy import EnergyMeter
from .read_texts import own_windows, read_texts
from .stage import Stages
from .state import RunState
from .texts import Texts, protocol, sources_of, with_sources


def prune(
    model: nn.Module,
    tokenizer=None,
    *,
    config: PruneConfig | None = None,
    statistics: Statistics | None = None,
    calibration: str | Sequence[str] | Tensor | None = None,
    eval: str | Tensor | Sequence[str | Tensor] | None = None,
    state: RunState | None = None,
    progress: bool = True,
    **settings,
) -> Report:
    """Prunes a causal language model in place.

    Args:
        model: a Hugging Face causal language model with floating-point weights, on the device to work on.
        tokenizer: its tokenizer; not needed when all text is given as token ids.
        config: the settings; or give them by name in **settings.
        statistics: of this dense model, from collect(); the forward and backward pass is then left out.
        calibration: overrides config.calibration: a text SOURCE[:SHARE], a list of them, or token ids [S, L] int64,
            which are used as they are.
        eval: overrides config.eval: a text, token ids [S, L] int64, or a list of them. Token ids are used as they are,
            and the record names them "tokens", "tokens 2" and so on.
        state: keeps finished stages, so that an interrupted run does not repeat them.
        progress: show bars, where standard error is a terminal.
        **settings: fields of PruneConfig, e.g. method="fwanda", allocation="global", sparsity=0.5.

    Returns:
        The record of the run; save it with the model by save_pruned().

    Raises:
        UserError: a setting, the text or the model does not allow it; the message is one line.
        TypeError: both config and settings are given.
    """
    if config is not None and settings:
        raise TypeError(f"give either config or settings, got both (settings: {', '.join(settings)})")
    report, _ = run_prune(
        model,
        tokenizer,
        config=config or PruneConfig.from_dict(settings),
        statistics=statistics,
        calibration=calibration,
        eval=eval,
        state=state,
        progress=progress,
    )
    return report


def run_prune(
    model: nn.Module,
    tokenizer,
    *,
    config: PruneConfig,
    statistics: Statistics | None = None,
    calibration: str | Sequence[str] | Tensor | None = None,
    eval: str | Tensor | Sequence[str | Tensor] | None = None,
    state: RunState | None = None,
    progress: bool = True,
    choice: Choice | None = None,
    own: Tensor | None = None,
) -> tuple[Report, Choice | None]:
    """prune(), for callers that run several settings with the same masks.

    Args:
        choice: what the search of "response" or "auto" chose in an earlier run on the same text. It is taken, and the
            search is left out.
        own: [S, L] int64 windows that the model wrote, from own_text(). If None or too few, the model writes them.

    Returns:
        The record, and the choice of the search; None without a search.

    Raises:
        UserError: as prune().
    """
    device = model_device(model)
    state = state or RunState()
    stage = Stages(state, device)
    with stage.noting(), evaluating(model), device_rules(model, config):
        config = with_sources(config, calibration, eval, statistics)
        sources = sources_of(config, calibration, eval, statistics)
        targets, skipped = plan(model, config)
        engine = make_engine(model, targets, config, progress=progress)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        stages.check_given(config, model, statistics)
        stages.identify(state, config, engine, sources, statistics)

        reads = stages.reads(config, statistics)
        own, sampling_energy = stages.own_text(stage, engine, config, tokenizer, own, **reads)
        texts = stages.texts(stage, engine, config, tokenizer, sources, own, **reads)
        dense = stages.dense_perplexity(stage, engine, texts)
        with stage.metered(EnergyMeter(device, config.energy)) as energy:
            statistics, passes = stages.statistics(stage, engine, config, texts, statistics)
            judge = stages.judge(stage, engine, config, texts, statistics, choice)
            choice = stages.choice(stage, engine, config, texts, statistics, judge, choice)
            settled, scales = (config, None) if choice is None else (choice.apply(config), choice.scales)
            budgets = stages.budgets(stage, engine, settled, statistics, scales, searched=choice is not None)
            refit = stages.refit(engine, settled, statistics, judge, scales)
            before = stages.losses_before(stage, engine, settled, texts, statistics)
            token_sq_grads, gradient_passes = stages.token_sq_grads(stage, engine, config, texts)
            inputs = Inputs(texts.calibration, statistics, budgets, scales, token_sq_grads, refit)
            rows, row_histogram, refitted = stages.pruned_blocks(stage, engine, settled, inputs)
            domains = stages.domains(stage, engine, config, texts, before)
        pruned = stages.pruned_perplexity(stage, engine, texts)

        energy_details = energy.to_dict()
        energy_details["phases"] = sampling_energy | energy_details["phases"]
        passes, counts = passes or gradient_passes, count_weights(engine)
        report = Report(
            config={**_described(model, config, engine), "chosen": None if choice is None else choice.to_dict()},
            matrices=[*rows, *map(_skipped_row, skipped)],
            block_parameters=counts.block_parameters,
            model_parameters=counts.parameters,
            model_zeros=counts.zeros,
            perplexity=[
                {"source": source, "dense": dense[source], "pruned": pruned[source]}
                | protocol(windows, texts.bos, tokenizer)
                for source, windows in texts.evaluation.items()
            ],
            seconds=dict(stage.seconds),
            peak_memory_bytes=_peak_memory(stage, device),
            energy=energy.result,
            energy_details=energy_details,
            versions=versions(device),
            tokens_sha256=_calibration_sha256(texts, statistics),
            bos=texts.bos,
            warnings=list(stage.notes),
            omega_floored_rows=_floored_rows(settled, scales, statistics, targets),
            domains=domains,
            passes=None if passes is None else asdict(passes),
            refit=refitted,
            row_histogram=row_histogram,
            backends=first_backends(device),
        )
    return report, choice


def collect(
    model: nn.Module,
    tokenizer=None,
    *,
    config: PruneConfig,
    calibration=None,
    progress: bool = True,
    own: Tensor | None = None,
) -> Statistics:
    """Measures statistics for any sparsity, pattern and allocation of wanda and fwanda.

    One forward pass over the text, and one backward pass over `fisher_samples` of its windows, serve them all.

    Args:
        model, tokenizer, config, calibration, progress: as prune(). Only the settings of the text, of BOS, of the
            Fisher information and of the passes count.
        own: as run_prune().

    Raises:
        UserError: as prune().
    """
    config = PruneConfig(**config.select(*CALIBRATION, "passes"))
    stage = Stages(RunState(), model_device(model))
    with stage.noting(), evaluating(model), device_rules(model, config):
        config = with_sources(config, calibration, None, None)
        targets, _ = plan(model, config)
        engine = make_engine(model, targets, config, progress=progress)
        sources = sources_of(config, calibration, None, None)
        reads = {"calibration": True, "domains": False}
        own, _ = stages.own_text(stage, engine, config, tokenizer, own, **reads)
        texts = read_texts(config, engine, tokenizer, sources, own, **reads)
        return stages.measured_statistics(stage, engine, config, texts, config.fisher)


def own_text(model: nn.Module, tokenizer, *, configs: Sequence[PruneConfig], progress: bool = True) -> Tensor | None:
    """Lets the model write the text that runs with these settings read, once for all of them.

    Args:
        model, tokenizer, progress: as prune().
        configs: with the same seqlen, own_seed() and start_token. There are as many windows as the run that reads most
            needs.

    Returns:
        [S, L] int64 windows on the CPU; None if no run reads any.

    Raises:
        UserError: as prune().
    """
    stage = Stages(RunState(), model_device(model))
    needs = [(config, stages.reads(config, None)) for config in (config.resolved() for config in configs)]
    config, reads = max(needs, key=lambda need: own_windows(need[0], **need[1]))
    with stage.noting(), evaluating(model), device_rules(model, config):
        engine = make_engine(model, [], config, progress=progress)
        return stages.own_text(stage, engine, config, tokenizer, **reads)[0]


def evaluate_model(model: nn.Module, tokenizer, *, config: PruneConfig, progress: bool = True) -> dict:
    """Perplexity of a model as it is, with its protocol, and the zeros it holds.

    Args:
        model, tokenizer: a causal language model and its tokenizer.
        config: eval, eval_seqlen (default: seqlen), eval_windows and bos count.
        progress: show a bar.

    Returns:
        {"perplexity": [{source, perplexity, seqlen, windows, tokens_sha256, bos, tokenizer}], one for each text,
        "sparsity": {"matrices": over the prunable matrices, "model": over all parameters}}.

    Raises:
        UserError: as prune().
    """
    stage = Stages(RunState(), model_device(model))
    with stage.noting(), evaluating(model):
        config = with_sources(config, None, None, None)
        targets, _ = plan(model, config)
        engine = make_engine(model, targets, config, progress=progress)
        sources = sources_of(config, None, None, None)
        texts = read_texts(config, engine, tokenizer, sources, calibration=False)
        found = [
            {"source": source, "perplexity": engine_perplexity(engine, windows, label=f"perplexity, {source}")}
            | protocol(windows, texts.bos, tokenizer)
            for source, windows in texts.evaluation.items()
        ]
        return {"perplexity": found, "sparsity": _zero_shares(count_weights(engine))}


def plan(model: nn.Module, config: PruneConfig) -> tuple[list[Target], list[Skipped]]:
    """The targets of a model and what is left alone, after all checks that need no text.

    Raises:
        UserError: as prune().
    """
    if hasattr(model, "_orig_mod"):
        raise UserError("the model is a wrapper of torch.compile; give the model itself, model._orig_mod")
    if config.nm and not config.responds and config.method == "fwanda":
        warnings.warn(
            f"row budgets have no effect inside an n:m group, so fwanda with {config.pattern} equals wanda with "
            f"{config.pattern}; --allocation response also weighs columns and differs",
            stacklevel=2,
        )
    if config.weighs_tokens and config.allocation != "uniform":
        warnings.warn(f"--allocation {config.allocation} has no effect with --pattern {config.pattern}", stacklevel=2)
    targets, skipped = select_targets(*find_targets(model), config)
    check_model(model, targets, config)
    check_finite(make_engine(model, targets, config))
    return targets, skipped


def _described(model: nn.Module, config: PruneConfig, engine: Engine) -> dict:
    """The settings of a run, with its model, and with the device and dtype that it used in place of "auto"."""
    dtype = str(engine.targets[0].module.weight.dtype).removeprefix("torch.")
    name = model.config.name_or_path
    return {"model": name, **config.to_dict(), "device": str(engine.device), "dtype": dtype}


def _calibration_sha256(texts: Texts, statistics: Statistics | None) -> str | None:
    if texts.calibration is not None:
        return tokens_sha256(texts.calibration)
    return None if statistics is None else statistics.tokens_sha256


def _floored_rows(
    config: PruneConfig, scales: ScoreScales | None, statistics: Statistics | None, targets: list[Target]
) -> int | None:
    """Rows whose omega was raised to the floor of row budgets and of F-SparseGPT's weights of rows; None without."""
    if scales is not None or not config.needs_fisher or not (config.traits.weighs_rows or config.allocation == "row"):
        return None
    return count_floored_rows(statistics, [target.name for target in targets])


def _skipped_row(item: Skipped) -> MatrixRow:
    size = sum(p.numel() for p in item.parameters)
    return MatrixRow(item.name, item.shape, size, size, sum(count_zeros(item.parameters)), skipped=item.reason)


def _zero_shares(counts: WeightCounts) -> dict[str, float]:
    return {
        "matrices": counts.target_zeros / counts.target_parameters,
        "model": counts.zeros / counts.parameters,
    }


def _peak_memory(stage: Stages, device: torch.device) -> int:
    if device.type == "cuda":
        return stage.peak_bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
