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
from .ranks import ALONE, Group, Merging, Node, Ranks
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
        together: whether other ranks take part in each pass, because they hold a share of the weights. All ranks must
            then run equally many passes, and none may start again by itself.
        loaded_bytes: of weights that run() loads to a GPU, whatever the number of windows.
        blocks: what checkpointing applies to.
        compiled_modules: what compiling applies to.
    """

    device: torch.device
    count: int
    length: int
    backward: bool
    restartable: bool
    busy_windows: int
    together: bool
    loaded_bytes: int
    blocks: Sequence[nn.Module]
    compiled_modules: Sequence[nn.Module]

    def ready(self, group: range, size: int) -> AbstractContextManager[None]:
        """Entered around the passes of a group, before the sums; `size` is the micro-batch, which may still grow.

        If the group is empty, only idle() is called inside.
        """

    def run(self, start: int, size: int) -> None:
        """Runs the windows [start, start + size)."""

    def idle(self) -> None:
        """Takes part in a pass of other ranks, where this one has no more windows; adds nothing to the sums."""

    def tensors(self) -> dict[str, Tensor]:
        """What an interrupted run must know besides the sums."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from tensors()."""

    def seek(self, start: int) -> None:
        """Goes to the first window of a group; the windows from there on run next, perhaps again."""


def run_windows(
    windows: Windows,
    sums: Sums,
    settings: PassSettings,
    *,
    ranks: Ranks = ALONE,
    unit: int | None = None,
    label: str | None = None,
    unfinished: Unfinished | None = None,
) -> PassRecord:
    """Runs all windows and adds them to the sums.

    Several ranks divide the windows; afterwards each has the sums of all. When the device runs out of memory, the loop
    starts its group of windows again with less: half the micro-batch, then checkpointing.

    Args:
        windows: what runs.
        sums: entered around the passes; start from nothing, or from what `unfinished` holds.
        settings: how they run.
        ranks: the processes of the run.
        unit: as Ranks.groups(); None: the micro-batch of the settings, or 1.
        label: title of the progress bar; None shows none.
        unfinished: saves the state of the loop about every minute and at its end; None: never.

    Returns:
        How the windows ran; of several ranks, as on those with the least memory.

    Raises:
        UserError: one window does not fit, or the blocks cannot be compiled and settings.compile is "on".
    """
    groups = ranks.groups(windows.count, unit or settings.micro_batch or 1)
    if windows.together and settings.micro_batch is None:
        settings = replace(settings, micro_batch=_common_micro_batch(windows, ranks))
    missing = _missing_passes(groups, settings.micro_batch, ranks) if windows.together else 0
    loop = _Loop(windows, sums, settings, groups, label, unfinished)
    merging = Merging(sums)
    for group in groups:
        loop.run(group.windows)
        if not ranks.alone:
            merging.add(Node(0, group.number), sums.tensors())
            sums.clear()
    if missing:
        with windows.ready(range(0), settings.micro_batch or 1):
            for _ in range(missing):
                windows.idle()
    ranks.merge(sums, merging, windows.device)
    return _common([record for record in ranks.gather(loop.record) if record is not None])


def _common_micro_batch(windows: Windows, ranks: Ranks) -> int:
    """Windows in a pass that fit the memory of every rank: all of them run one window, to measure it."""
    base = _reset_peak(windows.device)
    if windows.device.type == "cuda":
        with windows.ready(range(1), 1):
            windows.idle()
    return min(ranks.gather(_largest_micro_batch(windows, base)))


