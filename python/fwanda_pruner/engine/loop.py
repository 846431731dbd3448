"""The window loop: every pass of text through a model, or through one of its blocks, runs here.

It chooses the micro-batch, shrinks it when memory runs out, checkpoints and compiles blocks where that pays, shows
progress, and saves the sums for an interrupted run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import PruneConfig
from ..errors import UserError
from ..model.attributes import replaced
from ..notes import warn
from ..progress import progress_bar
from .compile_blocks import CompiledBlocks, CompileError
from .memory import free_memory
from .resume import Unfinished
from .sums import Sums

_SPARE = 0.8  # of the free memory that a larger micro-batch may count on
_COMPILE_SECONDS, _COMPILE_GAIN = 15, 0.25  # cost of a cold compilation; saved share of a pass (measured on an H100)


@dataclass(frozen=True)
class PassSettings:
    """How windows run. None of it changes the sums beyond rounding.

    Attributes:
        micro_batch: windows in a pass; None: as many as keep a GPU busy and fit its memory, 1 on a CPU.
        compile: "on": compile the blocks; "off": never; "auto": where compiling saves more time than it takes.
        checkpointing: "on": keep only the inputs of each block and run it again in the backward pass; "off": never;
            "auto": when one window does not fit otherwise.
    """

    micro_batch: int | None = None
    compile: str = "auto"
    checkpointing: str = "auto"

    @classmethod
    def of(cls, config: PruneConfig) -> PassSettings:
        """Those of a run."""
        size = None if config.micro_batch == "auto" else int(config.micro_batch)
        return cls(size, config.compile, config.checkpointing)


@dataclass
class PassRecord:
    """How windows ran: windows in a pass, whether compiled and checkpointed, seconds that compiling took."""

    micro_batch: int = 1
    compiled: bool = False
    checkpointing: bool = False
    compile_seconds: float = 0.0


class Windows(Protocol):
    """Windows, and the part of a model that they run through.

    Attributes:
        device: where they run.
        count, length: windows, and tokens in each.
        backward: whether run() includes a backward pass.
        restartable: False once run() has overwritten its own input, so that the loop cannot start again.
        busy_windows: windows that keep a large GPU busy; read only on one.
        blocks: what checkpointing applies to.
        compiled_modules: what compiling applies to.
    """

    device: torch.device
    count: int
    length: int
    backward: bool
    restartable: bool
    busy_windows: int
    blocks: Sequence[nn.Module]
    compiled_modules: Sequence[nn.Module]

    def ready(self, size: int) -> AbstractContextManager[None]:
        """Entered around all passes, before the sums are; `size` is the micro-batch, as far as it is known."""

    def run(self, start: int, size: int) -> None:
        """Runs the windows [start, start + size)."""

    def tensors(self) -> dict[str, Tensor]:
        """What an interrupted run must know besides the sums."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from tensors()."""

    def restart(self) -> None:
        """Goes back to the first window."""


def run_windows(
    windows: Windows,
    sums: Sums,
    settings: PassSettings,
    *,
    label: str | None = None,
    unfinished: Unfinished | None = None,
) -> PassRecord:
    """Runs all windows and adds them to the sums.

    When the device runs out of memory, the loop starts again with less: half the micro-batch, then checkpointing.

    Args:
        windows: what runs.
        sums: entered around the passes; start from nothing, or from what `unfinished` holds.
        settings: how they run.
        label: title of the progress bar; None shows none.
        unfinished: saves the state of the loop about every minute and at its end; None: never.

    Returns:
        How the windows ran.

    Raises:
        UserError: one window does not fit, or the blocks cannot be compiled and settings.compile is "on".
    """
    compile = settings.compile
    if sums.uncompiled is not None and compile != "off":
        if compile == "on":
            message = f"--compile on is ignored here: {sums.uncompiled} can only be measured in uncompiled blocks"
            warn(message)
        compile = "off"
    done, record = _begin(windows, sums, settings, unfinished)
    grow = settings.micro_batch is None and done == 0
    while True:
        compile = "off" if record.checkpointing else compile
        try:
            bar = progress_bar(total=windows.count, initial=done, label=label, unit="windows")
            with bar, windows.ready(record.micro_batch), sums:
                for size in _passes(windows, sums, record, grow, compile, done, unfinished):
                    bar.update(size)
            return record
        except torch.OutOfMemoryError:
            exhausted = True  # go on outside of the handler: the traceback holds the activations
        except CompileError as error:
            if compile == "on":
                raise UserError(f"the blocks cannot be compiled, use --compile off: {error}") from error
            warn(f"the blocks cannot be compiled, going on without: {error}")
            exhausted, compile = False, "off"
        if exhausted:
            grow = False
            _use_less_memory(windows, record, settings)
        record.compiled, record.compile_seconds, done = False, 0.0, 0
        sums.clear()
        windows.restart()


