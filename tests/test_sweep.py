"""Sweeps: recipes, cells that equal single runs, going on after an interruption, tables and pictures."""

import csv
import json
import math
from pathlib import Path

import pytest
import tiny
import torch
import yaml
from interrupt import interrupted_while_reading

import fwanda_pruner
from fwanda_pruner import cli
from fwanda_pruner.errors import UserError
from fwanda_pruner.run import stages
from fwanda_pruner.sweep import run as sweep
from fwanda_pruner.sweep.figures import PICTURES, draw
from fwanda_pruner.sweep.recipe import RECIPES, Recipe, describe, recipe_names
from fwanda_pruner.sweep.tables import lines_of, markdown, write_tables
from fwanda_pruner.text.sources import local_sha256

CELLS = [
    {"method": ["wanda", "magnitude"], "sparsity": [0.5, 0.6]},
    {"method": "fwanda", "allocation": ["row", "global"], "sparsity": 0.5},
    {"method": "fsparsegpt", "allocation": "global", "sparsity": 0.5},
    {"method": "wanda", "pattern": "2:4"},
]


@pytest.fixture
def recipe(tmp_path):
    """Writes a recipe; returns its path."""
    text = tmp_path / "text.txt"
    text.write_text(tiny.text(2000))

    def write(cells=CELLS, **others):
        base = {"calibration": str(text), "eval": str(text), "nsamples": 16, "seqlen": 24, "eval_windows": 6}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({"base": base, "cells": cells, **others}))
        return path

    return write


def run(recipe: Recipe, output, model=None) -> list[dict]:
    return sweep.run(model or tiny.llama(), tiny.tokenizer(), recipe, output, source="tiny", progress=False)


def write(found: Recipe, cells: list[dict], output) -> list:
    """Tables and pictures, as the command writes them."""
    lines = lines_of(found.cells, cells)
    return write_tables(lines, output) + draw(lines, output)


def measured(cell: dict) -> list[float]:
    """The perplexity on each text."""
    return [text["perplexity"] for text in cell["perplexity"]]


def disagreement(cell: dict) -> dict[str, float | None]:
    return {r["name"]: r["wanda_disagreement"] for r in cell["report"]["matrices"] if r["skipped"] is None}


def test_lists_are_crossed_with_each_other_and_the_seeds(recipe):
    found = Recipe.load(recipe(seeds=[0, 3])).cells
    assert len(found) == 2 * (2 + 2 + 1 + 1) + 2 and {config.seed for config in found} == {0, 3}
    assert [(c.sparsity, c.seed) for c in found if c.method == "magnitude"] == [("0.5", 0), ("0.6", 0)]  # reads no text


def test_overrides_take_the_place_of_settings_and_merge_what_they_make_equal(recipe):
    path = recipe([{"method": "wanda", "nsamples": [32, 64]}])
    assert len(Recipe.load(path).cells) == 2
    assert [config.nsamples for config in Recipe.load(path, {"nsamples": 16}).cells] == [16]


@pytest.mark.parametrize("share", [True, False])
def test_each_cell_is_the_result_of_a_run_by_itself(recipe, tmp_path, share):
    found = Recipe.load(recipe(share_statistics=share))
    cells = run(found, tmp_path / "out")
    for config, cell in zip(found.cells, cells, strict=True):
        alone = fwanda_pruner.prune(tiny.llama(), tiny.tokenizer(), config=config, progress=False)
        assert measured(cell) == [text["pruned"] for text in alone.perplexity], describe(config, found.cells)
        assert measured(cell["dense"]) == [text["dense"] for text in alone.perplexity]
        assert cell["report"]["matrices"] == json.loads(json.dumps(alone.to_dict()))["matrices"]
        assert cell["report"]["row_histogram"] == alone.row_histogram
        assert sum(alone.row_histogram) == sum(row.shape[0] for row in alone.matrices)


def test_the_model_is_dense_again_afterwards(recipe, tmp_path):
    model, dense = tiny.llama(), tiny.llama().state_dict()
    run(Recipe.load(recipe()), tmp_path / "out", model)
    assert all(torch.equal(weight, dense[name]) for name, weight in model.state_dict().items())


def test_disagreement_is_none_for_wanda_itself_and_some_for_others(recipe, tmp_path):
    found = Recipe.load(recipe())
    for config, cell in zip(found.cells, run(found, tmp_path / "out"), strict=True):
        if config.nm or config.method == "magnitude":
            assert set(disagreement(cell).values()) == {None}
        else:
            shares = disagreement(cell).values()
            assert max(shares) == 0 if config.method == "wanda" else max(shares) > 0.01


