"""Perplexity and accuracy of pruned models: the sweeps of a model, as one JSON file that names card and versions.

    python benchmarks/bench_quality.py smollm2 sparsity --calibration c4.jsonl --eval wiki.txt --output DIR
    python benchmarks/bench_quality.py --tables [--readme]

The first form runs recipes of `fwanda sweep`; each has a folder in DIR, and a run that was interrupted goes on there.
The pictures are drawn by `fwanda sweep` with the same folder. Prints the paths of the files, in benchmarks/results/.
The second form prints the tables of all such files there, and puts them between the markers of README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Iterable
from pathlib import Path

import transformers
from conftest import RESULTS, machine
from pages import put_between

from fwanda_pruner import PruneConfig
from fwanda_pruner.config import DTYPES
from fwanda_pruner.evaluate.tasks import ZEROSHOT
from fwanda_pruner.model.load import load_model
from fwanda_pruner.sweep import run as sweep
from fwanda_pruner.sweep.tables import Line, columns, evaluation, lines

README = RESULTS.parent.parent / "README.md"
BEGIN, END = "<!-- quality: begin -->", "<!-- quality: end -->"
OVERRIDES = ("calibration", "eval", "dtype", "bos")
MEASURED = ("perplexity", "zero-shot", "mmlu")
PROTOCOL = ("seqlen", "windows", "tokens_sha256", "bos", "tokenizer")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="as for fwanda sweep")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="as for fwanda sweep")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where the cells go")
    parser.add_argument("--calibration", help="text in place of the recipe's")
    parser.add_argument("--eval", help="text in place of the recipe's")
    parser.add_argument("--eval-data", metavar="DIR", help="data sets of the tasks")
    parser.add_argument("--batch-size", type=int, metavar="N", help="requests of the tasks in a forward pass")
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--bos", choices=("auto", "none", "window"))
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the JSON files go")
    parser.add_argument("--tables", action="store_true", help="print the tables of the JSON files and exit")
    parser.add_argument("--readme", action="store_true", help="with --tables: put them into README.md")
    args = parser.parse_args(arguments)
    if args.tables:
        tables(sorted(args.results.glob("quality-*.json")), readme=args.readme)
    elif not (args.model and args.recipes and args.output):
        parser.error("give a model, recipes and --output, or --tables")
    else:
        run(args)


def run(args: argparse.Namespace) -> None:
    given = {name: getattr(args, name) for name in OVERRIDES if getattr(args, name) is not None}
    recipes = {name: sweep.Recipe.load(name, given) for name in args.recipes}
    first = next(iter(recipes.values())).cells[0]
    model, tokenizer = load_model(args.model, device=first.device, dtype=first.dtype)
    args.results.mkdir(parents=True, exist_ok=True)
    for name, recipe in recipes.items():
        folder = args.output / Path(name).stem
        tasks = {"eval_data": args.eval_data, "batch_size": args.batch_size}
        cells = sweep.run(model, tokenizer, recipe, folder, source=args.model, **tasks)
        result = result_of(Path(name).stem, lines(recipe.cells, cells), next(model.parameters()).device.type)
        result["dtype"] = str(model.dtype).removeprefix("torch.")
        slug = re.sub(r"[^a-z0-9.]+", "-", f"{Path(args.model).name} {result['recipe']} {result['card']}".lower())
        path = args.results / f"quality-{slug}-{result['date']}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(path)


def result_of(recipe: str, found: list[Line], device: str) -> dict:
    """A sweep as JSON values: what ran on what, and each line with the figures of every seed."""
    first = found[0].cells[0]
    if len({tuple(cell.get(key) for key in PROTOCOL) for line in found for cell in line.cells}) > 1:
        raise SystemExit("the cells were evaluated in different ways; a table needs one")
    facts = {"kind": "quality", "recipe": recipe, **machine(device), "transformers": transformers.__version__}
    facts["model"] = first["model"]
    facts["protocol"] = {key: first.get(key) for key in PROTOCOL}
    sizes = {(line.config.nsamples, line.config.seqlen) for line in found}
    facts["calibration"] = dict(zip(("nsamples", "seqlen"), *sizes, strict=True)) if len(sizes) == 1 else None
    dense = evaluation(first["dense"])
    facts["dense"] = {name: dense[name] for name in MEASURED if name in dense}
    return facts | {"lines": [line_of(line) for line in found]}


def line_of(line: Line) -> dict:
    """A line of a sweep as JSON values; figures have a value for each seed."""
    config: PruneConfig = line.config
    settings = {key: getattr(config, key) for key in ("method", "allocation", "sparsity", "pattern")}
    chosen = [cell["report"]["config"].get("chosen") for cell in line.cells]
    tasks = [(cell.get("lm_eval") or {}).get("tasks") for cell in line.cells]
    return {
        "label": line.label,
        **settings,
        "seeds": [cell["report"]["config"]["seed"] for cell in line.cells],
        **{name: line.values(name) for name in columns([line])},
        "chosen": chosen if any(chosen) else None,
        "tasks": tasks if any(tasks) else None,
    }


def tables(paths: list[Path], *, readme: bool) -> None:
    results = sorted((json.loads(path.read_text()) for path in paths), key=lambda result: -len(result["lines"]))
    text = "\n".join(map(table, results))
    print(text)
    if readme:
        put_between(README, BEGIN, text, END)


def table(result: dict) -> str:
    """Markdown: a row for each setting, a column for each sparsity or pattern, over the dense model's."""
    shares = list(dict.fromkeys(column_of(line) for line in result["lines"]))
    rows: dict[str, dict[str, dict]] = {}
    for line in result["lines"]:
        rows.setdefault(line["label"].replace(f" {column_of(line)}", ""), {})[column_of(line)] = line
    names = [name for name in MEASURED if any(name in line for line in result["lines"])]
    head = [f"{name}, {column}" for name in names for column in shares]
    best = {(name, column): best_of(rows.values(), name, column) for name in names for column in shares}
    body = [
        [label, *(shown(by.get(column, {}).get(name), name, best[name, column]) for name, column in best)]
        for label, by in rows.items()
    ]
    return "\n".join([
        facts_of(result),
        "",
        *("| " + " | ".join(row) + " |" for row in [["", *head], ["---"] * (1 + len(head)), *body]),
        "",
    ])  # fmt: skip


