"""Tables of a sweep."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ..config import PruneConfig
from ..evaluate.lm_eval_tasks import ZEROSHOT
from ..formats.files import atomic_file, user_errors
from ..report.summary import protocol_line
from ..stage_names import pruning_seconds
from .recipe import describe


@dataclass(frozen=True)
class Line:
    """Cells that differ only in their seed: one row of a table.

    Attributes:
        label: the settings, without the seed.
        config: the settings, with seed 0.
        cells: what run() returned for each seed.
    """

    label: str
    config: PruneConfig
    cells: tuple[dict, ...]

    def values(self, name: str) -> list[float]:
        """A figure for each seed; empty if it is missing for one of them."""
        values = [figures(cell).get(name) for cell in self.cells]
        return [] if None in values else values

    def mean(self, name: str) -> float | None:
        """The mean of a figure over the seeds; None if it is missing for one of them."""
        values = self.values(name)
        return statistics.fmean(values) if values else None


TABLES = ("results.csv", "results.md")  # the files of write_tables()
PERPLEXITY, OF_DENSE = "perplexity ", "of dense "  # columns begin with these; the name of a text follows
_FORMATS = {PERPLEXITY: ".2f", OF_DENSE: ".3f", "seconds": ".1f", "peak GB": ".1f", "kJ": ".2f"}
_ACCURACY = ".4f"
# columns, and keys of benchmark results, that no task may take
_TAKEN = {"model", "label", "seeds", "chosen", "tasks", "settings", "zero-shot", "mmlu", "seconds", "peak GB", "kJ"}
_TAKEN |= {setting.name for setting in fields(PruneConfig)}
_COUNTS = ("version", "num_fewshot", "samples", "samples_total", "tasks")  # beside the metrics of a task


def _task_column(task: str) -> str:
    """The name of a task, told apart from the other columns."""
    taken = task in _TAKEN or task.startswith((PERPLEXITY, OF_DENSE, "task "))
    return f"task {task}" if taken or task.endswith(" stderr") else task


def evaluation(cell: dict) -> dict[str, float]:
    """The figures that describe a model: perplexities, and the first metric of each task with its standard error.

    Args:
        cell: what run() returned for a cell, or its "dense".
    """
    values = {PERPLEXITY + text["source"]: text["perplexity"] for text in cell["perplexity"]}
    tasks = cell.get("lm_eval") or {}
    named = {"zero-shot": tasks.get("zeroshot", {}), "mmlu": tasks.get("mmlu", {})}
    named |= {_task_column(name): results for name, results in tasks.get("tasks", {}).items()}
    for name, results in named.items():
        metric = next((key for key in results if key not in _COUNTS and "_stderr" not in key), None)
        if metric is not None:
            column = name if metric == "acc" else f"{name} {metric}"
            plain, *rule = metric.split(",")  # "exact_match,strict-match"
            error = results.get(",".join([f"{plain}_stderr", *rule]))
            values |= {column: results[metric], f"{column} stderr": error}
    return {name: value for name, value in values.items() if value is not None}


def figures(cell: dict) -> dict[str, float]:
    """The numbers of a cell that tables show: column -> value. Columns without a value are left out."""
    report, values, dense = cell["report"], evaluation(cell), evaluation(cell["dense"])
    perplexities = {name: value for name, value in values.items() if name.startswith(PERPLEXITY)}
    ratios = {OF_DENSE + name.removeprefix(PERPLEXITY): value / dense[name] for name, value in perplexities.items()}
    values = perplexities | ratios | values
    values["seconds"] = pruning_seconds(report["seconds"])
    values["peak GB"] = report["peak_memory_bytes"] / 1e9
    return values if isinstance(report["energy"], str) else {**values, "kJ": report["energy"] / 1e3}


def columns(lines: list[Line]) -> list[str]:
    """The columns for which any of the lines has a value."""
    return list(dict.fromkeys(name for line in lines for cell in line.cells for name in figures(cell)))


def lines_of(configs: Iterable[PruneConfig], cells: Iterable[dict]) -> list[Line]:
    """Put cells that differ only in their seed into one line; the order is that of the recipe."""
    configs = list(configs)
    groups: dict[PruneConfig, list[dict]] = defaultdict(list)
    for config, cell in zip(configs, cells, strict=True):
        groups[replace(config, seed=0)].append(cell)
    return [Line(describe(config, configs), config, tuple(group)) for config, group in groups.items()]


def write_tables(lines: list[Line], output: str | Path) -> list[Path]:
    """Write results.csv (a row for each cell) and results.md (a row for each line).

    Returns:
        The two files.
    """
    output = Path(output)
    texts = dict(zip(TABLES, (_csv(lines), markdown(lines)), strict=True))
    for name, text in texts.items():
        with user_errors(output), atomic_file(output / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return [output / name for name in texts]


def markdown(lines: list[Line]) -> str:
    """A table for each evaluation protocol. Several seeds give a mean ± standard deviation."""
    groups: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        groups[_protocol(line.cells[0])].append(line)
    return "\n".join(_table(protocol, group) for protocol, group in groups.items())


def _table(protocol: str, group: list[Line]) -> str:
    shown = columns(group)
    if "zero-shot" in shown:  # the mean alone; its tasks are in results.csv
        shown = [name for name in shown if name.removesuffix(" stderr") not in ZEROSHOT]
    head = ["settings", "seeds", *shown]
    rows = [[line.label, _seeds(line), *(_cell(line, name) for name in shown)] for line in group]
    first = group[0].cells[0]
    dense = {name: _format(name, value) for name, value in evaluation(first["dense"]).items() if name in shown}
    cells = ([part.replace("|", "\\|") for part in row] for row in [head, ["---"] * len(head), *rows])
    told = ", ".join(f"{name} {value}" for name, value in dense.items()) or "not measured"
    return "\n".join([
        f"Model {first['model']}; {protocol}. Dense: {told}.",
        "",
        *("| " + " | ".join(row) + " |" for row in cells),
        "",
    ])  # fmt: skip


def _protocol(cell: dict) -> str:
    parts = [f"{text['source']}: {protocol_line(text)}" for text in cell["perplexity"]] or ["no perplexity"]
    limit = (cell.get("lm_eval") or {}).get("limit")
    return "; ".join(parts + [f"the first {limit} examples of each task"] * (limit is not None))


def _seeds(line: Line) -> str:
    return ", ".join(str(cell["report"]["config"]["seed"]) for cell in line.cells)


def _format(name: str, value: float) -> str:
    return format(value, next((form for start, form in _FORMATS.items() if name.startswith(start)), _ACCURACY))


def _cell(line: Line, name: str) -> str:
    values = line.values(name)
    if not values:
        return "-"
    text = _format(name, statistics.fmean(values))
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return text
    return f"{text} ± {_format(name, statistics.stdev(values))}"


def _csv(lines: list[Line]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    settings, names = list(lines[0].config.to_dict()), columns(lines)
    writer.writerow(["model", "label", *settings, *names])
    for line in lines:
        for cell in line.cells:
            config = cell["report"]["config"]
            values = figures(cell)
            values = [values.get(name) for name in names]
            facts = [",".join(fact) if isinstance(fact, list) else fact for fact in map(config.get, settings)]
            writer.writerow([cell["model"], line.label, *facts, *values])
    return text.getvalue()
