"""The sharded engine: each rank holds a share of every weight, and gathers a block when it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..model.shares import keep_share_
from ..model.targets import Target
from .loop import PassSettings
from .ranks import Ranks
from .resident import Block, ResidentEngine
from .threshold import select_threshold

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
    _fixed = {"compile": "off"}  # compiled blocks would not see that weights come and go

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
        self._fused = self._fused_experts()

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

    def select_threshold(
        self, row_scales: Mapping[str, Tensor], column_scales: Mapping[str, Tensor], total: int
    ) -> dict[str, Tensor]:
        return select_threshold(self._named_weights, row_scales, column_scales, total)

    def _loading(self) -> dict[str, int]:
        return {"least_tokens": _LEAST_TOKENS}

    def _follow(self, index: int) -> None:
        for experts in self._fused[index]:
            experts.follow()