def _begin(
    windows: Windows, sums: Sums, settings: PassSettings, unfinished: Unfinished | None
) -> tuple[int, PassRecord]:
    """Windows that are done already, and how to run the others."""
    saved = None if unfinished is None else unfinished.load()
    if saved is None:
        size = min(settings.micro_batch or 1, windows.count)
        return 0, PassRecord(size, checkpointing=windows.backward and settings.checkpointing == "on")
    tensors, values = saved
    parts: dict[str, dict[str, Tensor]] = {"sums": {}, "windows": {}}
    for key, tensor in tensors.items():
        part, name = key.split(".", 1)
        parts[part][name] = tensor
    with torch.inference_mode(False):  # they are added to
        sums.load({name: tensor.to(windows.device, copy=True) for name, tensor in parts["sums"].items()})
    windows.load(parts["windows"])
    return values["done"], replace(PassRecord(**values["passes"]), compiled=False, compile_seconds=0.0)


def _passes(
    windows: Windows, sums: Sums, record: PassRecord, grow: bool, compile: str, done: int, unfinished: Unfinished | None
) -> Iterator[int]:
    """Runs the windows from `done` on; yields the size of each pass.

    The first pass is not compiled: it shows how much memory a window takes, and which modules share an input.
    """
    base = _reset_peak(windows.device) if grow else 0
    if done < windows.count:
        size = 1 if grow else min(record.micro_batch, windows.count - done)
        with _checkpointed(windows, record.checkpointing or compile == "on"):  # uncompiled activations are larger
            windows.run(done, size)
        done += size
        yield size
    if grow:
        record.micro_batch = min(_largest_micro_batch(windows, base), windows.count - done or 1)
    compiled, counts = CompiledBlocks(windows.compiled_modules, sums.modules), {}
    seconds: dict[bool, list[float]] = {True: [], False: []}  # of the next passes, by whether they are compiled
    with _checkpointed(windows, record.checkpointing):
        while done < windows.count:
            size = min(record.micro_batch, windows.count - done)
            whole = size == record.micro_batch
            if not record.compiled and _should_compile(windows, compile, seconds[False], done, size):
                record.compiled, counts = True, _whole_counts(sums, done * windows.length)
            on = record.compiled and whole
            with compiled.on(on), _timed(windows.device, seconds[on], whole and compile != "off"):
                windows.run(done, size)
            done += size
            yield size
            if unfinished is not None and (done == windows.count or unfinished.due()):
                tensors = {f"sums.{name}": tensor for name, tensor in sums.tensors().items()}
                tensors |= {f"windows.{name}": tensor for name, tensor in windows.tensors().items()}
                unfinished.save(tensors, {"done": done, "passes": asdict(record)})
    if record.compiled and not counts.items() <= _whole_counts(sums, done * windows.length).items():
        raise CompileError("compiled blocks do not show all inputs of their modules")
    if len(seconds[True]) > 1:
        record.compile_seconds = max(0.0, seconds[True][0] - seconds[True][1])


def _use_less_memory(windows: Windows, record: PassRecord, settings: PassSettings) -> None:
    """The one answer to a device that is out of memory: half the micro-batch, then checkpointing."""
    torch.cuda.empty_cache()
    if not windows.restartable:
        raise UserError(f"{windows.device} ran out of memory in the middle of a block; use a smaller --micro-batch")
    if record.micro_batch > 1:
        record.micro_batch //= 2
        change = f"{record.micro_batch} windows at a time"
    elif windows.backward and not record.checkpointing and settings.checkpointing == "auto":
        record.checkpointing = True
        change = "checkpointing of each block"
    else:
        advice = "use shorter windows (--seqlen, --eval-seqlen)"
        if windows.backward:
            advice = "use a smaller --seqlen, a larger --max-memory, or --checkpointing on"
        raise UserError(f"a window of {windows.length} tokens does not fit the memory of {windows.device}; {advice}")
    warn(f"{windows.device} ran out of memory: starting again with {change}")


def _largest_micro_batch(windows: Windows, base: int) -> int:
    """Windows that keep the device busy, as far as they fit beside `base` bytes."""
    if windows.device.type != "cuda":
        return 1
    window = torch.cuda.max_memory_allocated(windows.device) - base
    return max(1, min(windows.busy_windows, int(_SPARE * free_memory(windows.device) / max(window, 1))))


def _should_compile(windows: Windows, compile: str, seconds: list[float], done: int, micro_batch: int) -> bool:
    if compile != "auto" or windows.device.type != "cuda" or len(seconds) < 2:
        return compile == "on"
    return seconds[1] * _COMPILE_GAIN * (windows.count - done) / micro_batch > _COMPILE_SECONDS


def _checkpointed(windows: Windows, on: bool) -> AbstractContextManager[None]:
    """Runs each block again in the backward pass instead of keeping its activations."""
    if not on or not windows.backward:
        return nullcontext()
    run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return replaced("forward", {block: partial(run, block.forward) for block in windows.blocks})


@contextmanager
def _timed(device: torch.device, seconds: list[float], wanted: bool) -> Iterator[None]:
    """Times the first two passes of a kind, where compiling is a question. Other passes do not wait for the device."""
    if not wanted or len(seconds) > 1:
        yield
        return
    _synchronize(device)
    start = time.perf_counter()
    yield
    _synchronize(device)
    seconds.append(time.perf_counter() - start)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> int:
    """Bytes that are allocated now, from where the peak of the first pass counts."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _whole_counts(sums: Sums, tokens: int) -> dict[str, int]:
    """How many times each module saw each of so many tokens. Experts, which see some of them, have no entry."""
    counts = sums.token_counts()
    return {name: count // tokens for name, count in counts.items() if count and count % tokens == 0}