def test_statistics_are_measured_once_for_all_cells_of_a_text(recipe, tmp_path, monkeypatch):
    collected, plain = [], sweep.collect

    def count(*args, **kwargs):
        collected.append(kwargs["config"].seed)
        return plain(*args, **kwargs)

    monkeypatch.setattr(sweep, "collect", count)
    run(Recipe.load(recipe(seeds=[0, 1])), tmp_path / "out")
    assert collected == [0, 1]


def test_texts_with_and_without_bos_are_measured_apart_and_excluded_matrices_are_not(recipe, tmp_path, monkeypatch):
    """Statistics hold every matrix, whatever a cell prunes."""
    measured = []
    collect = sweep.collect
    monkeypatch.setattr(sweep, "collect", lambda *a, **k: measured.append(k["config"].bos) or collect(*a, **k))
    cells = [{"method": "wanda", "bos": ["none", "window"], "exclude": [["*mlp*"], []]}]
    found = run(Recipe.load(recipe(cells)), tmp_path / "out")
    assert sorted(measured) == ["none", "window"]
    for cell in found:
        pruned = {row["name"] for row in cell["report"]["matrices"] if row["skipped"] is None}
        assert disagreement(cell) == dict.fromkeys(pruned, 0.0)
        rows = sum(r["shape"][0] for r in cell["report"]["matrices"] if r["name"] in pruned)
        assert sum(cell["report"]["row_histogram"]) == rows
        assert any("mlp" in name for name in pruned) == (not cell["report"]["config"]["exclude"])


@pytest.mark.fault("damage")
def test_a_cell_that_damages_the_model_says_so_and_names_a_lower_sparsity_that_does_not(recipe, tmp_path):
    path = recipe([{"method": ["wanda", "magnitude"], "sparsity": [0.9, 0.1, 0.05]}])
    ids = torch.tensor(tiny.tokenizer()((tmp_path / "text.txt").read_text())["input_ids"])
    windows = ids[: 16 * 24].view(16, 24)
    with pytest.warns(UserWarning, match="wanda uniform 0.9: pruning has damaged the model"):
        cells = run(Recipe.load(path), tmp_path / "out", tiny.trained(tiny.llama(), windows))
    for cell in cells:
        said = [line for line in cell["report"]["warnings"] if line.endswith("--sparsity 0.1 did no such damage")]
        assert len(said) == (cell["report"]["config"]["sparsity"] == "0.9")


def test_energy_is_drawn_only_where_each_cell_has_all_of_it(recipe, tmp_path):
    for shared in (True, False):
        found = Recipe.load(recipe([{"method": "wanda"}], share_statistics=shared))
        cells = run(found, tmp_path / str(shared))
        cells[0]["report"]["energy"] = 1000.0
        written = write(found, cells, tmp_path / str(shared))
        assert ("perplexity-by-energy.png" in {path.name for path in written}) != shared


def test_what_is_done_with_the_same_masks_shares_their_choice(recipe, tmp_path, monkeypatch):
    cells = [{"method": ["fwanda", "fsparsegpt"], "allocation": ["response", "auto"], "bos": "none"}]
    found, searched, choose = Recipe.load(recipe(cells, seeds=[0, 1])), [], stages.choose

    def counted(engine, tokens, judge, statistics, config, **options):
        searched.append(config.method)
        return choose(engine, tokens, judge, statistics, config, **options)

    with monkeypatch.context() as patch:
        patch.setattr(stages, "choose", counted)
        cells = run(found, tmp_path / "out")
    assert searched == ["fwanda"] * 4  # the cells of this method come first
    for config, cell in zip(found.cells, cells, strict=True):
        alone = fwanda_pruner.prune(tiny.llama(), tiny.tokenizer(), config=config, progress=False)
        assert measured(cell) == [text["pruned"] for text in alone.perplexity]
        assert cell["report"]["config"]["chosen"] == alone.config["chosen"]


