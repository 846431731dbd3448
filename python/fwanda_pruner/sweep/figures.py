"""Pictures of a sweep."""

from __future__ import annotations

import importlib.util
import math
import statistics
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..config import PruneConfig
from ..errors import UserError, install_hint
from ..formats.files import atomic_file, user_errors
from .tables import PERPLEXITY, Line, columns, evaluation


def check_installed() -> None:
    """Refuse a sweep whose pictures cannot be drawn.

    Raises:
        UserError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"the pictures of a sweep need matplotlib; {install_hint('eval')}")


def draw(lines: list[Line], output: str | Path) -> list[Path]:
    """Draw each picture for which the lines have the figures.

    Returns:
        The files.
    """
    import matplotlib

    matplotlib.use("Agg")
    texts = [name for name in columns(lines) if name.startswith(PERPLEXITY)]
    lines = [line for line in lines if all(math.isfinite(value) for name in texts for value in line.values(name))]
    evaluated = [line for line in lines if any(map(line.values, texts))]
    unstructured = [line for line in lines if not line.config.pattern]
    # where cells share a calibration, its energy belongs to none of them
    whole_energy = not any(cell["shared"] for line in lines for cell in line.cells)
    of_texts = [
        ("perplexity-by-sparsity", _by_sparsity, [line for line in evaluated if not line.config.pattern]),
        ("perplexity-by-energy", _by_energy, [line for line in evaluated if whole_energy and line.values("kJ")]),
    ]
    pictures = [
        ("sparsity-by-block", _sparsity_by_block, [line for line in unstructured if _matrices_differ(line.config)]),
        ("disagreement-by-block", _disagreement_by_block, [line for line in lines if _disagreement(line)]),
        ("kept-in-rows", _kept, [line for line in unstructured if _row_histogram(line)]),
    ]
    paths = [
        _save_panels(Path(output, f"{name}.png"), plot, chosen, texts) for name, plot, chosen in of_texts if chosen
    ]
    return paths + [_save(Path(output, f"{name}.png"), plot, chosen) for name, plot, chosen in pictures if chosen]


def _matrices_differ(config: PruneConfig) -> bool:
    """Whether the allocation gives matrices different sparsities."""
    return not config.fixes_matrix_totals


def _of_matrices(line: Line, key: str) -> dict[str, float]:
    """A figure of each pruned matrix, from the first seed; matrices without it are left out."""
    rows = [row for row in line.cells[0]["report"]["matrices"] if row["skipped"] is None]
    return {row["name"]: row[key] for row in rows if row[key] is not None}


def _disagreement(line: Line) -> dict[str, float]:
    """Share of the mask entries of each matrix that differ from Wanda's; empty if it was not measured."""
    return _of_matrices(line, "wanda_disagreement")


def _row_histogram(line: Line) -> list[int] | None:
    return line.cells[0]["report"]["row_histogram"]


def _save_panels(path: Path, plot, chosen: list[Line], texts: list[str]) -> Path:
    """Draw a picture of perplexities, with a panel for each text."""
    panels = {text: [line for line in chosen if line.values(text)] for text in texts}
    return _write(path, [partial(plot, chosen=lines, text=text) for text, lines in panels.items() if lines])


def _save(path: Path, plot, chosen: list[Line]) -> Path:
    return _write(path, [partial(plot, chosen=chosen)])


def _write(path: Path, panels: list[Callable]) -> Path:
    """Draw panels beside each other; each is called with its axes."""
    from matplotlib import pyplot

    figure, places = pyplot.subplots(
        1, len(panels), figsize=(7 * len(panels), 4.5), layout="constrained", squeeze=False
    )
    for axes, panel in zip(places[0], panels, strict=True):
        panel(axes)
        axes.legend(fontsize=7)
    with user_errors(path.parent), atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    pyplot.close(figure)
    return path


def _by_sparsity(axes, chosen: list[Line], text: str) -> None:
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in chosen:
        curves[line.label.replace(f" {line.config.sparsity}", "")].append((float(line.config.removed), line.mean(text)))
    for label, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.axhline(evaluation(chosen[0].cells[0]["dense"])[text], color="gray", linestyle=":", label="dense")
    axes.set(xlabel="weights removed", ylabel=f"{text} (lower is better)", yscale="log")


def _by_energy(axes, chosen: list[Line], text: str) -> None:
    for line in chosen:
        axes.plot(line.mean("kJ"), line.mean(text), marker="o", linestyle="", label=line.label)
    axes.set(xlabel="energy of pruning, kJ gross", ylabel=f"{text} (lower is better)", yscale="log")


def _by_block(values: dict[str, float]) -> list[float]:
    """Mean over the matrices of each block, in order. The first number in a matrix's name is that of its block."""
    blocks: dict[int, list[float]] = defaultdict(list)
    for name, value in values.items():
        blocks[next(int(part) for part in name.split(".") if part.isdigit())].append(value)
    return [statistics.fmean(blocks[index]) for index in sorted(blocks)]


def _sparsity_by_block(axes, chosen: list[Line]) -> None:
    for line in chosen:
        axes.plot(_by_block(_of_matrices(line, "sparsity")), label=line.label)
    axes.set(xlabel="block", ylabel="weights removed, mean of its matrices")


def _disagreement_by_block(axes, chosen: list[Line]) -> None:
    for line in chosen:
        axes.plot(_by_block(_disagreement(line)), label=line.label)
    axes.set(xlabel="block", ylabel="mask entries unlike Wanda's")


def _kept(axes, chosen: list[Line]) -> None:
    for line in chosen:
        counts = _row_histogram(line)
        axes.stairs(
            [count / sum(counts) for count in counts],
            [i / len(counts) for i in range(len(counts) + 1)],
            label=line.label,
        )
    axes.set(xlabel="share of a row's weights that is kept", ylabel="share of the rows")
