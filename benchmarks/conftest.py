"""`pytest benchmarks/ --benchmark`: every op against naive torch, checked on the same inputs before it is timed.

Prints the table of pytest-benchmark and a table of rates, and writes one JSON file to .benchmarks, which git ignores.
`--results benchmarks/results` adds it to the results that the pages show. `--backend triton` measures one backend.
On a busy machine a warning says so.
"""

import contextlib
from pathlib import Path

import pytest
from lib.machine import COPY_BYTES, busy, copy_rate, machine, this_device
from lib.results import UNSHARED, OpRows

import fwanda_kernels as fk

REPORT = pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption("--benchmark", action="store_true", help="run the benchmarks instead of skipping them")
    parser.addoption("--backend", choices=("native", "triton"), help="measure this backend, and only the ops it serves")
    parser.addoption("--results", default=str(UNSHARED), metavar="DIR", help="folder for the JSON file (%(default)s)")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--benchmark"):
        for item in items:
            item.add_marker(pytest.mark.skip(reason="benchmarks run with --benchmark"))


@pytest.fixture(scope="session")
def device() -> str:
    return this_device()


@pytest.fixture
def backend(request):
    """The backend of --backend, forced while a case runs; None where the first that serves is measured."""
    name = request.config.getoption("--backend")
    with fk.use_backend(name) if name else contextlib.nullcontext():
        yield name


@pytest.fixture(scope="session")
def results(request, device) -> OpRows:
    """Collects a row for each benchmark."""
    facts = machine(device) | {"copy_gb_per_s": round(copy_rate(COPY_BYTES[device], device), 1)}
    facts["busy"] = busy(facts, device)
    rows = OpRows(Path(request.config.getoption("--results")), facts, request.config.getoption("--backend"))
    request.config.stash[REPORT] = rows
    return rows


def pytest_terminal_summary(terminalreporter, config):
    if REPORT not in config.stash:
        return
    report = config.stash[REPORT]
    terminalreporter.section("{card}, copy {copy_gb_per_s} GB/s".format_map(report.facts))
    for line in rate_table(report.facts["rows"]):
        terminalreporter.write_line(line)
    if report.facts["busy"]:
        terminalreporter.write_line(f"WARNING: {report.facts['busy']}: do not compare these times", yellow=True)
    terminalreporter.write_line(f"written to {report.path}")


def rate_table(rows: list[dict]) -> list[str]:
    """Lines of text: a head, then one line for each row."""
    lines = [("op", "case", "backend", "us", "host us", "GB/s", "% of copy", "naive us", "speedup", "mJ")]
    for row in rows:
        joules = "-" if row["joules"] is None else f"{row['joules'] * 1e3:.3g}"
        rates = ("-", "-") if row["bytes"] is None else (f"{row['gb_per_s']:.0f}", f"{row['percent_of_copy']:.0f}")
        speedup = row["naive_us"] / row["us"]
        times = (f"{row['naive_us']:.0f}", f"{speedup:.1f}x" if speedup >= 1 else f"{speedup:.2g}x")
        host = "-" if row.get("host_us") is None else f"{row['host_us']:.1f}"
        lines.append((row["op"], row["case"], row["backend"], f"{row['us']:.1f}", host, *rates, *times, joules))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
