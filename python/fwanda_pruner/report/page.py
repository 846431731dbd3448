"""What the HTML report shows, as plain values: the template only places them."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..methods_table import METHODS
from ..stage_names import StageName
from .record import MatrixRow, Report
from .summary import protocol_line, windows_of

_TITLES = {name.value: name.title for name in StageName}  # of stages
_LONGEST = 120  # blocks, and kinds of matrix, of one heat map; larger ones say what they leave out
_KINDS = 24
_SPIKE = 3.0  # times the range of the other values: farther ones are drawn at the edge of a chart


@dataclass(frozen=True)
class Run:
    """One report on the page.

    Attributes:
        number: from 1, in the order given; its name in charts.
        label: what the caller calls it.
        report: the record.
        search: what `auto` or `response` tried; None without a search.
    """

    number: int
    label: str
    report: Report
    search: Search | None = None

    @property
    def method(self) -> str:
        """Method, allocation and pattern in words."""
        config = self.report.config
        name = method_title(config.get("method")) or "Pruning"
        details = [config[key] for key in ("allocation", "pattern") if config.get(key)]
        return f"{name} ({', '.join(details)})" if details else name

    @property
    def model(self) -> str:
        return self.report.config.get("model") or "a model without a name"

    @property
    def pruned(self) -> list[MatrixRow]:
        """The matrices that were pruned."""
        return [row for row in self.report.matrices if row.skipped is None]

    @property
    def sentence(self) -> str:
        """What was done, and what it cost."""
        return self.sentence_of(self.model, str)

    def sentence_of(self, model: str, named: Callable[[str], str]) -> str:
        """The sentence with another name of the model, and with other names of texts."""
        shares = self.report.sparsity
        count = len(self.pruned)
        matrices = f"{count:,} {'matrix' if count == 1 else 'matrices'}"
        done = (
            f"{self.method} set {percent(shares['matrices'])} of the weights in {matrices} of {model} to zero, "
            f"{percent(shares['model'])} of the whole model"
        )
        costs = [_change({**text, "source": named(text["source"])}) for text in self.report.perplexity]
        return f"{done}; {' and '.join(costs)}." if costs else f"{done}; its perplexity was not measured."

    @property
    def kept(self) -> float:
        """Share of the weights in pruned matrices that the masks keep."""
        numel = sum(row.numel for row in self.pruned)
        return sum(row.kept for row in self.pruned) / numel if numel else 1.0


@dataclass(frozen=True)
class Search:
    """What `auto` or `response` tried.

    Attributes:
        chosen: the best candidate or round.
        losses: name of masks -> domain -> loss in nats; "dense" is the model before pruning.
        increases: name of masks -> domain -> loss less that of the dense model, in nats.
        means: name of masks -> their mean increase; None if a loss is not finite.
    """

    chosen: str
    losses: dict[str, dict[str, float]]
    increases: dict[str, dict[str, float]]
    means: dict[str, float | None]

    @property
    def domains(self) -> list[str]:
        return list(dict.fromkeys(domain for losses in self.losses.values() for domain in losses))


class Cell(NamedTuple):
    """One field of a heat map: matrices of one kind in one block.

    Attributes:
        share: over all their weights, in [0, 1].
        count, low, high: how many matrices there are, and their smallest and largest share.
    """

    share: float
    count: int
    low: float
    high: float


@dataclass(frozen=True)
class HeatMap:
    """Shares by block and kind of matrix.

    Attributes:
        kinds: the columns: names of matrices without the path to their block and without the number of an expert ->
            the shortest end of the name that no other column has.
        rows: block -> a cell for each kind, None where the block has no such matrix. The last cell is the whole block.
        left_out: blocks and kinds that are not shown, in words; None if all are.
    """

    kinds: dict[str, str]
    rows: dict[str, list[Cell | None]]
    left_out: str | None


def runs_of(reports: dict[str, Report]) -> list[Run]:
    """The runs of a page, in order."""
    return [
        Run(number, label, report, _search(report.config.get("chosen")))
        for number, (label, report) in enumerate(reports.items(), 1)
    ]


def method_title(name: str | None) -> str | None:
    """The title of a method by its name; the name itself where it is of another version."""
    return METHODS[name].title if name in METHODS else name


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def place_of(name: str) -> tuple[str, str]:
    """Block and kind of a matrix by its name: `model.layers.3.mlp.experts.7.up_proj` is ("3", "mlp.experts.up_proj").

    The first number is that of the block; a name without a number has no block.
    """
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if _is_number(part)), -1)
    block = parts[first] if first >= 0 else "-"
    return block, ".".join(part for part in parts[first + 1 :] if not _is_number(part)) or parts[0]


def _is_number(part: str) -> bool:
    return part.isdecimal() and len(part) < 10


def sparsity_map(run: Run) -> HeatMap:
    """Share of zeros by block and kind."""
    return _heat_map([(row, row.zeros) for row in run.pruned])


def disagreement_map(run: Run) -> HeatMap | None:
    """Share of mask entries unlike Wanda's by block and kind; None if it was not measured, or if all are alike."""
    rows = [row for row in run.pruned if row.wanda_disagreement is not None]
    if not any(row.wanda_disagreement for row in rows):
        return None
    return _heat_map([(row, row.wanda_disagreement * row.numel) for row in rows])


