"""What the stages of a run cost, and what they warn of."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import torch

from .energy import EnergyMeter


class StageName(str, Enum):
    """Stages of a run, in order; the values are the keys of `seconds` in fwanda.json."""

    LOAD = "load"
    TEXT = "text"
    EVAL_DENSE = "eval_dense"
    CALIBRATE = "calibrate"
    CHOOSE = "choose"
    BUDGETS = "budgets"
    CHECK = "check"
    PRUNE = "prune"
    EVAL_PRUNED = "eval_pruned"
    SAVE = "save"


@dataclass
class Stages:
    """Seconds and energy of each stage, the peak of GPU memory, and the warnings met on the way."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    device: torch.device = torch.device("cpu")
    meter: EnergyMeter | None = None
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage, the device's queued work included."""
        start = time.perf_counter()
        try:
            with self.meter.phase(stage) if self.meter else nullcontext():
                yield
        finally:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(self.device))
            self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.perf_counter() - start, 3)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Keep this package's warnings for the report; each is also shown, once."""
        package = str(Path(__file__).parents[1])
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            show = warnings.showwarning

            def keep(message, category, filename, lineno, file=None, line=None):
                ours = issubclass(category, UserWarning) and filename.startswith(package)
                if ours and str(message) in self.notes:
                    return
                if ours:
                    self.notes.append(str(message))
                show(message, category, filename, lineno, file, line)

            warnings.showwarning = keep
            yield
