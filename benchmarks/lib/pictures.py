"""Pictures made from results."""

from __future__ import annotations

import textwrap
from pathlib import Path

from .run_tables import Row
from .speed_tables import Card, by_case

PRODUCTS = ("packed_linear", "to_semi_structured")  # compared with a dense product, not with a copy


def pyplot():
    """matplotlib's pyplot, drawing into files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def speed(card: Card) -> Path:
    """Bars of each backend and of naive torch, as shares of the speed of a copy. Written beside the first result."""
    plot = pyplot()
    path, result = next(iter(card.results.items()))
    cases: dict[str, dict[str, float]] = {}
    for row in by_case(card):
        if row["bytes"] is not None and row["op"] not in PRODUCTS:
            shares = cases.setdefault(f"{row['op']}  {row['case']}", {})
            shares[row["backend"]] = row["percent_of_copy"]
            shares["naive torch"] = 100 * row["copy_us"] / row["naive_us"]
    names = sorted({name for shares in cases.values() for name in shares} - {"naive torch"}) + ["naive torch"]
    figure, axes = plot.subplots(figsize=(9, (0.1 + 0.14 * len(names)) * len(cases) + 1.4), layout="constrained")
    height = 0.84 / len(names)
    for i, name in enumerate(names):
        places = [case + 0.42 - (i + 0.5) * height for case in range(len(cases))]
        axes.barh(places, [shares.get(name, 0) for shares in [*cases.values()][::-1]], height, label=name)
    axes.axvline(100, color="black", linewidth=1, label="copy of the same bytes")
    axes.set_yticks(range(len(cases)), [*cases][::-1], fontsize=7)
    axes.margins(y=0.01)
    axes.set_xlabel("% of the speed of a copy (higher is better)")
    axes.set_title("{card}, torch {torch}, {date}".format_map(result), fontsize=9)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path.with_suffix(".png"), dpi=130)
    plot.close(figure)
    return path.with_suffix(".png")


def pareto(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (energy, loss) points that no other point beats or equals in both; lower is better."""
    front: list[tuple[float, float]] = []
    for cost, loss in sorted(points):
        if not front or loss < front[-1][1]:
            front.append((cost, loss))
    return front


def energy_and_quality(title: str, points: list[tuple[Row, float, float]], path: Path) -> None:
    """Perplexity against gross energy, a panel for each model, with the Pareto front.

    Args:
        title: what ran on what.
        points: (row, gross kJ, perplexity).
        path: of the PNG.
    """
    plot = pyplot()
    shapes = list(dict.fromkeys(row.shape for row, _, _ in points))
    figure, panels = plot.subplots(1, len(shapes), figsize=(5 * len(shapes), 4), layout="constrained", squeeze=False)
    for axes, shape in zip(panels[0], shapes, strict=True):
        of_shape = [item for item in points if item[0].shape == shape]
        axes.plot(*zip(*pareto([item[1:] for item in of_shape]), strict=True), color="grey", linewidth=1)
        for row, energy, loss in of_shape:
            axes.plot(energy, loss, "o", label=row.label)
        axes.set(title=shape, xlabel="energy of pruning, kJ gross (lower is better)", ylabel="perplexity")
        axes.legend(fontsize=7)
    figure.suptitle(textwrap.fill(title, 90 * len(shapes)), fontsize=7)
    figure.savefig(path, dpi=130)
    plot.close(figure)
