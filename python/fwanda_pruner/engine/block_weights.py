"""The weights of the decoder blocks: a few of them on the device, all others in the RAM or the files of the model."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import UserError
from ..model.attributes import replaced
from ..model.experts import FusedExperts
from .block_inputs import RamCopies, kept_away
from .memory import allocate_large, fits_ram, pinned

_RAM_SHARE = 0.8  # of the free RAM that copies of all blocks may take
# Tokens that a block of a dense model computes on for as long as it is copied: a GPU that reaches 400 TFLOP/s in such
# blocks does 400e12 / 50e9 = 8,000 FLOPs for each byte that PCIe 5 brings from pinned RAM, and a weight of 2 bytes
# takes 2 FLOPs a token. From a mapped file come about 6 GB/s.
_TOKENS_OF_RAM, _TOKENS_OF_FILE = 8192, 65536


class BlockWeights:
    """Loads decoder blocks when they run, and at most so many at a time.

    The home of a weight is the tensor that its parameter holds while the block is not loaded. transformers maps the
    files of a checkpoint into memory: such a weight is read from its file when its block is loaded, and takes no RAM
    before. While a block computes, the next one is loaded: on a GPU, by copies on a stream of their own.

    In a backward pass all blocks but the last `most` run again, from their inputs.

    Args:
        blocks: the decoder blocks, whose parameters are at home.
        fused: the fused experts in each of them.
        device: where they run.
        outside: parameters that modules outside the blocks use too; they stay where they are.
        most: blocks that are loaded at a time, at least 1. A block that hold() keeps loaded comes on top.
        processes: that may need the RAM for the same copies at the same time.

    Attributes:
        bytes_loaded: of weights that were loaded so far.
        most_loaded: blocks that were loaded at a time so far.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        fused: Sequence[Sequence[FusedExperts]],
        device: torch.device,
        outside: Iterable[nn.Parameter],
        most: int,
        processes: int = 1,
    ):
        self._blocks, self._most = list(blocks), most
        self._device = device
        stay = {id(parameter) for parameter in outside}
        self._parameters = [[p for p in block.parameters() if id(p) not in stay] for block in self._blocks]
        self._fused = fused
        self._home: dict[nn.Parameter, Tensor] = {}  # of the parameters that are loaded
        self._users: Counter[nn.Parameter] = Counter()  # loaded blocks of a parameter: blocks may share it
        self._loaded: OrderedDict[int, torch.cuda.Event | None] = OrderedDict()  # the latest used last
        self._held: set[int] = set()
        self._streaming = False
        self._current, self._step = 0, 1
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copies = RamCopies(device) if device.type == "cuda" else None
        self._pins = self._stream is not None and fits_ram(processes * self._unpinned_bytes(), _RAM_SHARE)
        self._before: torch.cuda.Event | None = None  # the computation that may use blocks other than the current one
        self.bytes_loaded = self.most_loaded = 0

    def _unpinned_bytes(self) -> int:
        parameters = {parameter for parameters in self._parameters for parameter in parameters}
        return sum(parameter.nbytes for parameter in parameters if not parameter.is_pinned())

    @property
    def loaded_bytes(self) -> int:
        """Of the largest blocks that can be loaded at a time."""
        return sum(sorted(sum(p.nbytes for p in parameters) for parameters in self._parameters)[-self._most :])

    @property
    def tokens_to_hide_copies(self) -> int:
        """Tokens in a pass, from which on a block computes for as long as the next one is copied."""
        if self._stream is None:
            return 0
        return _TOKENS_OF_RAM if self._pins else _TOKENS_OF_FILE

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Inside, each block that runs is loaded first. Afterwards all weights are at home."""
        if self._streaming:
            yield
            return
        forwards = {block: partial(self._run, i, block.forward) for i, block in enumerate(self._blocks)}
        with ExitStack() as stack:
            for index, block in enumerate(self._blocks):  # hooks of others read the weights before forward() is called
                handle = block.register_forward_pre_hook(lambda *_, index=index: self._use(index))
                stack.callback(handle.remove)
            stack.enter_context(replaced("forward", forwards))
            self._streaming = True
            try:
                yield
            finally:
                self._streaming = False
                self._mark()
                for index in [i for i in self._loaded if i not in self._held]:
                    self._unload(index)
                if self._stream is not None:
                    self._stream.synchronize()  # the caller may free the homes

    @contextmanager
    def hold(self, index: int, *, writes: bool) -> Iterator[None]:
        """Inside, a block stays loaded; with `writes` its weights go home afterwards."""
        self._use(index)
        self._held.add(index)
        try:
            yield
            if writes:
                self._write(index)
        finally:
            self._held.discard(index)
            if not self._streaming:
                self._mark()
                self._unload(index)

    def _run(self, index: int, forward, *args, **kwargs):
        def run(*args, **kwargs):
            self._use(index)
            try:
                return forward(*args, **kwargs)
            finally:  # checkpoint() leaves by an exception once it has all activations
                self._prefetch()

        if not torch.is_grad_enabled() or index >= len(self._blocks) - self._most:
            return run(*args, **kwargs)
        versions = [argument._version for argument in args if isinstance(argument, Tensor)]
        with kept_away(args[0], self._copies) if self._copies is not None and args else nullcontext():
            outputs = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        if versions != [argument._version for argument in args if isinstance(argument, Tensor)]:
            raise UserError(f"decoder block {index} overwrites its input and cannot run again; use --engine resident")
        return outputs

    def _use(self, index: int) -> None:
        """Loads a block for the computation that comes next."""
        if index != self._current:
            self._step = -1 if 0 < index < self._current else 1
            self._current = index
        self._mark()
        self._load(index)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._loaded[index])

    def _mark(self) -> None:
        """Notes where the computation is: blocks other than the current one are not used after this point."""
        if self._stream is not None:
            self._before = torch.cuda.current_stream(self._device).record_event()

    def _prefetch(self) -> None:
        """Begins to load the block that runs after the current one."""
        following = self._current + self._step
        if self._most > 1 and 0 <= following < len(self._blocks):
            self._load(following)

    def _load(self, index: int) -> None:
        if index in self._loaded:
            self._loaded.move_to_end(index)
            return
        while len(self._loaded.keys() - self._held) >= self._most:
            self._unload(next(i for i in self._loaded if i not in self._held and i != self._current))
        self._users.update(self._parameters[index])
        try:
            with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
                for parameter in self._parameters[index]:
                    if parameter not in self._home:
                        parameter.data = self._copy(parameter)
                event = self._stream.record_event() if self._stream is not None else None
        except torch.OutOfMemoryError:
            self._send_home(index)
            raise
        self._loaded[index] = event
        self.most_loaded = max(self.most_loaded, len(self._loaded))
        self._point(index)

    def _copy(self, parameter: nn.Parameter) -> Tensor:
        home = pinned(parameter.data) if self._pins else parameter.data
        self._home[parameter] = home
        self.bytes_loaded += home.nbytes
        if self._stream is None:
            return home.clone()
        return home.to(self._device, non_blocking=True)

    def _unload(self, index: int) -> None:
        del self._loaded[index]
        if self._stream is not None:
            self._stream.wait_event(self._before)  # the memory is used again by copies on that stream
        self._send_home(index)

    def _send_home(self, index: int) -> None:
        for parameter in self._parameters[index]:
            self._users[parameter] -= 1
            if not self._users[parameter] and parameter in self._home:
                parameter.data = self._home.pop(parameter)
        self._point(index)

    def _write(self, index: int) -> None:
        """Writes a loaded block home: into the same memory, or into an unnamed file if the RAM is full."""
        for parameter in self._parameters[index]:
            home = self._home[parameter]
            if not home.is_pinned() and not fits_ram(home.nbytes):  # pages of a mapped file take RAM once written
                home = self._home[parameter] = allocate_large(home.shape, home)
            home.copy_(parameter.data)

    def _point(self, index: int) -> None:
        for experts in self._fused[index]:
            experts.follow()
