"""The sharded engine: each rank holds a share of every weight, and gathers a block when it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..model.shares import keep_share_
from ..model.targets import Target
from .loop import PassRecord, PassSettings
from .masks_in_passing import Masks
from .prefix import SharedPrefix
from .ranks import Ranks
from .resident import Block, ResidentEngine
from .resume import Unfinished
from .sums import Sums
from .threshold import select_threshold
from .walk import BlockWalk

_LEAST_TOKENS = 8192  # in a pass: it gathers each block as often for few windows as for many


class ShardedEngine(ResidentEngine):
    """A model whose decoder blocks FSDP2 divides over the ranks.

    Everything but the blocks lies on the device of each rank. Running a block gathers its weights, and frees them
    afterwards; in a backward pass they are gathered again. So all ranks must run equally many passes. The methods are
    those of `ResidentEngine`, with the same results: on a CPU, the bits of resident ranks. No block is compiled.

    Args:
        model, targets, settings, progress: as ResidentEngine; the model is one of model.sharding.shard_().
        ranks: over which the weights and the windows are divided.
    """

    name = "sharded"

    def __init__(
        self,
        model: nn.Module,
        targets: Sequence[Target],
        settings: PassSettings | None = None,
        *,
        progress: bool = True,
        ranks: Ranks,
    ):
        super().__init__(model, targets, settings, progress=progress, ranks=ranks)
        self.settings = _uncompiled(self.settings)
        fused = {id(t.slice_of.experts): t.slice_of.experts for t in self.targets if t.slice_of is not None}
        inside = [set(block.modules()) for block in self._blocks]
        self._fused = [[experts for experts in fused.values() if experts.module in modules] for modules in inside]

    @contextmanager
    def block(self, index: int, *, writes: bool = False) -> Iterator[Block]:
        module = self._blocks[index]
        shares = dict(module.named_parameters())
        module.set_reshard_after_forward(False, recurse=False)  # text may run through the model meanwhile
        module.unshard()
        try:
            self._follow(index)
            with super().block(index, writes=writes) as block:
                yield block
            if writes:
                with torch.no_grad():
                    for name, weight in module.named_parameters():
                        keep_share_(shares[name], weight)
        finally:
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()

    @contextmanager
    def running(self) -> Iterator[None]:
        handles = [
            block.register_forward_pre_hook(lambda *_, index=index: self._follow(index))
            for index, block in enumerate(self._blocks)
            if self._fused[index]
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def measure(
        self,
        tokens: Tensor,
        sums: Sums,
        *,
        backward: bool,
        label_seed: int | None = None,
        settings: PassSettings | None = None,
        label: str | None = None,
        unfinished: Unfinished | None = None,
    ) -> PassRecord:
        settings = _uncompiled(settings or self.settings)
        facts = {"label_seed": label_seed, "settings": settings, "label": label, "unfinished": unfinished}
        with self.running():
            return super().measure(tokens, sums, backward=backward, **facts)

    def window_losses(
        self,
        tokens: Tensor,
        masks: Masks | None = None,
        *,
        first_target: int = 1,
        settings: PassSettings | None = None,
        label: str | None = None,
        prefix: SharedPrefix | None = None,
    ) -> Tensor:
        facts = {"first_target": first_target, "label": label, "prefix": prefix}
        settings = None if settings is None else _uncompiled(settings)
        with self.running():
            return super().window_losses(tokens, masks, settings=settings, **facts)

    @contextmanager
    def walk(self, tokens: Tensor) -> Iterator[BlockWalk]:
        with self.running(), super().walk(tokens) as walk:
            yield walk

    def select_threshold(
        self, row_scales: Mapping[str, Tensor], column_scales: Mapping[str, Tensor], total: int
    ) -> dict[str, Tensor]:
        return select_threshold(self._named_weights, row_scales, column_scales, total)

    def _loading(self) -> dict[str, int]:
        return {"least_tokens": _LEAST_TOKENS}

    def _named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and weight [R, C] of each target; a weight stays in memory until the next block is asked for."""
        for index in range(self.block_count):
            with self.block(index) as block:
                yield from block.weights.items()

    def _follow(self, index: int) -> None:
        for experts in self._fused[index]:
            experts.follow()


def _uncompiled(settings: PassSettings) -> PassSettings:
    """Compiled blocks would not see that weights come and go."""
    return replace(settings, compile="off")
