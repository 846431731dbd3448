"""Energy that GPUs use for some work, read from NVML.

Two protocols. "gross" reads the energy counter of each GPU at the ends of the work and of its phases, which costs no
time. "net" also measures the idle power first, samples the power (power.draw) at 10 Hz as the F-Wanda paper does, and
keeps reading for a second after the work.
"""

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

from ..config import ENERGY_PROTOCOLS
from ..errors import one_line

SAMPLE_SECONDS = 0.1  # 10 Hz
IDLE_SECONDS = 2.0  # how long to watch the idle power
SHORTEST = 2.0  # seconds; counters do not resolve shorter work
COMPARED = 5.0  # seconds; over longer work counter and samples should agree
AGREEMENT = 5.0  # percent
SETTLE = 1.0  # seconds after the work: counters publish late, and power.draw averages over about the last second


def trapezoid(seconds: Sequence[float], watts: Sequence[float]) -> float:
    """Integrates a power trace that is linear between its samples.

    Args:
        seconds: times, ascending.
        watts: the power at each of these times.

    Returns:
        Joules; 0 for fewer than two samples.

    Raises:
        ValueError: the lengths differ.
    """
    if len(seconds) != len(watts):
        raise ValueError(f"trapezoid: got {len(seconds)} times and {len(watts)} powers")
    points = list(zip(seconds, watts, strict=True))
    return math.fsum((t1 - t0) * (w0 + w1) / 2 for (t0, w0), (t1, w1) in pairwise(points))


@dataclass(frozen=True)
class Energy:
    """Energy of some work, summed over the GPUs that torch sees. "Gross" includes the idle power, "net" does not.

    Attributes:
        seconds: length of the work.
        counter_joules: gross, from the energy counters; None if a GPU has none.
        sampled_joules: gross, from power.draw at 10 Hz by the trapezoid rule; None if it was not sampled.
        idle_watts: the power before the work, with the model loaded; None if it was not measured.
        limit_watts: sum of the power limits; None if unknown.
        gpus: UUID -> gross joules of each GPU, from its counter if it has one.
    """

    seconds: float
    counter_joules: float | None
    sampled_joules: float | None
    idle_watts: float | None
    limit_watts: float | None
    gpus: dict[str, float]

    @property
    def gross_joules(self) -> float:
        """From the counters, or from samples if there is no counter."""
        return self.sampled_joules if self.counter_joules is None else self.counter_joules

    @property
    def net_joules(self) -> float | None:
        """gross_joules less the idle power times the seconds; None without an idle power."""
        return None if self.idle_watts is None else self.gross_joules - self.idle_watts * self.seconds

    @property
    def sampled_net_joules(self) -> float | None:
        """The paper's figure: sampled_joules less the idle power times the seconds; None if either is missing."""
        if self.idle_watts is None or self.sampled_joules is None:
            return None
        return self.sampled_joules - self.idle_watts * self.seconds

    @property
    def mean_watts(self) -> float:
        """Mean gross power."""
        return self.gross_joules / self.seconds

    @property
    def difference_percent(self) -> float | None:
        """How much more the samples give than the counters, in percent; None unless both are there."""
        if not self.counter_joules or self.sampled_joules is None:
            return None
        return 100 * (self.sampled_joules / self.counter_joules - 1)

    @property
    def flag(self) -> str | None:
        """Why not to trust the figure; None if nothing speaks against it."""
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
        """The fields and the figures that follow from them, as JSON values."""
        derived = ("gross_joules", "net_joules", "sampled_net_joules", "mean_watts", "difference_percent", "flag")
        return asdict(self) | {name: getattr(self, name) for name in derived}


