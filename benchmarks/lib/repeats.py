"""Repeated measurements: their mean, standard deviation and confidence interval, and the energy of repeated work."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fwanda_pruner.run.energy import SHORTEST, Energy, EnergyMeter, Timer

# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Spread:
    """Mean of repeated measurements and how far they scatter.

    Attributes:
        n: number of measurements.
        mean: in their unit.
        std: sample standard deviation; None for a single one.
        ci95: half width of the 95 % confidence interval of the mean (Student's t); None for a single one.
    """

    n: int
    mean: float
    std: float | None
    ci95: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of one or more numbers. Beyond 31, the t of 31 makes the interval a little wide."""
        n, mean = len(values), statistics.fmean(values)
        if n == 1:
            return cls(1, mean, None, None)
        std = statistics.stdev(values)
        return cls(n, mean, std, _T[min(n - 1, len(_T)) - 1] * std / math.sqrt(n))


@dataclass(frozen=True)
class Repeats:
    """Repeated measurements of one piece of work. Each figure is for one unit of it, say a token.

    Attributes:
        runs: how often the work ran in each window of measurement.
        seconds, gross_joules: spreads over the windows.
        net_joules: gross joules less the idle power over the window; None if the idle power could not be measured.
        flags: why a window cannot be trusted, if so.
    """

    runs: int
    seconds: Spread
    gross_joules: Spread
    net_joules: Spread | None
    flags: list[str]


def repeated(
    work: Callable[[], object],
    device: str | torch.device,
    *,
    repeats: int = 5,
    units: int = 1,
    timer: Timer | None = None,
) -> Repeats | str:
    """Measures the energy of work that is too short for the counter, by running it often in each window.

    The work runs once to warm up. The idle power is measured before each window.

    Args:
        work: changes nothing that it reads.
        device: where it runs.
        repeats: number of windows.
        units: what one run makes, say 128 tokens.
        timer: the clock.

    Returns:
        Repeats, or "not measured: <why>".
    """
    timer = timer or Timer()
    with EnergyMeter(device, "net", timer=timer) as probe:
        pass
    if probe.energy.startswith("not measured"):
        return probe.energy
    start = timer.now()
    work()
    torch.cuda.synchronize(device)
    # a tenth more than needed, since the first run is the slowest
    runs = math.ceil(1.1 * SHORTEST / max(timer.now() - start, 1e-6))
    windows: list[Energy] = []
    while len(windows) < repeats:
        energy = window(work, runs, device, timer)
        if isinstance(energy, Energy):
            windows.append(energy)
        elif energy.startswith("not resolved"):
            windows, runs = [], 2 * runs
        else:
            return energy
    return per_unit(windows, runs, runs * units)


def window(work: Callable[[], object], runs: int, device: str | torch.device, timer: Timer) -> Energy | str:
    """The energy of `runs` runs, or why there is none."""
    with EnergyMeter(device, "net", timer=timer) as meter:
        for _ in range(runs):
            work()
    return meter.energy


def per_unit(windows: list[Energy], runs: int, units: int) -> Repeats:
    """Spreads over the windows, each of which made `units` units in `runs` runs."""
    net = [window.net_joules for window in windows]
    return Repeats(
        runs=runs,
        seconds=Spread.of([window.seconds / units for window in windows]),
        gross_joules=Spread.of([window.gross_joules / units for window in windows]),
        net_joules=None if None in net else Spread.of([joules / units for joules in net]),
        flags=[window.flag for window in windows if window.flag],
    )
