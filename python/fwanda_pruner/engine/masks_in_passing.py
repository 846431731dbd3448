"""Masks that apply only while a block runs, so that a pruned model is tried without pruning it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..model.targets import Target

MaskFunctions = Mapping[str, Callable[[Tensor], Tensor]]
"""Name of a matrix -> a function that takes its weight [R, C] and gives its mask [R, C] bool, True where kept."""


@contextmanager
def masked_blocks(blocks: Sequence[nn.Module], targets: Sequence[Target], masks: MaskFunctions) -> Iterator[None]:
    """Prunes each decoder block while it runs; before and after that, the block is dense.

    Holds a copy of the weights of one block.
    """
    dense: list[tuple[Tensor, Tensor]] = []  # weights of the running block, and copies of their dense values

    def mask_of(block_targets: list[Target]):
        @torch.no_grad()
        def hook(*_):
            for target in block_targets:
                weight = target.weight
                mask = masks[target.name](weight)
                dense.append((weight, weight.clone()))
                weight.masked_fill_(~mask, 0)

        return hook

    def restore(*_) -> None:
        while dense:
            weight, copy = dense.pop()
            weight.copy_(copy)

    handles = []
    for index, block in enumerate(blocks):
        block_targets = [target for target in targets if target.block == index]
        if block_targets:
            handles += [
                block.register_forward_pre_hook(mask_of(block_targets)),
                block.register_forward_hook(restore, always_call=True),
            ]
    try:
        yield
    finally:
        restore()
        for handle in handles:
            handle.remove()
