"""The efficiency table of the paper (time, memory, energy) and its Pareto picture, from results of bench_prune.py.

    python benchmarks/paper_tables.py benchmarks/results/prune-*.json [--quality QUALITY.json] [--out DIR]

Each card with its driver and versions gets its own table, as Markdown and CSV; the lowest figure of a column is bold
among the rows of one model. Results that differ in tokens, dtype or sparsity are refused. QUALITY.json is a list of
{"shape", "method", "perplexity", "protocol"}, all of one protocol, with the method as the table shows it: "fwanda row".
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from pages import put_between

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- runs: begin -->", "<!-- runs: end -->"
METHODS = ("magnitude", "wanda", "sparsegpt", "fsparsegpt", "fwanda")
MACHINE = ("card", "driver", "torch", "triton", "transformers", "fwanda_kernels", "python")
PROTOCOL = ("tokens", "dtype", "sparsity")
# Column -> its Markdown head and number format; the ranked ones are better when lower.
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
RANKED = ("seconds", "cold_seconds", "peak_gb", "gross_kj", "net_kj")


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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    parser.add_argument("--quality", type=Path, metavar="QUALITY.json", help="perplexities for the Pareto picture")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: beside the first result)")
    parser.add_argument("--readme", action="store_true", help="also write the tables between the markers of README.md")
    args = parser.parse_args(arguments)
    folder = args.out or args.results[0].parent
    try:
        groups = grouped({path: read(path) for path in args.results})
        quality = None if args.quality is None else qualities(args.quality)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    folder.mkdir(parents=True, exist_ok=True)
    tables = []
    for index, results in enumerate(groups):
        rows = sorted((row for result in results for row in rows_of(result)), key=order)
        slug = re.sub(r"[^a-z0-9]+", "-", results[0]["card"].lower()).strip("-")
        stem = folder / f"efficiency-{slug}{f'-{index + 1}' if len(groups) > 1 else ''}"
        text = "\n".join(markdown(results, rows)) + "\n"
        stem.with_suffix(".md").write_text(text)
        write_csv(stem.with_suffix(".csv"), results, rows)
        tables.append(text)
        print(text)
        print("\n".join(str(stem.with_suffix(suffix)) for suffix in (".md", ".csv")))
        plotted = points(rows, quality or {})
        if plotted:
            picture(heading(results), plotted, stem.with_suffix(".png"))
            print(stem.with_suffix(".png"))
    if args.readme:
        put_between(README, BEGIN, "\n".join(tables), END)


def read(path: Path) -> dict:
    """A result of bench_prune.py.

    Raises:
        ValueError: the file is something else.
    """
    result = json.loads(path.read_text())
    if not isinstance(result, dict) or result.get("kind") != "prune":
        raise ValueError(f"{path} is not a result of bench_prune.py")
    return result


def grouped(results: dict[Path, dict]) -> list[list[dict]]:
    """The results of each machine: one card, driver and set of versions.

    Raises:
        ValueError: two results differ in their protocol, or are of the same run.
    """
    groups: dict[tuple, list[dict]] = {}
    seen: dict[tuple, Path] = {}
    first = next(iter(results))
    for path, result in results.items():
        for key in PROTOCOL:
            if result[key] != results[first][key]:
                raise ValueError(f"{path} has {key} {result[key]}, {first} has {results[first][key]}: not comparable")
        machine = tuple(result[key] for key in MACHINE)
        run = (*machine, result["shape"], label_of(result))
        if run in seen:
            raise ValueError(f"{path} and {seen[run]} are of the same run; give one of them")
        seen[run] = path
        groups.setdefault(machine, []).append(result)
    return list(groups.values())


def label_of(result: dict) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in result["settings"].items())
    return f"{result['method']} {result['allocation']}" + (f" ({settings})" if settings else "")


def rows_of(result: dict) -> list[Row]:
    """Our row of a result, and that of the plain-torch pipeline where it ran."""
    rows = [row_of(result, result["ours"], label_of(result))]
    inference = result.get("inference", {})
    for column, model in (("dense_joules_per_token", "dense"), ("joules_per_token", "pruned")):
        found = inference.get(model)
        if isinstance(found, dict):
            rows[0].values[column] = found["gross_joules"]["mean"]
            rows[0].ci95[column] = found["gross_joules"]["ci95"]
        elif found is not None:
            rows[0].notes.append(f"{rows[0].shape}, {model} decoding: {found}")
    rows[0].values["cold_seconds"] = result["ours"]["cold"]["total_seconds"]
    if not result["ours"]["warm"]:  # the other figures are then those of the cold run
        rows[0].values["seconds"] = None
    if "naive" in result:
        rows.append(row_of(result, result["naive"], f"{result['method']} {result['allocation']}, plain torch"))
    return rows


def row_of(result: dict, pipeline: dict, label: str) -> Row:
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


def order(row: Row) -> tuple:
    """By model, then method as in the paper, ours before plain torch."""
    return row.shape, METHODS.index(row.method), row.label


def best(rows: list[Row]) -> dict[tuple[str, str], float]:
    """(shape, column) -> the lowest figure, where there are at least two to compare."""
    lowest = {}
    for shape in {row.shape for row in rows}:
        for column in RANKED:
            values = [row.values[column] for row in rows if row.shape == shape and row.values[column] is not None]
            if len(values) > 1:
                lowest[shape, column] = min(values)
    return lowest


def markdown(results: list[dict], rows: list[Row]) -> list[str]:
    """A line of facts, the table, and the notes."""
    lowest, first = best(rows), results[0]
    used = [column for column in COLUMNS if any(row.values[column] is not None for row in rows)]
    runs = sorted({len(result["ours"]["warm"]) for result in results} - {0}) or [0]
    lines = [
        heading(results),
        f"{first['tokens']} calibration tokens, {first['dtype']}, {first['sparsity']} removed, random weights. "
        f"Warm runs: {' or '.join(map(str, runs))}"
        + ("; mean ± half width of the 95 % interval." if runs[-1] > 1 else "."),
        "",
        "| model | method | " + " | ".join(COLUMNS[column][0] for column in used) + " |",
        "|---|---|" + "---|" * len(used),
    ]
    for row in rows:
        cells = [cell(row, column, lowest.get((row.shape, column))) for column in used]
        lines.append(f"| {row.shape} | {row.label} | " + " | ".join(cells) + " |")
    notes = [note for row in rows for note in row.notes]
    return lines + [""] * bool(notes) + [f"- {note}" for note in notes]


def heading(results: list[dict]) -> str:
    dates = sorted({result["date"] for result in results})
    labels = {"triton": "Triton", "fwanda_kernels": "fwanda-kernels"}
    keys = [key for key in MACHINE if key not in ("card", "python") and results[0][key] is not None]
    facts = [f"{labels.get(key, key)} {results[0][key]}" for key in keys]
    return f"{', '.join([results[0]['card'], *facts])}, {' to '.join(dates[:1] + dates[1:][-1:])}."


def cell(row: Row, column: str, lowest: float | None) -> str:
    value, form = row.values[column], COLUMNS[column][1]
    if value is None:
        return "-"
    text = f"{value:{form}}"
    if row.ci95.get(column):
        text += f" ± {row.ci95[column]:{form}}"
    return f"**{text}**" if value == lowest else text


def write_csv(path: Path, results: list[dict], rows: list[Row]) -> None:
    """All figures unrounded, with their confidence intervals and the facts of the machine."""
    facts = {key: results[0][key] for key in MACHINE + PROTOCOL}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*facts, "shape", "method", *COLUMNS, *(f"{column}_ci95" for column in COLUMNS)])
        for row in rows:
            figures = [row.values[column] for column in COLUMNS] + [row.ci95.get(column) for column in COLUMNS]
            writer.writerow([*facts.values(), row.shape, row.label, *figures])


def qualities(path: Path) -> dict[tuple[str, str], float]:
    """(shape, method as shown) -> perplexity.

    Raises:
        ValueError: a key is missing, or the protocols differ.
    """
    entries = json.loads(path.read_text())
    try:
        protocols = {json.dumps(entry["protocol"], sort_keys=True) for entry in entries}
        found = {(entry["shape"], entry["method"]): float(entry["perplexity"]) for entry in entries}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: each entry needs shape, method, perplexity and protocol") from error
    if len(protocols) != 1:
        raise ValueError(f"{path} has perplexities of {len(protocols)} protocols: not comparable")
    return found


def pareto(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats in one coordinate and equals or beats in the other; lower is better."""
    front: list[tuple[float, float]] = []
    for cost, loss in sorted(points):
        if not front or loss < front[-1][1]:
            front.append((cost, loss))
    return front


