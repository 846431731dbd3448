"""Render the speed table of README.md and a picture from a result of the op benchmarks.

    python benchmarks/render.py benchmarks/results/ops-CARD-DATE.json

Writes the table between the speed markers of README.md, and the bars beside the result as PNG.
"""

import argparse
import json
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- speed: begin -->", "<!-- speed: end -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    path = parser.parse_args().result
    result = json.loads(path.read_text())
    text = README.read_text()
    head, rest = text.split(BEGIN)
    README.write_text(head + BEGIN + "\n" + table(result, path) + "\n" + END + rest.split(END)[1])
    picture(result, path.with_suffix(".png"))


def table(result: dict, path: Path) -> str:
    """Markdown: a line of facts, then a row for each op and shape."""
    facts = "{card}, driver {driver}, torch {torch}, Triton {triton}, {date}".format_map(result)
    lines = [
        f"{facts}; a copy of 2 GiB runs at {result['copy_gb_per_s']:.0f} GB/s (`{path.relative_to(README.parent)}`).",
        "",
        "| op | case | backend | µs | GB/s | % of a copy of the same bytes | naive torch µs | speedup |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        rate = "-" if row["bytes"] is None else f"{row['gb_per_s']:.0f}"
        share = "-" if row["bytes"] is None else f"{row['percent_of_copy']:.0f}"
        lines.append(
            f"| `{row['op']}` | {row['case']} | {row['backend']} | {row['us']:.1f} | {rate} | {share} "
            f"| {row['naive_us']:.0f} | {row['naive_us'] / row['us']:.1f}x |"
        )
    return "\n".join(lines)


def picture(result: dict, path: Path) -> None:
    """Horizontal bars: naive torch and ours as a share of the copy's speed, with the roof at 100 %."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result["rows"] if row["bytes"] is not None][::-1]
    figure, axes = pyplot.subplots(figsize=(9, 0.32 * len(rows) + 1.4), layout="constrained")
    places = range(len(rows))
    axes.barh([p + 0.2 for p in places], [row["percent_of_copy"] for row in rows], 0.4, label="fwanda_kernels")
    naive = [100 * row["copy_us"] / row["naive_us"] for row in rows]
    axes.barh([p - 0.2 for p in places], naive, 0.4, label="naive torch")
    axes.axvline(100, color="black", linewidth=1, label="copy of the same bytes")
    axes.set_yticks(list(places), [f"{row['op']}  {row['case']}" for row in rows], fontsize=7)
    axes.set_xlabel("% of the speed of a copy (higher is better)")
    axes.set_title(f"{result['card']}, torch {result['torch']}, {result['date']}", fontsize=9)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
