"""Render the speed table of README.md and a picture from results of the op benchmarks on one card.

    python benchmarks/render.py benchmarks/results/ops-CARD-DATE.json [MORE.json ...]

A later file only adds the rows that the earlier ones lack. Writes the table between the markers of README.md, and the
bars beside the first file as PNG.
"""

import argparse
import json
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- speed: begin -->", "<!-- speed: end -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    paths = parser.parse_args().results
    facts, rows = {}, {}
    for path in paths:
        result = json.loads(path.read_text())
        if facts and facts["card"] != result["card"]:
            parser.error(f"{path} is of {result['card']}, {paths[0]} of {facts['card']}")
        facts = facts or result
        rows = {(row["op"], row["case"]): row for row in result["rows"]} | rows
    head, rest = README.read_text().split(BEGIN)
    lines = table(facts, list(rows.values()), paths)
    README.write_text(head + BEGIN + "\n" + "\n".join(lines) + "\n" + END + rest.split(END)[1])
    picture(facts, list(rows.values()), paths[0].with_suffix(".png"))


def table(facts: dict, rows: list[dict], paths: list[Path]) -> list[str]:
    """Markdown: a line of facts, the picture, then a row for each op and shape."""
    files = ", ".join(f"`{path.resolve().relative_to(README.parent)}`" for path in paths)
    image = paths[0].with_suffix(".png").resolve().relative_to(README.parent)
    lines = [
        "{card}, driver {driver}, torch {torch}, Triton {triton}, {date}; a copy of 2 GiB runs at "
        "{copy_gb_per_s:.0f} GB/s.".format_map(facts),
        f"From {files}.",
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
