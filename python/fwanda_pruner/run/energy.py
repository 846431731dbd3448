"""Energy of a stretch of work on GPUs: the hardware counter, and power.draw at 10 Hz beside it."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ..errors import one_line

SAMPLE_SECONDS = 0.1  # 10 Hz
SHORTEST = 2.0  # seconds; the counters resolve no shorter window
COMPARED = 5.0  # seconds; from here on the two methods should agree
AGREEMENT = 5.0  # percent
# After the work: a counter publishes late, and power.draw is an average over about the last second.
SETTLE = 1.0


def trapezoid(seconds: Sequence[float], watts: Sequence[float]) -> float:
    """Joules under a power trace, linear between its samples; 0 for fewer than two.

    Args:
        seconds: times, ascending.
        watts: the power at each.

    Raises:
        ValueError: the lengths differ.
    """
    if len(seconds) != len(watts):
        raise ValueError(f"trapezoid: got {len(seconds)} times and {len(watts)} powers")
    points = list(zip(seconds, watts, strict=True))
    return math.fsum((t1 - t0) * (w0 + w1) / 2 for (t0, w0), (t1, w1) in pairwise(points))


@dataclass(frozen=True)
class Energy:
    """Energy of one window, summed over the GPUs that torch sees.

    Attributes:
        seconds: length of the window.
        counter_joules: gross, by the total-energy counters; None where a GPU has none.
        sampled_joules: gross, power.draw at 10 Hz integrated by trapezoids; None where it cannot be read.
        idle_watts: before the work, the model loaded; None if it was not measured.
        limit_watts: sum of the power limits; None if unknown.
        gpus: UUID -> gross joules, by the counter where there is one.
    """

    seconds: float
    counter_joules: float | None
    sampled_joules: float | None
    idle_watts: float | None
    limit_watts: float | None
    gpus: dict[str, float]

    @property
    def gross_joules(self) -> float:
        """By the counter, or by samples where there is none."""
        return self.sampled_joules if self.counter_joules is None else self.counter_joules

    @property
    def net_joules(self) -> float | None:
        """Gross without the idle power over the window; None without an idle power."""
        return None if self.idle_watts is None else self.gross_joules - self.idle_watts * self.seconds

    @property
    def sampled_net_joules(self) -> float | None:
        """The paper's figure: the sampled trace without the idle power."""
        if self.idle_watts is None or self.sampled_joules is None:
            return None
        return self.sampled_joules - self.idle_watts * self.seconds

    @property
    def mean_watts(self) -> float:
        """Gross mean power."""
        return self.gross_joules / self.seconds

    @property
    def difference_percent(self) -> float | None:
        """How far the sampled energy lies above the counter's; None without both."""
        if not self.counter_joules or self.sampled_joules is None:
            return None
        return 100 * (self.sampled_joules / self.counter_joules - 1)

    @property
    def flag(self) -> str | None:
        """Why the figure cannot be trusted; None if nothing speaks against it."""
        watts, idle, limit = self.mean_watts, self.idle_watts, self.limit_watts
        if idle is not None and watts < 0.9 * idle:
            return f"a mean power of {watts:.0f} W is below 0.9 of the idle power, {idle:.0f} W"
        if limit is not None and watts > 1.05 * limit:
            return f"a mean power of {watts:.0f} W is above 1.05 of the power limit, {limit:.0f} W"
        difference = self.difference_percent
        if self.seconds > COMPARED and difference is not None and abs(difference) > AGREEMENT:
            return f"power.draw at 10 Hz gives {difference:+.1f} % of the counter's energy"
        return None

    def to_dict(self) -> dict:
        """The fields and what follows from them, as JSON values."""
        derived = ("gross_joules", "net_joules", "sampled_net_joules", "mean_watts", "difference_percent", "flag")
        return asdict(self) | {name: getattr(self, name) for name in derived}