def _missing_passes(groups: Sequence[Group], size: int, ranks: Ranks) -> int:
    """How many passes fewer than the rank with the most windows this rank needs."""
    passes = sum(-(-len(group.windows) // size) for group in groups)
    return max(ranks.gather(passes)) - passes


def _common(records: Sequence[PassRecord]) -> PassRecord:
    """How all ranks ran together."""
    return PassRecord(
        min(record.micro_batch for record in records),
        any(record.compiled for record in records),
        any(record.checkpointing for record in records),
        max(record.compile_seconds for record in records),
    )


class _Loop:
    """The passes over the groups of one rank, one group after the other.

    Args:
        groups: of this rank.
        windows, sums, settings, label, unfinished: as run_windows().

    Attributes:
        record: how the windows ran so far; None before the first.
    """

    def __init__(
        self,
        windows: Windows,
        sums: Sums,
        settings: PassSettings,
        groups: Sequence[Group],
        label: str | None,
        unfinished: Unfinished | None,
    ):
        self.record: PassRecord | None = None
        self._windows, self._sums, self._settings = windows, sums, settings
        self._label, self._unfinished = label, unfinished
        self._last = groups[-1].windows.stop if groups else 0
        self._total = sum(len(group.windows) for group in groups)
        self._compile = _compile_setting(sums, settings)
        self._seconds: dict[bool, list[float]] = {True: [], False: []}  # of passes, by whether they are compiled
        self._compiled = CompiledBlocks(windows.compiled_modules, sums.modules)  # once: this takes 0.2 s on a 7B
        self._counts: dict[str, int] = {}  # how often each module sees each token, from uncompiled passes

    def run(self, group: range) -> None:
        """Runs a group and adds it to the sums."""
        self._windows.seek(group.start)
        done, grow = self._begin(group)
        while True:
            self._compile = "off" if self.record.checkpointing else self._compile
            try:
                self._sums.begin(group.start * self._windows.length, group.stop * self._windows.length)
                before = self._total - (self._last - done)
                bar = progress_bar(total=self._total, initial=before, label=self._label, unit="windows")
                with bar, self._windows.ready(group, self.record.micro_batch), self._sums:
                    for size in self._passes(group, done, grow):
                        bar.update(size)
                return
            except torch.OutOfMemoryError:
                exhausted = True  # go on outside of the handler: the traceback holds the activations
            except CompileError as error:
                if self._compile == "on":
                    raise UserError(f"the blocks cannot be compiled, use --compile off: {error}") from error
                warn(f"the blocks cannot be compiled, going on without: {error}")
                exhausted, self._compile = False, "off"
            if exhausted:
                grow = False
                _use_less_memory(self._windows, self.record, self._settings)
            self.record.compiled, self.record.compile_seconds, done = False, 0.0, group.start
            self._seconds = {True: [], False: []}
            self._sums.clear()
            self._windows.seek(group.start)

    def _begin(self, group: range) -> tuple[int, bool]:
        """The first window that is not done, and whether the micro-batch may still grow."""
        if self.record is not None:
            return group.start, False
        saved = None if self._unfinished is None else self._unfinished.load()
        if saved is None:
            size = min(self._settings.micro_batch or 1, self._windows.count)
            checkpointing = self._windows.backward and self._settings.checkpointing == "on"
            self.record = PassRecord(size, checkpointing=checkpointing)
            return group.start, self._settings.micro_batch is None
        tensors, values = saved
        parts: dict[str, dict[str, Tensor]] = {"sums": {}, "windows": {}}
        for key, tensor in tensors.items():
            part, name = key.split(".", 1)
            parts[part][name] = tensor
        with torch.inference_mode(False):  # they are added to
            device = self._windows.device
            self._sums.load({name: tensor.to(device, copy=True) for name, tensor in parts["sums"].items()})
        self._windows.load(parts["windows"])
        self.record = replace(PassRecord(**values["passes"]), compiled=False, compile_seconds=0.0)
        return values["done"], self._settings.micro_batch is None and values["done"] == 0

    def _passes(self, group: range, done: int, grow: bool) -> Iterator[int]:
        """Runs the windows of a group from `done` on; yields the size of each pass.

        The first pass is not compiled: it shows how much memory a window takes, and which modules share an input. Later
        groups, whose sums know that already, are compiled from their first pass on.
        """
        windows, record = self._windows, self.record
        base = _reset_peak(windows.device) if grow else 0
        compiling = record.compiled and self._sums.knows_inputs
        if not compiling and done < group.stop:
            size = 1 if grow else min(record.micro_batch, group.stop - done)
            with _checkpointed(windows, record.checkpointing or self._compile == "on"):  # uncompiled ones are larger
                windows.run(done, size)
            done += size
            yield size
        if grow:
            record.micro_batch = min(_largest_micro_batch(windows, base), group.stop - done or 1)
        with _checkpointed(windows, record.checkpointing):
            while done < group.stop:
                size = min(record.micro_batch, group.stop - done)
                whole = size == record.micro_batch
                passes = (self._last - done) / size  # that are left in all groups
                begin = record.compiled or _should_compile(windows, self._compile, self._seconds[False], passes)
                if begin and not compiling:
                    compiling = record.compiled = True
                    self._counts = _whole_counts(self._sums, (done - group.start) * windows.length)
                on = compiling and whole
                wanted = whole and self._compile != "off"
                with self._compiled.on(on), _timed(windows.device, self._seconds[on], wanted):
                    windows.run(done, size)
                done += size
                yield size
                if self._unfinished is not None and (done == group.stop or self._unfinished.due()):
                    self._save(done)
        if compiling and not self._counts.items() <= _whole_counts(self._sums, len(group) * windows.length).items():
            raise CompileError("compiled blocks do not show all inputs of their modules")
        if len(self._seconds[True]) > 1:
            record.compile_seconds = max(0.0, self._seconds[True][0] - self._seconds[True][1])

    def _save(self, done: int) -> None:
        tensors = {f"sums.{name}": tensor for name, tensor in self._sums.tensors().items()}
        tensors |= {f"windows.{name}": tensor for name, tensor in self._windows.tensors().items()}
        self._unfinished.save(tensors, {"done": done, "passes": asdict(self.record)})


def _compile_setting(sums: Sums, settings: PassSettings) -> str:
    """settings.compile, as far as the sums can be measured in compiled blocks."""
    if sums.uncompiled is None or settings.compile == "off":
        return settings.compile
    if settings.compile == "on":
        warn(f"--compile on is ignored here: {sums.uncompiled} can only be measured in uncompiled blocks")
    return "off"


def _use_less_memory(windows: Windows, record: PassRecord, settings: PassSettings) -> None:
    """The one answer to a device that is out of memory: half the micro-batch, then checkpointing."""
    torch.cuda.empty_cache()
    if windows.together:
        raise UserError(
            f"{windows.device} ran out of memory; use a smaller --micro-batch, --checkpointing on, --offload, or more "
            f"ranks"
        )
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
            advice = "use a smaller --seqlen, a larger --max-memory, or --engine streamed --segment 1"
        raise UserError(f"a window of {windows.length} tokens does not fit the memory of {windows.device}; {advice}")
    warn(f"{windows.device} ran out of memory: starting again with {change}")


def _largest_micro_batch(windows: Windows, base: int) -> int:
    """Windows that keep the device busy, as far as they fit beside `base` bytes."""
    if windows.device.type != "cuda":
        return 1
    window = torch.cuda.max_memory_allocated(windows.device) - base - windows.loaded_bytes
    return max(1, min(windows.busy_windows, int(_SPARE * free_memory(windows.device) / max(window, 1))))


def _should_compile(windows: Windows, compile: str, seconds: list[float], passes: float) -> bool:
    if compile != "auto" or windows.device.type != "cuda" or len(seconds) < 2:
        return compile == "on"
    return seconds[1] * _COMPILE_GAIN * passes > _COMPILE_SECONDS


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
