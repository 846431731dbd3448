"""`pytest benchmarks/ --benchmark`: every op against naive torch, checked on the same inputs before it is timed.

Prints pytest-benchmark's table and one of rates, and writes one JSON file to benchmarks/results.
"""

import datetime
import json
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fwanda_kernels as fk
from fwanda_kernels.testing import bench

RESULTS = Path(__file__).parent / "results"
COPY_BYTES = {"cuda": 1 << 31, "cpu": 1 << 28}


def pytest_addoption(parser):
    parser.addoption("--benchmark", action="store_true", help="run the benchmarks instead of skipping them")
    parser.addoption("--results", default=str(RESULTS), metavar="DIR", help="folder for the JSON file (%(default)s)")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--benchmark"):
        for item in items:
            item.add_marker(pytest.mark.skip(reason="benchmarks run with --benchmark"))


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def results(request, device):
    """Where a benchmark adds its row; the file is written after each, so that a run cut short leaves what it has."""
    facts = {**machine(device), "copy_gb_per_s": round(copy_rate(COPY_BYTES[device], device), 1), "rows": []}
    folder = Path(request.config.getoption("--results"))
    folder.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", facts["card"].lower()).strip("-")
    results = Results(facts, folder / f"ops-{slug}-{facts['date']}.json")
    request.config.stash[_REPORT] = results
    return results


@dataclass
class Results:
    """The facts of this machine, the rows so far, and the file that holds them."""

    facts: dict
    path: Path

    def add(self, row: dict) -> None:
        self.facts["rows"].append(row)
        self.path.write_text(json.dumps(self.facts, indent=1) + "\n")


_REPORT = pytest.StashKey()


def pytest_terminal_summary(terminalreporter, config):
    if _REPORT not in config.stash:
        return
    results = config.stash[_REPORT]
    terminalreporter.section("{card}, copy {copy_gb_per_s} GB/s".format_map(results.facts))
    for line in table(results.facts["rows"]):
        terminalreporter.write_line(line)
    terminalreporter.write_line(f"written to {results.path}")


def table(rows: list[dict]) -> list[str]:
    """Lines of the table of rates."""
    head = ("op", "case", "backend", "us", "GB/s", "% of copy", "naive us", "speedup", "mJ")
    cells = [head]
    for row in rows:
        joules = "-" if row["joules"] is None else f"{row['joules'] * 1e3:.3g}"
        rates = ("-", "-") if row["bytes"] is None else (f"{row['gb_per_s']:.0f}", f"{row['percent_of_copy']:.0f}")
        cells.append((
            row["op"], row["case"], row["backend"], f"{row['us']:.1f}", *rates, f"{row['naive_us']:.0f}",
            f"{row['naive_us'] / row['us']:.1f}x", joules,
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


def copy_rate(size: int, device: str) -> float:
    """GB/s of copying `size` bytes, read and written bytes counted."""
    size = min(size, COPY_BYTES[device])
    count = 1 if size >= COPY_BYTES[device] else min(16, max(2, COPY_BYTES[device] // size))
    pairs = [torch.randn(2, max(size // 4, 1), device=device).to(torch.bfloat16) for _ in range(count)]
    calls = [lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs]
    return bench(calls, device=device).gb_per_s(size)


def machine(device: str) -> dict:
    """What a result must name: card, driver, versions, date."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return {
        "card": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "driver": driver() if device == "cuda" else None,
        "threads": None if device == "cuda" else torch.get_num_threads(),
        "fwanda_kernels": fk.__version__,
        "torch": torch.__version__,
        "triton": triton_version,
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