class Timer:
    """Real time, and a thread for what is done every so often. Tests put their own in its place."""

    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def every(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        """Call repeatedly in a thread, until the returned function is called."""
        stop = threading.Event()

        def run() -> None:
            while not stop.wait(seconds):
                call()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()

        def end() -> None:
            stop.set()
            thread.join()

        return end


class _Reading(NamedTuple):
    """All GPUs at one time, in their order. watts: None unless all have power.draw; joules: None between the ends of
    phases, and unless all have a counter."""

    seconds: float
    watts: list[float] | None
    joules: list[float] | None


class _Gpus:
    """The GPUs that torch sees, through NVML.

    Raises:
        Exception: there is no NVML, or a GPU has neither a counter nor power.draw.
    """

    def __init__(self):
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        try:
            uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
            self.handles = {uuid: pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids}
            self.has_counter = self._error(pynvml.nvmlDeviceGetTotalEnergyConsumption) is None
            error = self._error(pynvml.nvmlDeviceGetPowerUsage)
            self.has_power = error is None
            if not (self.has_counter or self.has_power):
                raise error
        except BaseException:
            self.close()
            raise

    def _error(self, function) -> Exception | None:
        try:
            self._all(function)
        except Exception as error:
            return error
        return None

    def _all(self, function) -> list[float]:
        return [function(handle) / 1000 for handle in self.handles.values()]

    def read(self, seconds: float, *, counter: bool) -> _Reading:
        watts = self._all(self._nvml.nvmlDeviceGetPowerUsage) if self.has_power else None
        joules = self._all(self._nvml.nvmlDeviceGetTotalEnergyConsumption) if self.has_counter and counter else None
        return _Reading(seconds, watts, joules)

    def limit_watts(self) -> float | None:
        with contextlib.suppress(Exception):
            return sum(self._all(self._nvml.nvmlDeviceGetEnforcedPowerLimit))
        return None

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._nvml.nvmlShutdown()


class EnergyMeter:
    """Context manager that measures the energy of its block on all visible CUDA GPUs.

    Never raises: where energy cannot be measured, the reason is the result. An estimate is never given. A window that
    is long enough keeps the meter a second longer, so that what counters and averages publish late is counted; the
    power of that second is taken off again, and it is no part of the window.

    Args:
        device: where the work runs; waited for at both ends of the block and of each phase. On a device other than
            CUDA nothing is measured.
        idle: watts before the work, from idle_power(); None if not measured, then there are no net joules.
        timer: the clock.

    Attributes:
        energy: Energy, or "not measured: <why>", or "not resolved: <why>" under 2 s; final once the block is left.
        phases: the same for each name given to phase(), by the counter alone where there is one. The ends are exact to
            about a tenth of a second of power.
    """

    def __init__(self, device: str | torch.device, *, idle: float | None = None, timer: Timer | None = None):
        self.energy: Energy | str = "not measured: the measurement has not ended"
        self.phases: dict[str, Energy | str] = {}
        self._device, self._idle, self._timer = torch.device(device), idle, timer or Timer()
        self._gpus: _Gpus | None = None
        self._stop: Callable[[], None] = lambda: None
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._trace: list[_Reading] = []
        self._spans: dict[str, list[tuple[int, int]]] = {}

    @property
    def result(self) -> float | str:
        """Gross joules, or why there are none."""
        return self.energy if isinstance(self.energy, str) else self.energy.gross_joules

    def to_dict(self) -> dict:
        """{"total": ..., "phases": {name: ...}}: each the dict of an Energy, or the reason there is none."""
        phases = {name: _plain(energy) for name, energy in self.phases.items()}
        return {"total": _plain(self.energy), "phases": phases}

    def __enter__(self) -> EnergyMeter:
        if self._device.type != "cuda":
            self._failure = f"not measured: the device is {self._device.type}"
            return self
        try:
            self._gpus = _Gpus()
            self._mark()
            if self._gpus.has_power:
                self._stop = self._timer.every(SAMPLE_SECONDS, self._sample)
        except ImportError:
            self._failure = "not measured: no NVML (pip install nvidia-ml-py)"
        except Exception as error:  # NVMLError, or what a broken driver raises: the work must go on
            self._fail(error)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        end, rest = self._mark(), 0.0
        measured = self._failure is None and self._gpus.has_power and self._length(0, end) >= SHORTEST
        if measured and kind is None:
            self._timer.sleep(SETTLE)
            tail = self._mark()
            rest, end = self._length(end, tail), tail
        self._stop()
        self.energy = self._measured([(0, end)], rest, compare=True)
        self.phases = {name: self._measured(spans) for name, spans in self._spans.items()}
        if self._gpus is not None:
            self._gpus.close()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the energy of a block, its queued work included, to a named phase."""
        start = self._mark()
        try:
            yield
        finally:
            self._spans.setdefault(name, []).append((start, self._mark()))

    def _mark(self) -> int:
        """Read once the device has finished; returns the reading's place in the trace."""
        if self._gpus is not None and self._failure is None:
            try:
                torch.cuda.synchronize(self._device)
            except Exception as error:  # must not hide an error of the work itself
                self._fail(error)
        return self._sample(counter=True)

    def _sample(self, counter: bool = False) -> int:
        with self._lock:
            if self._gpus is not None and self._failure is None:
                try:
                    self._trace.append(self._gpus.read(self._timer.now(), counter=counter))
                except Exception as error:
                    self._fail(error)
            return len(self._trace) - 1

    def _fail(self, error: Exception) -> None:
        self._failure = f"not measured: {one_line(error)}"

    def _length(self, start: int, end: int) -> float:
        return self._trace[end].seconds - self._trace[start].seconds

    def _measured(self, spans: list[tuple[int, int]], rest: float = 0.0, compare: bool = False) -> Energy | str:
        """Energy over spans of the trace, the last `rest` seconds taken off at the power of the last reading.

        Samples stand beside the counter only to compare: inside the work they lag by up to a second.
        """
        if self._failure is not None:
            return self._failure
        seconds = sum(self._length(*span) for span in spans) - rest
        if seconds < SHORTEST:
            return f"not resolved: {seconds:.2f} s of work, under {SHORTEST:g} s"
        counter, sampled = [], []
        for gpu in range(len(self._gpus.handles)):
            off = rest * self._trace[-1].watts[gpu] if rest else 0.0
            if self._gpus.has_counter:
                counter.append(sum(self._trace[j].joules[gpu] - self._trace[i].joules[gpu] for i, j in spans) - off)
            if self._gpus.has_power and (compare or not counter):
                sampled.append(sum(self._sampled(gpu, *span) for span in spans) - off)
        return Energy(
            seconds=seconds,
            counter_joules=sum(counter) if counter else None,
            sampled_joules=sum(sampled) if sampled else None,
            idle_watts=self._idle,
            limit_watts=self._gpus.limit_watts(),
            gpus=dict(zip(self._gpus.handles, counter or sampled, strict=True)),
        )

    def _sampled(self, gpu: int, start: int, end: int) -> float:
        readings = self._trace[start : end + 1]
        return trapezoid([r.seconds for r in readings], [r.watts[gpu] for r in readings])


def idle_power(device: str | torch.device, seconds: float = 2.0, *, timer: Timer | None = None) -> float | None:
    """Mean watts of all visible GPUs at rest; None where they cannot be measured. Never raises.

    Call it just before the work, with the model loaded. Only the second half of the time is measured: power.draw may be
    an average that still holds what ran before.

    Args:
        device: waited for first.
        seconds: how long to watch.
        timer: the clock.
    """
    if torch.device(device).type != "cuda":
        return None
    timer, gpus = timer or Timer(), None
    try:
        gpus = _Gpus()
        torch.cuda.synchronize(device)
        timer.sleep(seconds / 2)
        readings = [gpus.read(timer.now(), counter=not gpus.has_power)]
        while readings[-1].seconds - readings[0].seconds < seconds / 2:
            timer.sleep(SAMPLE_SECONDS)
            readings.append(gpus.read(timer.now(), counter=not gpus.has_power))
        times = [r.seconds for r in readings]
        if gpus.has_power:
            joules = trapezoid(times, [sum(r.watts) for r in readings])
        else:
            joules = sum(readings[-1].joules) - sum(readings[0].joules)
        return joules / (times[-1] - times[0])
    except Exception:  # the meter of the work says why
        return None
    finally:
        if gpus is not None:
            gpus.close()


def _plain(energy: Energy | str) -> dict | str:
    return energy if isinstance(energy, str) else energy.to_dict()
