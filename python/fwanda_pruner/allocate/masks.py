"""Masks without zeros in the weights: what a budget or a pattern would keep, and the loss of the model with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

import fwanda_kernels as fk

from ..config import PruneConfig
from ..engine.device import model_device
from ..engine.losses import find_decoder, summed_loss
from ..measure.statistics import Statistics
from ..model.targets import Target, find_blocks
from .budgets import Factors, keep_budgets, threshold_budgets

Masks = Mapping[str, Callable[[], Tensor]]  # name -> a call that gives [R, C] bool, True where kept
_BATCH_TOKENS = 16384


def masks_of(
    config: PruneConfig, targets: Sequence[Target], statistics: Statistics, factors: Factors | None = None
) -> Masks:
    """What the configured allocation or pattern keeps of the dense weights; with factors: what the scores with them do.

    Raises:
        UserError: the allocation has no budget.
    """
    scales = {t.name: column_scale(statistics, factors, t.name) for t in targets}
    if config.nm:
        return {t.name: partial(_pattern_mask, t, scales[t.name], *config.nm) for t in targets}
    if factors is None:
        budgets = keep_budgets(config, list(targets), statistics)
    else:
        budgets = threshold_budgets(config, targets, statistics, factors)
    return {t.name: partial(row_mask, t, scales[t.name], budgets[t.name]) for t in targets}


def column_scale(statistics: Statistics, factors: Factors | None, name: str) -> Tensor:
    """[C] fp32: what |W| is multiplied by, column by column, to rank the weights of a row."""
    norm = statistics.layer(name).norm
    return norm if factors is None else norm * factors.columns[name]


def row_mask(target: Target, scale: Tensor, keep: Tensor) -> Tensor:
    """[R, C] bool: in row i the keep[i] largest |W| * scale."""
    return fk.row_topk_mask(target.weight, scale, keep)


def _pattern_mask(target: Target, scale: Tensor, n: int, m: int) -> Tensor:
    """[R, C] bool: of every m columns the n largest |W| * scale; columns left over stay."""
    weight = target.weight
    whole = weight.shape[1] - weight.shape[1] % m
    mask = torch.ones_like(weight, dtype=torch.bool)
    mask[:, :whole] = fk.nm_mask(weight[:, :whole], scale[:whole], n, m)
    return mask


def kept_as_bits(masks: Masks) -> Masks:
    """The same masks, selected once and held in one bit a weight, for uses in quick succession."""
    return {name: _Bits(mask()) for name, mask in masks.items()}


class _Bits:
    """A mask in an eighth of its bytes; a call gives it."""

    def __init__(self, mask: Tensor):
        self._shape = mask.shape
        self._places = (2 ** torch.arange(8, device=mask.device)).to(torch.uint8)
        bits = functional.pad(mask.flatten(), (0, -mask.numel() % 8)).view(-1, 8)
        self._bytes = (bits * self._places).sum(1, dtype=torch.uint8)

    def __call__(self) -> Tensor:
        bits = (self._bytes[:, None] & self._places) != 0
        return bits.flatten()[: self._shape.numel()].view(self._shape)


def masked_loss(model: nn.Module, tokens: Tensor, targets: Sequence[Target], masks: Masks) -> float:
    """mean_loss() of the model with these masks; its weights are as before afterwards."""
    with masked_in_passing(model, targets, masks):
        return mean_loss(model, tokens)


@torch.no_grad()
def mean_loss(model: nn.Module, tokens: Tensor) -> float:
    """Mean next-token loss in nats over tokens [S, L]; inf where it is not finite."""
    decoder, device = find_decoder(model), model_device(model)
    size = max(1, _BATCH_TOKENS // tokens.shape[1])  # in masked_loss() a block is pruned once for each batch
    total = sum(summed_loss(model, decoder, ids.to(device)) for ids in tokens.split(size))
    mean = total / (tokens.shape[0] * (tokens.shape[1] - 1))
    return mean if math.isfinite(mean) else math.inf


@contextmanager
def masked_in_passing(model: nn.Module, targets: Sequence[Target], masks: Masks) -> Iterator[None]:
    """Within the block, each decoder block is pruned while it runs, and dense before and after.

    Holds a copy of the weights of one block.
    """
    kept: list[tuple[Tensor, Tensor]] = []  # weights, and copies of what they were

    def before(found: list[Target]):
        @torch.no_grad()
        def hook(*_):
            for target in found:
                mask = masks[target.name]()
                kept.append((target.weight, target.weight.clone()))
                target.weight.masked_fill_(~mask, 0)

        return hook

    def restore(*_) -> None:
        while kept:
            weight, dense = kept.pop()
            weight.copy_(dense)

    handles = []
    for index, block in enumerate(find_blocks(model)[1]):
        found = [target for target in targets if target.block == index]
        if found:
            handles += [block.register_forward_pre_hook(before(found)), block.register_forward_hook(restore)]
    try:
        yield
    finally:
        restore()
        for handle in handles:
            handle.remove()
