"""What the rest of the pruner asks of an engine, and where an engine is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from ..config import PruneConfig
from ..errors import UserError
from ..model.placement import blocks_lie_apart, is_sharded
from ..model.targets import Target, find_blocks
from .loop import PassRecord, PassSettings
from .masks_in_passing import Masks
from .prefix import SharedPrefix
from .ranks import Ranks
from .resident import Block, ResidentEngine
from .resume import Unfinished
from .sharded import ShardedEngine
from .streamed import StreamedEngine
from .sums import Sums
from .walk import BlockWalk

_SEGMENT = 4  # decoder blocks: one computes, one is loaded, and the others run once instead of twice


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
        name, segment, bytes_loaded: for the record, as in Report.
    """

    name: str
    segment: int | None
    bytes_loaded: int | None
    model: nn.Module
    targets: Sequence[Target]
    settings: PassSettings
    device: torch.device
    progress: bool
    ranks: Ranks
    block_count: int

    def block_path(self, index: int) -> str: ...

    def targets_of(self, index: int) -> list[Target]: ...

    def block(self, index: int, *, writes: bool = False) -> AbstractContextManager[Block]: ...

    def running(self) -> AbstractContextManager[None]: ...

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
    """The engine for a model: sharded if its weights are divided over the ranks; streamed if the settings say so, or if
    its blocks do not lie on the device of the rest.

    Args:
        model: a causal language model in eval mode.
        targets: its matrices to prune.
        config: the settings of the run, which say how windows run; None: the defaults.
        progress: whether to show progress bars.

    Raises:
        UserError: the settings ask for an engine for which the model was not loaded.
    """
    config = config or PruneConfig()
    settings, shared = PassSettings.of(config), {"progress": progress, "ranks": Ranks.current()}
    if is_sharded(model):
        if config.engine not in ("auto", "sharded"):
            raise UserError(f"the weights are divided over the ranks; load the model with --engine {config.engine}")
        return ShardedEngine(model, targets, settings, **shared)
    if config.engine == "sharded":
        raise UserError("--engine sharded needs a model that was loaded for it: load_model(name, engine='sharded')")
    apart, blocks = blocks_lie_apart(model), len(find_blocks(model)[1])
    segment = min(config.segment or _SEGMENT, blocks)
    if apart and config.engine == "resident":
        raise UserError("the decoder blocks of the model are not on its device; load it with --engine resident")
    if apart or (config.engine == "streamed" and segment < blocks):
        return StreamedEngine(model, targets, settings, segment=segment, **shared)
    return ResidentEngine(model, targets, settings, **shared)