def points(rows: list[Row], quality: dict[tuple[str, str], float]) -> list[tuple[Row, float, float]]:
    """(row, gross kJ, perplexity) of the rows that have both."""
    known = [row for row in rows if row.values["gross_kj"] is not None and (row.shape, row.label) in quality]
    return [(row, row.values["gross_kj"], quality[row.shape, row.label]) for row in known]


def picture(title: str, plotted: list[tuple[Row, float, float]], path: Path) -> None:
    """Perplexity against gross energy from points(), a panel for each model, with the Pareto front."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row.shape for row, _, _ in plotted))
    figure, panels = pyplot.subplots(1, len(shapes), figsize=(5 * len(shapes), 4), layout="constrained", squeeze=False)
    for axes, shape in zip(panels[0], shapes, strict=True):
        shown = [item for item in plotted if item[0].shape == shape]
        axes.plot(*zip(*pareto([item[1:] for item in shown]), strict=True), color="grey", linewidth=1)
        for row, energy, loss in shown:
            axes.plot(energy, loss, "o", label=row.label)
        axes.set(title=shape, xlabel="energy of pruning, kJ gross (lower is better)", ylabel="perplexity")
        axes.legend(fontsize=7)
    figure.suptitle(textwrap.fill(title, 90 * len(shapes)), fontsize=7)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
