"""C++ on CPUs: row and n:m selection, from csrc/cpu.cpp, and packed weights, from csrc/cpu_packed.cpp."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from .._checks import report_bad
from ..ops.packed import altered
from . import load_library

_SCHEMAS = (
    "row_topk_mask(Tensor weight, Tensor scale, Tensor keep, Tensor(a!) out) -> int",
    "row_topk_prune_(Tensor(a!) weight, Tensor scale, Tensor keep) -> int",
    "nm_mask(Tensor weight, Tensor scale, int n, int m, Tensor(a!) out) -> int",
    "nm_prune_(Tensor(a!) weight, Tensor scale, int n, int m) -> int",
    "packed_linear(Tensor x, Tensor packed, Tensor? bias, int rows, int columns, Tensor(a!) out) -> int",
    "unpack_weight(Tensor packed, Tensor(a!) out) -> int",
)
load_library(*_SCHEMAS)
_FUNCTIONS = {name: getattr(torch.ops.fwanda_C, name).default for name in (s.partition("(")[0] for s in _SCHEMAS)}
_MOST_TOKENS = 16  # more are faster with the dense weight
_REFUSED = 8  # csrc/bad.h


def row_topk_mask(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> Tensor:
    mask = _empty("row_topk_mask", weight.shape, torch.bool)
    _report("row_topk_mask", _FUNCTIONS["row_topk_mask"](weight, scale, keep, mask), bad)
    return mask


def row_topk_prune_(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> None:
    _report("row_topk_prune_", _FUNCTIONS["row_topk_prune_"](weight, scale, keep), bad)


def foreach_row_topk_prune_(
    weights: list[Tensor], scales: list[Tensor], keeps: list[Tensor], bad: Tensor | None
) -> None:
    for i, (weight, scale, keep) in enumerate(zip(weights, scales, keeps, strict=True)):
        code = _FUNCTIONS["row_topk_prune_"](weight, scale, keep)
        _report(f"foreach_row_topk_prune_ at index {i}", code, None if bad is None else bad[i : i + 1])


def nm_mask(weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> Tensor:
    mask = _empty("nm_mask", weight.shape, torch.bool)
    _report("nm_mask", _FUNCTIONS["nm_mask"](weight, scale, n, m, mask), bad)
    return mask


def nm_prune_(weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> None:
    _report("nm_prune_", _FUNCTIONS["nm_prune_"](weight, scale, n, m), bad)


def unpack_weight(packed: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    out = _empty("unpack_weight", (rows, columns), dtype)
    _expect_whole("unpack_weight", _FUNCTIONS["unpack_weight"](packed.contiguous(), out))
    return out


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, rows: int, columns: int) -> Tensor:
    if not columns:
        return NotImplemented
    if len(x) > _MOST_TOKENS:
        return linear(x, unpack_weight(packed, rows, columns, x.dtype), bias)
    bias = None if bias is None else bias.contiguous()
    out = _empty("packed_linear", (len(x), rows), x.dtype)
    code = _FUNCTIONS["packed_linear"](x.contiguous(), packed.contiguous(), bias, rows, columns, out)
    _expect_whole("packed_linear", code)
    return out


def _empty(op: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Room for the result of an op.

    Raises:
        torch.OutOfMemoryError: there is none. torch has only a RuntimeError of many lines for it.
    """
    try:
        return torch.empty(shape, dtype=dtype, device="cpu")
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        message = f"{op}: out of memory: no room for the result on the CPU; free memory, or give less at a time"
        raise torch.OutOfMemoryError(message) from error


def _report(op: str, code: int, bad: Tensor | None) -> None:
    """Report a selection's code as report_bad() does, or raise RuntimeError."""
    _expect_taken(op, code)
    report_bad(op, code, bad)


def _expect_whole(op: str, code: int) -> None:
    """Raise ValueError if the bytes of the packed weight are altered."""
    _expect_taken(op, code)
    if code:
        raise altered(op)


def _expect_taken(op: str, code: int) -> None:
    if code == _REFUSED:
        raise RuntimeError(
            f"{op}: the C++ library does not take these shapes or dtypes; call it through fwanda_kernels"
        )