def test_cells_share_the_text_that_the_model_writes(recipe, tmp_path, monkeypatch):
    """Each kind of cell takes from it what it reads, and measures the same as alone."""
    drawn, draw_tokens = [], stages.sample_tokens

    def counted(model, **settings):
        drawn.append(settings["seed"])
        return draw_tokens(model, **settings)

    cells = [
        {"method": ["fwanda", "wanda", "sparsegpt"], "calibration": "self", "bos": "none", "nsamples": 20},
        {"method": "fwanda", "allocation": "response", "calibration": "self", "bos": "none", "nsamples": 20},
        {"method": "magnitude", "guard": "self", "bos": "none"},
    ]
    found = Recipe.load(recipe(cells, seeds=[0, 1]))
    with monkeypatch.context() as patch:
        patch.setattr(stages, "sample_tokens", counted)
        cells = run(found, tmp_path / "out")
    assert len(drawn) == len(set(drawn)) == 3 and {0, 1} <= set(drawn)  # the guard alone reads another text
    for config, cell in zip(found.cells, cells, strict=True):
        alone = fwanda_pruner.prune(tiny.llama(), tiny.tokenizer(), config=config, progress=False)
        assert measured(cell) == [text["pruned"] for text in alone.perplexity]
        assert cell["report"]["tokens_sha256"] == alone.tokens_sha256
        compared = cell["report"]["domains"]  # with given statistics, Wanda is compared on the guards alone
        assert compared and all(domain in alone.domains for domain in compared)


def test_finished_cells_do_not_run_again(recipe, tmp_path):
    later = tmp_path / "tomorrow.txt"  # its cell comes after those of text.txt
    found = Recipe.load(
        recipe([{"method": "wanda", "sparsity": [0.5, 0.6]}, {"method": "wanda", "calibration": str(later)}])
    )
    with pytest.raises(UserError, match="tomorrow.txt"):
        run(found, tmp_path / "out")
    finished = {path: path.stat() for path in (tmp_path / "out" / "cells").iterdir()}
    assert len(finished) == 3  # two cells and the dense model
    later.write_text(tiny.text(2000, seed=4))
    again = run(found, tmp_path / "out")
    assert len(list((tmp_path / "out" / "cells").iterdir())) == 4
    for path, before in finished.items():
        assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    whole = run(found, tmp_path / "other")
    assert list(map(measured, again)) == list(map(measured, whole))


def test_tables_have_a_row_for_each_cell_and_line(recipe, tmp_path):
    found = Recipe.load(recipe(seeds=[0, 1]))
    cells = run(found, tmp_path / "out")
    written = write(found, cells, tmp_path / "out")
    assert {path.name for path in written} == {
        "results.csv",
        "results.md",
        "perplexity-by-sparsity.png",
        "sparsity-by-block.png",
        "disagreement-by-block.png",
        "kept-in-rows.png",
    }
    assert all(path.stat().st_size for path in written)
    rows = list(csv.DictReader((tmp_path / "out" / "results.csv").open()))
    assert [float(row[f"perplexity {tmp_path / 'text.txt'}"]) for row in rows] == [
        measured(cell)[0] for line in lines_of(found.cells, cells) for cell in line.cells
    ]
    table = (tmp_path / "out" / "results.md").read_text()
    assert table.count("| 0, 1 |") == 6 and table.count("| 0 |") == 2  # seeds
    assert "| wanda uniform 2:4 |" in table and " ± " in table


def test_tables_have_the_accuracies_and_their_errors(recipe, tmp_path, monkeypatch):
    accuracy = {"acc": 0.375, "acc_stderr": 0.0086}
    parts = {"rte": accuracy, "gsm8k": {"version": 3, "exact,strict": 0.5, "exact_stderr,strict": 0.25}}
    found = {"limit": 1, "tasks": parts, "zeroshot": accuracy, "mmlu": {**accuracy, "tasks": {}}}
    monkeypatch.setattr(sweep, "evaluate_tasks", lambda *_, **__: found)
    loaded = Recipe.load(recipe([{"method": "wanda"}], tasks=["zeroshot", "mmlu", "gsm8k"]))
    lines = lines_of(loaded.cells, run(loaded, tmp_path / "out"))
    table = markdown(lines)
    head, _, row = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    shown = dict(zip(head, row, strict=True))
    for name in ("zero-shot", "mmlu"):
        assert (shown[name], shown[f"{name} stderr"]) == ("0.3750", "0.0086")
    assert (shown["gsm8k exact,strict"], shown["gsm8k exact,strict stderr"]) == ("0.5000", "0.2500")
    assert "rte" not in shown
    assert "; the first 1 examples of each task. Dense: perplexity " in table and "zero-shot 0.3750, " in table
    write_tables(lines, tmp_path / "out")
    assert next(csv.DictReader((tmp_path / "out" / "results.csv").open()))["rte"] == "0.375"


