"""benchmarks/bench_quality.py: sweeps as JSON results, and the tables made from them."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import yaml

from fwanda_pruner.evaluate.lm_eval_tasks import ZEROSHOT

FOLDER = Path(__file__).parent.parent
sys.path.append(str(FOLDER / "benchmarks"))
import render  # noqa: E402


def bench_quality(*arguments):
    return benchmark("bench_quality.py", *arguments)


def quality_table(results):
    done = benchmark("render.py", "--print", "quality", "--results", str(results))
    assert done.returncode == 0, done.stderr
    return done.stdout


def benchmark(script, *arguments):
    paths = [str(FOLDER), str(FOLDER / "python")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(FOLDER / "benchmarks" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


@pytest.fixture
def paths(tmp_path):
    """The arguments of a small run on a model folder."""
    tiny.llama().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(tiny.text(2000))
    (tmp_path / "other.txt").write_text(tiny.text(300, seed=1))
    base = {"calibration": "c4", "eval": "wikitext2", "nsamples": 16, "seqlen": 24, "eval_windows": 4}
    cells = [
        {"method": ["wanda", "magnitude"], "sparsity": [0.5, 0.7]},
        {"method": "sparsegpt", "sparsity": 0.5},
        {"method": "wanda", "pattern": "2:4"},
    ]
    (tmp_path / "few.yaml").write_text(yaml.safe_dump({"base": base, "cells": cells, "seeds": [0, 1]}))
    text, other = str(tmp_path / "text.txt"), str(tmp_path / "other.txt")
    return [
        str(tmp_path / "model"), str(tmp_path / "few.yaml"), "--calibration", text, "--eval", text, "--eval", other,
        "--bos", "none", "--output", str(tmp_path / "cells"), "--results", str(tmp_path / "results"),
    ]  # fmt: skip


def test_a_sweep_becomes_one_file_and_a_table(paths):
    done = bench_quality(*paths)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.splitlines()[-1])
    assert path.name.startswith("quality-model-few-") and [path] == list(path.parent.iterdir())
    result = json.loads(path.read_text())
    for key in ("card", "driver", "torch", "transformers", "triton", "python", "date"):
        assert key in result
    assert result["dtype"] == "float32" and [text["bos"] for text in result["texts"]] == [False, False]
    first, second = (f"perplexity {text['source']}" for text in result["texts"])
    assert (first.endswith("text.txt"), second.endswith("other.txt")) == (True, True)
    assert result["dense"].keys() == {first, second}
    lines = {line["label"]: line for line in result["lines"]}
    assert len(lines) == 6
    assert all(line["seeds"] == ([0] if line["method"] == "magnitude" else [0, 1]) for line in lines.values())
    cells = [json.loads(cell.read_text()) for cell in (path.parent.parent / "cells" / "few" / "cells").glob("*.json")]
    found = {
        (c["report"]["config"]["method"], c["report"]["config"]["seed"]): [t["perplexity"] for t in c["perplexity"]]
        for c in cells
        if "report" in c
    }
    for place, name in enumerate((first, second)):
        assert lines["sparsegpt uniform 0.5"][name] == [found["sparsegpt", seed][place] for seed in (0, 1)]

    text = quality_table(path.parent)
    shown = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines() if "|" in row]
    texts = [name.removeprefix("perplexity ").removesuffix(".txt") for name in (first, second)]
    assert shown[0] == ["", *(f"{text}, {share}" for text in texts for share in ("0.5", "0.7", "2:4"))]
    assert all(line["calibration"] == lines["wanda uniform 0.5"]["calibration"] for line in lines.values())
    rows = {row[0]: row[1:] for row in shown[2:]}
    assert rows.keys() == {"wanda uniform", "magnitude layer", "sparsegpt uniform"}
    assert rows["sparsegpt uniform"][1:3] == ["-", "-"] and rows["magnitude layer"][2] == "-"
    column = {label: statistics.fmean(lines[f"{label} 0.7"][first]) for label in ("wanda uniform", "magnitude layer")}
    best = min(column, key=column.get)
    assert [label for label in column if rows[label][1].startswith("**")] == [best]
    assert rows[best][1].strip("*").split(" ± ")[0] == f"{column[best]:.1f}"


def test_settings_that_differ_otherwise_and_accuracies_have_rows_of_their_own(tmp_path):
    accuracy = {name: {"acc": 0.5, "samples": 10} for name in ZEROSHOT} | {"piqa": {"acc": 0.5, "samples": 99}}
    line = {"method": "fwanda", "allocation": "row", "sparsity": "0.5", "pattern": None, "seeds": [0]}
    line |= {"zero-shot stderr": [0.01], "tasks": [accuracy]}
    result = {
        "model": "m", "recipe": "r", "dtype": "float32", "card": "c", "driver": None, "torch": "2", "date": "today",
        "texts": [{"source": "code", "windows": 4, "seqlen": 24, "bos": True}], "calibration": None,
        "dense": {"perplexity code": 9.0, "zero-shot": 0.6},
        "lines": [
            line | {"label": "fwanda row 0.5 fisher=mean", "perplexity code": [12.0], "zero-shot": [0.375]},
            line | {"label": "fwanda row 0.5 fisher=true", "perplexity code": [13.0], "zero-shot": [0.5]},
        ],
    }  # fmt: skip
    (tmp_path / "quality-m.json").write_text(json.dumps(result))
    assert quality_table(tmp_path).splitlines()[:6] == [
        "Recipe `r`: m, float32, c, torch 2, today; 4 windows of 24 of code (with BOS), seed 0. Dense: perplexity code"
        " 9.0, zero-shot 0.600."
        " Zero-shot: 70 examples, one accuracy has a standard error of 0.010.",
        "",
        "|  | code, 0.5 | zero-shot, 0.5 |",
        "| --- | --- | --- |",
        "| fwanda row fisher=mean | **12.0** | 0.375 |",
        "| fwanda row fisher=true | 13.0 | **0.500** |",
    ]


def test_an_incomplete_command_is_refused():
    done = bench_quality("model")
    assert done.returncode == 2 and "the following arguments are required: RECIPE, --output" in done.stderr


def test_the_table_of_the_readme_has_means_and_the_best_in_bold(tmp_path):
    rules = [
        ("wanda", "uniform", ["c4"]), ("sparsegpt", "uniform", ["c4"]), ("fwanda", "row", ["c4"]),
        ("fwanda", "global", ["c4"]), ("fwanda", "auto", ["c4"]), ("fwanda", "auto", ["c4.jsonl", "self"]),
        ("fwanda", "auto", ["c4", "code"]),
    ]  # fmt: skip
    texts = [{"source": "wikitext2.txt", "windows": 4, "seqlen": 2048, "bos": False}]
    texts += [texts[0] | {"source": "code"}, texts[0] | {"source": "sample", "windows": 3}]
    lines = []
    for place, (method, allocation, calibration) in enumerate(rules):
        line = {"label": "x", "method": method, "allocation": allocation, "sparsity": "0.5", "pattern": None}
        line |= {
            "calibration": calibration,
            "seeds": [0, 1],
            "perplexity wikitext2.txt": [900.0 - place, 910.0 - place],
        }
        lines.append(line | {"perplexity code": [20.0 + place] * 2, "perplexity sample": [30.0 - place] * 2})
    result = {
        "model": "smollm2", "recipe": "domains", "dtype": "bfloat16", "card": "c", "driver": "580", "torch": "2",
        "date": "2026-11-28", "texts": texts, "calibration": {"nsamples": 128, "seqlen": 2048}, "lines": lines,
        "dense": {"perplexity wikitext2.txt": 21.75, "perplexity code": 6.5, "perplexity sample": 10},
    }  # fmt: skip
    (tmp_path / "quality-a.json").write_text(json.dumps(result))
    (tmp_path / "quality-b.json").write_text(json.dumps(result | {"recipe": "two-four", "lines": []}))
    text = benchmark("render.py", "--print", "readme-quality", "--results", str(tmp_path)).stdout.splitlines()
    assert "driver 580, torch 2, 2026-11-28" in text[0] and text[0].endswith("means of 2 seeds.")
    assert "4, 4 and 3 windows of 2,048 tokens" in text[0]
    assert text[2] == "| method | allocation | calibrated on | prose | code | documentation |"
    assert text[4:6] == ["| dense |  |  | 21.8 | 6.5 | 10.0 |", "| Wanda | uniform | C4 | 905.0 | **20.0** | 30.0 |"]
    assert text[-2:] == [
        "| F-Wanda | auto | C4 and own text | 900.0 | 25.0 | 25.0 |",
        "| F-Wanda | auto | C4 and code | **899.0** | 26.0 | **24.0** |",
    ]
    told = " ".join(benchmark("render.py", "--print", "readme-result", "--results", str(tmp_path)).stdout.split())
    assert "rises from 21.8 to 905.0 by Wanda, to 904.0 by SparseGPT, and to 902.0 by F-Wanda with our default" in told
    assert "that the model writes itself, it rises only to **900.0**" in told
    assert "On code, in the same order, it rises from 6.5 to 20.0, 21.0, 23.0 and **25.0**" in told


@pytest.mark.parametrize(
    "text",
    ["[]", "3", "{", "{}", '{"date": 3}', '{"date": "today", "card": "c"}', "[" * 100_000, "\ud800"],
    ids=["list", "number", "broken", "empty", "date", "few keys", "deep", "bytes"],
)
@pytest.mark.parametrize("name", ["quality", "speed"])
def test_a_foreign_file_among_the_results_is_one_line(tmp_path, text, name, capsys):
    path = tmp_path / ("quality-a.json" if name == "quality" else "ops-a.json")
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(SystemExit) as error:
        render.main(["--print", name, "--results", str(tmp_path)])
    assert capsys.readouterr() == ("", "")
    assert "\n" not in error.value.code and f"{path}: not a result of these benchmarks" in error.value.code
