"""Masks that an allocation selects, without zeros in the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import fwanda_kernels as fk

from ..config import PruneConfig
from ..engine.engine import Engine
from ..engine.masks_in_passing import Masks
from ..measure.statistics import Statistics
from .budgets import ScoreScales, keep_budgets


@dataclass(frozen=True)
class RowMasks:
    """In each row the budgeted number of weights with the largest |W_ij| * scale_j.

    Attributes:
        scales: name -> [C] fp32.
        budgets: name -> [R] int64.
    """

    scales: Mapping[str, Tensor]
    budgets: Mapping[str, Tensor]

    def prune_(self, weights: Mapping[str, Tensor]) -> None:
        scales, budgets = [self.scales[name] for name in weights], [self.budgets[name] for name in weights]
        fk.foreach_row_topk_prune_(list(weights.values()), scales, budgets, bad=_unread(weights))


@dataclass(frozen=True)
class PatternMasks:
    """Of every m consecutive weights of a row the n with the largest |W_ij| * scale_j; columns left over stay.

    Attributes:
        scales: name -> [C] fp32.
        n, m: of the pattern.
    """

    scales: Mapping[str, Tensor]
    n: int
    m: int

    def prune_(self, weights: Mapping[str, Tensor]) -> None:
        for (name, weight), bad in zip(weights.items(), _unread(weights).split(1), strict=True):
            whole = weight.shape[1] - weight.shape[1] % self.m
            fk.nm_prune_(weight[:, :whole], self.scales[name][:whole], self.n, self.m, bad=bad)


def _unread(weights: Mapping[str, Tensor]) -> Tensor:
    """A flag for bad values for each weight. Nobody reads them: the values were checked before, and a call with a flag
    does not wait for the device.
    """
    return torch.zeros(len(weights), dtype=torch.int32, device=next(iter(weights.values())).device)


@dataclass(frozen=True)
class PackedMasks:
    """Selected masks, one bit for each weight: to apply them takes less time than to select them again.

    Attributes:
        packed: name -> [R, ceil(C / 8)] uint8, as fk.pack_mask() packs a mask.
    """

    packed: Mapping[str, Tensor]

    def prune_(self, weights: Mapping[str, Tensor]) -> None:
        for name, weight in weights.items():
            weight.copy_(fk.masked_weight(weight, self.packed[name]))


def masks_of(
    config: PruneConfig, engine: Engine, statistics: Statistics, scales: ScoreScales | None = None
) -> RowMasks | PatternMasks:
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
        return PatternMasks(column_scales, *config.nm)
    return RowMasks(column_scales, keep_budgets(config, engine, statistics, scales))


def column_scale(statistics: Statistics, scales: ScoreScales | None, name: str) -> Tensor:
    """[C] fp32 s: the weights of a row are ranked by |W_ij| * s_j."""
    norm = statistics.layer(name).norm
    return norm if scales is None else norm * scales.columns[name]


def pack(engine: Engine, masks: Masks) -> PackedMasks:
    """Selects masks on the dense weights and packs them. A weight that is 0 counts as removed."""
    packed: dict[str, Tensor] = {}
    for index in range(engine.block_count):
        with engine.block(index) as block:
            weights = {name: weight.clone() for name, weight in block.weights.items()}
            if weights:
                masks.prune_(weights)
            packed |= {name: fk.pack_mask(weight != 0) for name, weight in weights.items()}
    return PackedMasks(packed)