def test_a_task_that_is_named_like_a_figure_has_a_column_of_its_own(recipe, tmp_path, monkeypatch):
    names = ("seconds", "kJ", "perplexity x", "method", "zero-shot", "label", "piqa", "piqa stderr")
    parts = {name: {"acc": 0.125, "acc_stderr": 0.5} for name in names}
    found = {"limit": None, "tasks": parts, "zeroshot": {"acc": 0.75, "acc_stderr": 0.25}, "mmlu": {}}
    monkeypatch.setattr(sweep, "evaluate_tasks", lambda *_, **__: found)
    loaded = Recipe.load(recipe([{"method": "wanda"}], tasks=["zeroshot"]))
    (line,) = lines_of(loaded.cells, run(loaded, tmp_path / "out"))
    assert line.mean("seconds") != 0.125 and line.mean("zero-shot") == 0.75 and line.values("kJ") == []
    for name in names:
        column = name if name == "piqa" else f"task {name}"
        assert (line.mean(column), line.mean(f"{column} stderr")) == (0.125, 0.5)
    write_tables([line], tmp_path / "out")
    head, *_ = csv.reader((tmp_path / "out" / "results.csv").open())
    assert len(head) == len(set(head))


def test_perplexities_of_different_protocols_have_tables_of_their_own(recipe, tmp_path):
    found = Recipe.load(recipe([{"method": "magnitude", "eval_seqlen": [12, 24]}]))
    table = markdown(lines_of(found.cells, run(found, tmp_path / "out")))
    assert table.count("Model tiny;") == 2 and " windows of 12," in table and " windows of 24," in table


def test_each_text_has_columns_of_its_own_and_rows_are_told_apart_by_calibration(recipe, tmp_path):
    (tmp_path / "other.txt").write_text(tiny.text(400, seed=3))
    text, other = str(tmp_path / "text.txt"), str(tmp_path / "other.txt")
    found = Recipe.load(recipe([{"method": "wanda", "calibration": [text, other], "eval": [[text, other]]}]))
    cells = run(found, tmp_path / "out")
    written = write(found, cells, tmp_path / "out")
    table = (tmp_path / "out" / "results.md").read_text()
    head, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    assert head[2:6] == [f"{name} {source}" for name in ("perplexity", "of dense") for source in (text, other)]
    assert [row[0] for row in rows] == [f"wanda uniform 0.5 calibration={source}" for source in (text, other)]
    for row, cell in zip(rows, cells, strict=True):
        assert row[2:4] == [f"{value:.2f}" for value in measured(cell)] and row[2] != row[3]
        ratios = [value / dense for value, dense in zip(measured(cell), measured(cell["dense"]), strict=True)]
        assert row[4:6] == [f"{ratio:.3f}" for ratio in ratios]
    assert "perplexity-by-sparsity.png" in {path.name for path in written}


def test_settings_that_hold_lists_are_shown_as_a_sum(recipe):
    configs = Recipe.load(recipe([{"method": "wanda", "eval": [["code", "sample"], "code"]}])).cells
    assert [config.eval for config in configs] == [("code", "sample"), ("code",)]
    assert [describe(config, configs) for config in configs] == [
        "wanda uniform 0.5 eval=code+sample", "wanda uniform 0.5 eval=code",
    ]  # fmt: skip


def test_domains_measures_every_method_and_calibration_on_every_text():
    found = Recipe.load("domains").cells
    assert len(found) == 6 * 3 * 3 and len({config.calibration for config in found}) == 3
    assert all(config.eval == ("wikitext2", "code", "sample") and config.sparsity == "0.5" for config in found)
    assert {(config.method, config.allocation) for config in found} == {
        ("wanda", "uniform"), ("sparsegpt", "uniform"), ("fwanda", "row"), ("fwanda", "global"), ("fwanda", "auto"),
        ("fsparsegpt", "auto"),
    }  # fmt: skip


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_that_come_along_can_be_read(name):
    found = Recipe.load(name)
    assert len(found.cells) > 1 and all(config.eval[0] == "wikitext2" for config in found.cells)


