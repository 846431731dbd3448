"""Pictures of a sweep."""

from __future__ import annotations

import importlib.util
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..config import PruneConfig
from ..errors import UserError, install_hint
from ..formats.files import atomic_file, user_errors
from ..report.page import place_of, spike_limit
from .tables import PERPLEXITY, Line, columns, evaluation

PICTURES = (  # the files that draw() may write
    "perplexity-by-sparsity.png", "perplexity-by-energy.png", "sparsity-by-block.png", "disagreement-by-block.png",
    "kept-in-rows.png",
)  # fmt: skip
_LOG_FROM = 3  # ratio of the largest perplexity to the smallest from which the axis is logarithmic
_TICKS_OF_A_DECADE = (1, 1.5, 2, 3, 5, 7)


def check_installed() -> None:
    """Refuse a sweep whose pictures cannot be drawn.

    Raises:
        UserError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"the pictures of a sweep need matplotlib; {install_hint('matplotlib')}")


def draw(lines: list[Line], output: str | Path) -> list[Path]:
    """Draw each picture for which the lines have the figures.

    The picture of perplexities has every line, those with a pattern too. A note names the lines whose perplexity is not
    finite.

    Returns:
        The files.
    """
    import matplotlib

    matplotlib.use("Agg")
    texts = [name for name in columns(lines) if name.startswith(PERPLEXITY)]
    evaluated = [line for line in lines if any(_finite(line, text) for text in texts)]
    unstructured = [line for line in lines if not line.config.pattern]
    # where cells share a calibration, its energy belongs to none of them
    whole_energy = not any(cell["shared"] for line in lines for cell in line.cells)
    by_sparsity, by_energy, sparsity_by_block, disagreement_by_block, kept_in_rows = PICTURES
    disagreeing = [line for line in lines if _disagreement(line)]
    differ = any(value for line in disagreeing for value in _disagreement(line).values())
    of_texts = [
        (by_sparsity, _by_sparsity, evaluated),
        (by_energy, _by_energy, [line for line in evaluated if whole_energy and line.values("kJ")]),
    ]
    pictures = [
        (sparsity_by_block, _sparsity_by_block, [line for line in unstructured if _matrices_differ(line.config)]),
        (disagreement_by_block, _disagreement_by_block, disagreeing if differ else []),
        (kept_in_rows, _kept, [line for line in unstructured if _row_histogram(line)]),
    ]
    paths = []
    for name, plot, chosen in of_texts:
        panels = [partial(plot, lines=lines, chosen=chosen, text=text) for text in texts if _any_finite(chosen, text)]
        if panels:
            paths.append(_write(Path(output, name), panels))
    for name, plot, chosen in pictures:
        if chosen:
            paths.append(_write(Path(output, name), [partial(plot, chosen=chosen)]))
    return paths


def _finite(line: Line, text: str) -> bool:
    """Whether a line has a finite perplexity on a text for each of its seeds."""
    values = line.values(text)
    return bool(values) and all(map(math.isfinite, values))


def _any_finite(lines: Sequence[Line], text: str) -> bool:
    return any(_finite(line, text) for line in lines)


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


def _write(path: Path, panels: list[Callable]) -> Path:
    """Draw panels beside each other; each is called with its axes."""
    from matplotlib import pyplot

    with pyplot.rc_context({"axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False}):
        figure, places = pyplot.subplots(
            1, len(panels), figsize=(8.5 * len(panels), 4.5), layout="constrained", squeeze=False
        )
        for axes, panel in zip(places[0], panels, strict=True):
            axes.grid(alpha=0.3)
            panel(axes)
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        with user_errors(path.parent), atomic_file(path) as temporary:
            figure.savefig(temporary, dpi=130, format="png")
        pyplot.close(figure)
    return path


def _looks() -> itertools.cycle:
    """Colour, marker and kind of line of one curve after the other; the first twenty differ."""
    from matplotlib import colormaps

    colours = [colormaps["tab10"](i) for i in range(10)]
    looks = [
        {"color": colours[i % 10], "marker": "os^Dv<>pPX"[i % 10], "linestyle": "-" if i < 10 else "--"}
        for i in range(20)
    ]
    return itertools.cycle(looks)


def _model(lines: Sequence[Line]) -> str:
    return str(lines[0].cells[0].get("model") or "the model")


def _title(lines: Sequence[Line], text: str) -> str:
    return f"{_model(lines)}: perplexity on {text.removeprefix(PERPLEXITY)}"


def _note(axes, lines: Sequence[str]) -> None:
    """Small text below a panel."""
    if lines:
        axes.annotate("\n".join(lines), (0, -0.16), xycoords="axes fraction", va="top", fontsize=8, color="dimgray")


def _by_sparsity(axes, lines: list[Line], chosen: list[Line], text: str) -> None:
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in chosen:
        if _finite(line, text):
            label = line.label if line.config.pattern else line.label.replace(f" {line.config.sparsity}", "")
            curves[label].append((float(line.config.removed), line.mean(text)))
    dense = evaluation(chosen[0].cells[0]["dense"]).get(text)
    limit = _perplexity_axis(axes, [y for points in curves.values() for _, y in points], dense)
    shares = sorted({x for points in curves.values() for x, _ in points})
    for (label, points), look in zip(curves.items(), _looks(), strict=False):
        points = sorted(points)
        axes.plot(*zip(*points, strict=True), label=label, **look)
        _clipped(axes, points, limit, look["color"])
    _percent(axes.xaxis)
    axes.set_xlim(shares[0] - 0.03, shares[-1] + 0.03)
    if all(after - before > (shares[-1] - shares[0]) / 12 for before, after in itertools.pairwise(shares)):
        axes.set_xticks(shares)
    axes.set(xlabel="weights removed", title=f"{_title(chosen, text)} by sparsity")
    _note(axes, _not_finite(lines, text))


def _by_energy(axes, lines: list[Line], chosen: list[Line], text: str) -> None:
    points = {line.label: (line.mean("kJ"), line.mean(text)) for line in chosen if _finite(line, text)}
    limit = _perplexity_axis(axes, [y for _, y in points.values()], None)
    for (label, point), look in zip(points.items(), _looks(), strict=False):
        axes.plot(*point, label=label, **look | {"linestyle": ""})
        _clipped(axes, [point], limit, look["color"])
    axes.xaxis.set_major_formatter(_plain)
    axes.set(xlabel="energy of pruning, kJ gross", title=f"{_title(chosen, text)} by energy")
    axes.set_xlim(left=0)
    _note(axes, _not_finite([line for line in lines if line.values("kJ")], text))


def _not_finite(lines: Sequence[Line], text: str) -> list[str]:
    """A note for the lines that have no point, because their perplexity is not finite."""
    labels = [line.label for line in lines if line.values(text) and not _finite(line, text)]
    return [f"not finite: {', '.join(labels)}"] if labels else []


def _perplexity_axis(axes, values: list[float], dense: float | None) -> float | None:
    """Scale and label of an axis of perplexities, and a line for the dense model.

    Returns:
        The limit of the axis, where it leaves out large values; else None.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    known = [*values, dense] if dense is not None and math.isfinite(dense) else values
    limit = spike_limit([math.log(value) for value in known]) if min(known) > 0 else None
    limit = None if limit is None else math.exp(limit)
    low, high = min(known), max(known) if limit is None else limit
    if low > 0 and high / low > _LOG_FROM:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=_TICKS_OF_A_DECADE if high / low < 100 else (1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(_plain)
    if limit is not None:
        axes.set_ylim(low * 0.9, limit)
    if len(known) > len(values):
        axes.axhline(dense, color="gray", linestyle=":", label="dense")
    axes.set_ylabel("perplexity (lower is better)")
    return limit


def _clipped(axes, points: Sequence[tuple[float, float]], limit: float | None, colour) -> None:
    """An arrow at the upper edge, with the value, for each point above the limit."""
    for x, y in points:
        if limit is not None and y > limit:
            place = axes.get_xaxis_transform()
            axes.plot(x, 0.985, marker="^", color=colour, transform=place, clip_on=False, linestyle="")
            axes.text(x, 0.95, f"{_plain(y)} ", transform=place, ha="right", va="top", fontsize=8, color=colour)


def _plain(value: float, _position: int | None = None) -> str:
    """A number as people write it: 60, not 6 x 10^1."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _percent(axis) -> None:
    """Shares as percent, with no more digits than they have."""
    axis.set_major_formatter(lambda share, _position: f"{100 * share:.3g} %")


def _by_block(values: dict[str, float]) -> dict[int, float]:
    """Block -> mean over its matrices; matrices in no block are left out."""
    blocks: dict[int, list[float]] = defaultdict(list)
    for name, value in values.items():
        block, _ = place_of(name)
        if block != "-":
            blocks[int(block)].append(value)
    return {index: statistics.fmean(blocks[index]) for index in sorted(blocks)}


def _sparsity_by_block(axes, chosen: list[Line]) -> None:
    _block_curves(axes, {line.label: _by_block(_of_matrices(line, "sparsity")) for line in chosen})
    axes.set(ylabel="weights removed, mean of its matrices", title=f"{_model(chosen)}: sparsity by block")


def _disagreement_by_block(axes, chosen: list[Line]) -> None:
    _block_curves(axes, {line.label: _by_block(_disagreement(line)) for line in chosen})
    axes.set(ylabel="mask entries unlike Wanda's", title=f"{_model(chosen)}: disagreement with Wanda by block")


def _block_curves(axes, curves: dict[str, dict[int, float]]) -> None:
    """A curve of shares over the blocks for each label."""
    from matplotlib.ticker import MaxNLocator

    limit = spike_limit([value for values in curves.values() for value in values.values()])
    for (label, values), look in zip(curves.items(), _looks(), strict=False):
        axes.plot(list(values), list(values.values()), label=label, markersize=3, **look)
    if limit is not None:
        axes.set_ylim(top=limit)
        above = [
            f"{label}, block {block}: {100 * value:.1f} %"
            for label, values in curves.items()
            for block, value in values.items()
            if value > limit
        ]
        _note(axes, [f"outside the picture: {'; '.join(above[:6])}{' ...' * (len(above) > 6)}"])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _percent(axes.yaxis)
    axes.set_xlabel("block")


def _kept(axes, chosen: list[Line]) -> None:
    shares = {}
    for line in chosen:
        counts = _row_histogram(line)
        shares[line.label] = [count / sum(counts) for count in counts]
    limit = spike_limit([share for values in shares.values() for share in values if share > 0])
    for (label, values), look in zip(shares.items(), _looks(), strict=False):
        edges = [i / len(values) for i in range(len(values) + 1)]
        axes.stairs(values, edges, label=label, color=look["color"], linestyle=look["linestyle"], linewidth=1.5)
    if limit is not None:
        axes.set_ylim(0, limit)
        above = [f"{label} {100 * max(values):.0f} %" for label, values in shares.items() if max(values) > limit]
        _note(axes, [f"outside the picture, share of the rows in one bin: {', '.join(above)}"])
    _percent(axes.xaxis)
    _percent(axes.yaxis)
    axes.set(
        xlabel="share of a row's weights that is kept",
        ylabel="share of the rows",
        title=f"{_model(chosen)}: weights kept in rows",
    )
