"""How much of the time of copies between RAM and a GPU lies under computation."""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fwanda_pruner import PruneConfig
from fwanda_pruner.engine.engine import make_engine
from fwanda_pruner.measure.sums import StatisticsSums
from fwanda_pruner.model.targets import find_targets

_DIRECTIONS = {"to_device": "HtoD", "to_ram": "DtoH"}
Interval = tuple[float, float]  # start and end


def profiled_copies(model: nn.Module, tokens: Tensor, config: PruneConfig) -> dict:
    """The copies during the passes over windows [S, L] that measure statistics, after a first one has warmed up.

    Args:
        model, tokens, config: as prune(); the micro-batch is a number.

    Returns:
        As share_under_kernels(), for "to_device" and "to_ram".
    """
    engine = make_engine(model, find_targets(model)[0], config, progress=False)
    modules = {target.name: target.module for target in engine.targets}
    engine.measure(tokens[: int(config.micro_batch)], StatisticsSums(modules), backward=config.needs_fisher)
    activity = ProfilerActivity.CUDA if engine.device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        engine.measure(tokens, StatisticsSums(modules), backward=config.needs_fisher)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return {way: share_under_kernels(events, kind) for way, kind in _DIRECTIONS.items()}


def share_under_kernels(events: Sequence[dict], direction: str) -> dict:
    """Of the copies of a trace.

    Args:
        events: "traceEvents" of a Chrome trace; times are microseconds.
        direction: "HtoD" or "DtoH".

    Returns:
        {"seconds": of all these copies, "bytes": that they moved, "under_kernels": share of the seconds during which a
        kernel runs, None without copies}.
    """
    kernels = _union(_interval(e) for e in events if e.get("cat") == "kernel")
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and direction in e["name"]]
    total = sum(event["dur"] for event in copies)
    under = sum(_overlap(_interval(event), kernels) for event in copies)
    moved = sum(event.get("args", {}).get("bytes", 0) for event in copies)
    return {"seconds": total / 1e6, "bytes": moved, "under_kernels": under / total if total else None}


def _interval(event: dict) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Intervals in order, those that touch joined."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _overlap(interval: Interval, others: Sequence[Interval]) -> float:
    """Length of an interval that ordered intervals cover."""
    start, end = interval
    first = max(0, bisect_right(others, (start, float("inf"))) - 1)
    covered = 0.0
    for index in range(first, len(others)):
        other_start, other_end = others[index]
        if other_start >= end:
            break
        covered += max(0.0, min(end, other_end) - max(start, other_start))
    return covered
