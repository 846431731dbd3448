"""Tables and pictures of a sweep."""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ..config import RESPONSES, PruneConfig
from ..errors import UserError
from ..evaluate.tasks import ZEROSHOT
from ..formats.dense import atomic_file, user_errors
from .run import describe


@dataclass(frozen=True)
class Line:
    """All seeds of one cell.

    Attributes:
        label: its settings without the seed.
        config: with seed 0.
        cells: what sweep.run() returned for each seed.
    """

    label: str
    config: PruneConfig
    cells: tuple[dict, ...]

    def values(self, name: str) -> list[float]:
        """A figure for each seed; empty if a seed lacks it."""
        found = [figures(cell).get(name) for cell in self.cells]
        return [] if None in found else found

    def mean(self, name: str) -> float | None:
        """Mean over the seeds; None if a seed lacks it."""
        found = self.values(name)
        return statistics.fmean(found) if found else None


_UNCOUNTED = ("text", "eval_dense", "eval_pruned")  # stages that the energy is not of
_FORMATS = {"perplexity": ".2f", "of dense": ".3f", "seconds": ".1f", "peak GB": ".1f", "kJ": ".2f"}
_ACCURACY = ".4f"
_COUNTS = ("version", "num_fewshot", "samples", "samples_total", "tasks")  # beside the metrics of a task


def evaluation(found: dict) -> dict[str, float]:
    """What was measured of a model: perplexity, and the first metric of each task with its standard error.

    Args:
        found: a cell, or its "dense".
    """
    values = {"perplexity": found.get("perplexity")}
    tasks = found.get("lm_eval") or {}
    named = {"zero-shot": tasks.get("zeroshot", {}), "mmlu": tasks.get("mmlu", {}), **tasks.get("tasks", {})}
    for name, facts in named.items():
        metric = next((key for key in facts if key not in _COUNTS and "_stderr" not in key), None)
        if metric is not None:
            column = name if metric == "acc" else f"{name} {metric}"
            plain, *rule = metric.split(",")  # "exact_match,strict-match"
            values |= {column: facts[metric], f"{column} stderr": facts.get(",".join([f"{plain}_stderr", *rule]))}
    return {name: value for name, value in values.items() if value is not None}


def figures(cell: dict) -> dict[str, float]:
    """The numbers of a cell that tables show, by column; those that it has."""
    report, found = cell["report"], evaluation(cell)
    if "perplexity" in found:
        ratio = found["perplexity"] / cell["dense"]["perplexity"]
        found = {"perplexity": found["perplexity"], "of dense": ratio, **found}
    found["seconds"] = sum(s for stage, s in report["seconds"].items() if stage not in _UNCOUNTED)
    found["peak GB"] = report["peak_memory_bytes"] / 1e9
    return found if isinstance(report["energy"], str) else {**found, "kJ": report["energy"] / 1e3}


def columns(found: list[Line]) -> list[str]:
    """The names of all figures that any of the lines has."""
    return list(dict.fromkeys(name for line in found for cell in line.cells for name in figures(cell)))


