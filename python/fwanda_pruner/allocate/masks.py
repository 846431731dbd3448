"""Masks that a method would keep, without zeros in the weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

import fwanda_kernels as fk

from ..config import PruneConfig
from ..engine.engine import Engine
from ..engine.masks_in_passing import MaskFunctions
from ..measure.statistics import Statistics
from .budgets import ScoreScales, keep_budgets


def masks_of(
    config: PruneConfig, engine: Engine, statistics: Statistics, scales: ScoreScales | None = None
) -> MaskFunctions:
    """Masks that the configured allocation or pattern selects on the dense weights.

    Args:
        config: resolved.
        engine: of the dense model.
        statistics: of that model.
        scales: multiply the scores.

    Raises:
        UserError: the allocation has no budget.
    """
    column_scales = {t.name: column_scale(statistics, scales, t.name) for t in engine.targets}
    if config.nm:
        n, m = config.nm
        return {name: partial(_pattern_mask, scale=scale, n=n, m=m) for name, scale in column_scales.items()}
    budgets = keep_budgets(config, engine, statistics, scales)
    return {name: partial(row_mask, scale=scale, keep=budgets[name]) for name, scale in column_scales.items()}


def column_scale(statistics: Statistics, scales: ScoreScales | None, name: str) -> Tensor:
    """[C] fp32 s: the weights of a row are ranked by |W_ij| * s_j."""
    norm = statistics.layer(name).norm
    return norm if scales is None else norm * scales.columns[name]


def row_mask(weight: Tensor, *, scale: Tensor, keep: Tensor) -> Tensor:
    """[R, C] bool: in row i the keep[i] largest |W| * scale."""
    return fk.row_topk_mask(weight, scale, keep)


def _pattern_mask(weight: Tensor, *, scale: Tensor, n: int, m: int) -> Tensor:
    """[R, C] bool: of every m columns the n largest |W| * scale. Columns left over at the end stay."""
    whole = weight.shape[1] - weight.shape[1] % m
    mask = torch.ones_like(weight, dtype=torch.bool)
    mask[:, :whole] = fk.nm_mask(weight[:, :whole], scale[:whole], n, m)
    return mask


def select_once(engine: Engine, masks: MaskFunctions) -> MaskFunctions:
    """The same masks, selected now and held as one bit a weight, for uses in quick succession."""
    selected: dict[str, Callable[[Tensor], Tensor]] = {}
    for index in range(engine.block_count):
        with engine.block(index) as block:
            selected |= {name: MaskBits(masks[name](weight)) for name, weight in block.weights.items()}
    return selected


class MaskBits:
    """A mask [R, C] bool held as one bit a weight; a call gives it back."""

    def __init__(self, mask: Tensor):
        self._shape = mask.shape
        self._places = (2 ** torch.arange(8, device=mask.device)).to(torch.uint8)
        bits = functional.pad(mask.flatten(), (0, -mask.numel() % 8)).view(-1, 8)
        self._bytes = (bits * self._places).sum(1, dtype=torch.uint8)

    def __call__(self, _weight: Tensor | None = None) -> Tensor:
        bits = (self._bytes[:, None] & self._places) != 0
        return bits.flatten()[: self._shape.numel()].view(self._shape)
