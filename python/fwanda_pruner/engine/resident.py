"""The resident engine: all weights lie on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace

from torch import Tensor, nn

import fwanda_kernels as fk

from ..model.experts import FusedExperts, run_split
from ..model.targets import Target, find_blocks
from .device import model_device
from .loop import PassRecord, PassSettings, run_windows
from .masks_in_passing import Masks, masked_blocks
from .model_windows import ModelWindows, WindowLosses
from .prefix import SharedPrefix
from .ranks import ALONE, Ranks
from .resume import Unfinished
from .sums import Sums
from .walk import BlockWalk

_LOSS_TOKENS = 16384  # tokens in a pass that only measures a loss: every pass selects the masks again


@dataclass(frozen=True)
class Block:
    """One decoder block whose weights are in memory.

    Attributes:
        module: the block.
        weights: name -> [R, C] weight of each target in it. What is written to it stays, if the block was asked for to
            write.
    """

    module: nn.Module
    weights: Mapping[str, Tensor]


class ResidentEngine:
    """A model whose weights all lie on one device; also the base of the other engines.

    Those bring the weights of a block in block(), and of each block that runs in running().

    Args:
        model: a causal language model in eval mode.
        targets: its matrices to prune.
        settings: how windows run.
        progress: whether to show progress bars.
        ranks: the processes that share the run, each with a copy of the model.

    Attributes:
        targets, settings, ranks: as given.
        progress: as given, on the first rank.
        device: where the model is.
        block_count: number of decoder blocks.
        name, segment, bytes_loaded: for the record, as in Report.
    """

    name, segment, bytes_loaded = "resident", None, None
    _fixed: Mapping[str, str] = {}  # settings of passes that the engine allows no choice of

    def __init__(
        self,
        model: nn.Module,
        targets: Sequence[Target],
        settings: PassSettings | None = None,
        *,
        progress: bool = True,
        ranks: Ranks = ALONE,
    ):
        self.model, self.targets = model, list(targets)
        self.settings, self.ranks = replace(settings or PassSettings(), **self._fixed), ranks
        self.progress = progress and ranks.first
        self.device = model_device(model)
        self._path, self._blocks = find_blocks(model)
        self.block_count = len(self._blocks)

    def block_path(self, index: int) -> str:
        """Dotted path of block `index` in the model."""
        return f"{self._path}.{index}"

    def targets_of(self, index: int) -> list[Target]:
        """The targets in block `index`."""
        return [target for target in self.targets if target.block == index]

    @contextmanager
    def block(self, index: int, *, writes: bool = False) -> Iterator[Block]:
        """Within the `with` statement the weights of decoder block `index` are in memory.

        Args:
            index: of the block.
            writes: whether the weights are changed inside. Without it, changes may be lost.
        """
        yield Block(self._blocks[index], {target.name: target.weight for target in self.targets_of(index)})

    def running(self) -> AbstractContextManager[None]:
        """Inside, the model itself may be called."""
        return nullcontext()

    def parameters_outside_blocks(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and parameter of all that lies outside the decoder blocks: embeddings, norms, heads, other towers."""
        inside = {id(parameter) for parameter in self._blocks.parameters()}
        return ((name, p) for name, p in self.model.named_parameters() if id(p) not in inside)

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
        """Runs windows [S, L] through the dense model and adds them to the sums.

        Args:
            tokens: [S, L] int64.
            sums: what is measured.
            backward, label_seed: as ModelWindows.
            settings: how the windows run; None: the engine's.
            label: title of the progress bar; None shows none.
            unfinished: saves the sums for an interrupted run.

        Raises:
            UserError: the memory does not suffice, or the model cannot be measured.
        """
        facts = {"backward": backward, "label_seed": label_seed}
        windows = ModelWindows(self.model, tokens, **facts, **self._loading())
        settings, shown = replace(settings or self.settings, **self._fixed), self._shown(label)
        with self.running(), self._split_experts():
            return run_windows(windows, sums, settings, ranks=self.ranks, label=shown, unfinished=unfinished)

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
        """Mean next-token loss of each window in nats: [S] fp64 on the CPU; nan or inf where a logit is.

        Args:
            tokens: [S, L] int64.
            masks: prune the targets by these while they run; None: the weights as they are.
            first_target: position of the first token that is predicted.
            settings: how the windows run; None: 16,384 tokens at a time.
            label: title of the progress bar; None shows none.
            prefix: from shared_prefix(), where it served only calls with the same tokens; None: all blocks run.

        Raises:
            UserError: the memory does not suffice.
        """
        settings = settings or PassSettings(max(1, _LOSS_TOKENS // tokens.shape[1]), compile="off")
        settings = replace(settings, **self._fixed)
        losses = WindowLosses()
        facts = {"first_target": first_target, "prefix": prefix}
        windows = ModelWindows(self.model, tokens, add_losses=losses.add, **facts, **self._loading())
        with self.running(), ExitStack() as stack:
            if masks is not None:
                stack.enter_context(self._split_experts())
                stack.enter_context(masked_blocks(self._blocks, self.targets, masks))
            run_windows(windows, losses, settings, ranks=self.ranks, label=self._shown(label))
        return losses.tensors()["losses"].cpu() / (tokens.shape[1] - first_target)

    def shared_prefix(self) -> SharedPrefix:
        """For several calls of window_losses() with the same tokens: the blocks before the first target run once."""
        return SharedPrefix(self._blocks[: min((target.block for target in self.targets), default=0)])

    @contextmanager
    def walk(self, tokens: Tensor) -> Iterator[BlockWalk]:
        """The windows [S, L], one decoder block at a time.

        Raises:
            UserError: the blocks are not a plain chain, or a window does not fit the memory.
        """
        with self.running(), self._split_experts():
            yield BlockWalk(self.model, tokens, micro_batch=self.settings.micro_batch, ranks=self.ranks)

    def select_threshold(
        self, row_scales: Mapping[str, Tensor], column_scales: Mapping[str, Tensor], total: int
    ) -> dict[str, Tensor]:
        """name -> [R] int64: weights kept in each row when the `total` largest scores of all named matrices are kept.

        The score is |W_ij| * column_scale_j * row_scale_i; ties as fk.select_threshold(). An engine that does not hold
        all weights at once uses threshold.select_threshold() instead.
        """
        names, weights = list(row_scales), dict(self._named_weights())
        counts = fk.select_threshold(
            [weights[name] for name in names], list(row_scales.values()), [column_scales[name] for name in names], total
        )
        return dict(zip(names, counts, strict=True))

    def _shown(self, label: str | None) -> str | None:
        return label if self.progress else None

    def _loading(self) -> dict[str, int]:
        """Arguments of ModelWindows, for weights that are loaded during a pass."""
        return {}

    def _named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and weight [R, C] of each target. A weight may leave the memory when the next block is asked for."""
        for index in range(self.block_count):
            with self.block(index) as block:
                yield from block.weights.items()

    def _fused_experts(self) -> list[list[FusedExperts]]:
        """The fused experts of each block."""
        found: list[dict[int, FusedExperts]] = [{} for _ in range(self.block_count)]
        for target in self.targets:
            if target.slice_of is not None:
                found[target.block][id(target.slice_of.experts)] = target.slice_of.experts
        return [list(experts.values()) for experts in found]

    def _split_experts(self) -> AbstractContextManager[None]:
        """Inside, experts compute by linear layers of their own, which hooks can watch."""
        return run_split(experts for of_block in self._fused_experts() for experts in of_block)
