"""Charts of the HTML report: SVG for a page, whose text is text and whose colours are variables of the page."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ..errors import shortened
from .page import Search, spike_limit

SERIES = 8  # colours of the page; with each, a marker and a kind of line
# matplotlib needs colours: these stand for the variables of the page
_VARIABLES = {
    "#000001": "var(--ink)",
    "#000002": "var(--muted)",
    "#000003": "var(--line)",
    **{f"#0000{16 + i:x}": f"var(--series-{i + 1})" for i in range(SERIES)},
}
_INK, _MUTED, _LINE, *_COLOURS = _VARIABLES
_MARKERS = "os^Dv<>p"
_DASHES = ("-", "--", "-.", ":") * 2
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fwanda",
    "text.parse_math": False,
    "text.usetex": False,
    "font.size": 10.5,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
}
_WIDTH = 5.6  # inches: 403 units of the SVG, so that text stays legible on a phone
_ROWS = 40  # of the chart of a search


class Charts:
    """Draws the charts of one page. Each has ids of its own."""

    def __init__(self):
        self._drawn = 0

    def histogram(self, counts: Sequence[int], kept: float, number: int, alt: str) -> str:
        """Share of the rows by the share of their weights that is kept.

        Args:
            counts: number of rows in each bin of [0, 1].
            kept: share of all weights that is kept.
            number: of the run, for its colour.
            alt: what the chart shows, in words.
        """

        def plot(axes: Axes) -> None:
            total, edges = sum(counts), [i / len(counts) for i in range(len(counts) + 1)]
            shares = [count / total for count in counts]
            axes.stairs(shares, edges, fill=True, color=_COLOURS[(number - 1) % SERIES])
            axes.axvline(kept, color=_INK, linestyle=":", linewidth=1.2)
            axes.set(xlim=(0, 1), ylim=(0, max(shares) * 1.08), xlabel="weights kept in a row", ylabel="share of rows")
            axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None, symbol=" %"))
            axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))

        return self._svg(plot, 2.5, alt)

    def by_block(self, lines: Mapping[int, Mapping[int, float]], ylabel: str, alt: str) -> str:
        """A line of shares over the blocks for each run.

        Args:
            lines: number of a run -> block -> share.
            ylabel: what is shown.
            alt: what the chart shows, in words.
        """

        def plot(axes: Axes) -> None:
            for number, values in lines.items():
                axes.plot(list(values), list(values.values()), label=f"run {number}", **_look(number))
            axes.set(xlabel="block", ylabel=ylabel, ylim=(0, None))
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None, symbol=" %"))
            axes.yaxis.set_major_locator(MaxNLocator(5))

        return self._svg(plot, 2.5, alt, legend=len(lines) if len(lines) > 1 else 0)

    def search(self, search: Search, alt: str) -> str:
        """The increase of the loss under all masks that a search tried; the first 40 of them.

        Args:
            search: what it tried.
            alt: what the chart shows, in words.
        """
        names = list(search.increases)[:_ROWS]
        domains = list(dict.fromkeys(domain for name in names for domain in search.increases[name]))
        every = [value for name in names for value in search.increases[name].values()]
        limit = spike_limit(every)

        def plot(axes: Axes) -> None:
            for place, domain in enumerate(domains):
                found = [(search.increases[name].get(domain), y) for y, name in enumerate(names)]
                points = [(x, y) for x, y in found if x is not None and (limit is None or x <= limit)]
                index = (place + SERIES // 2) % SERIES  # other colours than the first runs have
                look = {"color": _COLOURS[index], "marker": _MARKERS[index], "s": 26, "zorder": 3}
                axes.scatter(*_columns(points), label=shortened(domain, 24), **look)
            means = [(search.means[name], y) for y, name in enumerate(names) if search.means[name] is not None]
            inside = [(x, y) for x, y in means if limit is None or x <= limit]
            axes.scatter(*_columns(inside), color=_INK, marker="|", s=130, linewidths=2.5, label="mean", zorder=4)
            for x, y in means:
                if limit is not None and x > limit:
                    axes.text(limit, y, f"mean {x:.2f} →", ha="right", va="center", fontsize=9.5)
            if search.chosen in names:
                axes.axhspan(*(names.index(search.chosen) + half for half in (-0.5, 0.5)), color=_LINE, zorder=0)
            axes.set(xlabel="increase of the loss over the dense model, nats", ylim=(len(names) - 0.4, -0.6))
            labels = [f"{shortened(name, 24)}{', chosen' * (name == search.chosen)}" for name in names]
            axes.set_yticks(range(len(names)), labels=labels)
            axes.xaxis.set_major_locator(MaxNLocator(5))
            if limit is not None:
                axes.set_xlim(right=limit)

        height = 0.9 + 0.25 * len(names)
        return self._svg(plot, height, alt, legend=len(domains) + 1)

    def _svg(self, plot, height: float, alt: str, *, legend: int = 0) -> str:
        """Draws on new axes and returns the SVG element as text.

        Args:
            plot: called with the axes.
            height: without the legend, in inches.
            alt: the alternative text.
            legend: number of its entries; it stands above the axes.
        """
        self._drawn += 1
        with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the page brings the fonts, whatever matplotlib lacks
            height += 0.22 * math.ceil(legend / 3)
            figure = Figure(figsize=(_WIDTH, height), layout="constrained")
            figure.patch.set_alpha(0)
            axes = figure.add_subplot()
            axes.patch.set_alpha(0)
            plot(axes)
            if legend:
                figure.legend(loc="outside upper left", ncols=3, fontsize=9.5)
            text = io.StringIO()
            figure.savefig(text, format="svg", metadata={"Date": None})
        return _for_page(text.getvalue(), f"chart-{self._drawn}", alt)


def _look(number: int) -> dict:
    """Colour, marker and line of a run: runs differ in print too."""
    index = (number - 1) % SERIES
    return {"color": _COLOURS[index], "marker": _MARKERS[index], "linestyle": _DASHES[index]}


def _columns(points: list[tuple[float, int]]) -> tuple[tuple, tuple]:
    """The x and the y of points."""
    return tuple(zip(*points, strict=True)) if points else ((), ())


def _for_page(svg: str, prefix: str, alt: str) -> str:
    """An SVG element of matplotlib with an alternative text, ids that begin with `prefix`, and the page's colours."""
    root = ElementTree.fromstring(svg)
    for metadata in root.findall("{*}metadata"):
        root.remove(metadata)
    for element in root.iter():
        element.tag = _local(element.tag)
        element.attrib = {_local(key): _for_page_value(value, prefix) for key, value in element.attrib.items()}
        if "id" in element.attrib:
            element.set("id", f"{prefix}-{element.get('id')}")
        if element.get("href", "").startswith("#"):
            element.set("href", f"#{prefix}-{element.get('href')[1:]}")
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    root.set("role", "img")
    root.set("aria-label", alt)
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    """A name without its namespace, which HTML does not need."""
    return name.rpartition("}")[2]


def _for_page_value(value: str, prefix: str) -> str:
    for before, after in _VARIABLES.items():
        value = value.replace(before, after)
    return value.replace("url(#", f"url(#{prefix}-")


def shades(count: int) -> list[tuple[str, str]]:
    """(colour, colour of text on it) of a perceptually uniform scale, from small to large values."""
    found = matplotlib.colormaps["viridis"].reversed().resampled(count)(range(count))
    return [(matplotlib.colors.to_hex(colour), "#000" if _luminance(colour) > 0.179 else "#fff") for colour in found]


def _luminance(colour: Sequence[float]) -> float:
    """Relative luminance of an sRGB colour, as the contrast rules of WCAG define it."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
