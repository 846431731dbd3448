"""The stages of a run: what each costs, and what an interrupted run keeps of it.

Nothing else in the package times a stage or resumes one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..engine.ranks import ALONE, Ranks
from ..progress import begin_stage
from ..stage_names import StageName
from .energy import EnergyMeter
from .state import RunState

T = TypeVar("T")
SAVE_SECONDS = 60  # between two saves of an unfinished stage


@dataclass(frozen=True)
class Codec(Generic[T]):
    """How a result is stored: as named tensors and JSON values.

    Attributes:
        encode: result -> (tensors, values).
        decode: (tensors on the CPU, values) -> result.
    """

    encode: Callable[[T], tuple[dict[str, Tensor], Any]]
    decode: Callable[[dict[str, Tensor], Any], T]


@contextmanager
def timed(seconds: dict[str, float], name: StageName) -> Iterator[None]:
    """Adds the time of the block of code to the seconds of a stage."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name.value] = round(seconds.get(name.value, 0.0) + time.perf_counter() - start, 3)


class Stages:
    """Runs the stages of one run: `stage(name, compute, codec)`.

    Args:
        state: keeps the results of stages that have a codec.
        device: where the run works; its queued work counts for the stage that queued it.
        ranks: the processes of the run. The first keeps results; all get its results, and all warnings.

    Attributes:
        seconds: stage -> seconds.
        peak_bytes: peak of the GPU memory over all stages.
        notes: the warnings of the run, see notes.recording().
    """

    def __init__(self, state: RunState, device: torch.device, ranks: Ranks = ALONE):
        self.seconds: dict[str, float] = {}
        self.peak_bytes = 0
        self.notes = state.notes
        self._state, self._device, self._ranks = state, device, ranks
        self._meter: EnergyMeter | None = None

    def __call__(self, name: StageName, compute: Callable[[], T], codec: Codec[T] | None = None) -> T:
        """The result of a stage: from an interrupted run, or else computed, timed and kept.

        Args:
            name: of the stage; seconds of stages with the same name add up.
            compute: computes the result.
            codec: stores it; None: the stage is computed in every run.
        """
        saved = None if codec is None else self._ranks.share(lambda: self._state.recall(name.value))
        begin_stage(name.title, kept=saved is not None)
        if codec is not None and saved is not None:
            return codec.decode(*saved)
        with timed(self.seconds, name), self._measured(name.value):
            result = compute()
        self._ranks.share_notes()
        if codec is not None:
            result = self._of_first(result, codec)
            self._state.keep(name.value, *codec.encode(result))
            self._state.forget_parts(name.value)
        return result

    def _of_first(self, result: T, codec: Codec[T]) -> T:
        """The result of the first rank: rounding on GPUs may differ, and all must go on with the same bits."""
        if self._ranks.size == 1:
            return result
        tensors, values = codec.encode(result)
        shared = self._ranks.share(lambda: ({name: tensor.cpu() for name, tensor in tensors.items()}, values))
        return result if self._ranks.first else codec.decode(*shared)

    def unfinished(self, name: StageName, part: str = "part") -> _UnfinishedStage | None:
        """Where one long computation inside a stage saves its state; the parts of a stage have different names.

        None in a process group: no rank knows the state of all.
        """
        return _UnfinishedStage(self._state, f"{name.value}-{part}") if self._ranks.alone else None

    def steps(self, name: StageName, codec: Codec[T]) -> _StageSteps[T]:
        """Where a stage of many steps keeps the result of each."""
        return _StageSteps(self._state, name.value, codec, self._ranks)

    @contextmanager
    def metered(self, meter: EnergyMeter) -> Iterator[EnergyMeter]:
        """Measures the energy of the stages inside the block."""
        with meter:
            self._meter = meter
            try:
                yield meter
            finally:
                self._meter = None

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        """Measures energy and memory, and waits for the work that the block of code has queued on the device."""
        try:
            with self._meter.phase(name) if self._meter else nullcontext():
                yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
                self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(self._device))


class _UnfinishedStage:
    """See `engine.resume.Unfinished`."""

    def __init__(self, state: RunState, name: str):
        self._state, self._name = state, name
        self._saved_at = time.monotonic()

    def load(self) -> tuple[dict[str, Tensor], dict] | None:
        return self._state.recall(self._name)

    def due(self) -> bool:
        return time.monotonic() - self._saved_at >= SAVE_SECONDS

    def save(self, tensors: dict[str, Tensor], values: dict) -> None:
        self._state.keep(self._name, tensors, values)
        self._saved_at = time.monotonic()


class _StageSteps(Generic[T]):
    """See `engine.resume.Steps`."""

    def __init__(self, state: RunState, name: str, codec: Codec[T], ranks: Ranks):
        self._state, self._name, self._codec, self._ranks = state, name, codec, ranks

    def load(self, index: int) -> T | None:
        saved = self._ranks.share(lambda: self._state.recall(self._path(index)))
        return None if saved is None else self._codec.decode(*saved)

    def save(self, index: int, result: T) -> None:
        self._ranks.share_notes()
        self._state.keep(self._path(index), *self._codec.encode(result))

    def _path(self, index: int) -> str:
        return f"{self._name}-{index:05d}"