def _heat_map(rows: Sequence[tuple[MatrixRow, float]]) -> HeatMap:
    """Shares over the weights of all matrices that lie at the same place.

    Args:
        rows: matrices, each with the number of its weights that count.
    """
    places: dict[str, dict[str, list[tuple[MatrixRow, float]]]] = defaultdict(lambda: defaultdict(list))
    for row, part in rows:
        block, kind = place_of(row.name)
        places[block][kind].append((row, part))
    blocks = sorted(places, key=lambda block: (block == "-", int(block) if block != "-" else 0))
    kinds = list(dict.fromkeys(kind for block in blocks for kind in places[block]))
    shown = {
        block: [*(_cell(places[block].get(kind, ())) for kind in kinds[:_KINDS]), _cell(_all(places[block].values()))]
        for block in blocks[:_LONGEST]
    }
    left_out = [
        f"{len(names) - limit:,} more {what}"
        for names, limit, what in ((blocks, _LONGEST, "blocks"), (kinds, _KINDS, "kinds of matrix"))
        if len(names) > limit
    ]
    return HeatMap(_short(kinds[:_KINDS]), shown, " and ".join(left_out) or None)


def _short(kinds: Sequence[str]) -> dict[str, str]:
    """Name of a kind -> its shortest end, cut at dots, that no other has."""
    ends = {kind: [".".join(kind.split(".")[-n:]) for n in range(1, kind.count(".") + 2)] for kind in kinds}
    count = Counter(end for found in ends.values() for end in found)
    return {kind: next((end for end in found if count[end] == 1), kind) for kind, found in ends.items()}


def _all(groups: Iterable[list]) -> list:
    return [item for group in groups for item in group]


def _cell(rows: Sequence[tuple[MatrixRow, float]]) -> Cell | None:
    numel = sum(row.numel for row, _ in rows)
    if not numel:
        return None
    shares = [part / row.numel for row, part in rows if row.numel]
    return Cell(sum(part for _, part in rows) / numel, len(rows), min(shares), max(shares))


def scale_of(maps: Iterable[HeatMap]) -> tuple[float, float]:
    """Ends of the colour scale that serves several heat maps: multiples of 5 %, at least 20 % apart."""
    shares = [cell.share for heat_map in maps for cells in heat_map.rows.values() for cell in cells if cell is not None]
    low, high = math.floor(min(shares, default=0) * 20), math.ceil(max(shares, default=1) * 20)
    while high - low < 4:
        low, high = max(0, low - 1), min(20, high + 1)
    return low / 20, high / 20


def means_by_block(heat_map: HeatMap) -> dict[int, float]:
    """Block -> share over all its weights; without what lies in no block."""
    return {int(block): cells[-1].share for block, cells in heat_map.rows.items() if block != "-"}


def rows_in_words(counts: Sequence[int], kept: float) -> str:
    """What Report.row_histogram says of most rows, and of the middle one, within the width of its bins.

    Args:
        counts: number of rows in each bin of [0, 1].
        kept: share of all weights that is kept.
    """
    if max(counts) == sum(counts):
        return f"All rows keep about {percent(kept, 0)} of their weights."
    total, reached, bins = sum(counts), 0, []
    for index, count in enumerate(counts):
        reached += count
        while len(bins) < 3 and reached >= (0.1, 0.5, 0.9)[len(bins)] * total:
            bins.append(index)
    low, middle, high = bins
    most = f"{percent(low / len(counts), 0)} to {percent((high + 1) / len(counts), 0)}"
    median = f"{percent(middle / len(counts), 0)} to {percent((middle + 1) / len(counts), 0)}"
    return f"At least eight of ten rows keep {most} of their weights; the median row keeps {median}."


def _search(chosen: dict | None) -> Search | None:
    """The search that a record tells of; None if there was none or its losses are missing."""
    if not chosen or "dense" not in chosen["losses"] or chosen["name"] not in chosen["losses"]:
        return None
    losses, dense = chosen["losses"], chosen["losses"]["dense"]
    increases = {
        name: {domain: values[domain] - loss for domain, loss in dense.items() if domain in values}
        for name, values in losses.items()
        if name != "dense"
    }
    means = {
        name: statistics.fmean(found.values()) if found and len(found) == len(dense) else None
        for name, found in increases.items()
    }
    return Search(chosen["name"], losses, increases, means)


