"""C++ on CPUs: row and n:m selection, from csrc/cpu.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from .._checks import report_bad
from . import load_library

load_library(("row_topk_mask", "row_topk_prune_", "nm_mask", "nm_prune_"))
_C = torch.ops.fwanda_C


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
