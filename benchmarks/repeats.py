"""Measurements repeated: mean, standard deviation and confidence interval, and the energy of work run over and over."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fwanda_pruner.run.energy import SHORTEST, Energy, EnergyMeter, Timer, idle_power

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
        """The spread of one or more numbers. Beyond 31 the last t of the table is used, which is a little wide."""
        n, mean = len(values), statistics.fmean(values)
        if n == 1:
            return cls(1, mean, None, None)
        std = statistics.stdev(values)
        return cls(n, mean, std, _T[min(n - 1, len(_T)) - 1] * std / math.sqrt(n))


@dataclass(frozen=True)
class Repeats:
    """Repeated measurements of one piece of work, each figure for one unit of it.

    Attributes:
        runs: runs in each window.
        seconds, gross_joules: spreads over the windows.
        net_joules: the same without the idle power; None if that could not be measured.
        flags: what the windows were flagged for.
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
    """Energy of work by repeated measurement, after one run that warms up; the idle power is measured before each.

    Args:
        work: changes nothing that it reads; run again until a window is long enough.
        device: where it runs.
        repeats: number of windows.
        units: what one run makes, tokens say; the figures are for one of them.
        timer: the clock.

    Returns:
        Repeats, or "not measured: <why>".
    """
    timer = timer or Timer()
    with EnergyMeter(device, timer=timer) as probe:
        pass
    if probe.energy.startswith("not measured"):
        return probe.energy
    start = timer.now()
    work()
    torch.cuda.synchronize(device)
    # a tenth more than needed, as the first run is the slowest
    runs = math.ceil(1.1 * SHORTEST / max(timer.now() - start, 1e-6))
    windows: list[Energy] = []
    while len(windows) < repeats:
        with EnergyMeter(device, idle=idle_power(device, timer=timer), timer=timer) as meter:
            for _ in range(runs):
                work()
        if isinstance(meter.energy, Energy):
            windows.append(meter.energy)
        elif meter.energy.startswith("not resolved"):
            windows, runs = [], 2 * runs
        else:
            return meter.energy
    net = [window.net_joules for window in windows]
    return Repeats(
        runs=runs,
        seconds=Spread.of([window.seconds / (runs * units) for window in windows]),
        gross_joules=Spread.of([window.gross_joules / (runs * units) for window in windows]),
        net_joules=None if None in net else Spread.of([joules / (runs * units) for joules in net]),
        flags=[window.flag for window in windows if window.flag],
    )
