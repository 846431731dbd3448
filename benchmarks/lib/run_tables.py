"""Tables of whole runs, from results of bench_prune.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .markdown import table
from .results import RESULTS, read_all

METHODS = ("magnitude", "wanda", "sparsegpt", "fsparsegpt", "fwanda")
MACHINE = ("card", "driver", "torch", "triton", "transformers", "fwanda_kernels", "python")
PROTOCOL = ("tokens", "dtype", "sparsity")
# Column -> its head and number format
COLUMNS = {
    "seconds": ("time, s", ".2f"),
    "cold_seconds": ("cold, s", ".2f"),
    "times_floor": ("x floor", ".2f"),
    "peak_gb": ("peak GPU, GB", ".1f"),
    "gross_kj": ("gross, kJ", ".2f"),
    "net_kj": ("net, kJ", ".2f"),
    "sampled_net_kj": ("net at 10 Hz, kJ", ".2f"),
    "dense_joules_per_token": ("dense, gross J/token", ".2f"),
    "joules_per_token": ("pruned, gross J/token", ".2f"),
}
RANKED = ("seconds", "cold_seconds", "peak_gb", "gross_kj", "net_kj")  # the lowest figure of these is bold


@dataclass
class Row:
    """One pipeline on one model.

    Attributes:
        shape, method: what ran.
        label: the method with its allocation and other settings, as shown.
        values: column of COLUMNS -> figure, None where there is none.
        ci95: column -> half width of the 95 % confidence interval; only where runs were repeated.
        notes: flags, and why something was not measured.
    """

    shape: str
    method: str
    label: str
    values: dict[str, float | None]
    ci95: dict[str, float]
    notes: list[str]


def full(folder: Path = RESULTS) -> str:
    """A table for each machine, from the newest result of each run."""
    return "\n".join(machine_table(results, sorted_rows(results)) for results in by_machine(newest_runs(folder)))


def newest_runs(folder: Path) -> list[dict]:
    """The newest result for each card, model, method with its settings, and protocol; older dates first."""
    newest = {}
    for result in read_all("prune", folder).values():
        key = (result["card"], result["shape"], label_of(result), *(result[key] for key in PROTOCOL))
        newest[key] = result
    return list(newest.values())


def by_machine(results: list[dict]) -> list[list[dict]]:
    """The results of each machine, its versions and protocol."""
    groups: dict[tuple, list[dict]] = {}
    for result in results:
        groups.setdefault(tuple(result[key] for key in MACHINE + PROTOCOL), []).append(result)
    return list(groups.values())


def label_of(result: dict) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in result["settings"].items())
    return f"{result['method']} {result['allocation']}" + (f" ({settings})" if settings else "")


def rows_of(result: dict) -> list[Row]:
    """Our row of a result, and that of the plain-torch pipeline where it ran."""
    rows = [row_of(result, result["ours"], label_of(result))]
    inference = result.get("inference", {})
    for column, model in (("dense_joules_per_token", "dense"), ("joules_per_token", "pruned")):
        energy = inference.get(model)
        if isinstance(energy, dict):
            rows[0].values[column] = energy["gross_joules"]["mean"]
            rows[0].ci95[column] = energy["gross_joules"]["ci95"]
        elif energy is not None:
            rows[0].notes.append(f"{rows[0].shape}, {model} decoding: {energy}")
    rows[0].values["cold_seconds"] = result["ours"]["cold"]["total_seconds"]
    if not result["ours"]["warm"]:  # the other figures are then those of the cold run
        rows[0].values["seconds"] = None
    if "naive" in result:
        rows.append(row_of(result, result["naive"], f"{result['method']} {result['allocation']}, plain torch"))
    return rows


def row_of(result: dict, pipeline: dict, label: str) -> Row:
    """The figures of one pipeline: of its warm runs, or of the cold run if there is no warm one."""
    spread, warm = pipeline["spread"], pipeline["warm"] or [pipeline["cold"]]
    scales = {
        "seconds": ("total_seconds", 1),
        "gross_kj": ("gross_joules", 1e-3),
        "net_kj": ("net_joules", 1e-3),
        "sampled_net_kj": ("sampled_net_joules", 1e-3),
    }
    values: dict[str, float | None] = dict.fromkeys(COLUMNS)
    ci95 = {}
    for column, (key, scale) in scales.items():
        if spread[key] is not None:
            values[column] = spread[key]["mean"] * scale
            ci95[column] = spread[key]["ci95"] and spread[key]["ci95"] * scale
    peaks = [run["peak_memory_bytes"] for run in warm]
    values["peak_gb"] = None if None in peaks else max(peaks) / 1e9
    if result["floor_seconds"] is not None:
        values["times_floor"] = values["seconds"] / result["floor_seconds"]
    totals = [run["energy"]["total"] for run in warm]
    remarks = [total if isinstance(total, str) else total.get("flag") for total in totals]
    notes = [f"{result['shape']}, {label}: {remark}" for remark in dict.fromkeys(remarks) if remark]
    return Row(result["shape"], result["method"], label, values, ci95, notes)


def sorted_rows(results: list[dict]) -> list[Row]:
    """By model, then by method as in the paper, ours before plain torch."""
    rows = [row for result in results for row in rows_of(result)]
    return sorted(rows, key=lambda row: (row.shape, METHODS.index(row.method), row.label))


def machine_table(results: list[dict], rows: list[Row]) -> str:
    """Markdown: what ran on what, the table, and the notes."""
    lowest, first = best(rows), results[0]
    used = [column for column in COLUMNS if any(row.values[column] is not None for row in rows)]
    runs = sorted({len(result["ours"]["warm"]) for result in results} - {0}) or [0]
    interval = "; mean ± half width of the 95 % interval" if runs[-1] > 1 else ""
    protocol = f"{first['tokens']} calibration tokens, {first['dtype']}, {first['sparsity']} removed, random weights."
    text = f"{heading(results)}\n{protocol} Warm runs: {' or '.join(map(str, runs))}{interval}.\n\n"
    text += table(
        ["model", "method", *(COLUMNS[column][0] for column in used)],
        [
            [row.shape, row.label, *(cell(row, column, lowest.get((row.shape, column))) for column in used)]
            for row in rows
        ],
    )
    notes = [f"- {note}\n" for row in rows for note in row.notes]
    return text + "\n" * bool(notes) + "".join(notes)


def best(rows: list[Row]) -> dict[tuple[str, str], float]:
    """(shape, column) -> the lowest figure, where there are at least two to compare."""
    lowest = {}
    for shape in {row.shape for row in rows}:
        for column in RANKED:
            values = [row.values[column] for row in rows if row.shape == shape and row.values[column] is not None]
            if len(values) > 1:
                lowest[shape, column] = min(values)
    return lowest


def heading(results: list[dict]) -> str:
    labels = {"triton": "Triton", "fwanda_kernels": "fwanda-kernels"}
    keys = [key for key in MACHINE if key not in ("card", "python") and results[0][key] is not None]
    facts = [f"{labels.get(key, key)} {results[0][key]}" for key in keys]
    return f"{', '.join([results[0]['card'], *facts])}, {period({result['date'] for result in results})}."


def cell(row: Row, column: str, lowest: float | None) -> str:
    value, form = row.values[column], COLUMNS[column][1]
    if value is None:
        return "-"
    text = f"{value:{form}}"
    if row.ci95.get(column):
        text += f" ± {row.ci95[column]:{form}}"
    return f"**{text}**" if value == lowest else text


def period(dates: set[str]) -> str:
    """The first and the last of some dates."""
    return " to ".join(dict.fromkeys((min(dates), max(dates))))
