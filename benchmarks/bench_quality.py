"""Perplexity and accuracy of pruned models: the sweeps of a model, as one JSON file each that names card and versions.

    python benchmarks/bench_quality.py smollm2 sparsity --calibration c4.jsonl --eval wiki.txt --output DIR

Runs recipes of `fwanda sweep`. Each recipe has a folder in DIR, where an interrupted run goes on. `fwanda sweep` with
the same folder draws the pictures. --calibration and --eval may be repeated. Prints the paths of the JSON files;
render.py makes tables from them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import transformers
from lib.machine import machine
from lib.results import UNSHARED, slug, write

from fwanda_pruner import load_model
from fwanda_pruner.sweep.recipe import Recipe
from fwanda_pruner.sweep.run import TaskSettings, run
from fwanda_pruner.sweep.tables import PERPLEXITY, Line, columns, evaluation, lines_of

OVERRIDES = ("calibration", "eval", "dtype", "bos")
ACCURACIES = ("zero-shot", "mmlu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    option = parser.add_argument
    option("model", help="as for fwanda sweep")
    option("recipes", nargs="+", metavar="RECIPE", help="as for fwanda sweep")
    option("--output", type=Path, metavar="DIR", required=True, help="folder of the cells")
    option("--calibration", action="append", metavar="SOURCE[:SHARE]", help="text in place of the recipe's")
    option("--eval", action="append", metavar="TEXT", help="text in place of the recipe's")
    option("--eval-data", metavar="DIR", help="data sets of the tasks")
    option("--batch-size", type=int, metavar="N", help="requests of the tasks in a forward pass")
    option("--dtype", choices=("float32", "bfloat16", "float16"))
    option("--bos", choices=("auto", "none", "window"))
    option("--results", type=Path, default=UNSHARED, metavar="DIR", help="folder of the JSON files (%(default)s)")
    measure(parser.parse_args())


def measure(args: argparse.Namespace) -> None:
    """Run the recipes, and write and print one JSON file for each."""
    given = {name: getattr(args, name) for name in OVERRIDES if getattr(args, name) is not None}
    recipes = {name: Recipe.load(name, given) for name in args.recipes}
    first = next(iter(recipes.values())).cells[0]
    model, tokenizer = load_model(args.model, device=first.device, dtype=first.dtype)
    args.results.mkdir(parents=True, exist_ok=True)
    for name, recipe in recipes.items():
        folder = args.output / Path(name).stem
        tasks = TaskSettings(args.batch_size or TaskSettings.batch_size, data_dir=args.eval_data)
        cells = run(model, tokenizer, recipe, folder, source=args.model, tasks=tasks)
        result = result_of(Path(name).stem, lines_of(recipe.cells, cells), next(model.parameters()).device.type)
        result["dtype"] = str(model.dtype).removeprefix("torch.")
        path_slug = slug(Path(args.model).name, result["recipe"], result["card"])
        path = args.results / f"quality-{path_slug}-{result['date']}.json"
        write(path, result)
        print(path)


def result_of(recipe: str, sweep_lines: list[Line], device: str) -> dict:
    """A sweep as JSON values: what ran on what, and each line with the figures of every seed."""
    first = sweep_lines[0].cells[0]
    texts = protocols_of(first)
    if any(protocols_of(cell) != texts for line in sweep_lines for cell in line.cells):
        raise SystemExit("the cells were evaluated in different ways; a table needs one")
    sizes = {(line.config.nsamples, line.config.seqlen) for line in sweep_lines}
    dense = evaluation(first["dense"])
    return {
        "kind": "quality",
        "recipe": recipe,
        **machine(device),
        "transformers": transformers.__version__,
        "model": Path(first["model"]).name if Path(first["model"]).exists() else first["model"],
        "texts": texts,
        "calibration": dict(zip(("nsamples", "seqlen"), *sizes, strict=True)) if len(sizes) == 1 else None,
        "dense": {name: value for name, value in dense.items() if name in ACCURACIES or name.startswith(PERPLEXITY)},
        "lines": [line_of(line) for line in sweep_lines],
    }


def protocols_of(cell: dict) -> list[dict]:
    """{source, seqlen, windows, tokens_sha256, bos, tokenizer} of each evaluation text of a cell."""
    return [{key: value for key, value in text.items() if key != "perplexity"} for text in cell["perplexity"]]


def line_of(line: Line) -> dict:
    """A line of a sweep as JSON values; each figure is a list with a value for each seed."""
    keys = ("method", "allocation", "sparsity", "pattern", "calibration")
    settings = {key: getattr(line.config, key) for key in keys}
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


if __name__ == "__main__":
    main()
