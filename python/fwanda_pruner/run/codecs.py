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
from .stage import Codec
from .texts import HeldOut, Texts

NUMBER: Codec[float] = Codec(lambda number: ({}, number), lambda _, number: number)
NUMBERS: Codec[dict[str, float]] = Codec(lambda numbers: ({}, numbers), lambda _, numbers: numbers)

Tensors = dict[str, Tensor]


def _encode_texts(texts: Texts) -> tuple[Tensors, dict]:
    tensors = {"calibration": texts.calibration}
    tensors |= {f"evaluation-{i}": windows for i, windows in enumerate(texts.evaluation.values())}
    values = {"bos": texts.bos, "unread": None, "evaluation": list(texts.evaluation)}
    if texts.held_out is not None:
        tensors["held_out"] = texts.held_out.tokens  # they may be calibration windows: files share no memory
        values["unread"] = texts.held_out.unread
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}, values


def _decode_texts(tensors: Tensors, values: dict) -> Texts:
    held_out = HeldOut(tensors["held_out"], values["unread"]) if "held_out" in tensors else None
    evaluation = {source: tensors[f"evaluation-{i}"] for i, source in enumerate(values["evaluation"])}
    return Texts(tensors.get("calibration"), evaluation, held_out, values["bos"])


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
        values = {"loss": state.loss, "micro_batch": state.micro_batch, "checkpointing": state.checkpointing}
        return state.scales.tensors(), values

    return Codec(encode, lambda tensors, values: Round(ScoreScales.of_tensors(tensors, device), **values))


def _encode_block(block: PrunedBlock) -> tuple[Tensors, dict]:
    return dict(block.weights), {
        "rows": [asdict(row) for row in block.rows],
        "row_histogram": block.row_histogram.tolist(),
    }


def _decode_block(tensors: Tensors, values: dict) -> PrunedBlock:
    rows = [MatrixRow(**{**row, "shape": tuple(row["shape"])}) for row in values["rows"]]
    return PrunedBlock(tensors, rows, torch.tensor(values["row_histogram"], dtype=torch.int64))


BLOCK: Codec[PrunedBlock] = Codec(_encode_block, _decode_block)


def _on(device: torch.device, tensors: Tensors) -> Tensors:
    return {name: tensor.to(device) for name, tensor in tensors.items()}
