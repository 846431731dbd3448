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
README_RECIPE = {"model": "smollm2", "recipe": "domains"}
# (method, allocation, calibration) -> how the README names them
README_ROWS = {
    ("wanda", "uniform", "c4"): ("Wanda", "uniform", "C4"),
    ("sparsegpt", "uniform", "c4"): ("SparseGPT", "uniform", "C4"),
    ("fwanda", "row", "c4"): ("F-Wanda", "row (the paper's rule)", "C4"),
    ("fwanda", "global", "c4"): ("F-Wanda", "global (default)", "C4"),
    ("fwanda", "auto", "c4"): ("F-Wanda", "auto", "C4"),
    ("fwanda", "auto", "c4+self"): ("F-Wanda", "auto", "C4 and own text"),
    ("fwanda", "auto", "c4+code"): ("F-Wanda", "auto", "C4 and code"),
}
README_TEXTS = {"wikitext2": "prose", "code": "code", "sample": "documentation"}


def full(folder: Path = RESULTS) -> str:
    """A table for each result, the longest first."""
    results = sorted(read_all("quality", folder).values(), key=lambda result: (-len(result["lines"]), result["recipe"]))
    return "\n".join(map(result_table, results))


def result_table(result: dict) -> str:
    """A row for each setting, a column for each text or accuracy and each sparsity or pattern."""
    shares = list(dict.fromkeys(share_of(line) for line in result["lines"]))
    rows: dict[str, dict[str, dict]] = {}
    for line in result["lines"]:
        label = line["label"].replace(f" {share_of(line)}", "").replace(".jsonl", "")
        rows.setdefault(label, {})[share_of(line)] = line
    measured = [*text_columns(result), *ACCURACIES]
    names = [name for name in measured if any(name in line for line in result["lines"])]
    best = {(name, share): best_of(rows.values(), name, share) for name in names for share in shares}
    body = [
        [label, *(shown(by.get(share, {}).get(name), name, best[name, share]) for name, share in best)]
        for label, by in rows.items()
    ]
    heads = [f"{without_suffix(name.removeprefix(PERPLEXITY))}, {share}" for name, share in best]
    return f"{caption(result)}\n\n{table(['', *heads], body)}"


def readme_means(folder: Path) -> tuple[dict, dict[tuple[str, str, str], dict[str, float]]]:
    """The result of the README, and for each line its means over the seeds, by text."""
    result = [r for r in read_all("quality", folder).values() if README_RECIPE.items() <= r.items()][-1]
    means = {
        (line["method"], line["allocation"], "+".join(map(without_suffix, line["calibration"]))): {
            README_TEXTS[without_suffix(text["source"])]: statistics.fmean(line[PERPLEXITY + text["source"]])
            for text in result["texts"]
        }
        for line in result["lines"]
    }
    return result, means


def readme_dense(result: dict) -> dict[str, float]:
    """Perplexity of the dense model on each text."""
    sources = [text["source"] for text in result["texts"]]
    return {README_TEXTS[without_suffix(source)]: result["dense"][PERPLEXITY + source] for source in sources}


def readme_result(folder: Path = RESULTS) -> str:
    """The result that the README begins with, in four sentences."""
    result, means = readme_means(folder)
    dense = readme_dense(result)
    keys = [("wanda", "uniform", "c4"), ("sparsegpt", "uniform", "c4"), ("fwanda", "global", "c4")]
    prose, code = ([f"{means[key][text]:,.1f}" for key in keys] for text in ("prose", "code"))
    auto = means["fwanda", "auto", "c4+self"]
    return (
        "Half of the weights in the decoder blocks of SmolLM2-135M-Instruct are removed. The perplexity on prose "
        f"(lower is better) rises from\n{dense['prose']:,.1f} to {prose[0]} by Wanda, to {prose[1]} by SparseGPT, and "
        f"to {prose[2]} by F-Wanda with our default allocation `global`, all calibrated on C4, a collection\nof web "
        "text. With `--allocation auto`, calibrated on C4 and on text that the model writes itself, it rises only to "
        f"**{auto['prose']:,.1f}**. On code, in\nthe same order, it rises from {dense['code']:,.1f} to "
        f"{', '.join(code)} and **{auto['code']:,.1f}**. The weights were dequantised from a 4-bit\nfile; "
        "[Quality](#quality) has the details.\n"
    )


def readme(folder: Path = RESULTS) -> str:
    """A small table: perplexity of SmolLM2 by text, mean of the seeds."""
    result, means = readme_means(folder)
    dense = readme_dense(result)
    rows = [["dense", "", "", *(f"{value:,.1f}" for value in dense.values())]]
    best = {text: min(means[key][text] for key in README_ROWS) for text in dense}
    for key, names in README_ROWS.items():
        figures = [(means[key][text], best[text]) for text in dense]
        rows.append([*names, *(f"**{mean:,.1f}**" if mean == lowest else f"{mean:,.1f}" for mean, lowest in figures)])
    return f"{readme_caption(result)}\n\n{table(['method', 'allocation', 'calibrated on', *dense], rows)}"


def readme_caption(result: dict) -> str:
    seeds = max((line["seeds"] for line in result["lines"]), key=len)
    calibration, windows = result["calibration"], [str(text["windows"]) for text in result["texts"]]
    return (
        f"SmolLM2-135M-Instruct with 50 % of the weights removed, {result['dtype']}, {machine_line(result)}. "
        f"Perplexity on prose (WikiText-2), code (Python's standard library) and documentation (that of Python): "
        f"{', '.join(windows[:-1])} and {windows[-1]} windows of {result['texts'][0]['seqlen']:,} tokens; "
        f"calibrated on {calibration['nsamples']} x {calibration['seqlen']:,} tokens; means of {len(seeds)} seeds."
    )


def without_suffix(source: str) -> str:
    """A text without the suffix of a file: wikitext2.txt is wikitext2."""
    return source.removesuffix(".txt").removesuffix(".jsonl")


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
    dense = ", ".join(f"{without_suffix(name)} {shown([value], name)}" for name, value in result["dense"].items())
    return (
        f"Recipe `{result['recipe']}`: {result['model']}, {result['dtype']}, {machine_line(result)}; "
        f"{calibrated}{texts}, {told}. Dense: {dense}.{zero_shot(result)}"
    )


def windows_of(text: dict) -> str:
    bos = "with" if text["bos"] else "no"
    return f"{text['windows']} windows of {text['seqlen']} of {without_suffix(text['source'])} ({bos} BOS)"


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
