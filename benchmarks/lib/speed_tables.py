"""Tables of the speed of single ops, from results of `pytest benchmarks/ --benchmark`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .machine import COPY_BYTES
from .markdown import table
from .results import RESULTS, read_all
from .run_tables import newest_runs, period

HOSTS = ("nn.utils.prune", "ao.pruning", "Wanda fork", "llm-compressor")  # in place of an op: see bench_integrations.py
# (op, case) -> its name in the README
README_ROWS = {
    ("row_topk_prune_", "4096 x 11008"): "row selection, 4096 x 11008",
    ("nm_prune_", "2:4, 4096 x 11008"): "2:4 selection, 4096 x 11008",
    ("select_threshold", "7B, 224 matrices"): "one threshold over all of a 7B",
    ("foreach_accumulate_sq_sums_", "7B block, 8192 tokens"): "squared sums of a 7B block, 8192 tokens",
    ("obs_prune_", "4096 x 11008"): "SparseGPT walk, 4096 x 11008",
}
# (card, backend) -> head of its column in the README
README_COLUMNS = {
    ("NVIDIA H200", "native"): "H200, CUDA kernels",
    ("NVIDIA H200", "triton"): "H200, Triton kernels",
    ("NVIDIA H100 80GB HBM3", "native"): "H100, CUDA kernels",
}
README_RUN = {"shape": "llama-2-7b", "method": "fwanda", "allocation": "row", "settings": {"compile": "on"}}


@dataclass
class Card:
    """What was measured on one card.

    Attributes:
        results: path -> result of each file that has a row here, older first.
        rows: (op, case, backend) -> its newest row.
    """

    results: dict[Path, dict]
    rows: dict[tuple[str, str, str], dict]


def cards(folder: Path, *, hosts: bool) -> dict[str, Card]:
    """Name -> Card, with the rows of the hosts or with those of the ops."""
    results = read_all("ops", folder)
    newest: dict[str, dict[tuple[str, str, str], tuple[Path, dict]]] = {}
    for path, result in results.items():
        of_card = newest.setdefault(result["card"], {})
        for row in result["rows"]:
            if (row["op"] in HOSTS) == hosts:
                of_card[row["op"], row["case"], row["backend"]] = path, row
    found = {}
    for name, of_card in newest.items():
        used = {path for path, _ in of_card.values()}
        rows = {key: row for key, (_, row) in of_card.items()}
        if rows:
            found[name] = Card({path: result for path, result in results.items() if path in used}, rows)
    return dict(sorted(found.items(), key=lambda item: -len(item[1].rows)))


def caption(measured: Iterable[Card]) -> str:
    """Cards, driver or threads, versions and dates."""
    dates: dict[str, set[str]] = {}
    for result in (result for card in measured for result in card.results.values()):
        where = f"driver {result['driver']}" if result["driver"] else f"{result['threads']} threads"
        facts = f"{result['card']}, {where}, torch {result['torch']}, Triton {result['triton']}"
        dates.setdefault(facts, set()).add(result["date"])
    return "; ".join(f"{facts}, {period(of_these)}" for facts, of_these in dates.items()) + "."


def source(card: Card) -> str:
    return f"From {', '.join(f'`benchmarks/results/{path.name}`' for path in card.results)}."


def full(folder: Path = RESULTS) -> str:
    """A table for each card, with a row for each op and shape."""
    return "\n".join(map(op_table, cards(folder, hosts=False).values()))


def op_table(card: Card) -> str:
    result = next(iter(card.results.values()))
    mebibytes = COPY_BYTES["cuda" if result["driver"] else "cpu"] >> 20
    copied = f"A copy of {mebibytes:,} MiB runs at {result['copy_gb_per_s']:.0f} GB/s."
    head = ("op", "case", "backend", "µs", "host µs", "GB/s", "% of a copy", "naive torch, µs", "speedup")
    rows = [
        (f"`{row['op']}`", row["case"], row["backend"], f"{row['us']:.1f}", host(row), *rates(row), *times_naive(row))
        for row in by_case(card)
    ]
    return f"{caption([card])} {copied}\n{source(card)}\n\n{table(head, rows)}"


def by_case(card: Card) -> list[dict]:
    """The rows, those of one op and case together, in the order of the first of them."""
    places: dict[tuple[str, str], int] = {}
    for op, case, _ in card.rows:
        places.setdefault((op, case), len(places))
    return sorted(card.rows.values(), key=lambda row: (places[row["op"], row["case"]], row["backend"]))


def host(row: dict) -> str:
    return "-" if row.get("host_us") is None else f"{row['host_us']:.0f}"


def rates(row: dict) -> tuple[str, str]:
    if row["bytes"] is None:
        return "-", "-"
    return f"{row['gb_per_s']:.0f}", f"{row['percent_of_copy']:.0f}"


def times_naive(row: dict) -> tuple[str, str]:
    return f"{row['naive_us']:.0f}", f"{row['naive_us'] / row['us']:.1f}x"


def hosts(folder: Path = RESULTS) -> str:
    """A table for each card, with a row for each host and case."""
    head = ("host", "case", "backend", "without, µs", "with the kernels, µs", "speedup")
    tables = []
    for card in cards(folder, hosts=True).values():
        rows = [
            (row["op"], row["case"], row["backend"], f"{row['naive_us']:.0f}", f"{row['us']:.0f}", times_naive(row)[1])
            for row in sorted(card.rows.values(), key=lambda row: HOSTS.index(row["op"]))
        ]
        tables.append(f"{caption([card])}\n{source(card)}\n\n{table(head, rows)}")
    return "\n".join(tables)


def readme(folder: Path = RESULTS) -> str:
    """A small table of a few ops and one whole run, with a column for each card and backend."""
    measured = cards(folder, hosts=False)
    runs = {run["card"]: run for run in newest_runs(folder) if README_RUN.items() <= run.items()}
    columns = [
        (card, backend)
        for card, backend in README_COLUMNS
        if card in runs and any((*key, backend) in measured[card].rows for key in README_ROWS if card in measured)
    ]
    head = ["", *(README_COLUMNS[column] for column in columns)]
    rows = [
        [label, *(op_cell(measured[card].rows.get((*key, backend))) for card, backend in columns)]
        for key, label in README_ROWS.items()
    ]
    whole = [run_cell(runs[card]) if backend == "native" else "-" for card, backend in columns]
    rows.append(["a whole F-Wanda run of a 7B", *whole])
    run = next(iter(runs.values()))
    dates = " and ".join(sorted({runs[card]["date"] for card, _ in columns}))
    protocol = (
        f"The whole run ({dates}): shape of {run['shape']}, random weights, {run['tokens']} calibration tokens, "
        f"{run['dtype']}, `{run['allocation']}` allocation, {run['sparsity']} removed, backward pass on all windows, "
        "compiled, warm; joules are gross."
    )
    used = dict.fromkeys(card for card, _ in columns)
    return f"{caption(measured[card] for card in used)} {protocol}\n\n{table(head, rows)}"


def op_cell(row: dict | None) -> str:
    """Time, share of a copy's speed, and speedup over naive torch; a dash if the op was not measured."""
    if row is None:
        return "-"
    share = "" if row["bytes"] is None else f", {row['percent_of_copy']:.0f} %"
    return f"{row['us']:,.0f} µs{share}, {row['naive_us'] / row['us']:.0f}x"


def run_cell(run: dict) -> str:
    """Seconds and joules of the warm runs, and the speedup over plain torch."""
    spread = run["ours"]["spread"]
    energy = spread["gross_joules"]
    joules = "" if energy is None else f", {energy['mean'] / 1e3:.1f} kJ"
    speedup = f", {run['speedup']:.1f}x" if "speedup" in run else ""
    return f"{spread['total_seconds']['mean']:.1f} s{joules}{speedup}"
