"""The streamed engine: a few decoder blocks lie on the device, and the others are loaded when they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor, nn

from ..model.placement import parameters_of_the_rest
from ..model.targets import Target
from .block_weights import BlockWeights
from .loop import PassSettings
from .ranks import ALONE, Ranks
from .resident import Block, ResidentEngine
from .threshold import select_threshold


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
    # compiled blocks would not see that weights move, and BlockWeights decides which blocks run twice
    _fixed = {"compile": "off", "checkpointing": "off"}

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
        self.segment = segment
        rest = parameters_of_the_rest(model)
        self.weights = BlockWeights(self._blocks, self._fused_experts(), self.device, rest, segment, ranks.size)

    @property
    def bytes_loaded(self) -> int:
        return self.weights.bytes_loaded

    @contextmanager
    def block(self, index: int, *, writes: bool = False) -> Iterator[Block]:
        with self.weights.hold(index, writes=writes), super().block(index, writes=writes) as block:
            yield block

    def running(self) -> AbstractContextManager[None]:
        return self.weights.streaming()

    def select_threshold(
        self, row_scales: Mapping[str, Tensor], column_scales: Mapping[str, Tensor], total: int
    ) -> dict[str, Tensor]:
        return select_threshold(self._named_weights, row_scales, column_scales, total)

    def _loading(self) -> dict[str, int]:
        return {"least_tokens": self.weights.tokens_to_hide_copies, "loaded_bytes": self.weights.loaded_bytes}
