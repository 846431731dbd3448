"""One threshold for the scores of all targets, with the weights of one block in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

_LOW_BITS = 16  # of the 31 bits of a score; the others are the high ones
_LOW_MASK = (1 << _LOW_BITS) - 1


def select_threshold(
    weights: Callable[[], Iterator[tuple[str, Tensor]]],
    row_scales: Mapping[str, Tensor],
    column_scales: Mapping[str, Tensor],
    total: int,
) -> dict[str, Tensor]:
    """name -> [R] int64, equal to those of fk.select_threshold() on all weights at once.

    Histograms of the high and then of the low bits of the scores are added up block by block. A third reading counts
    each row. So all weights are read three times.

    Args:
        weights: begins to read the weights: their names, and [R, C] bf16, fp16 or fp32.
        row_scales, column_scales, total: as Engine.select_threshold().
    """

    def scores() -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights():
            if name in row_scales:
                yield name, _score_bits(weight, row_scales[name], column_scales[name])

    def histogram(values: Callable[[Tensor], Tensor], size: int) -> Tensor:
        return sum(torch.bincount(values(bits).flatten(), minlength=size) for _, bits in scores())

    high, above = _bucket_of(histogram(lambda bits: bits >> _LOW_BITS, 1 << (31 - _LOW_BITS)), total)
    low_counts = histogram(lambda bits: bits[bits >> _LOW_BITS == high] & _LOW_MASK, 1 << _LOW_BITS)
    low, above_low = _bucket_of(low_counts, total - above)
    threshold = high << _LOW_BITS | low
    counts = {name: ((bits > threshold).sum(1), (bits == threshold).sum(1)) for name, bits in scores()}
    return _with_ties({name: counts[name] for name in row_scales}, total - above - above_low)


def _score_bits(weight: Tensor, row_scale: Tensor, column_scale: Tensor) -> Tensor:
    """[R, C] int32 bits of the scores |W_ij| * column_scale_j * row_scale_i: they have the order of the scores."""
    score = (weight.float() * column_scale * row_scale[:, None]).abs_()
    score.masked_fill_((row_scale == 0)[:, None], 0)  # an overflow times 0 would be NaN
    return score.view(torch.int32)


def _bucket_of(counts: Tensor, rank: Tensor | int) -> tuple[Tensor, Tensor]:
    """The bucket of the score with this rank from the top, and how many scores lie above the bucket."""
    from_top = counts.flip(0).cumsum(0).flip(0)
    bucket = ((from_top >= rank).sum() - 1).clamp(min=0)
    return bucket, from_top[bucket] - counts[bucket]


def _with_ties(counts: Mapping[str, tuple[Tensor, Tensor]], kept: Tensor) -> dict[str, Tensor]:
    """Larger scores of each row and those of its ties that stay: the last `kept` of all."""
    ties = torch.cat([ties for _, ties in counts.values()])
    after = ties.flip(0).cumsum(0).flip(0) - ties
    stay = torch.minimum(ties, (kept - after).clamp(min=0)).split([len(ties) for _, ties in counts.values()])
    return {name: larger + tied for (name, (larger, _)), tied in zip(counts.items(), stay, strict=True)}
