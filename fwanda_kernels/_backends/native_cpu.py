"""C++ on CPUs: row and n:m selection, from csrc/cpu.cpp, and packed weights, from csrc/cpu_packed.cpp."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from .._checks import report_bad
from . import load_library

load_library(("row_topk_mask", "row_topk_prune_", "nm_mask", "nm_prune_", "packed_linear", "unpack_weight"))
_C = torch.ops.fwanda_C
_MOST_TOKENS = 16  # more are faster with the dense weight


def row_topk_mask(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> Tensor:
    mask, code = _C.row_topk_mask(weight, scale, keep)
    report_bad("row_topk_mask", code, bad)
    return mask


def row_topk_prune_(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> None:
    report_bad("row_topk_prune_", _C.row_topk_prune_(weight, scale, keep), bad)


def foreach_row_topk_prune_(
    weights: list[Tensor], scales: list[Tensor], keeps: list[Tensor], bad: Tensor | None
) -> None:
    for i, (weight, scale, keep) in enumerate(zip(weights, scales, keeps, strict=True)):
        code = _C.row_topk_prune_(weight, scale, keep)
        report_bad(f"foreach_row_topk_prune_ at index {i}", code, None if bad is None else bad[i : i + 1])


def nm_mask(weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> Tensor:
    mask, code = _C.nm_mask(weight, scale, n, m)
    report_bad("nm_mask", code, bad)
    return mask


def nm_prune_(weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> None:
    report_bad("nm_prune_", _C.nm_prune_(weight, scale, n, m), bad)


def unpack_weight(packed: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    like = torch.empty(0, dtype=dtype, device=packed.device)
    return _C.unpack_weight(packed.contiguous(), like, rows, columns)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, rows: int, columns: int) -> Tensor:
    if not columns:
        return NotImplemented
    if len(x) > _MOST_TOKENS:
        return linear(x, unpack_weight(packed, rows, columns, x.dtype), bias)
    bias = None if bias is None else bias.contiguous()
    return _C.packed_linear.default(x.contiguous(), packed.contiguous(), bias, rows, columns)
