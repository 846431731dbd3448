"""What the rest of the pruner asks of an engine, and where an engine is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from ..config import PruneConfig
from ..model.targets import Target
from .loop import PassRecord, PassSettings
from .masks_in_passing import Masks
from .prefix import SharedPrefix
from .ranks import Ranks
from .resident import Block, ResidentEngine
from .resume import Unfinished
from .sums import Sums
from .walk import BlockWalk


class Engine(Protocol):
    """Knows where the weights of a model are, and how text goes through it.

    `measure/`, `allocate/`, `methods/` and `run/` use only what stands here. `ResidentEngine` documents each method.

    Attributes:
        model: for its structure and configuration. Its weights may be absent outside of block().
        targets: the matrices to prune.
        settings: how windows run.
        device: where weights and sums are while they are used.
        progress: whether to show progress bars.
        ranks: the processes that share the run.
        block_count: number of decoder blocks.
    """

    model: nn.Module
    targets: Sequence[Target]
    settings: PassSettings
    device: torch.device
    progress: bool
    ranks: Ranks
    block_count: int

    def block_path(self, index: int) -> str: ...

    def targets_of(self, index: int) -> list[Target]: ...

    def block(self, index: int) -> AbstractContextManager[Block]: ...

    def parameters_outside_blocks(self) -> Iterator[tuple[str, nn.Parameter]]: ...

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
    ) -> PassRecord: ...

    def window_losses(
        self,
        tokens: Tensor,
        masks: Masks | None = None,
        *,
        first_target: int = 1,
        settings: PassSettings | None = None,
        label: str | None = None,
        prefix: SharedPrefix | None = None,
    ) -> Tensor: ...

    def shared_prefix(self) -> SharedPrefix: ...

    def walk(self, tokens: Tensor) -> AbstractContextManager[BlockWalk]: ...

    def select_threshold(
        self, row_scales: Mapping[str, Tensor], column_scales: Mapping[str, Tensor], total: int
    ) -> dict[str, Tensor]: ...


def make_engine(
    model: nn.Module, targets: Sequence[Target], config: PruneConfig | None = None, *, progress: bool = True
) -> Engine:
    """The engine for a model: today always the resident one.

    Args:
        model: a causal language model in eval mode.
        targets: its matrices to prune.
        config: the settings of the run, which say how windows run; None: the defaults.
        progress: whether to show progress bars.
    """
    settings = None if config is None else PassSettings.of(config)
    return ResidentEngine(model, targets, settings, progress=progress, ranks=Ranks.current())
