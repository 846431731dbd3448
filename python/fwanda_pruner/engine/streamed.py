"""The streamed engine: a few decoder blocks lie on the device, and the others are loaded when they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from torch import Tensor, nn

from ..model.placement import parameters_of_the_rest
from ..model.targets import Target
from .block_weights import BlockWeights
from .loop import PassRecord, PassSettings
from .masks_in_passing import Masks
from .prefix import SharedPrefix
from .ranks import ALONE, Ranks
from .resident import Block, ResidentEngine
from .resume import Unfinished
from .sums import Sums
from .threshold import select_threshold
from .walk import BlockWalk


class StreamedEngine(ResidentEngine):
    """A model whose decoder blocks take turns on the device.

    Everything but the blocks lies on the device. The methods are those of `ResidentEngine`, with the same results: on a
    CPU, the same bits where the micro-batches are the same. No block is compiled. In a backward pass all blocks
    but those of the last segment run a second time.

    Args:
        model, targets, settings, progress, ranks: as ResidentEngine. The blocks lie in RAM, or in the mapped files of a
            checkpoint.
        segment: blocks that are on the device at a time, at least 1; with 2 or more, a GPU computes while the next
            block is loaded.

    Attributes:
        weights: loads the blocks.
        segment: as given.
        bytes_loaded: of weights that were copied to the device so far.
    """

    name = "streamed"

    def __init__(
        self,
        model: nn.Module,
        targets: Sequence[Target],
        settings: PassSettings | None = None,
        *,
        segment: int,
        progress: bool = True,
        ranks: Ranks = ALONE,
    ):
        super().__init__(model, targets, settings, progress=progress, ranks=ranks)
        self.settings = _uncompiled(self.settings)
        self.segment = segment
        fused = {id(t.slice_of.experts): t.slice_of.experts for t in self.targets if t.slice_of is not None}
        rest = parameters_of_the_rest(model)
        self.weights = BlockWeights(self._blocks, fused.values(), self.device, rest, segment, ranks.size)

    @property
    def bytes_loaded(self) -> int:
        return self.weights.bytes_loaded

    @contextmanager
    def block(self, index: int, *, writes: bool = False) -> Iterator[Block]:
        with self.weights.hold(index, writes=writes), super().block(index, writes=writes) as block:
            yield block

    def running(self) -> AbstractContextManager[None]:
        return self.weights.streaming()

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
        return {"least_tokens": self.weights.tokens_to_hide_copies, "loaded_bytes": self.weights.loaded_bytes}

    def _named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and weight [R, C] of each target; a weight stays in memory until the next block is asked for."""
        for index in range(self.block_count):
            with self.block(index) as block:
                yield from block.weights.items()


def _uncompiled(settings: PassSettings) -> PassSettings:
    """Compiled blocks would not see that weights move; and BlockWeights decides which blocks run twice."""
    return replace(settings, compile="off", checkpointing="off")