def column_of(line: dict) -> str:
    return line["pattern"] or line["sparsity"]


def facts_of(result: dict) -> str:
    """What ran on what, in one line."""
    protocol, text = result["protocol"], result["calibration"]
    driver = f", driver {result['driver']}" if result["driver"] else ""
    calibrated = f"calibrated on {text['nsamples']} x {text['seqlen']} tokens, " if text else ""
    seeds = max((line["seeds"] for line in result["lines"]), key=len)
    bos = "with" if protocol["bos"] else "no"
    told = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))} (mean ± standard deviation)"
    dense = ", ".join(f"{name} {shown([value], name)}" for name, value in result["dense"].items())
    return (
        f"{result['model']}, {result['dtype']}, {result['card']}{driver}, torch {result['torch']}, {result['date']}; "
        f"{calibrated}{protocol['windows']} windows of {protocol['seqlen']}, {bos} BOS, "
        f"{told}. Dense: {dense}.{zero_shot(result)}"
    )


def zero_shot(result: dict) -> str:
    """What the zero-shot accuracies were measured on, and how sure one of them is."""
    errors = [error for line in result["lines"] for error in line.get("zero-shot stderr", ())]
    if not errors:
        return ""
    examples = sum(result["lines"][0]["tasks"][0][name]["samples"] for name in ZEROSHOT)
    return f" Zero-shot: {examples:,} examples, one accuracy has a standard error of {statistics.fmean(errors):.3f}."


def best_of(rows: Iterable[dict[str, dict]], name: str, column: str) -> float:
    """The best mean of a column: the lowest perplexity, the highest accuracy."""
    means = [statistics.fmean(by[column][name]) for by in rows if name in by.get(column, {})]
    return min(means) if name == "perplexity" else max(means)


def shown(values: list[float] | None, name: str, best: float | None = None) -> str:
    if not values:
        return "-"
    digits, mean = 1 if name == "perplexity" else 3, statistics.fmean(values)
    text = f"{mean:.{digits}f}"
    if len(values) > 1 and all(map(math.isfinite, values)):
        text += f" ± {statistics.stdev(values):.{digits}f}"
    return f"**{text}**" if mean == best else text


if __name__ == "__main__":
    main()