def stage_rows(runs: Sequence[Run]) -> list[dict]:
    """A row for each stage: its name in words, and for each run its seconds and joules, None where it has none."""
    found = dict.fromkeys(name for run in runs for name in run.report.seconds)
    names = [*(name for name in _TITLES if name in found), *(name for name in found if name not in _TITLES)]
    return [
        {
            "name": _TITLES.get(name, name),
            "cells": [
                {
                    "seconds": run.report.seconds.get(name),
                    "joules": joules(run.report.energy_details.get("phases", {}).get(name)),
                }
                for run in runs
            ],
        }
        for name in names
    ]


def joules(energy: dict | str | None) -> float | None:
    """Gross joules of a stage or of a run; None if they were not measured."""
    return energy["gross_joules"] if isinstance(energy, dict) else None


def domain_groups(runs: Sequence[Run]) -> dict[str, list[dict]]:
    """Source of a domain -> what each run that was compared on it measured there.

    A row has the keys of Report.domains, `run`, `read` (its windows in words), `increase` (of the loss by pruning, None
    if it is not known) and `bar` (the increase as a share of the largest one on the page, in [0, 1]).
    """
    groups: dict[str, list[dict]] = defaultdict(list)
    for run in runs:
        for domain in run.report.domains:
            known = domain["dense"] is not None and domain["pruned"] is not None
            increase = domain["pruned"] - domain["dense"] if known else None
            groups[domain["source"]].append({**domain, "run": run, "read": windows_of(domain), "increase": increase})
    rows = _all(groups.values())
    largest = max((row["increase"] or 0 for row in rows), default=0)
    for row in rows:
        row["bar"] = max(0, row["increase"] or 0) / largest if largest > 0 else 0
    return dict(groups)


def perplexity_groups(runs: Sequence[Run]) -> dict[tuple[str, str], list[dict]]:
    """(text, how it was measured) -> {run, dense, pruned, ratio, measured} of each run that measured it in that way."""
    groups: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for run in runs:
        for text in run.report.perplexity:
            finite = math.isfinite(text["pruned"]) and math.isfinite(text["dense"]) and text["dense"] > 0
            row = {"run": run, "dense": text["dense"], "pruned": text["pruned"], "measured": measured_on(text)}
            row["ratio"] = text["pruned"] / text["dense"] if finite else None
            groups[text["source"], protocol_line(text)].append(row)
    return dict(groups)


def measured_on(text: dict) -> str:
    """The windows of a text on which a perplexity was measured, in words."""
    bos = ", each after BOS" if text["bos"] else ""
    return f"{text['windows']:,} windows of {text['seqlen']:,} tokens{bos} (SHA-256 {text['tokens_sha256']:.12})"


def settings_rows(runs: Sequence[Run]) -> list[dict]:
    """A row for each setting: its values, and whether they differ between runs."""
    names = list(dict.fromkeys(name for run in runs for name in run.report.config if name != "chosen"))
    rows = []
    for name in names:
        values = [_in_words(run.report.config.get(name)) for run in runs]
        rows.append({"name": name, "values": values, "differs": len(set(values)) > 1})
    return rows


def grouped(pairs: Iterable[tuple[str, Run]]) -> dict[str, list[Run]]:
    """A text -> the runs that it belongs to, once each."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for text, run in pairs:
        if run not in groups[text]:
            groups[text].append(run)
    return dict(groups)


def energy_in_words(run: Run) -> str:
    """The energy of a run, or why it is not known."""
    energy, total = run.report.energy, run.report.energy_details.get("total")
    if isinstance(energy, str):
        return f"Energy: {energy}."
    net = total["net_joules"] if isinstance(total, dict) else None
    flag = total["flag"] if isinstance(total, dict) else None
    parts = [f"{energy:,.0f} J gross", *([f"{net:,.0f} J net of the idle power"] if net is not None else [])]
    return f"Energy of calibration, search and pruning: {', '.join(parts)}{f'; {flag}' if flag else ''}."


def _in_words(value) -> str:
    if value in (None, "", []):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _change(text: dict) -> str:
    dense, pruned = text["dense"], text["pruned"]
    if not (math.isfinite(dense) and math.isfinite(pruned)):
        return f"perplexity on {text['source']} was {perplexity(dense)} before and is {perplexity(pruned)} after"
    verb = "rose" if pruned > dense else "fell" if pruned < dense else "changed"
    return f"perplexity on {text['source']} {verb} from {perplexity(dense)} to {perplexity(pruned)}"


def perplexity(value: float) -> str:
    return f"{value:,.2f}" if math.isfinite(value) else "not finite"


def spike_limit(values: Sequence[float]) -> float | None:
    """The largest value that is drawn in its place, if larger ones would flatten the others; else None.

    Half of the values at least stay in their place.
    """
    found = sorted(values)
    for count in range(len(found) - 1, len(found) // 2, -1):
        rest = found[:count]
        spread = max(rest[-1] - rest[0], abs(rest[-1]) / 10)
        if found[count] - rest[-1] > _SPIKE * spread:
            return rest[-1] + spread / 2
    return None
