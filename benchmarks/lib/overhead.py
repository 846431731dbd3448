"""What collecting statistics adds to the time of the calibration passes."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

from torch import Tensor, nn

from fwanda_pruner import PruneConfig
from fwanda_pruner.engine.loop import PassRecord, PassSettings, run_windows
from fwanda_pruner.engine.model_windows import ModelWindows
from fwanda_pruner.engine.sums import Sums
from fwanda_pruner.measure.sums import StatisticsSums

from .machine import synchronize
from .naive import linears

ROUNDS = 3
WARM_UP = 4  # micro-batches; the last of them are compiled


def statistics_overhead(model: nn.Module, tokens: Tensor, config: PruneConfig) -> dict:
    """Percent that statistics add to the forward and backward passes over all windows [S, L].

    Passes with and without statistics take turns; the medians of three rounds are compared.
    """
    modules = linears(model)
    make_sums: dict[str, Callable[[], Sums]] = {"with": lambda: StatisticsSums(modules), "without": Sums}
    _, record = timed_passes(model, tokens, make_sums["with"](), PassSettings.of(config))
    settings = PassSettings(
        record.micro_batch, "on" if record.compiled else "off", "on" if record.checkpointing else "off"
    )
    timed_passes(model, tokens[: WARM_UP * record.micro_batch], Sums(), settings)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(ROUNDS):
        for name, make in make_sums.items():
            seconds[name].append(timed_passes(model, tokens, make(), settings)[0])
    with_, without = (statistics.median(seconds[name]) for name in ("with", "without"))
    return {"percent": 100 * (with_ / without - 1), "seconds": seconds, "passes": dataclasses.asdict(record)}


def timed_passes(model: nn.Module, tokens: Tensor, sums: Sums, settings: PassSettings) -> tuple[float, PassRecord]:
    """Seconds of the passes, and how they ran."""
    synchronize(tokens.device.type)
    start = time.perf_counter()
    record = run_windows(ModelWindows(model, tokens, backward=True), sums, settings)
    synchronize(tokens.device.type)
    return time.perf_counter() - start, record
