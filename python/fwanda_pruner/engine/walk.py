"""The calibration windows, one decoder block at a time."""

from __future__ import annotations

import os
import tempfile
import warnings

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..model.targets import find_blocks
from .device import free_memory, model_device

_BATCH_TOKENS = 8192  # in a call of a block on a GPU: the sums over tokens are then bound by arithmetic
_GPU_SHARE, _RAM_SHARE = 0.4, 0.5  # of what is free, for the hidden states


class _Captured(Exception):
    """Ends a forward pass once the inputs of the first block are known."""


class BlockStream:
    """The calibration windows, one decoder block at a time.

    Holds the hidden state of every window at the input of the current block, on the GPU, in RAM or on disk, whichever
    has room first, and the other arguments that each block gets (masks, position embeddings), which must not depend on
    the window.

    Args:
        model: a causal language model in eval mode.
        tokens: [S, L] int64 windows without padding.
        micro_batch: windows in a call of a block; None: what makes 8,192 tokens on a GPU, 1 on a CPU.

    Raises:
        UserError: the model's blocks are not a plain chain.
    """

    def __init__(self, model: nn.Module, tokens: Tensor, *, micro_batch: int | None = None):
        self.blocks = find_blocks(model)[1]
        self._model = model
        self._device = model_device(model)
        if len(tokens) > 1 and not _same(*(self._capture_arguments(ids[None]) for ids in (tokens[0], tokens[-1]))):
            raise UserError(f"{_not_streamable(model)}: the arguments of its blocks depend on the tokens")
        size = micro_batch or (max(1, _BATCH_TOKENS // tokens.shape[1]) if self._device.type == "cuda" else 1)
        while not self._begin(tokens, size):
            if size == 1:
                raise UserError(
                    f"a window of {tokens.shape[1]} tokens does not fit the memory of {self._device}; use a smaller "
                    f"--seqlen or a larger --max-memory"
                )
            size //= 2
            warnings.warn(f"{self._device} ran out of memory: going on with batches of {size} windows", stacklevel=2)

    def _begin(self, tokens: Tensor, size: int) -> bool:
        """Run batches of `size` windows up to the first block, one through the model; False if that does not fit."""
        batches = tokens.split(size)
        try:
            # some arguments have an entry for each window of the batch
            self._arguments = {len(ids): self._capture_arguments(ids) for ids in (batches[0], batches[-1])}
            first = self._capture_hidden(batches[0])
            hidden = _room_for((len(tokens), *first.shape[1:]), first)
            self._hidden = hidden.split(size)
            for ids, states in zip(batches, self._hidden, strict=True):
                states.copy_(self._capture_hidden(ids))
        except torch.OutOfMemoryError:
            self._arguments, self._hidden = {}, ()
            torch.cuda.empty_cache()
            return False
        return True

    @torch.no_grad()
    def _capture_arguments(self, ids: Tensor) -> list[tuple[tuple, dict]]:
        """Arguments of each block in one forward pass, which also shows that the blocks form a plain chain."""
        captured: list[tuple[tuple, dict]] = []
        before: list[Tensor] = []

        def hook(_module, args, kwargs):
            hidden = args[0] if args else kwargs["hidden_states"]
            if not hidden.isfinite().all():
                raise UserError(
                    f"the input of block {len(captured)} has NaN or inf values; the model overflows on the calibration "
                    f"text"
                )
            if captured and not _close(self._block_output(len(captured) - 1, before.pop(), captured[-1]), hidden):
                raise UserError(
                    f"{_not_streamable(self._model)}: a block takes more than the output of the one before it"
                )
            captured.append((args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"}))
            before.append(hidden)

        handles = [block.register_forward_pre_hook(hook, with_kwargs=True) for block in self.blocks]
        try:
            self._model.base_model(input_ids=ids.to(self._device), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        if len(captured) != len(self.blocks):
            raise UserError(f"{_not_streamable(self._model)}: it called {len(captured)} of {len(self.blocks)} blocks")
        return captured

    def _block_output(self, index: int, hidden: Tensor, arguments: tuple[tuple, dict]) -> Tensor:
        args, kwargs = arguments
        output = self.blocks[index].forward(hidden, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    @torch.no_grad()
    def _capture_hidden(self, ids: Tensor) -> Tensor:
        def hook(_module, args, kwargs):
            raise _Captured(args[0] if args else kwargs["hidden_states"])

        handle = self.blocks[0].register_forward_pre_hook(hook, with_kwargs=True)
        try:
            self._model.base_model(input_ids=ids.to(self._device), use_cache=False)
        except _Captured as captured:
            return captured.args[0]
        finally:
            handle.remove()
        raise AssertionError("the first block was not called")

    def input_groups(self, index: int, modules: dict[str, nn.Module]) -> list[list[str]]:
        """Names of the modules of block `index` in the order of their calls, those with the same input together.

        A module that the first windows do not reach stands in a group of its own at the end.
        """
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
            self._run_batch(index, self._hidden[0])
        finally:
            for handle in handles:
                handle.remove()
        called = [names for _, names in groups]
        reached = {name for names in called for name in names}
        return called + [[name] for name in modules if name not in reached]

    def run(self, index: int, *, advance: bool) -> None:
        """Run every window through block `index`; with advance, its outputs become the inputs of the next block."""
        for hidden in self._hidden:
            output = self._run_batch(index, hidden)
            if advance:
                hidden.copy_(output)

    @torch.no_grad()
    def _run_batch(self, index: int, hidden: Tensor) -> Tensor:
        return self._block_output(index, hidden.to(self._device), self._arguments[len(hidden)][index])


def _room_for(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialised tensor of like's dtype: on its device, else in RAM, else in an unnamed file."""
    needed = torch.Size(shape).numel() * like.element_size()
    if like.device.type == "cuda" and needed < _GPU_SHARE * free_memory(like.device):
        return like.new_empty(shape)
    if needed < _RAM_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return torch.empty(shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")
    try:
        with tempfile.NamedTemporaryFile(prefix="fwanda-") as file:  # the mapping outlives the name
            os.posix_fallocate(file.fileno(), 0, needed)
            flat = torch.from_file(file.name, shared=True, size=torch.Size(shape).numel(), dtype=like.dtype)
    except OSError as error:
        raise UserError(
            f"the hidden states need {needed / 2**30:.1f} GiB of memory, or of disk in {tempfile.gettempdir()} (TMPDIR "
            f"names another folder): {error.strerror}; or use fewer or shorter --nsamples and --seqlen"
        ) from error
    return flat.view(shape)


def _not_streamable(model: nn.Module) -> str:
    return f"{type(model).__name__} cannot be run block by block, use wanda or fwanda with --order onepass"


def _same(a, b) -> bool:
    """Equal structures with equal tensors; what is neither is not compared."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return True


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).float().norm() <= 1e-2 * b.float().norm())