@pytest.mark.parametrize("name", ["main", "efficiency", "calibration-size", "fisher", "sparsity"])
def test_recipes_that_reproduce_the_paper_name_its_rule(name):
    cells = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())["cells"]
    allocations = [cell.get("allocation") for cell in cells if "fwanda" in cell["method"]]
    assert allocations and all("row" in (allocation or []) for allocation in allocations)


BROKEN = {
    "cells: 3": "cells must be a list, got int",
    "cells: []": "cells a list of mappings, at least one",
    "cells: [{method: wonda}]": "--method must be one of",
    "cells: [{methd: wanda}]": "unknown setting 'methd'",
    "cels: [{method: wanda}]": "unknown key 'cels'; the keys are base, cells",
    "3": "must be a mapping with the keys base, cells, seeds, tasks, share_statistics, got int",
    "cells: [{method: wanda}]\nshare_statistics: maybe": "share_statistics must be true or false, got str",
    'cells: [{method: wanda, eval: "a\\0b.txt"}]': "--eval holds an unprintable character, got",
    "cells: [{method: wanda}]\nseeds: []": "a list of seeds or of values is empty",
    "cells: [{method: []}]": "a list of seeds or of values is empty",
    "cells: [{method: wanda}]\ntasks: [1]": "tasks must be a list of names",
    "cells: [{method: wanda, dtype: [float32, bfloat16]}]": "one model serves all cells; give device and dtype in base",
    "[": "cannot read the recipe",
    f"cells: [{{method: [{'wanda, ' * 100}], seqlen: [{'2, ' * 101}]}}]": "its lists make 10100 cells, at most 10000",
    f"cells: [{{{', '.join(f'k{n}: [0, 0, 0, 0]' for n in range(300))}}}]": r"make 414951\d+\.\.\. cells, at most",
    "base: 3\ncells: [{method: wanda}]": "base must be a mapping",
    "base: {seed: 7}\ncells: [{method: wanda}]": "give a list of seeds beside cells, and no seed in base or in a cell",
    "cells: [{method: wanda, seed: [1, 2]}]": "give a list of seeds beside cells, and no seed in base or in a cell",
}


@pytest.mark.fault("endless work")
@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_recipe_is_one_line(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=BROKEN[text]) as error:
        Recipe.load(path)
    assert "\n" not in str(error.value)


def test_a_recipe_that_does_not_exist_names_those_that_do():
    with pytest.raises(UserError, match="recipes of the package: .*main"):
        Recipe.load("nothing")
    with pytest.raises(UserError, match=r"^cannot read the recipe sparsty: No such .*; did you mean sparsity\?$"):
        Recipe.load("sparsty")


def test_the_command_writes_the_tables(recipe, tmp_path, capsys):
    tiny.llama().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    path = str(recipe([{"method": ["wanda", "magnitude"]}]))
    argv = ["sweep", str(tmp_path / "model"), path, "--output", str(tmp_path / "out"), "--nsamples", "17"]
    assert cli.main(argv) == 0
    assert "| wanda uniform 0.5 | 0 |" in capsys.readouterr().out
    rows = list(csv.DictReader((tmp_path / "out" / "results.csv").open()))
    assert [row["nsamples"] for row in rows] == ["17", "17"]


@pytest.mark.fault("file of the user")
@pytest.mark.parametrize("name", ["results.csv", "results.md", *PICTURES])
def test_a_file_of_the_user_is_never_replaced(recipe, tmp_path, capsys, name):
    tiny.llama().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    mine = tmp_path / "mine"
    (mine / "cells").mkdir(parents=True)
    (mine / "cells" / "notes.json").write_text("mine")
    (mine / name).write_text("mine")
    path = recipe([{"method": "magnitude"}])
    argv = ["sweep", str(tmp_path / "model"), str(path), "--output", str(mine)]
    assert cli.main(argv) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"{mine} holds {name}, which was not written by fwanda sweep; choose another folder" in line
    assert (mine / name).read_text() == "mine" and sorted(path.name for path in mine.iterdir()) == ["cells", name]
    argv[-1] = str(tmp_path / "out")
    assert cli.main(argv) == 0 and cli.main(argv) == 0  # its own results


