"""Render the speed tables of README.md and docs/integrating.md and a picture from benchmarks of one card.

    python benchmarks/render.py benchmarks/results/ops-CARD-DATE.json [MORE.json ...]

The rows of a later file replace those of an earlier one. Writes the ops between the markers of README.md, the hosts
between those of docs/integrating.md, and the bars of the ops beside the first file as PNG.
"""

import argparse
import json
from pathlib import Path

from pages import put_between

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- speed: begin -->", "<!-- speed: end -->"
HOSTS = ("nn.utils.prune", "ao.pruning", "Wanda fork", "llm-compressor")  # in place of an op: see bench_integrations.py


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--only", choices=("ops", "hosts"), help="write one of the two tables (default: both)")
    args = parser.parse_args()
    paths = args.results
    facts, rows = {}, {}
    for path in paths:
        result = json.loads(path.read_text())
        if facts and facts["card"] != result["card"]:
            parser.error(f"{path} is of {result['card']}, {paths[0]} of {facts['card']}")
        facts = facts or result
        rows |= {(row["op"], row["case"]): row for row in result["rows"]}
    ops = [row for row in rows.values() if row["op"] not in HOSTS]
    hosts = [row for row in rows.values() if row["op"] in HOSTS]
    if ops and args.only != "hosts":
        picture(facts, ops, paths[0].with_suffix(".png"))
        put_between(ROOT / "README.md", BEGIN, "\n".join(op_table(facts, ops, paths)) + "\n", END)
    if hosts and args.only != "ops":
        put_between(ROOT / "docs" / "integrating.md", BEGIN, "\n".join(host_table(facts, hosts, paths)) + "\n", END)


def machine(facts: dict) -> str:
    return "{card}, driver {driver}, torch {torch}, Triton {triton}, {date}".format_map(facts)


def source(paths: list[Path]) -> str:
    return "From " + ", ".join(f"`{path.resolve().relative_to(ROOT)}`" for path in paths) + "."


def op_table(facts: dict, rows: list[dict], paths: list[Path]) -> list[str]:
    """Markdown: a line of facts, the picture, then a row for each op and shape."""
    image = paths[0].with_suffix(".png").resolve().relative_to(ROOT)
    lines = [
        f"{machine(facts)}; a copy of 2 GiB runs at {facts['copy_gb_per_s']:.0f} GB/s.",
        source(paths),
        "",
        f"![Share of the speed of a copy]({image})",
        "",
        "| op | case | backend | µs | GB/s | % of a copy of the same bytes | naive torch µs | speedup |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        rate = "-" if row["bytes"] is None else f"{row['gb_per_s']:.0f}"
        share = "-" if row["bytes"] is None else f"{row['percent_of_copy']:.0f}"
        lines.append(
            f"| `{row['op']}` | {row['case']} | {row['backend']} | {row['us']:.1f} | {rate} | {share} "
            f"| {row['naive_us']:.0f} | {row['naive_us'] / row['us']:.1f}x |"
        )
    return lines


def host_table(facts: dict, rows: list[dict], paths: list[Path]) -> list[str]:
    """Markdown: a line of facts, then a row for each host and case."""
    lines = [
        f"{machine(facts)}.",
        source(paths),
        "",
        "| host | case | backend | without, µs | with the kernels, µs | speedup |",
        "|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {row['op']} | {row['case']} | {row['backend']} | {row['naive_us']:.0f} | {row['us']:.0f} "
        f"| {row['naive_us'] / row['us']:.1f}x |"
        for row in sorted(rows, key=lambda row: HOSTS.index(row["op"]))
    ]


def picture(facts: dict, rows: list[dict], path: Path) -> None:
    """Horizontal bars: naive torch and ours as a share of the copy's speed, with the roof at 100 %."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row["bytes"] is not None][::-1]
    figure, axes = pyplot.subplots(figsize=(9, 0.32 * len(rows) + 1.4), layout="constrained")
    places = range(len(rows))
    axes.barh([p + 0.2 for p in places], [row["percent_of_copy"] for row in rows], 0.4, label="fwanda_kernels")
    naive = [100 * row["copy_us"] / row["naive_us"] for row in rows]
    axes.barh([p - 0.2 for p in places], naive, 0.4, label="naive torch")
    axes.axvline(100, color="black", linewidth=1, label="copy of the same bytes")
    axes.set_yticks(list(places), [f"{row['op']}  {row['case']}" for row in rows], fontsize=7)
    axes.set_xlabel("% of the speed of a copy (higher is better)")
    axes.set_title("{card}, torch {torch}, {date}".format_map(facts), fontsize=9)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
