"""Tables of perplexity and accuracy, from results of bench_quality.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from pathlib import Path

from fwanda_pruner.evaluate.lm_eval_tasks import ZEROSHOT
from fwanda_pruner.sweep.tables import PERPLEXITY

from .markdown import table
from .results import RESULTS, read_all

ACCURACIES = ("zero-shot", "mmlu")
README_RECIPE = {"model": "smollm2", "recipe": "sparsity"}
# (method, allocation) -> their names in the README
README_ROWS = {
    ("magnitude", "layer"): ("Magnitude", "layer"),
    ("wanda", "uniform"): ("Wanda", "uniform"),
    ("sparsegpt", "uniform"): ("SparseGPT", "uniform"),
    ("fwanda", "row"): ("F-Wanda", "row (the paper's rule)"),
    ("fwanda", "global"): ("F-Wanda", "global (default)"),
    ("fwanda", "auto"): ("F-Wanda", "auto"),
    ("fsparsegpt", "auto"): ("F-SparseGPT", "auto"),
}


def full(folder: Path = RESULTS) -> str:
    """A table for each result, the longest first."""
    results = sorted(read_all("quality", folder).values(), key=lambda result: (-len(result["lines"]), result["recipe"]))
    return "\n".join(map(result_table, results))


def result_table(result: dict) -> str:
    """A row for each setting, a column for each text or accuracy and each sparsity or pattern."""
    shares = list(dict.fromkeys(share_of(line) for line in result["lines"]))
    rows: dict[str, dict[str, dict]] = {}
    for line in result["lines"]:
        rows.setdefault(line["label"].replace(f" {share_of(line)}", ""), {})[share_of(line)] = line
    measured = [*text_columns(result), *ACCURACIES]
    names = [name for name in measured if any(name in line for line in result["lines"])]
    best = {(name, share): best_of(rows.values(), name, share) for name in names for share in shares}
    body = [
        [label, *(shown(by.get(share, {}).get(name), name, best[name, share]) for name, share in best)]
        for label, by in rows.items()
    ]
    return f"{caption(result)}\n\n{table(['', *(f'{name}, {share}' for name, share in best)], body)}"


def readme_means(folder: Path) -> tuple[dict, dict]:
    """The result of the README, and its means over the seeds on the first text, by method, allocation and share."""
    result = [r for r in read_all("quality", folder).values() if README_RECIPE.items() <= r.items()][-1]
    text = text_columns(result)[0]
    means = {
        (line["method"], line["allocation"], share_of(line)): statistics.fmean(line[text]) for line in result["lines"]
    }
    return result, means


def readme_result(folder: Path = RESULTS) -> str:
    """The result that the README begins with, in two sentences."""
    result, means = readme_means(folder)
    rules = (("wanda", "uniform"), ("sparsegpt", "uniform"), ("fwanda", "auto"))
    dense = result["dense"][text_columns(result)[0]]
    wanda, sparsegpt, auto = (means[method, allocation, "0.5"] for method, allocation in rules)
    return (
        "Half of the weights in the decoder blocks of SmolLM2-135M-Instruct are removed. The perplexity on WikiText-2 "
        "(lower is better)\n"
        f"rises from {dense:,.1f} to {wanda:,.1f} by Wanda, to {sparsegpt:,.1f} by SparseGPT, and to **{auto:,.1f}** "
        "by F-Wanda with `--allocation auto`. The weights\n"
        "were dequantised from a 4-bit file; [Quality](#quality) has the details.\n"
    )


def readme(folder: Path = RESULTS) -> str:
    """A small table: perplexity of SmolLM2 on the first text by share removed, mean of the seeds."""
    result, means = readme_means(folder)
    shares = list(dict.fromkeys(share_of(line) for line in result["lines"]))
    best = {share: min(means[method, allocation, share] for method, allocation in README_ROWS) for share in shares}
    rows = []
    for (method, allocation), names in README_ROWS.items():
        figures = [(means[method, allocation, share], best[share]) for share in shares]
        rows.append([*names, *(f"**{mean:,.1f}**" if mean == lowest else f"{mean:,.1f}" for mean, lowest in figures)])
    first, *others = (f"{float(share):.0%}".replace("%", " %") for share in shares)
    head = ["method", "allocation", f"perplexity, {first} removed", *others]
    return f"{readme_caption(result)}\n\n{table(head, rows)}"


def readme_caption(result: dict) -> str:
    seeds = max((line["seeds"] for line in result["lines"]), key=len)
    calibration, text = result["calibration"], result["texts"][0]
    return (
        f"SmolLM2-135M-Instruct, {result['dtype']}, {machine_line(result)}. "
        f"Perplexity on {text['windows']} windows of {text['seqlen']:,} tokens of WikiText-2; "
        f"calibrated on {calibration['nsamples']} x {calibration['seqlen']:,} tokens; means of {len(seeds)} seeds. "
        f"Dense: {result['dense'][text_columns(result)[0]]:.1f}."
    )


def text_columns(result: dict) -> list[str]:
    """Names of the columns with perplexities, one for each text."""
    return [PERPLEXITY + text["source"] for text in result["texts"]]


def share_of(line: dict) -> str:
    return line["pattern"] or line["sparsity"]


def machine_line(result: dict) -> str:
    driver = f", driver {result['driver']}" if result["driver"] else ""
    return f"{result['card']}{driver}, torch {result['torch']}, {result['date']}"


def caption(result: dict) -> str:
    """What ran on what, in one line."""
    calibration = result["calibration"]
    calibrated = f"calibrated on {calibration['nsamples']} x {calibration['seqlen']} tokens, " if calibration else ""
    texts = ", ".join(windows_of(text) for text in result["texts"])
    seeds = max((line["seeds"] for line in result["lines"]), key=len)
    repeated = len(seeds) > 1
    told = f"seeds {', '.join(map(str, seeds))} (mean ± standard deviation)" if repeated else f"seed {seeds[0]}"
    dense = ", ".join(f"{name} {shown([value], name)}" for name, value in result["dense"].items())
    return (
        f"{result['model']}, {result['dtype']}, {machine_line(result)}; "
        f"{calibrated}{texts}, {told}. Dense: {dense}.{zero_shot(result)}"
    )


def windows_of(text: dict) -> str:
    bos = "with" if text["bos"] else "no"
    return f"{text['windows']} windows of {text['seqlen']} of {text['source']} ({bos} BOS)"


def zero_shot(result: dict) -> str:
    """How many examples the zero-shot accuracies were measured on, and the standard error of one."""
    errors = [error for line in result["lines"] for error in line.get("zero-shot stderr", ())]
    if not errors:
        return ""
    examples = sum(result["lines"][0]["tasks"][0][name]["samples"] for name in ZEROSHOT)
    return f" Zero-shot: {examples:,} examples, one accuracy has a standard error of {statistics.fmean(errors):.3f}."


def best_of(rows: Iterable[dict[str, dict]], name: str, share: str) -> float:
    """The best mean of a column: the lowest perplexity, the highest accuracy."""
    means = [statistics.fmean(by[share][name]) for by in rows if name in by.get(share, {})]
    return min(means) if name.startswith(PERPLEXITY) else max(means)


def shown(values: list[float] | None, name: str, best: float | None = None) -> str:
    """Mean and deviation of a figure, bold if the mean is the best."""
    if not values:
        return "-"
    digits, mean = 1 if name.startswith(PERPLEXITY) else 3, statistics.fmean(values)
    text = f"{mean:.{digits}f}"
    if len(values) > 1 and all(map(math.isfinite, values)):
        text += f" ± {statistics.stdev(values):.{digits}f}"
    return f"**{text}**" if mean == best else text
