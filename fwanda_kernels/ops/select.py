"""Selection of the largest scores of each row, with a count for each row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _checks as checks
from .._checks import BOOL, FP32, INT64
from .._dispatch import define
from .._ties import largest_of_rows


@define(
    "row_topk_mask(Tensor weight, Tensor scale, Tensor keep, Tensor(a!)? bad) -> Tensor",
    fake=lambda weight, scale, keep, bad: weight.new_empty(weight.shape, dtype=torch.bool),
    sample=lambda i: (i.weight, i.scale, i.keep, i.bad(1)),
)
def _row_topk_mask(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> Tensor:
    return _mask("row_topk_mask", weight, scale, keep, bad)


@define(
    "row_topk_prune_(Tensor(a!) weight, Tensor scale, Tensor keep, Tensor(b!)? bad) -> ()",
    fake=lambda weight, scale, keep, bad: None,
    sample=lambda i: (i.weight, i.scale, i.keep, i.bad(1)),
)
def _row_topk_prune_(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> None:
    _prune("row_topk_prune_", weight, scale, keep, bad)


def _mask(op: str, weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> Tensor:
    checks.report_bad(op, checks.bad_code(weight, scale, keep), bad)
    return largest_of_rows(weight.float().abs() * scale, keep.clamp(0, weight.shape[1]))


def _prune(op: str, weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> None:
    weight.masked_fill_(~_mask(op, weight, scale, keep, bad), 0)


def row_topk_mask(
    weight: Tensor,
    scale: Tensor,
    keep: int | Tensor,
    *,
    among: Tensor | None = None,
    bad: Tensor | None = None,
) -> Tensor:
    """Mask of the keep[i] weights of each row with the largest score |W_ij| * scale_j.

    Args:
        weight: [R, C] bf16|fp16|fp32, finite.
        scale: [C] fp32, finite and >= 0, e.g. the norm of each input column.
        keep: number kept, 0 <= keep <= C: one int for all rows, or [R] int64.
        among: [R, C] bool, True where a weight may be kept; None: anywhere. A row with fewer than keep[i] of them keeps
            all of those.
        bad: [1] int32 on the same device. With it, the call does not wait for the device to check values. Instead it
            ORs 1 (weight not finite), 2 (scale not finite or negative) or 4 (keep out of range) into `bad`; the mask
            then has no meaning.

    Returns:
        [R, C] bool, contiguous, True = keep; exactly keep[i] True in row i, or as many as `among` has.

    Raises:
        ValueError: a shape, dtype, device or int keep does not fit; without `bad`, a value does not.

    Tie rule: the score is one rounded fp32 product; among equal scores the lowest column is removed first. Products too
    large for fp32 all score inf, and those too small all score 0, so they tie; multiply all scales by one number to
    avoid that.
    Moves 3 B per bf16 weight, about 27 B with `among`. Source: Sun et al. 2024 (Wanda), equation 1; with a
    keep of its own for each row, the F-Wanda paper, algorithm 1.
    """
    keep = _check_selection("row_topk_mask", weight, scale, keep, bad)
    if among is None:
        return _row_topk_mask(weight, scale, keep, bad)
    checks.expect("row_topk_mask", "among", among, weight.shape, BOOL, weight)
    kept = _row_topk_mask(weight * among, scale, keep, bad)
    kept &= among
    # a weight outside `among` scores 0, so it takes a place only from zeros; the last zeros inside get those places
    left = among ^ kept
    unread = checks.new_flag(weight)  # without a flag the op would wait for the device
    missing = keep - kept.sum(1, dtype=torch.int32)
    last = _row_topk_mask(left.to(torch.bfloat16), torch.ones_like(scale), missing, unread)
    return kept.logical_or_(last & left)


def row_topk_prune_(weight: Tensor, scale: Tensor, keep: int | Tensor, *, bad: Tensor | None = None) -> None:
    """Set the weights that row_topk_mask() does not keep to +0.0, in place.

    Arguments, errors and tie rule are those of row_topk_mask(). Moves 4 B per bf16 weight.
    """
    keep = _check_selection("row_topk_prune_", weight, scale, keep, bad)
    _row_topk_prune_(weight, scale, keep, bad)


def _check_selection(op: str, weight: Tensor, scale: Tensor, keep: int | Tensor, bad: Tensor | None) -> Tensor:
    """Check the arguments; returns keep as [R] int64."""
    checks.expect_weight(op, weight)
    rows, cols = weight.shape
    checks.expect(op, "scale", scale, (cols,), FP32, weight)
    checks.expect_bad(op, bad, weight)
    if not isinstance(keep, Tensor):
        keep = checks.as_count(op, "keep", keep)
        if not 0 <= keep <= cols:
            raise ValueError(f"{op}: keep must be in [0, C]=[0, {cols}], got {keep}")
        return torch.full((rows,), keep, dtype=torch.int64, device=weight.device)
    checks.expect(op, "keep", keep, (rows,), INT64, weight)
    return keep


@define(
    "foreach_row_topk_prune_(Tensor(a!)[] weights, Tensor[] scales, Tensor[] keeps, Tensor(b!)? bad) -> ()",
    fake=lambda weights, scales, keeps, bad: None,
    sample=lambda i: ([i.weight, i.weight * 2], [i.scale, i.scale], [i.keep, i.keep], i.bad(2)),
)
def _foreach_row_topk_prune_(
    weights: list[Tensor], scales: list[Tensor], keeps: list[Tensor], bad: Tensor | None
) -> None:
    for i, (weight, scale, keep) in enumerate(zip(weights, scales, keeps, strict=True)):
        _prune(f"foreach_row_topk_prune_ at index {i}", weight, scale, keep, None if bad is None else bad[i : i + 1])


def foreach_row_topk_prune_(
    weights: Sequence[Tensor], scales: Sequence[Tensor], keeps: Sequence[Tensor], *, bad: Tensor | None = None
) -> None:
    """Call row_topk_prune_() on each matrix of a list, in one launch where the backend can.

    Args:
        weights: L matrices [R_l, C_l] bf16|fp16|fp32 without overlap, on one device.
        scales: L vectors [C_l] fp32.
        keeps: L vectors [R_l] int64.
        bad: [L] int32, the flag of row_topk_mask() for each matrix.

    Raises:
        ValueError: a length, shape, dtype or device does not fit; without `bad`, a value does not.

    Tie rule and result are those of row_topk_prune_().
    """
    op = "foreach_row_topk_prune_"
    checks.expect_lists(op, weights=weights, scales=scales, keeps=keeps)
    shapes = checks.expect_weights(op, weights)
    checks.expect_each(op, "scales", scales, [(cols,) for _, cols in shapes], FP32, weights[0])
    checks.expect_each(op, "keeps", keeps, [(rows,) for rows, _ in shapes], INT64, weights[0])
    checks.expect_bad(op, bad, weights[0], len(weights))
    _foreach_row_topk_prune_(list(weights), list(scales), list(keeps), bad)