def check_installed() -> None:
    """Refuse a sweep whose pictures could not be drawn.

    Raises:
        UserError: matplotlib is missing.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError('the pictures of a sweep need matplotlib: pip install "fwanda-kernels[eval]"')


def lines(configs: Iterable[PruneConfig], cells: Iterable[dict]) -> list[Line]:
    """Cells that differ by their seed alone in one line, in the order of the recipe."""
    configs = list(configs)
    groups: dict[PruneConfig, list[dict]] = defaultdict(list)
    for config, cell in zip(configs, cells, strict=True):
        groups[replace(config, seed=0)].append(cell)
    return [Line(describe(config, configs), config, tuple(found)) for config, found in groups.items()]


def write(found: list[Line], output: str | Path) -> list[Path]:
    """Write results.csv (a row a cell), results.md (a row a line) and the pictures that the results allow.

    Returns:
        The files.
    """
    output = Path(output)
    texts = {"results.csv": _csv(found), "results.md": markdown(found)}
    for name, text in texts.items():
        with user_errors(output), atomic_file(output / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return [output / name for name in texts] + _pictures(found, output)


def markdown(found: list[Line]) -> str:
    """A table for each evaluation protocol: a row a line, means and their standard deviation over several seeds."""
    groups: dict[str, list[Line]] = defaultdict(list)
    for line in found:
        groups[_protocol(line.cells[0])].append(line)
    return "\n".join(_table(protocol, group) for protocol, group in groups.items())


def _table(protocol: str, group: list[Line]) -> str:
    shown = columns(group)
    if "zero-shot" in shown:  # the tasks that it is the mean of are in results.csv
        shown = [name for name in shown if name.removesuffix(" stderr") not in ZEROSHOT]
    head = ["settings", "seeds", *shown]
    rows = [[line.label, _seeds(line), *(_cell(line, name) for name in shown)] for line in group]
    first = group[0].cells[0]
    dense = {name: _format(name, value) for name, value in evaluation(first["dense"]).items() if name in shown}
    told = ", ".join(f"{name} {value}" for name, value in dense.items()) or "not measured"
    return "\n".join([
        f"Model {first['model']}; {protocol}. Dense: {told}.",
        "",
        *("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]),
        "",
    ])  # fmt: skip


def _protocol(cell: dict) -> str:
    text = "no perplexity"
    if cell.get("perplexity") is not None:
        text = "{windows} windows of {seqlen} tokens, tokens {tokens_sha256:.12}, bos {bos}, {tokenizer}"
    limit = (cell.get("lm_eval") or {}).get("limit")
    return text.format_map(cell) + (f"; the first {limit} examples of each task" if limit else "")


def _seeds(line: Line) -> str:
    return ", ".join(str(cell["report"]["config"]["seed"]) for cell in line.cells)


def _format(name: str, value: float) -> str:
    return format(value, _FORMATS.get(name, _ACCURACY))


def _cell(line: Line, name: str) -> str:
    values = line.values(name)
    if not values:
        return "-"
    text = _format(name, statistics.fmean(values))
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return text
    return f"{text} ± {_format(name, statistics.stdev(values))}"


def _csv(found: list[Line]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    settings, names = list(found[0].config.to_dict()), columns(found)
    writer.writerow(["model", "label", *settings, *names])
    for line in found:
        for cell in line.cells:
            config = cell["report"]["config"]
            values = figures(cell)
            values = [values.get(name) for name in names]
            writer.writerow([cell["model"], line.label, *(config.get(key) for key in settings), *values])
    return text.getvalue()


def _pictures(found: list[Line], output: Path) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    found = [x for x in found if all(map(math.isfinite, x.values("perplexity")))]
    alone = not any(cell["shared"] for x in found for cell in x.cells)  # else some energy is counted for none, or one
    drawn = [
        ("perplexity-by-sparsity", _by_sparsity, [x for x in found if x.values("perplexity") and not x.config.pattern]),
        ("perplexity-by-energy", _by_energy, [x for x in found if alone and x.values("perplexity") and x.values("kJ")]),
        ("sparsity-by-block", _sparsity_by_block, [x for x in found if _divides(x.config)]),
        ("disagreement-by-block", _disagreement_by_block, [x for x in found if x.cells[0]["disagreement"]]),
        ("kept-in-rows", _kept, [x for x in found if not x.config.pattern]),
    ]
    return [_draw(output / f"{name}.png", draw, chosen) for name, draw, chosen in drawn if chosen]


def _divides(config: PruneConfig) -> bool:
    """Whether matrices differ in sparsity."""
    return not config.pattern and config.allocation in ("global", *RESPONSES)


def _draw(path: Path, draw, chosen: list[Line]) -> Path:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    draw(axes, chosen)
    axes.legend(fontsize=7)
    with user_errors(path.parent), atomic_file(path) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    pyplot.close(figure)
    return path


def _by_sparsity(axes, chosen: list[Line]) -> None:
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in chosen:
        curves[line.label.replace(f" {line.config.sparsity}", "")].append(
            (float(line.config.removed), line.mean("perplexity"))
        )
    for label, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.axhline(chosen[0].cells[0]["dense"]["perplexity"], color="gray", linestyle=":", label="dense")
    axes.set(xlabel="weights removed", ylabel="perplexity (lower is better)", yscale="log")


def _by_energy(axes, chosen: list[Line]) -> None:
    for line in chosen:
        axes.plot(line.mean("kJ"), line.mean("perplexity"), marker="o", linestyle="", label=line.label)
    axes.set(xlabel="energy of pruning, kJ gross", ylabel="perplexity (lower is better)", yscale="log")


def _by_block(values: dict[str, float]) -> list[float]:
    """Mean over the matrices of each block, in order; names hold the block's number first."""
    blocks: dict[int, list[float]] = defaultdict(list)
    for name, value in values.items():
        blocks[next(int(part) for part in name.split(".") if part.isdigit())].append(value)
    return [statistics.fmean(blocks[index]) for index in sorted(blocks)]


def _sparsity_by_block(axes, chosen: list[Line]) -> None:
    for line in chosen:
        rows = [row for row in line.cells[0]["report"]["matrices"] if row["skipped"] is None]
        axes.plot(_by_block({row["name"]: row["sparsity"] for row in rows}), label=line.label)
    axes.set(xlabel="block", ylabel="weights removed, mean of its matrices")


def _disagreement_by_block(axes, chosen: list[Line]) -> None:
    for line in chosen:
        axes.plot(_by_block(line.cells[0]["disagreement"]), label=line.label)
    axes.set(xlabel="block", ylabel="mask entries unlike Wanda's")


def _kept(axes, chosen: list[Line]) -> None:
    for line in chosen:
        counts = line.cells[0]["kept"]
        axes.stairs(
            [count / sum(counts) for count in counts],
            [i / len(counts) for i in range(len(counts) + 1)],
            label=line.label,
        )
    axes.set(xlabel="share of a row's weights that is kept", ylabel="share of the rows")