class Timer:
    """A clock, and a thread that repeats a call. Tests pass a clock of their own instead."""

    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)

    def every(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        """Repeat a call in a thread. Returns a function that ends it."""
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
    """One reading of all GPUs, in their order."""

    seconds: float
    watts: list[float] | None  # None if the power was not read
    joules: list[float] | None  # None if the counters were not read


class _Gpus:
    """The GPUs that torch sees, through NVML.

    Raises:
        Exception: there is no NVML, or the GPUs have neither of the two sources.
    """

    def __init__(self):
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        try:
            uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
            self.handles = {uuid: pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids}
            self.counter_error = self._error(pynvml.nvmlDeviceGetTotalEnergyConsumption)
            self.has_counter = self.counter_error is None
            power_error = self._error(pynvml.nvmlDeviceGetPowerUsage)
            self.has_power = power_error is None
            if not (self.has_counter or self.has_power):
                raise power_error
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

    def read(self, seconds: float, *, power: bool, counter: bool) -> _Reading:
        watts = self._all(self._nvml.nvmlDeviceGetPowerUsage) if self.has_power and power else None
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
    """Context manager that measures the energy of its block on all GPUs that torch sees.

    It never raises: if energy cannot be measured, the reason is the result. It never estimates.

    "gross" reads the counters at the ends of the block and of each phase, and nothing else. "net" first measures the
    idle power for 2 s and samples power.draw at 10 Hz during the block. If the block took at least 2 s, it goes on
    reading for one second, so that it sees what counters and averages publish late; the power of that second is
    subtracted again.

    Args:
        device: where the work runs. The meter waits for it at both ends of the block and of each phase. It measures
            nothing on a device other than CUDA.
        protocol: "gross" or "net".
        timer: the clock.

    Attributes:
        energy: Energy, or "not measured: <why>", or "not resolved: <why>" under 2 s; final after the block.
        phases: the same for each name given to phase(), from the counters alone if there are any. The ends are exact
            to about a tenth of a second of power.

    Raises:
        ValueError: there is no such protocol.
    """

    def __init__(self, device: str | torch.device, protocol: str = "gross", *, timer: Timer | None = None):
        if protocol not in ENERGY_PROTOCOLS:
            raise ValueError(f"EnergyMeter: protocol must be one of {', '.join(ENERGY_PROTOCOLS)}, got {protocol!r}")
        self.energy: Energy | str = "not measured: the measurement has not ended"
        self.phases: dict[str, Energy | str] = {}
        self._device, self._net, self._timer = torch.device(device), protocol == "net", timer or Timer()
        self._idle: float | None = None
        self._gpus: _Gpus | None = None
        self._stop: Callable[[], None] = lambda: None
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._trace: list[_Reading] = []
        self._spans: dict[str, list[tuple[int, int]]] = {}

    @property
    def result(self) -> float | str:
        """Gross joules, or the reason that there are none."""
        return self.energy if isinstance(self.energy, str) else self.energy.gross_joules

    def to_dict(self) -> dict:
        """{"total": ..., "phases": {name: ...}}: each is the dict of an Energy, or the reason that there is none."""
        phases = {name: _json_value(energy) for name, energy in self.phases.items()}
        return {"total": _json_value(self.energy), "phases": phases}

    def __enter__(self) -> EnergyMeter:
        if self._device.type != "cuda":
            self._failure = f"not measured: the device is {self._device.type}"
            return self
        if self._net:
            self._idle = idle_power(self._device, timer=self._timer)
        try:
            self._gpus = _Gpus()
            if not (self._net or self._gpus.has_counter):
                why = one_line(self._gpus.counter_error)
                self._failure = f"not measured: no energy counter ({why}); --energy net samples the power instead"
                return self
            self._mark()
            if self._samples:
                self._stop = self._timer.every(SAMPLE_SECONDS, self._sample)
        except ImportError:
            self._failure = "not measured: no NVML (pip install nvidia-ml-py)"
        except Exception as error:  # NVMLError, or what a broken driver raises: the work must go on
            self._fail(error)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        end, rest = self._mark(), 0.0
        if self._failure is None and self._samples and kind is None and self._length(0, end) >= SHORTEST:
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

    @property
    def _samples(self) -> bool:
        return self._net and self._gpus.has_power

    def _mark(self) -> int:
        """Wait for the device, then read. Returns the place of the reading in the trace."""
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
                    self._trace.append(self._gpus.read(self._timer.now(), power=self._net, counter=counter))
                except Exception as error:
                    self._fail(error)
            return len(self._trace) - 1

    def _fail(self, error: Exception) -> None:
        self._failure = f"not measured: {one_line(error)}"

    def _length(self, start: int, end: int) -> float:
        return self._trace[end].seconds - self._trace[start].seconds

    def _measured(self, spans: list[tuple[int, int]], rest: float = 0.0, compare: bool = False) -> Energy | str:
        """Energy over spans of the trace, less the last `rest` seconds at the power of the last reading.

        With `compare`, samples are integrated although there is a counter. Phases do without: inside the work, samples
        lag by up to a second.
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
            if self._samples and (compare or not counter):
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


def idle_power(
    device: str | torch.device, seconds: float = IDLE_SECONDS, *, timer: Timer | None = None
) -> float | None:
    """Mean watts at rest of all GPUs that torch sees; None if they cannot be measured. Never raises.

    Call it just before the work, with the model loaded. It measures the second half of the time alone: power.draw may
    be an average that still contains earlier work.

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
        readings = [gpus.read(timer.now(), power=True, counter=not gpus.has_power)]
        while readings[-1].seconds - readings[0].seconds < seconds / 2:
            timer.sleep(SAMPLE_SECONDS)
            readings.append(gpus.read(timer.now(), power=True, counter=not gpus.has_power))
        times = [r.seconds for r in readings]
        if gpus.has_power:
            joules = trapezoid(times, [sum(r.watts) for r in readings])
        else:
            joules = sum(readings[-1].joules) - sum(readings[0].joules)
        return joules / (times[-1] - times[0])
    except Exception:  # the meter of the work reports the reason
        return None
    finally:
        if gpus is not None:
            gpus.close()


def _json_value(energy: Energy | str) -> dict | str:
    return energy if isinstance(energy, str) else energy.to_dict()
