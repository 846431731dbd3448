"""Masks that apply only while a block runs, so that a pruned model is tried without pruning it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from ..model.targets import Target


class Masks(Protocol):
    """Which weights of a model stay."""

    def prune_(self, weights: Mapping[str, Tensor]) -> None:
        """Sets the removed weights of some matrices [R, C], given by their names, to 0 in place.

        The matrices hold their dense weights. The call does not wait for the device.
        """


@contextmanager
def masked_blocks(blocks: Sequence[nn.Module], targets: Sequence[Target], masks: Masks) -> Iterator[None]:
    """Prunes each decoder block while it runs; before and after that, the block is dense.

    Holds a copy of the weights of one block.
    """
    dense: list[tuple[Tensor, Tensor]] = []  # weights of the running block, and copies of their dense values

    def prune_targets(block_targets: list[Target]):
        @torch.no_grad()
        def hook(*_):
            weights = {target.name: target.weight for target in block_targets}
            dense.extend((weight, weight.clone()) for weight in weights.values())
            masks.prune_(weights)

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
                block.register_forward_pre_hook(prune_targets(block_targets)),
                block.register_forward_hook(restore, always_call=True, prepend=True),  # FSDP frees the weights
            ]
    try:
        yield
    finally:
        restore()
        for handle in handles:
            handle.remove()
