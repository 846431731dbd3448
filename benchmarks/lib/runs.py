"""One whole run, ours or in plain torch, and its figures."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

import fwanda_pruner
from fwanda_pruner import PruneConfig
from fwanda_pruner.run.energy import EnergyMeter
from fwanda_pruner.stage_names import StageName, pruning_seconds

from . import naive
from .machine import synchronize
from .repeats import Spread

JOULES = ("gross_joules", "net_joules", "sampled_net_joules")


def our_run(model: nn.Module, tokens: Tensor, config: PruneConfig, save_in: Path | None = None) -> dict:
    """A run of fwanda_pruner. It prunes the model in place.

    Args:
        model: with fresh weights.
        tokens: [S, L] int64, the calibration windows.
        config: its settings.
        save_in: a folder in which the pruned model is saved for a moment; None: it is not saved.
    """
    report = fwanda_pruner.prune(model, None, config=config, calibration=tokens)
    if save_in is not None:
        with tempfile.TemporaryDirectory(dir=save_in) as folder:
            fwanda_pruner.save_pruned(model, None, report, Path(folder) / "model")
    return {
        "seconds": dict(report.seconds),
        "total_seconds": pruning_seconds(report.seconds),
        "peak_memory_bytes": report.peak_memory_bytes,
        "energy": report.energy_details,
        "passes": report.passes,
        "bytes_loaded": report.bytes_loaded,
        "warnings": report.warnings,
    }


def naive_run(model: nn.Module, tokens: Tensor, method: str, sparsity: float) -> dict:
    """A run of the published pipeline in plain torch. It prunes the model in place."""
    device, seconds = tokens.device.type, {}
    synchronize(device)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def phase(name: str):
        start = time.perf_counter()
        with meter.phase(name):
            yield
            synchronize(device)
        seconds[name] = time.perf_counter() - start

    with EnergyMeter(device, "net") as meter:
        naive.prune(model, tokens, method, sparsity, phase)
    return {
        "seconds": seconds,
        "total_seconds": pruning_seconds(seconds),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "energy": meter.to_dict(),
    }


def with_rates(run: dict, flops: float | None, roof: dict) -> dict:
    """The run with its rate and its multiple of the floor.

    Args:
        run: from our_run() or naive_run().
        flops: of its calibration; None: there is no floor, and the rates are None.
        roof: from shapes.gemm_roof().
    """
    if flops is None:
        return run | dict.fromkeys(("tflop_per_s", "share_of_roof", "times_floor"))
    rate = flops / run["seconds"][StageName.CALIBRATE.value] / 1e12
    return run | {
        "tflop_per_s": rate,
        "share_of_roof": rate / roof["tflop_per_s"],
        "times_floor": run["total_seconds"] * roof["tflop_per_s"] * 1e12 / flops,
    }


def spread(runs: list[dict]) -> dict:
    """Mean, deviation and confidence interval of the totals. Joules are None where a run has none."""
    values = {"total_seconds": [run["total_seconds"] for run in runs]}
    values |= {key: [joules_of(run, key) for run in runs] for key in JOULES}
    return {key: None if None in x else dataclasses.asdict(Spread.of(x)) for key, x in values.items()}


def joules_of(run: dict, key: str) -> float | None:
    total = run["energy"]["total"]
    return None if isinstance(total, str) else total.get(key)
