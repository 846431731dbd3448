"""Facts about all weights, gathered one block at a time from any engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fwanda_kernels import unpack_weight

from ..errors import UserError
from ..model.packed import packed_weights
from .engine import Engine


def fingerprint(engine: Engine) -> str:
    """sha256 of a sample of each weight in fp32, and of the headers of packed ones. It tells models apart."""
    digest = hashlib.sha256()
    for index in range(engine.block_count):
        with engine.block(index) as block:
            for weight in block.weights.values():
                rows, cols = weight.shape
                sample = weight[:: max(1, rows // 8), :: max(1, cols // 8)]
                digest.update(sample.float().cpu().contiguous().numpy().tobytes())
            for _, packed, _ in packed_weights(block.module):
                digest.update(bytes(packed[:64].tolist()))  # the header, which holds a hash of the rest
    return digest.hexdigest()


def check_finite(engine: Engine) -> None:
    """Refuses parameters with NaN or inf.

    Raises:
        UserError: naming the first such parameter.
    """
    _refuse_not_finite(engine.parameters_outside_blocks())
    for index in range(engine.block_count):
        with engine.block(index) as block:
            _refuse_not_finite((f"{engine.block_path(index)}.{n}", p) for n, p in block.module.named_parameters())
            for name, packed, header in packed_weights(block.module):  # one at a time is dense
                _refuse_not_finite([(f"{engine.block_path(index)}.{name}", unpack_weight(packed, header))])


def _refuse_not_finite(named: Iterable[tuple[str, Tensor]]) -> None:
    parameters = dict(named)
    finite = torch.stack([p.detach().isfinite().all() for p in parameters.values()]).tolist() if parameters else []
    for name, good in zip(parameters, finite, strict=True):
        if not good:
            raise UserError(f"{name} has NaN or inf values: the checkpoint is broken, or too large for its dtype")


@dataclass(frozen=True)
class WeightCounts:
    """Counts over a whole model; tied parameters count once.

    Attributes:
        parameters, zeros: of the whole model.
        block_parameters: of the decoder blocks.
        target_parameters, target_zeros: of the targets, and of packed matrices.
    """

    parameters: int
    zeros: int
    block_parameters: int
    target_parameters: int
    target_zeros: int


def count_weights(engine: Engine) -> WeightCounts:
    """Counts parameters and zeros."""
    outside = [p for _, p in engine.parameters_outside_blocks()]
    inside_size = inside_zeros = target_size = target_zeros = 0
    counted: set[int] = set()  # parameters that several blocks share count once
    for index in range(engine.block_count):
        with engine.block(index) as block:
            parameters = [p for p in block.module.parameters() if id(p) not in counted]
            counted |= {id(p) for p in parameters}
            weights = list(block.weights.values())
            inside_size += sum(p.numel() for p in parameters)
            inside_zeros += sum(count_zeros(parameters))
            target_size += sum(w.numel() for w in weights)
            target_zeros += sum(count_zeros(weights))
            for _, packed, header in packed_weights(block.module):
                size, zeros = header.shape[0] * header.shape[1], *count_zeros([unpack_weight(packed, header)])
                inside_size, inside_zeros = inside_size + size, inside_zeros + zeros
                target_size, target_zeros = target_size + size, target_zeros + zeros
    return WeightCounts(
        parameters=inside_size + sum(p.numel() for p in outside),
        zeros=inside_zeros + sum(count_zeros(outside)),
        block_parameters=inside_size,
        target_parameters=target_size,
        target_zeros=target_zeros,
    )


def count_zeros(tensors: Iterable[Tensor]) -> list[int]:
    """Zeros of each tensor; waits for the device once."""
    tensors = list(tensors)
    if not tensors:
        return []
    return torch.stack([tensor.numel() - torch.count_nonzero(tensor) for tensor in tensors]).tolist()
