"""The calibration windows, one decoder block at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..errors import UserError, one_line
from ..model.attributes import called_as, uncached
from ..model.placement import decoder_of, is_sharded
from ..model.targets import find_blocks
from .device import model_device
from .loop import PassSettings, run_windows
from .memory import allocate_large
from .ranks import ALONE, Ranks
from .sums import Sums

_BATCH_TOKENS = 8192  # tokens in a call of a block on a GPU: the sums are then bound by arithmetic


class _FirstBlock(Exception):
    """Ends a forward pass once the input of the first block is known."""


class BlockWalk:
    """The hidden states of all windows at the input of one block, which moves through the model.

    Holds the hidden states on the GPU, in RAM or on disk, whichever has room first, and the other arguments that each
    block gets (masks, position embeddings), which must not depend on the window.

    Args:
        model: a causal language model in eval mode.
        tokens: [S, L] int64 windows without padding.
        micro_batch: windows in a call of a block; None: 8,192 tokens on a GPU, one window on a CPU.
        ranks: the processes of the run; each holds the hidden states of its own windows.

    Attributes:
        blocks, device: of the model.
        ranks: as given.
        arguments_checked: whether check_arguments() has passed.
        hidden: [S, L, H] of the windows of this rank; None if it has none.

    Raises:
        UserError: the model's blocks are not a plain chain, or a window does not fit the memory.
    """

    def __init__(self, model: nn.Module, tokens: Tensor, *, micro_batch: int | None = None, ranks: Ranks = ALONE):
        self.blocks = find_blocks(model)[1]
        self.device = model_device(model)
        self._model, self._tokens = model, tokens
        self._arguments: dict[int, list[tuple[tuple, dict]]] = {}  # windows in a call -> arguments of each block
        self.hidden: Tensor | None = None
        gpu_windows = max(1, _BATCH_TOKENS // tokens.shape[1])
        self._micro_batch = micro_batch or (gpu_windows if self.device.type == "cuda" else 1)
        self.ranks, self._unit = ranks, self._micro_batch  # the groups stay the same where memory runs out
        groups = [group.windows for group in ranks.groups(len(tokens), self._unit)]
        self._own = range(groups[0].start, groups[-1].stop) if groups else range(0)
        self.arguments_checked = False
        if is_sharded(model):
            self._prepare_all()
        self._run(_EmbeddingWindows(self), Sums())

    def _prepare_all(self) -> None:
        """Does on every rank what needs passes through the whole model, in which all ranks must take part."""
        self.check_arguments()
        for size in self.ranks.pass_sizes(len(self._tokens), self._unit):
            self.arguments_for(size)

    def run(self, index: int, sums: Sums, *, advance: bool) -> None:
        """Runs all windows through block `index` and adds them to the sums.

        Args:
            index: of the block.
            sums: entered around the passes.
            advance: whether the block's outputs become the inputs of the next block.
        """
        self._run(_BlockWindows(self, index, advance), sums)

    def advance(self, index: int) -> None:
        """Makes the outputs of block `index` the inputs of the next block."""
        self.run(index, Sums(), advance=True)

    def _run(self, windows: _WalkWindows, sums: Sums) -> None:
        settings = PassSettings(self._micro_batch, compile="off", checkpointing="off")
        record = run_windows(windows, sums, settings, ranks=self.ranks, unit=self._unit)
        self._micro_batch = record.micro_batch

    def input_groups(self, index: int, modules: Mapping[str, nn.Module]) -> list[list[str]]:
        """Names of the modules of block `index` in the order of their calls, those with the same input together.

        A module that the first windows do not reach stands in a group of its own at the end.
        """
        return self.ranks.share(lambda: self._input_groups(index, modules))  # the first rank has the first windows

    def _input_groups(self, index: int, modules: Mapping[str, nn.Module]) -> list[list[str]]:
        groups: list[tuple[Tensor, list[str]]] = []

        def hook_of(name: str):
            def hook(_module, args, kwargs):
                x = args[0] if args else next(iter(kwargs.values()))
                if groups and groups[-1][0] is x:
                    groups[-1][1].append(name)
                elif all(name not in names for _, names in groups):
                    groups.append((x, [name]))

            return hook

        handles = [
            module.register_forward_pre_hook(hook_of(name), with_kwargs=True) for name, module in modules.items()
        ]
        try:
            with torch.no_grad():
                self.outputs(index, 0, min(self._micro_batch, len(self.hidden)))
        finally:
            for handle in handles:
                handle.remove()
        called = [names for _, names in groups]
        reached = {name for names in called for name in names}
        return called + [[name] for name in modules if name not in reached]

    def check_arguments(self) -> None:
        """Refuses a model whose blocks get other arguments for other windows."""
        first, last = self._tokens[:1], self._tokens[-1:]
        if len(self._tokens) > 1 and not _same(self._block_arguments(first), self._block_arguments(last)):
            raise UserError(f"{_not_a_chain(self._model)}: the arguments of its blocks depend on the tokens")
        self.arguments_checked = True

    @property
    def first_window(self) -> int:
        """The first window of this rank."""
        return self._own.start

    def begin(self, start: int, size: int) -> None:
        """Stores the hidden states of some windows at the input of the first block."""
        ids = self._tokens[start : start + size]
        states = self._first_hidden(ids)
        if states.shape[:2] != ids.shape:
            raise UserError(
                f"{_not_a_chain(self._model)}: the input of its blocks is {list(states.shape)}, not [B, L, H]"
            )
        if self.hidden is None:
            self.hidden = allocate_large((len(self._own), *states.shape[1:]), states)
        self.hidden_of(start, size).copy_(states)

    def hidden_of(self, start: int, size: int) -> Tensor:
        """[size, L, H] hidden states of the windows [start, start + size), where they are kept."""
        return self.hidden[start - self._own.start :][:size]

    def outputs(self, index: int, start: int, size: int) -> Tensor:
        """[size, L, H] outputs of block `index` for some windows."""
        hidden = self.hidden_of(start, size).to(self.device)
        return self._block_output(index, hidden, self.arguments_for(size)[index])

    def arguments_for(self, size: int) -> list[tuple[tuple, dict]]:
        """Arguments of each block in a call with so many windows: some have an entry for each window.

        The first call for a size is a pass through the whole model.
        """
        if size not in self._arguments:
            self._arguments[size] = self._block_arguments(self._tokens[:size])
        return self._arguments[size]

    def forget_arguments_above(self, size: int) -> None:
        """Frees the arguments of larger calls, which did not fit the memory."""
        self._arguments = {count: arguments for count, arguments in self._arguments.items() if count <= size}

    @torch.no_grad()
    def _block_arguments(self, ids: Tensor) -> list[tuple[tuple, dict]]:
        """Arguments of each block, from a forward pass that also shows whether the blocks form a plain chain."""
        captured: list[tuple[tuple, dict]] = []
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []  # of the block before

        def begin(_module, args, kwargs):
            hidden = self._hidden_given(args, kwargs)
            if not hidden.isfinite().all():
                raise UserError(
                    f"the input of block {len(captured)} has NaN or inf values; the model overflows on the calibration "
                    f"text"
                )
            if outputs and not _close(outputs.pop(), hidden):
                raise UserError(f"{_not_a_chain(self._model)}: a block takes more than the output of the one before it")
            captured.append((args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"}))
            inputs.append(hidden)

        def end(_module, _args, _output):
            outputs.append(self._block_output(len(captured) - 1, inputs.pop(), captured[-1]))

        handles = []
        for block in self.blocks:
            handles.append(block.register_forward_pre_hook(begin, with_kwargs=True))
            handles.append(block.register_forward_hook(end, prepend=True))  # while the weights are in memory
        try:
            self._model.base_model(input_ids=ids.to(self.device), **uncached(self._model.base_model))
        finally:
            for handle in handles:
                handle.remove()
        if len(captured) != len(self.blocks):
            raise UserError(f"{_not_a_chain(self._model)}: it called {len(captured)} of {len(self.blocks)} blocks")
        return captured

    def _block_output(self, index: int, hidden: Tensor, arguments: tuple[tuple, dict]) -> Tensor:
        args, kwargs = arguments
        try:
            output = self.blocks[index].forward(hidden, *args, **kwargs)
        except TypeError as error:
            if error.__traceback__.tb_next is not None:  # raised inside the block
                raise
            raise UserError(f"{_not_a_chain(self._model)}: {one_line(error, 200)}") from error
        output = output[0] if isinstance(output, tuple | list) and output else output
        if not isinstance(output, Tensor):
            raise UserError(f"{_not_a_chain(self._model)}: a block returns a {type(output).__name__}")
        return output

    def _hidden_given(self, args: tuple, kwargs: dict) -> Tensor:
        """The hidden states among the arguments of a block."""
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor):
            raise UserError(
                f"{_not_a_chain(self._model)}: a block gets no tensor as its first argument or hidden_states"
            )
        return hidden

    def _first_hidden(self, ids: Tensor) -> Tensor:
        """[B, L, H] input of the first block."""

        def first(*args, **kwargs):
            raise _FirstBlock(self._hidden_given(args, kwargs))

        # a forward pass that ends early must not begin for the hooks of FSDP
        decoder = decoder_of(self._model)
        try:
            with called_as({decoder: decoder.forward, self.blocks[0]: first}):
                self._model.base_model(input_ids=ids.to(self.device), **uncached(self._model.base_model))
        except _FirstBlock as reached:
            return reached.args[0]
        raise AssertionError("the first block was not called")


class _WalkWindows:
    """What the two kinds of passes of a walk have in common; see `loop.Windows`."""

    backward = False
    blocks = compiled_modules = ()
    restartable = True
    busy_windows, loaded_bytes = 1, 0

    def __init__(self, walk: BlockWalk):
        self._walk = walk
        self.device, self.together = walk.device, is_sharded(walk._model)
        self.count, self.length = walk._tokens.shape

    @contextmanager
    def ready(self, group: range, size: int) -> Iterator[None]:
        self._walk.forget_arguments_above(size)
        for batch in {min(size, len(group)), len(group) % size} - {0}:
            self._walk.arguments_for(batch)  # runs the whole model, so it must come before the sums watch its modules
        with torch.no_grad():
            yield

    def idle(self) -> None:
        """Nothing: the block is in memory on every rank, and the model has run already."""

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        pass

    def seek(self, start: int) -> None:
        pass


class _EmbeddingWindows(_WalkWindows):
    """Windows up to the input of the first block."""

    @contextmanager
    def ready(self, group: range, size: int) -> Iterator[None]:
        with super().ready(group, size):
            if not self._walk.arguments_checked:
                self._walk.check_arguments()  # here, so that a window that does not fit the memory is a UserError
            yield

    def run(self, start: int, size: int) -> None:
        self._walk.begin(start, size)

    def seek(self, start: int) -> None:
        if start == self._walk.first_window:  # all windows run again
            self._walk.hidden = None


class _BlockWindows(_WalkWindows):
    """Hidden states through one block."""

    def __init__(self, walk: BlockWalk, index: int, advance: bool):
        super().__init__(walk)
        self._index, self._advance = index, advance

    def run(self, start: int, size: int) -> None:
        output = self._walk.outputs(self._index, start, size)
        if self._advance:
            self.restartable = False
            self._walk.hidden_of(start, size).copy_(output)

    def seek(self, start: int) -> None:
        self.restartable = True


def _not_a_chain(model: nn.Module) -> str:
    return f"{type(model).__name__} cannot be run block by block, use wanda or fwanda with --order onepass"


def _same(a, b) -> bool:
    """Whether two structures are equal in shape and in their tensors; other values are not compared."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return True


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).float().norm() <= 1e-2 * b.float().norm())
