"""The tie rule in plain torch: what the reference and the backends share.

Among equal scores the entry that comes first goes first: the lowest column of a row, then the lowest row and matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor


def keep_last_ties(larger: Tensor, ties: Tensor, kept: Tensor) -> Tensor:
    """Keep counts of rows: all larger scores, and the last `kept` of the scores that tie.

    Args:
        larger: [R] int64, scores above the threshold in each row, over all matrices in order.
        ties: [R] int64, scores equal to the threshold in each row.
        kept: [] int64, how many of the ties stay.

    Returns:
        [R] int64.
    """
    after = ties.flip(0).cumsum(0).flip(0) - ties
    return larger + torch.minimum(ties, (kept - after).clamp(min=0))


def largest_of_rows(score: Tensor, count: Tensor | int) -> Tensor:
    """[R, C] mask, contiguous, of the largest scores of each row: count, or count[i] of an [R] int64, in [0, C]."""
    return ~lowest_of_rows(score, score.shape[1] - count)


def lowest_of_rows(score: Tensor, count: Tensor | int) -> Tensor:
    """[R, C] mask, contiguous, of the lowest scores of each row: count, or count[i] of an [R] int64."""
    order = torch.argsort(score, dim=1, stable=True)
    rank = torch.arange(score.shape[1], device=score.device)
    chosen = rank < (count[:, None] if isinstance(count, Tensor) else count)
    mask = torch.empty(score.shape, dtype=torch.bool, device=score.device)
    return mask.scatter_(1, order, chosen.expand_as(order))


def lowest(score: Tensor, count: int) -> Tensor:
    """Mask of the `count` lowest entries of a vector."""
    if count == 0:
        return torch.zeros_like(score, dtype=torch.bool)
    kth = score.kthvalue(count).values
    below, equal = score < kth, score == kth
    return below | (equal & (equal.cumsum(0) <= count - below.sum()))
