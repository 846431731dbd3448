"""n:m selection, and the packed forms of 2:4."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks as checks
from .._checks import FP32
from .._dispatch import define
from .._ties import largest_of_rows


@define(
    "nm_mask(Tensor weight, Tensor scale, int n, int m, Tensor(a!)? bad) -> Tensor",
    fake=lambda weight, scale, n, m, bad: weight.new_empty(weight.shape, dtype=torch.bool),
    sample=lambda i: (i.weight, i.scale, 2, 4, i.bad(1)),
)
def _nm_mask(weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> Tensor:
    return _mask("nm_mask", weight, scale, n, m, bad)


@define(
    "nm_prune_(Tensor(a!) weight, Tensor scale, int n, int m, Tensor(b!)? bad) -> ()",
    fake=lambda weight, scale, n, m, bad: None,
    sample=lambda i: (i.weight, i.scale, 2, 4, i.bad(1)),
)
def _nm_prune_(weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> None:
    weight.masked_fill_(~_mask("nm_prune_", weight, scale, n, m, bad), 0)


def _mask(op: str, weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> Tensor:
    checks.report_bad(op, checks.bad_code(weight, scale), bad)
    groups = (weight.float().abs() * scale).unflatten(1, (-1, m) if weight.shape[1] else (0, m)).flatten(0, 1)
    return largest_of_rows(groups, n).view(weight.shape)


def nm_mask(weight: Tensor, scale: Tensor, n: int, m: int, *, bad: Tensor | None = None) -> Tensor:
    """Mask that keeps n of every m consecutive weights of a row, those with the largest |W_ij| * scale_j.

    Args:
        weight: [R, C] bf16|fp16|fp32, finite; C a multiple of m.
        scale: [C] fp32, finite and >= 0.
        n: number KEPT in a group, 0 <= n <= m.
        m: columns in a group.
        bad: as in row_topk_mask().

    Returns:
        [R, C] bool, contiguous, True = keep.

    Raises:
        ValueError: a shape, dtype, device or the pattern does not fit; without `bad`, a value does not.

    Tie rule: that of row_topk_mask(), in each group. Moves 3 B per bf16 weight.
    """
    n, m = _check_pattern("nm_mask", weight, scale, n, m, bad)
    return _nm_mask(weight, scale, n, m, bad)


def nm_prune_(weight: Tensor, scale: Tensor, n: int, m: int, *, bad: Tensor | None = None) -> None:
    """Set the weights that nm_mask() does not keep to +0.0, in place.

    Arguments, errors and tie rule are those of nm_mask(). Moves 4 B per bf16 weight.
    """
    n, m = _check_pattern("nm_prune_", weight, scale, n, m, bad)
    _nm_prune_(weight, scale, n, m, bad)


def _check_pattern(op: str, weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> tuple[int, int]:
    checks.expect_weight(op, weight)
    checks.expect(op, "scale", scale, weight.shape[1:], FP32, weight)
    checks.expect_bad(op, bad, weight)
    n, m = checks.expect_pattern(op, n, m)
    if weight.shape[1] % m:
        raise ValueError(f"{op}: C={weight.shape[1]} columns are not a multiple of m={m}")
    return n, m


@define(
    "compress_24(Tensor weight, Tensor scale, Tensor(a!)? bad) -> (Tensor, Tensor)",
    fake=lambda weight, scale, bad: (
        weight.new_empty([weight.shape[0], weight.shape[1] // 2]),
        weight.new_empty([weight.shape[0], weight.shape[1] // 16], dtype=torch.int16),
    ),
    sample=lambda i: (i.half_weight(32, 64), i.scale_of(64), i.bad(1)),
)
def _compress_24(weight: Tensor, scale: Tensor, bad: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, cols = weight.shape
    kept = _mask("compress_24", weight, scale, 2, 4, bad).view(rows, cols // 4, 4)
    positions = kept.to(torch.uint8).sort(dim=2, descending=True, stable=True).indices[..., :2]
    values = weight.reshape(rows, cols // 4, 4).gather(2, positions).view(rows, cols // 2)
    nibbles = (positions[..., 0] | positions[..., 1] << 2).view(rows, cols // 16, 4)
    shifts = torch.tensor([0, 4, 8, 12], device=weight.device)
    words = (nibbles << shifts).sum(2).to(torch.int16)
    meta = torch.empty(rows * (cols // 16), dtype=torch.int16, device=weight.device)
    meta[_meta_offsets(rows, cols // 16, weight.device).flatten()] = words.flatten()
    return values, meta.view(rows, cols // 16)


def _meta_offsets(rows: int, words: int, device) -> Tensor:
    """[rows, words] place of each 16-bit word of metadata in the order that the sparse tensor cores read.

    Within 32 rows, the two high bits of the row number become its low bits. Then the off-diagonal words of each 2 x 2
    square swap, and pairs of columns are stored column-major.
    """
    r = torch.arange(rows, device=device)[:, None]
    w = torch.arange(words, device=device)[None, :]
    moved = (r & ~31) | (r & 7) << 2 | (r & 24) >> 3
    shift = (w & 1) - (moved & 1)
    moved, w = moved + shift, w - shift
    return (w >> 1) * 2 * rows + moved * 2 + (w & 1)


def compress_24(weight: Tensor, scale: Tensor, *, bad: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Select 2:4 as nm_mask() does and pack the result in the layout of torch's CUTLASS sparse kernels.

    Args:
        weight: [R, C] bf16|fp16, finite; R and C multiples of 32.
        scale: [C] fp32, finite and >= 0.
        bad: as in row_topk_mask().

    Returns:
        values: [R, C/2] in the weight's dtype, the two kept weights of each group in column order.
        meta: [R, C/16] int16: two bits for each kept position, four groups in an element, reordered for the kernels.

    Raises:
        ValueError: a shape, dtype or device does not fit; without `bad`, a value does not.

    Moves 3.125 B per weight. Source of the layout: the metadata order of CUTLASS for sparse tensor cores of compute
    capability 8.x, as torch's SparseSemiStructuredTensorCUTLASS reads it.
    """
    op = "compress_24"
    _check_pattern(op, weight, scale, 2, 4, bad)
    if weight.dtype == torch.float32:
        raise ValueError(f"{op}: weight must be bfloat16 or float16, got float32")
    if weight.shape[0] % 32 or weight.shape[1] % 32:
        raise ValueError(f"{op}: R and C must be multiples of 32, got {list(weight.shape)}")
    return _compress_24(weight, scale, bad)


def compress_24_cusparselt(weight: Tensor, scale: Tensor, *, bad: Tensor | None = None) -> Tensor:
    """Select 2:4 as nm_mask() does and pack the result for cuSPARSELt, the runtime that Hopper needs.

    Args:
        weight: [R, C] bf16|fp16 on a CUDA device; not modified.
        scale: [C] fp32, finite and >= 0.
        bad: as in row_topk_mask().

    Returns:
        The packed matrix, as `torch._cslt_sparse_mm` takes it.

    Raises:
        ValueError: as compress_24(), or the weight is not on a CUDA device.
        RuntimeError: this build of torch has no cuSPARSELt.
    """
    _check_pattern("compress_24_cusparselt", weight, scale, 2, 4, bad)
    if not weight.is_cuda:
        raise ValueError(f"compress_24_cusparselt: weight must be on a CUDA device, got {weight.device}")
    pruned = weight.clone(memory_format=torch.contiguous_format)
    _nm_prune_(pruned, scale, 2, 4, bad)
    return torch._cslt_compress(pruned)
