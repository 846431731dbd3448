"""How the results of stages are stored for an interrupted run."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from ..allocate.budgets import ScoreScales
from ..allocate.response import Round
from ..allocate.search import Choice
from ..engine.loop import PassRecord
from ..measure.statistics import Statistics
from ..methods.block_loop import PrunedBlock
from ..report.record import MatrixRow
from ..text.domains import Domain
from .stage import Codec
from .texts import Texts

NUMBER: Codec[float] = Codec(lambda number: ({}, number), lambda _, number: number)
TOKENS: Codec[Tensor] = Codec(lambda tokens: ({"tokens": tokens}, None), lambda tensors, _: tensors["tokens"])
VALUES: Codec[dict] = Codec(lambda values: ({}, values), lambda _, values: values)
_DOMAIN_TENSORS, _DOMAIN_VALUES = ("reported", "choice"), ("source", "calibrated", "guard", "unread")

Tensors = dict[str, Tensor]


def _encode_texts(texts: Texts) -> tuple[Tensors, dict]:
    tensors = {name: getattr(texts, name) for name in ("calibration", "labels")}
    tensors |= {f"evaluation{i}": windows for i, windows in enumerate(texts.evaluation.values())}
    for i, domain in enumerate(texts.domains):  # clones: files share no memory, and windows may serve two purposes
        tensors |= {f"domain{i}.{part}": getattr(domain, part).clone() for part in _DOMAIN_TENSORS}
    domains = [{name: getattr(domain, name) for name in _DOMAIN_VALUES} for domain in texts.domains]
    values = {"bos": texts.bos, "ids": list(texts.ids), "domains": domains, "evaluation": list(texts.evaluation)}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}, values


def _decode_texts(tensors: Tensors, values: dict) -> Texts:
    domains = [
        Domain(**facts, **{part: tensors[f"domain{i}.{part}"] for part in _DOMAIN_TENSORS})
        for i, facts in enumerate(values["domains"])
    ]
    evaluation = {source: tensors[f"evaluation{i}"] for i, source in enumerate(values["evaluation"])}
    known = {name: tensors.get(name) for name in ("calibration", "labels")}
    bos, ids = values["bos"], tuple(values["ids"])
    return Texts(**known, evaluation=evaluation, domains=tuple(domains), bos=bos, ids=ids)


TEXTS: Codec[Texts] = Codec(_encode_texts, _decode_texts)


def statistics_codec(device: torch.device) -> Codec[Statistics]:
    return Codec(Statistics.to_parts, lambda tensors, values: Statistics.of_parts(tensors, values).to(device))


def token_sq_grads_codec(device: torch.device) -> Codec[tuple[Tensors, PassRecord]]:
    return Codec(
        lambda result: (result[0], asdict(result[1])),
        lambda tensors, values: (_on(device, tensors), PassRecord(**values)),
    )


def budgets_codec(device: torch.device) -> Codec[Tensors]:
    return Codec(lambda budgets: (budgets, None), lambda tensors, _: _on(device, tensors))


def choice_codec(device: torch.device) -> Codec[Choice]:
    def decode(tensors: Tensors, values: dict) -> Choice:
        return Choice(**values, scales=ScoreScales.of_tensors(tensors, device) if tensors else None)

    return Codec(lambda choice: (choice.scales.tensors() if choice.scales else {}, choice.to_dict()), decode)


def round_codec(device: torch.device) -> Codec[Round]:
    def encode(state: Round) -> tuple[Tensors, dict]:
        values = {"losses": state.losses, "micro_batch": state.micro_batch, "checkpointing": state.checkpointing}
        return state.scales.tensors(), values

    return Codec(encode, lambda tensors, values: Round(ScoreScales.of_tensors(tensors, device), **values))


def _encode_block(block: PrunedBlock) -> tuple[Tensors, dict]:
    return dict(block.weights), {
        "rows": [asdict(row) for row in block.rows],
        "row_histogram": block.row_histogram.tolist(),
        "refitted": block.refitted,
        "unseen": block.unseen,
    }


def _decode_block(tensors: Tensors, values: dict) -> PrunedBlock:
    rows = [MatrixRow(**{**row, "shape": tuple(row["shape"])}) for row in values["rows"]]
    row_histogram = torch.tensor(values["row_histogram"], dtype=torch.int64, device="cpu")
    return PrunedBlock(tensors, rows, row_histogram, values["refitted"], values["unseen"])


BLOCK: Codec[PrunedBlock] = Codec(_encode_block, _decode_block)


def _on(device: torch.device, tensors: Tensors) -> Tensors:
    return {name: tensor.to(device) for name, tensor in tensors.items()}
