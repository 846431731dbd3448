"""Facts about this machine that every result must name, and the speed of its copies."""

import datetime
import os
import platform
import re
from pathlib import Path

import torch

import fwanda_kernels as fk
from fwanda_kernels.testing import bench

from .results import RESULTS, read_all

_SLOW = 0.6  # copies below this part of the usual rate: the machine is busy
COPY_BYTES = {"cuda": 1 << 31, "cpu": 1 << 28}


def this_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def machine(device: str) -> dict:
    """Card, driver, versions and date, as the first keys of a result."""
    return {
        "card": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "driver": driver() if device == "cuda" else None,
        "threads": None if device == "cuda" else torch.get_num_threads(),
        "fwanda_kernels": fk.__version__,
        "torch": torch.__version__,
        "triton": triton_version(),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def cpu_name() -> str:
    try:
        return re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):
        return platform.processor() or platform.machine()


def driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # a result without the driver's version is still a result
        return None


def triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def copy_rate(byte_count: int, device: str) -> float:
    """GB/s of copying `byte_count` bytes in all: half of them read, half of them written."""
    byte_count = min(byte_count, COPY_BYTES[device])
    pair_count = 1 if byte_count >= COPY_BYTES[device] else min(16, max(2, COPY_BYTES[device] // byte_count))
    pairs = [torch.randn(2, max(byte_count // 4, 1), device=device).to(torch.bfloat16) for _ in range(pair_count)]
    calls = [lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs]
    return bench(calls, device=device).gb_per_s(byte_count)


def busy(facts: dict, device: str, folder: Path = RESULTS) -> str | None:
    """Why times that are measured now cannot be trusted, or None if they can.

    The machine is busy if copies are slow for this card, or if many processes wait for the CPU.

    Args:
        facts: of machine(), and copy_gb_per_s.
        device: "cpu" or "cuda".
        folder: of earlier results; the fastest copy among those of the same card counts as usual.
    """
    rates = [
        result["copy_gb_per_s"]
        for result in read_all("ops", folder).values()
        if result["card"] == facts["card"] and result["threads"] == facts["threads"] and not result.get("busy")
    ]
    if rates and facts["copy_gb_per_s"] < _SLOW * max(rates):
        return f"copies run at {facts['copy_gb_per_s']} GB/s, usually at {max(rates)} on this machine; it is busy"
    waiting, cores = os.getloadavg()[0], os.cpu_count() or 1
    if device == "cpu" and waiting > cores / 2 + torch.get_num_threads():
        return f"{waiting:.1f} processes share {cores} cores; the machine is busy"
    return None


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