@pytest.mark.parametrize(
    "cell, line",
    [
        ({"include": [["nothing"]]}, "--include 'nothing' matches none"),
        ({"max_memory": "1KB"}, "--max-memory limits the memory of a GPU"),
        ({"method": "wanda", "seqlen": 10_000_000}, "one sequence needs"),
        ({"pattern": "2:3"}, "has 32 columns, pattern 2:3 needs a multiple of 3"),
        ({"eval": [["short.txt"]]}, "short.txt"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_measured(
    cell, line, recipe, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("the fox")
    tiny.llama().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    path = str(recipe([{"method": "magnitude"}, {"method": "magnitude", **cell}]))
    assert cli.main(["sweep", str(tmp_path / "model"), path, "--output", str(tmp_path / "out"), "--device", "cpu"]) == 2
    assert line in capsys.readouterr().err.splitlines()[-1] and not (tmp_path / "out").exists()


@pytest.mark.fault("file of the user")
@pytest.mark.parametrize("name", ["model", "./model", "a\nb"])
def test_an_output_that_is_the_model_or_unprintable_is_refused_before_the_model_is_read(name, recipe, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    output = f"{tmp_path}/{name}"
    assert cli.main(["sweep", str(tmp_path / "model"), str(recipe()), "--output", output]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "is the folder of the model" in line or "holds an unprintable character" in line
    assert not list((tmp_path / "model").iterdir())


def test_flags_of_tasks_are_refused_for_a_recipe_without_tasks(recipe, tmp_path, capsys):
    for flag, value in (("--limit", "-1"), ("--batch-size", "0"), ("--eval-data", "nowhere")):
        argv = ["sweep", "no-such-model", str(recipe([{"method": "magnitude"}])), "--output", str(tmp_path / "out")]
        assert cli.main([*argv, flag, value]) == 2
        assert "--eval-data, --limit and --batch-size are for tasks, and" in capsys.readouterr().err


def test_the_hash_of_a_text_changes_with_any_file_of_its_folder(tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "train.txt").write_text(tiny.text(800))
    before = local_sha256(str(folder))
    assert before == local_sha256(str(folder)) != local_sha256(str(folder / "train.txt"))
    (folder / "train.txt").write_text(tiny.text(800, seed=1))
    changed = local_sha256(str(folder))
    (folder / "train.txt").rename(folder / "test.txt")
    assert len({before, changed, local_sha256(str(folder)), None}) == 4
    monkeypatch.chdir(tmp_path)
    folder.rename("sample")
    assert local_sha256("sample") is None and local_sha256("./sample") is not None  # the name of a built-in text


def test_a_bar_in_the_name_of_a_text_is_no_new_column(recipe, tmp_path):
    (tmp_path / "a|b.txt").write_text(tiny.text(300))
    found = Recipe.load(recipe([{"method": "magnitude", "eval": [[str(tmp_path / "a|b.txt")]]}]))
    table = [
        line for line in markdown(lines_of(found.cells, run(found, tmp_path / "out"))).splitlines() if line[:1] == "|"
    ]
    assert "a\\|b.txt" in table[0] and len({line.replace("\\|", "").count("|") for line in table}) == 1


def test_ctrl_c_says_how_to_go_on(recipe, tmp_path, capsys):
    tiny.llama().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "eval.txt").write_text(tiny.text(800))
    path, text = str(recipe([{"method": "magnitude"}])), str(tmp_path / "eval.txt")
    argv = ["sweep", str(tmp_path / "model"), path, "--output", str(tmp_path / "out"), "--eval", text]
    with interrupted_while_reading((tmp_path / "out" / "cells").exists):
        assert cli.main(argv) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "fwanda: interrupted; continue with the same command"


def test_tasks_are_checked_before_the_model_is_read(recipe, tmp_path, capsys):
    path = str(recipe([{"method": "magnitude"}], tasks=["zeroshot"]))
    argv = ["sweep", "no-such-model", path, "--output", str(tmp_path / "out"), "--eval-data", str(tmp_path / "nowhere")]
    assert cli.main(argv) == 2
    assert "--eval-data must be a folder of data sets" in capsys.readouterr().err
    path = str(recipe([{"method": "magnitude"}], tasks=["ppl"]))
    assert cli.main(["sweep", "no-such-model", path, "--output", str(tmp_path / "out")]) == 2
    assert "perplexity (ppl) is no task here; name the texts to measure it on with eval" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_report_of_a_sweep_says_where_its_tables_are(recipe, tmp_path, capsys):
    found = Recipe.load(recipe([{"method": "magnitude"}]))
    write(found, run(found, tmp_path / "out"), tmp_path / "out")
    cell = next(path for path in (tmp_path / "out" / "cells").iterdir() if not path.name.startswith("dense"))
    for path in (tmp_path / "out", cell):
        assert cli.main(["report", str(path)]) == 2
        line = capsys.readouterr().err
        assert "of a sweep" in line and "results.md and results.csv" in line


def test_a_perplexity_that_is_not_finite_is_shown(recipe, tmp_path):
    found = Recipe.load(recipe([{"method": "wanda"}], seeds=[0, 1]))
    cells = run(found, tmp_path / "out")
    cells[0]["perplexity"][0]["perplexity"] = math.inf
    written = write(found, cells, tmp_path / "out")
    assert "| inf |" in (tmp_path / "out" / "results.md").read_text()
    assert [path.name for path in written[2:]] == ["kept-in-rows.png"]  # all masks are Wanda's


def drawn(monkeypatch) -> dict[str, list]:
    """Name of a picture -> its axes, as they are saved."""
    from matplotlib.figure import Figure

    pictures, save = {}, Figure.savefig

    def kept(figure, path, **options):
        pictures[path.stem] = figure.axes
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
    return pictures


def texts_of(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.fixture
def lines(recipe, tmp_path):
    """Lines of a sweep whose perplexities and figures a test may change."""
    found = Recipe.load(recipe())
    return lines_of(found.cells, run(found, tmp_path / "out"))


@pytest.mark.fault("sweep pictures")
def test_every_cell_is_in_the_picture_of_perplexities_with_plain_numbers(lines, tmp_path, monkeypatch):
    pictures = drawn(monkeypatch)
    draw(lines, tmp_path)
    (axes,) = pictures["perplexity-by-sparsity"]
    labels = axes.get_legend_handles_labels()[1]
    assert set(labels) == {
        "dense", "wanda uniform", "magnitude layer", "fwanda row", "fwanda global", "fsparsegpt global",
        "wanda uniform 2:4",
    }  # fmt: skip
    points = sum(
        len(line.get_xdata()) for line in axes.lines if line.get_label() in labels and line.get_label() != "dense"
    )
    assert points == len(lines)
    axes.figure.canvas.draw()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["50 %", "60 %"]
    assert all("10^" not in label.get_text() and "$" not in label.get_text() for label in axes.get_yticklabels())
    assert all(axes.get_title().startswith("tiny: ") for (axes,) in pictures.values())


@pytest.mark.fault("sweep pictures")
def test_perplexities_over_decades_have_plain_numbers(lines, tmp_path, monkeypatch):
    pictures = drawn(monkeypatch)
    for number, line in enumerate(lines):
        line.cells[0]["perplexity"][0]["perplexity"] = 20 * 3.0**number
    draw(lines, tmp_path)
    (axes,) = pictures["perplexity-by-sparsity"]
    axes.figure.canvas.draw()
    low, high = axes.get_ylim()
    shown = [t.get_text() for t in axes.get_yticklabels() if low <= t.get_position()[1] <= high]
    assert axes.get_yscale() == "log" and {"100", "1,000", "50"} <= set(shown)
    assert axes.yaxis.get_minor_formatter()(60, 0) == ""


@pytest.mark.fault("sweep pictures")
def test_a_spike_is_clipped_with_its_value(lines, tmp_path, monkeypatch):
    pictures = drawn(monkeypatch)
    lines[0].cells[0]["perplexity"][0]["perplexity"] = 5e9
    draw(lines, tmp_path)
    (axes,) = pictures["perplexity-by-sparsity"]
    assert axes.get_ylim()[1] < 1e6 and "5,000,000,000 " in texts_of(axes)
    (axes,) = pictures["kept-in-rows"]
    assert axes.get_ylim()[1] < 1 and any("outside the picture" in text for text in texts_of(axes))


@pytest.mark.fault("sweep pictures")
def test_a_perplexity_that_is_not_finite_is_told_in_the_picture(lines, tmp_path, monkeypatch):
    pictures = drawn(monkeypatch)
    lines[0].cells[0]["perplexity"][0]["perplexity"] = math.nan
    draw(lines, tmp_path)
    (axes,) = pictures["perplexity-by-sparsity"]
    assert f"not finite: {lines[0].label}" in texts_of(axes)
    assert lines[0].label in pictures["disagreement-by-block"][0].get_legend_handles_labels()[1]


def test_names_that_look_like_formulas_are_drawn(lines, tmp_path):
    for line in lines:
        line.cells[0]["model"] = "$\\frac{1$_\x00日本"
    assert len(draw(lines, tmp_path)) == 4


def test_cells_that_differ_in_order_have_rows_of_their_own(recipe):
    found = Recipe.load(recipe([{"method": "wanda", "order": ["onepass", "sequential"]}])).cells
    assert [describe(config, found) for config in found] == [
        "wanda uniform 0.5", "wanda uniform 0.5 order=sequential",
    ]  # fmt: skip


@pytest.mark.fault("other model")
def test_a_model_that_differs_in_a_norm_or_a_setting_runs_again(recipe, tmp_path):
    found = Recipe.load(recipe([{"method": "wanda"}]))
    norm, epsilon = tiny.llama(), tiny.llama(rms_norm_eps=1e-2)
    norm.model.norm.weight.data[0] += 1
    cells = [run(found, tmp_path / "out", model)[0] for model in (None, norm, epsilon, tiny.llama().bfloat16())]
    assert len({measured(cell["dense"])[0] for cell in cells}) == 4


@pytest.mark.fault("other model")
def test_another_tokenizer_runs_again(recipe, tmp_path):
    found = Recipe.load(recipe([{"method": "wanda"}]))
    first = run(found, tmp_path / "out")
    other = sweep.run(tiny.llama(), tiny.tokenizer(turned=True), found, tmp_path / "out", source="tiny", progress=False)
    assert measured(first[0]["dense"]) != measured(other[0]["dense"]) and run(found, tmp_path / "out") == first


def test_another_text_or_model_runs_again(recipe, tmp_path):
    found = Recipe.load(recipe([{"method": "wanda"}]))
    first = run(found, tmp_path / "out")
    assert run(found, tmp_path / "out") == first
    others = [run(found, tmp_path / "out", tiny.llama(seed=5))]
    (tmp_path / "text.txt").write_text(tiny.text(2000, seed=9))
    others.append(run(found, tmp_path / "out"))
    assert len({measured(cells[0])[0] for cells in (first, *others)}) == 3
    assert len({measured(cells[0]["dense"])[0] for cells in (first, *others)}) == 3


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"report": {}}', "[" * 100_000, "{"], ids=range(6))
@pytest.mark.parametrize("dense", [True, False])
def test_a_broken_cell_is_one_line(text, dense, recipe, tmp_path):
    found = Recipe.load(recipe([{"method": "magnitude"}]))
    run(found, tmp_path / "out")
    files = list((tmp_path / "out" / "cells").glob("*.json"))
    broken = [path for path in files if path.name.startswith("dense-") == dense]
    for path in files:
        path.write_text(text) if path in broken else path.unlink()
    assert len(files) == 2 and len(broken) == 1
    with pytest.raises(UserError, match=r"\.json is broken \(.*\); remove it, and its cell runs again"):
        run(found, tmp_path / "out")


@pytest.mark.parametrize(
    "path", [("perplexity",), ("dense",), ("shared",), ("report", "seconds"), ("report", "config")]
)
@pytest.mark.parametrize("value", [3, [3], None])
def test_a_cell_that_is_damaged_inside_is_one_line(path, value, recipe, tmp_path):
    found = Recipe.load(recipe([{"method": "magnitude"}]))
    run(found, tmp_path / "out")
    file = next(p for p in (tmp_path / "out" / "cells").glob("*.json") if not p.name.startswith("dense-"))
    cell = json.loads(file.read_text())
    inner = cell
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file.write_text(json.dumps(cell))
    with pytest.raises(UserError, match=r"\.json is broken \(.*\); remove it, and its cell runs again"):
        run(found, tmp_path / "out")


@pytest.mark.parametrize("name", ["file", "file/out", "x" * 300])
def test_an_output_that_cannot_be_made_is_one_line(name, recipe, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="^output .*: not writable .*; choose another folder$"):
        run(Recipe.load(recipe([{"method": "magnitude"}])), tmp_path / name)


def test_a_sweep_may_write_into_the_current_folder(recipe, tmp_path, monkeypatch):
    found = Recipe.load(recipe([{"method": "magnitude"}]))
    monkeypatch.chdir(tmp_path)
    assert run(found, ".") and (tmp_path / "cells").is_dir()


def test_a_dense_model_that_overflows_ends_the_sweep(recipe, tmp_path):
    model = tiny.llama()
    model.model.norm.weight.data.mul_(1e38)
    with pytest.raises(UserError, match="the dense model has perplexity"):
        run(Recipe.load(recipe([{"method": "magnitude"}])), tmp_path / "out", model)
