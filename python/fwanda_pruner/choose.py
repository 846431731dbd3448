"""Which allocation: masks are tried in passing, block by block, on text that calibration did not read."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from tqdm import tqdm

import fwanda_kernels as fk

from .budgets import keep_budgets
from .calibrate import Statistics
from .config import PruneConfig
from .errors import UserError
from .head import find_decoder, summed_loss
from .model import Target, find_blocks

HELD_OUT = 8  # windows
_BATCH_TOKENS = 16384
# (b, c) of the global allocation: the measured optimum is flat, and its place differs between models
_EXPONENTS = ((0.75, 0.5), (1.0, 0.5), (1.0, 0.75), (0.75, 0.25), (0.5, 0.5), (0.5, 0.25))


def candidates(config: PruneConfig) -> dict[str, PruneConfig]:
    """What "auto" chooses from, by a short name: uniform rows as Wanda, the published rule, the global allocation."""
    found = {name: replace(config, allocation=name) for name in ("uniform", "row")}
    for b, c in _EXPONENTS:
        found[f"global b={b:g} c={c:g}"] = replace(config, allocation="global", row_exponent=b, layer_exponent=c)
    return found


def try_masks(
    model: nn.Module,
    tokens: Tensor,
    targets: Sequence[Target],
    statistics: Statistics,
    configs: Mapping[str, PruneConfig],
    *,
    progress: bool = True,
) -> dict[str, float]:
    """Loss of the masks of each config, without an update of the weights, which are as before afterwards.

    Args:
        model: a dense causal language model in eval mode.
        tokens: [S, L] int64 windows, better not those of the calibration.
        targets: its matrices.
        statistics: of the dense model, with g2 where an allocation reads it.
        configs: name -> resolved config.
        progress: show a bar.

    Returns:
        name -> mean next-token loss in nats; inf where it is not finite or the allocation has no budget.
    """
    decoder, device = find_decoder(model), targets[0].weight.device
    size = max(1, _BATCH_TOKENS // tokens.shape[1])  # a block is pruned once for each batch
    losses = {}
    for name, config in tqdm(configs.items(), desc="try", unit="mask", disable=None if progress else True):
        try:
            budgets = keep_budgets(config, list(targets), statistics)
        except UserError:
            losses[name] = math.inf
            continue
        with torch.no_grad(), masked_in_passing(model, targets, statistics, budgets):
            total = sum(summed_loss(model, decoder, ids.to(device)) for ids in tokens.split(size))
        mean = total / (tokens.shape[0] * (tokens.shape[1] - 1))
        losses[name] = mean if math.isfinite(mean) else math.inf
    return losses


@contextmanager
def masked_in_passing(
    model: nn.Module, targets: Sequence[Target], statistics: Statistics, budgets: Mapping[str, Tensor]
) -> Iterator[None]:
    """Within the block, each decoder block is pruned while it runs, and dense before and after.

    Holds a copy of the weights of one block.
    """
    kept: dict[Target, Tensor] = {}

    def before(found: list[Target]):
        def hook(*_):
            for target in found:
                kept[target] = target.weight.clone()
            weights, scales = [t.weight for t in found], [statistics.layer(t.name).norm for t in found]
            fk.foreach_row_topk_prune_(weights, scales, [budgets[t.name] for t in found])

        return hook

    def restore(*_) -> None:
        while kept:
            target, weight = kept.popitem()
            target.weight.copy_(weight)

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


def best(losses: Mapping[str, float]) -> str:
    """The name with the lowest loss, the first of equals.

    Raises:
        UserError: none is finite.
    """
    name = min(losses, key=losses.get)
    if not math.isfinite(losses[name]):
        raise UserError("--allocation auto: no allocation gives a finite loss on the held-out text; choose one")
    return name
