"""The efficiency table of the paper (time, memory, energy) and its Pareto picture, from results of bench_prune.py.

    python benchmarks/paper_tables.py benchmarks/results/prune-*.json [--quality QUALITY.json] [--out DIR]

Each card with its driver and versions gets a table of its own, as Markdown and as CSV. The lowest figure of a column is
bold among the rows of one model. Results that differ in tokens, dtype or sparsity are refused.

QUALITY.json is a list of {"shape", "method", "perplexity", "protocol"}, all of one protocol, with the method as the
table shows it: "fwanda row".
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

from lib.pictures import energy_and_quality
from lib.results import read, slug
from lib.run_tables import COLUMNS, MACHINE, PROTOCOL, Row, by_machine, heading, label_of, machine_table, sorted_rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("results", type=Path, nargs="+", metavar="RESULT.json")
    option("--quality", type=Path, metavar="QUALITY.json", help="perplexities for the Pareto picture")
    option("--out", type=Path, metavar="DIR", help="where to write (default: beside the first result)")
    args = parser.parse_args(arguments)
    try:
        results = {path: read(path) for path in args.results}
        check_comparable(results)
        perplexities = {} if args.quality is None else read_perplexities(args.quality)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    folder = args.out or args.results[0].parent
    folder.mkdir(parents=True, exist_ok=True)
    groups = by_machine(list(results.values()))
    for index, group in enumerate(groups):
        number = f"-{index + 1}" if len(groups) > 1 else ""
        write_group(group, folder / f"efficiency-{slug(group[0]['card']).replace('.', '-')}{number}", perplexities)


def write_group(results: list[dict], stem: Path, perplexities: dict[tuple[str, str], float]) -> None:
    """Write and print the table of one machine, and draw its picture if there are perplexities."""
    rows = sorted_rows(results)
    text = machine_table(results, rows)
    stem.with_suffix(".md").write_text(text)
    write_csv(stem.with_suffix(".csv"), results, rows)
    print(text)
    print("\n".join(str(stem.with_suffix(suffix)) for suffix in (".md", ".csv")))
    points = [
        (row, row.values["gross_kj"], perplexities[row.shape, row.label])
        for row in rows
        if row.values["gross_kj"] is not None and (row.shape, row.label) in perplexities
    ]
    if points:
        energy_and_quality(heading(results), points, stem.with_suffix(".png"))
        print(stem.with_suffix(".png"))


def check_comparable(results: dict[Path, dict]) -> None:
    """Checks that the results can stand in one table.

    Raises:
        ValueError: a file is something else, two results differ in their protocol, or two are of the same run.
    """
    for path, result in results.items():
        if not isinstance(result, dict) or result.get("kind") != "prune":
            raise ValueError(f"{path} is not a result of bench_prune.py")
    seen: dict[tuple, Path] = {}
    first = next(iter(results))
    for path, result in results.items():
        for key in PROTOCOL:
            if result[key] != results[first][key]:
                raise ValueError(f"{path} has {key} {result[key]}, {first} has {results[first][key]}: not comparable")
        run = (*(result[key] for key in MACHINE), result["shape"], label_of(result))
        if run in seen:
            raise ValueError(f"{path} and {seen[run]} are of the same run; give one of them")
        seen[run] = path


def read_perplexities(path: Path) -> dict[tuple[str, str], float]:
    """(shape, method as shown) -> perplexity.

    Raises:
        ValueError: a key is missing, or the protocols differ.
    """
    entries = json.loads(path.read_text())
    try:
        protocols = {json.dumps(entry["protocol"], sort_keys=True) for entry in entries}
        perplexities = {(entry["shape"], entry["method"]): float(entry["perplexity"]) for entry in entries}
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: each entry needs shape, method, perplexity and protocol") from error
    if len(protocols) != 1:
        raise ValueError(f"{path} has perplexities of {len(protocols)} protocols: not comparable")
    return perplexities


def write_csv(path: Path, results: list[dict], rows: list[Row]) -> None:
    """All figures unrounded, with their confidence intervals and the facts of the machine."""
    facts = {key: results[0][key] for key in MACHINE + PROTOCOL}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*facts, "shape", "method", *COLUMNS, *(f"{column}_ci95" for column in COLUMNS)])
        for row in rows:
            figures = [row.values[column] for column in COLUMNS] + [row.ci95.get(column) for column in COLUMNS]
            writer.writerow([*facts.values(), row.shape, row.label, *figures])


if __name__ == "__main__":
    main()
