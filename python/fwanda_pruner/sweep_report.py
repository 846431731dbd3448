"""Tables and pictures of a sweep."""

from __future__ import annotations

import csv
import importlib.util
import io
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from .config import RESPONSES, PruneConfig
from .errors import UserError
from .save import atomic_file
from .sweep import describe


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
        found = [FIGURES[name](cell) for cell in self.cells]
        return [] if None in found else found

    def mean(self, name: str) -> float | None:
        """Mean over the seeds; None if a seed lacks it."""
        found = self.values(name)
        return statistics.fmean(found) if found else None


def _task(cell: dict, name: str, metric: str = "acc") -> float | None:
    return ((cell.get("lm_eval") or {}).get(name) or {}).get(metric)


_UNCOUNTED = ("text", "eval_dense", "eval_pruned")  # stages that the energy is not of
FIGURES = {
    "perplexity": lambda cell: cell.get("perplexity"),
    "of dense": lambda cell: cell["perplexity"] / cell["dense"]["perplexity"] if cell.get("perplexity") else None,
    "zero-shot": lambda cell: _task(cell, "zeroshot"),
    "zero-shot stderr": lambda cell: _task(cell, "zeroshot", "acc_stderr"),
    "mmlu": lambda cell: _task(cell, "mmlu"),
    "mmlu stderr": lambda cell: _task(cell, "mmlu", "acc_stderr"),
    "seconds": lambda cell: sum(s for stage, s in cell["report"]["seconds"].items() if stage not in _UNCOUNTED),
    "peak GB": lambda cell: cell["report"]["peak_memory_bytes"] / 1e9,
    "kJ": lambda cell: None if isinstance(cell["report"]["energy"], str) else cell["report"]["energy"] / 1e3,
}
_FORMATS = {"perplexity": ".2f", "of dense": ".3f", "seconds": ".1f", "peak GB": ".1f", "kJ": ".2f"} | dict.fromkeys(
    ("zero-shot", "zero-shot stderr", "mmlu", "mmlu stderr"), ".4f"
)


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
        with atomic_file(output / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return [output / name for name in texts] + _pictures(found, output)


def markdown(found: list[Line]) -> str:
    """A table for each evaluation protocol: a row a line, means and their standard deviation over several seeds."""
    groups: dict[str, list[Line]] = defaultdict(list)
    for line in found:
        groups[_protocol(line.cells[0])].append(line)
    return "\n".join(_table(protocol, group) for protocol, group in groups.items())


def _table(protocol: str, group: list[Line]) -> str:
    shown = [name for name in FIGURES if any(line.values(name) for line in group)]
    head = ["settings", "seeds", *shown]
    rows = [[line.label, str(len(line.cells)), *(_cell(line, name) for name in shown)] for line in group]
    first = group[0].cells[0]
    dense = {name: format(value, _FORMATS[name]) for name in shown if (value := _of_dense(first, name)) is not None}
    told = ", ".join(f"{name} {value}" for name, value in dense.items()) or "not measured"
    return "\n".join([
        f"Model {first['model']}; {protocol}. Dense: {told}.",
        "",
        *("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]),
        "",
    ])  # fmt: skip


def _of_dense(cell: dict, name: str) -> float | None:
    return None if name in ("of dense", "seconds", "peak GB", "kJ") else FIGURES[name](cell["dense"])


def _protocol(cell: dict) -> str:
    if cell.get("perplexity") is None:
        return "no perplexity"
    return "{windows} windows of {seqlen} tokens, tokens {tokens_sha256:.12}, bos {bos}, {tokenizer}".format_map(cell)


def _cell(line: Line, name: str) -> str:
    values = line.values(name)
    if not values:
        return "-"
    text = format(statistics.fmean(values), _FORMATS[name])
    return text if len(values) == 1 else f"{text} ± {format(statistics.stdev(values), _FORMATS[name])}"


def _csv(found: list[Line]) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    settings = list(found[0].config.to_dict())
    writer.writerow(["model", "label", *settings, *FIGURES])
    for line in found:
        for cell in line.cells:
            config = cell["report"]["config"]
            figures = [FIGURES[name](cell) for name in FIGURES]
            writer.writerow([cell["model"], line.label, *(config.get(key) for key in settings), *figures])
    return text.getvalue()


def _pictures(found: list[Line], output: Path) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
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
    with atomic_file(path) as temporary:
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
