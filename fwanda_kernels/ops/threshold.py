"""One threshold for the scores of many matrices: how many weights each row keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import _checks as checks
from .._checks import FP32
from .._dispatch import define
from .._ties import keep_last_ties

_HIGH_BITS, _LOW_BITS = 15, 16


@define(
    "select_threshold(Tensor[] weights, Tensor[] row_scales, Tensor[] col_scales, SymInt total, Tensor(a!)? bad)"
    " -> Tensor",
    fake=lambda weights, row_scales, col_scales, total, bad: weights[0].new_empty(
        [sum(w.shape[0] for w in weights)], dtype=torch.int64
    ),
    sample=lambda i: (
        [i.weight, i.weight * 2], [i.row_scale, i.row_scale], [i.scale, i.scale], i.rows * i.cols, i.bad(1),
    ),
)  # fmt: skip
def _select_threshold(
    weights: list[Tensor], row_scales: list[Tensor], col_scales: list[Tensor], total: int, bad: Tensor | None
) -> Tensor:
    """Two histograms, of the high and of the low bits of the scores; one matrix's scores exist at a time."""
    wrong_weight = torch.stack([checks.bad_weight(w) for w in weights]).any()
    wrong_scale = torch.stack([checks.bad_scale(s) for s in (*row_scales, *col_scales)]).any()
    code = wrong_weight.to(torch.int32) * checks.BAD_WEIGHT + wrong_scale.to(torch.int32) * checks.BAD_SCALE
    checks.report_bad("select_threshold", code, bad)

    def keys() -> Iterator[Tensor]:
        return (_score_bits(*matrix) for matrix in zip(weights, row_scales, col_scales, strict=True))

    high = sum(torch.bincount((key >> _LOW_BITS).flatten(), minlength=1 << _HIGH_BITS) for key in keys())
    bucket, above = _kth_bucket(high, total)
    low_mask = (1 << _LOW_BITS) - 1
    low = sum(torch.bincount(key[(key >> _LOW_BITS) == bucket] & low_mask, minlength=1 << _LOW_BITS) for key in keys())
    offset, above_low = _kth_bucket(low, total - above)
    threshold = (bucket << _LOW_BITS) | offset
    larger, ties = zip(*(((key > threshold).sum(1), (key == threshold).sum(1)) for key in keys()), strict=True)
    return keep_last_ties(torch.cat(larger), torch.cat(ties), total - above - above_low)


def _score_bits(weight: Tensor, row_scale: Tensor, col_scale: Tensor) -> Tensor:
    """[R, C] int32 bits of the scores: those of non-negative floats have the order of the floats."""
    score = (weight.float() * col_scale * row_scale[:, None]).abs_()
    score.masked_fill_((row_scale == 0)[:, None], 0)  # an overflow times 0 would be NaN
    return score.view(torch.int32)


def _kth_bucket(counts: Tensor, k: Tensor | int) -> tuple[Tensor, Tensor]:
    """Highest bucket at which the count from the top reaches k, and how many lie above it."""
    from_top = counts.flip(0).cumsum(0).flip(0)
    bucket = ((from_top >= k).sum() - 1).clamp(min=0)
    return bucket, from_top[bucket] - counts[bucket]


def select_threshold(
    weights: Sequence[Tensor],
    row_scales: Sequence[Tensor],
    col_scales: Sequence[Tensor],
    total: int,
    *,
    bad: Tensor | None = None,
) -> list[Tensor]:
    """Count, in each row, the weights among the `total` largest scores of all matrices together.

    The score is fp32(fp32(|W_ij| * col_scale_j) * row_scale_i). With the same col_scale and these counts as `keep`,
    row_topk_mask() gives the mask of a matrix.

    Args:
        weights: L matrices [R_l, C_l] bf16|fp16|fp32, finite, on one device.
        row_scales: L vectors [R_l] fp32, finite and >= 0.
        col_scales: L vectors [C_l] fp32, finite and >= 0.
        total: number KEPT over all matrices, 0 <= total <= sum of R_l * C_l.
        bad: as in row_topk_mask().

    Returns:
        L vectors [R_l] int64 that sum to total.

    Raises:
        ValueError: a shape, dtype, device or total does not fit; without `bad`, a value does not.

    Tie rule: among equal scores the lowest (matrix, row, column) is removed first; products too large or too small for
    fp32 score inf or 0, and so tie. The reference reads the weights
    three times and holds no score tensor larger than one matrix.
    """
    op = "select_threshold"
    checks.expect_lists(op, weights=weights, row_scales=row_scales, col_scales=col_scales)
    shapes = checks.expect_weights(op, weights)
    checks.expect_each(op, "row_scales", row_scales, [(rows,) for rows, _ in shapes], FP32, weights[0])
    checks.expect_each(op, "col_scales", col_scales, [(cols,) for _, cols in shapes], FP32, weights[0])
    checks.expect_bad(op, bad, weights[0])
    total, size = checks.as_count(op, "total", total), sum(rows * cols for rows, cols in shapes)
    if not 0 <= total <= size:
        raise ValueError(f"{op}: total must be in [0, {size}], got {total}")
    keep = _select_threshold(list(weights), list(row_scales), list(col_scales), total, bad)
    return list(keep.split([rows for rows, _ in shapes]))
