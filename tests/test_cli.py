"""The command line: what it writes, and one line with exit code 2 for every mistake."""

import json
import logging
import os
import runpy
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import tiny
import torch
from helpers_cli import arguments, make_folder
from interrupt import interrupted_while_reading
from transformers import AutoModelForCausalLM, CodeGenConfig, CodeGenForCausalLM

from fwanda_pruner import prune
from fwanda_pruner.cli import main
from fwanda_pruner.config import GROUPS, PruneConfig, settings_of
from fwanda_pruner.text import windows

DOCS = Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("cli"))


def test_prune_writes_a_folder_that_loads(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(arguments(folder, out, "--sparsity", "0.5", "--eval", str(folder / "eval.txt"))) == 0
    facts = json.loads((out / "fwanda.json").read_text())
    assert facts["sparsity"]["matrices"] == 0.5
    assert facts["perplexity"][0]["windows"] == 300 // (24 - facts["bos"])
    assert list(facts["seconds"])[0] == "load"
    model = AutoModelForCausalLM.from_pretrained(out)
    assert int((model.model.layers[0].mlp.up_proj.weight == 0).sum()) == 48 * 16
    assert "saved" in capsys.readouterr().out
    assert {p.name for p in tmp_path.iterdir()} == {"out"}


def test_eval_is_optional(folder, tmp_path):
    assert main(arguments(folder, tmp_path / "out")) == 0
    assert json.loads((tmp_path / "out" / "fwanda.json").read_text())["perplexity"] == []


def test_calibrate_then_prune_at_two_sparsities_equals_pruning_directly(folder, tmp_path):
    stats = tmp_path / "s.safetensors"
    text = ["--calibration", str(folder / "calibration.txt"), "--nsamples", "16", "--seqlen", "24"]
    assert main(["calibrate", str(folder / "model"), *text, "--output", str(stats)]) == 0
    for sparsity in ("0.5", "0.7"):
        settings = ("--allocation", "global", "--sparsity", sparsity)
        assert main(arguments(folder, tmp_path / f"a{sparsity}", *settings, method="fwanda")) == 0
        given = arguments(folder, tmp_path / f"b{sparsity}", *settings, "--statistics", str(stats), method="fwanda")
        assert main(given) == 0
        a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / f"{x}{sparsity}") for x in "ab")
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.fault("wrong layers")
def test_dry_run_lists_every_target_and_writes_nothing(folder, tmp_path, capsys):
    assert main([*arguments(folder, tmp_path / "out", "--sparsity", "0.5"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.count("removes") == 14 and "model.layers.1.mlp.down_proj  [32, 48]  removes 768" in out
    assert list(tmp_path.iterdir()) == [] and "already" not in out


@pytest.mark.fault("existing zeros")
@pytest.mark.parametrize("save", ["dense", "packed"])
def test_dry_run_of_a_pruned_model_says_that_its_zeros_are_there(save, folder, tmp_path, capsys):
    assert main(arguments(folder, tmp_path / "out", "--save", save)) == 0
    assert main(["prune", str(tmp_path / "out"), "--sparsity", "0.7", "--dry-run", "--device", "cpu"]) == 0
    weights = 2 * (4 * 32 * 32 - 2 * 16 * 32 + 3 * 32 * 48)
    line = f"{weights // 2} of these weights (50.00%) are 0 already: they stay 0 and are removed first"
    assert line in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("allocation", ["global", "row"])
def test_dry_run_says_that_it_cannot_divide_by_fisher_information(allocation, folder, tmp_path, capsys):
    command = arguments(folder, tmp_path / "out", "--allocation", allocation, "--dry-run", method="fwanda")
    assert main(command) == 0
    *rows, total = capsys.readouterr().out.splitlines()
    by_matrix = allocation == "row"  # which leaves as much of each matrix as is asked
    assert sum("removes 768" in row for row in rows) == (2 * 3 if by_matrix else 0)
    assert any("by measurements on the text, which --dry-run does not make" in row for row in rows) != by_matrix
    assert "(0.5000); nothing was written" in total and list(tmp_path.iterdir()) == []


@pytest.mark.fault("fused experts")
def test_dry_run_says_where_slices_of_experts_lie_and_what_share_is_covered(tmp_path, capsys):
    tiny.build("gpt_oss").save_pretrained(tmp_path / "model")
    command = ["prune", str(tmp_path / "model"), "--method", "wanda", "--dry-run", "--device", "cpu"]
    assert main([*command, "--exclude", "*.0.self_attn.*", "--exclude", "*.q_proj"]) == 0
    out = capsys.readouterr().out
    name = "model.layers.1.mlp.experts"
    assert f"{name}.2.down_proj  [32, 48]  removes 768  = {name}.down_proj[2]" in out
    assert "model.layers.0.mlp.router.weight  [4, 32]  skipped: a router to the experts, which stays dense" in out
    assert "model.layers.0.self_attn.q_proj  [32, 32]  skipped: excluded by --exclude *.0.self_attn.*" in out
    assert "model.layers.1.self_attn.q_proj  [32, 32]  skipped: excluded by --exclude *.q_proj" in out
    weights = 2 * (3072 + 4 * 4608) - 3072 - 1024
    assert f"19 matrices of {weights} weights, {weights // 2} removed (0.5000)" in out
    assert "of the parameters of the blocks" in out


@pytest.mark.fault("wrong layers")
def test_include_and_exclude_leave_the_rest_dense_and_are_recorded(folder, tmp_path, capsys):
    (tmp_path / "settings.yaml").write_text("include: ['*.mlp.*']\n")
    globs = ("--config", str(tmp_path / "settings.yaml"), "--exclude", "*.1.mlp.up_proj")
    assert main(arguments(folder, tmp_path / "out", *globs)) == 0
    facts = json.loads((tmp_path / "out" / "fwanda.json").read_text())
    assert (facts["config"]["include"], facts["config"]["exclude"]) == (["*.mlp.*"], ["*.1.mlp.up_proj"])
    pruned = [row["name"] for row in facts["matrices"] if row["skipped"] is None]
    assert len(pruned) == 5 and all(".mlp." in name for name in pruned)
    reasons = [row["skipped"] for row in facts["matrices"] if row["skipped"] is not None]
    assert reasons.count("not matched by --include") == 8 and "excluded by --exclude *.1.mlp.up_proj" in reasons
    model, dense = (AutoModelForCausalLM.from_pretrained(path) for path in (tmp_path / "out", folder / "model"))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, dense.get_parameter(name)) != (name.removesuffix(".weight") in pruned)
    assert facts["coverage"]["blocks"] > facts["coverage"]["model"] > 0
    assert "coverage" in capsys.readouterr().out


def test_statistics_of_all_matrices_serve_some_of_them(folder, tmp_path):
    stats = tmp_path / "s.safetensors"
    text = ["--calibration", str(folder / "calibration.txt"), "--nsamples", "16", "--seqlen", "24"]
    assert main(["calibrate", str(folder / "model"), *text, "--output", str(stats)]) == 0
    extra = ("--include", "*.mlp.*", "--statistics", str(stats))
    assert main(arguments(folder, tmp_path / "out", *extra)) == 0


def test_a_pickle_is_read_only_if_allowed(folder, tmp_path, capsys):
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(tiny.llama().state_dict(), tmp_path / "model" / "pytorch_model.bin")
    command = ["prune", str(tmp_path / "model"), "--method", "magnitude", "--dry-run"]
    assert main(command) == 2
    check_one_line(capsys, "pass --allow-pickle if you trust it")
    assert main([*command, "--allow-pickle"]) == 0


def test_report_puts_two_runs_in_one_table(folder, tmp_path, capsys):
    for name, method in (("a", "wanda"), ("b", "magnitude")):
        assert main(arguments(folder, tmp_path / name, "--eval", str(folder / "eval.txt"), method=method)) == 0
    capsys.readouterr()
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b" / "fwanda.json")]) == 0
    out = capsys.readouterr().out
    assert "wanda" in out and "magnitude" in out and out.count("windows of 24 tokens") == 1


def test_eval_measures_a_pruned_folder_as_its_report_did_and_prints_json(folder, tmp_path, capsys):
    texts = [str(folder / "eval.txt"), str(folder / "calibration.txt")]
    flags = ["--eval", texts[0], "--eval", texts[1]]
    assert main(arguments(folder, tmp_path / "out", *flags, "--bos", "none")) == 0
    expected = json.loads((tmp_path / "out" / "fwanda.json").read_text())["perplexity"]
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "out")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts.keys() == {"model", "perplexity", "sparsity"} and facts["sparsity"]["matrices"] == 0.5
    assert [text["source"] for text in facts["perplexity"]] == [text["source"] for text in expected] == texts
    for found, recorded in zip(facts["perplexity"], expected, strict=True):
        assert found.pop("perplexity") == pytest.approx(recorded.pop("pruned"), rel=1e-6)
        assert recorded.pop("dense") and found == recorded


def test_eval_without_a_text_reads_sample(folder, capsys):
    flags = ["--eval-seqlen", "24", "--eval-windows", "2", "--bos", "none"]
    assert main(["eval", str(folder / "model"), *flags]) == 0
    (text,) = json.loads(capsys.readouterr().out)["perplexity"]
    assert (text["source"], text["windows"]) == ("sample", 2)


def test_eval_says_what_it_chose_about_bos_unless_the_flag_or_the_record_did(folder, tmp_path, capsys):
    flags = ["--eval", str(folder / "eval.txt"), "--eval-seqlen", "24", "--eval-windows", "2"]
    assert main(["eval", str(folder / "model"), *flags]) == 0
    out, error = capsys.readouterr()
    lines = {
        True: f"BOS before each window: it lowers the loss on {folder / 'eval.txt'}; --bos none leaves it out",
        False: f"no BOS: it does not lower the loss on {folder / 'eval.txt'}; --bos window puts it before each window",
    }
    assert lines[json.loads(out)["perplexity"][0]["bos"]] in error.splitlines()
    assert main(arguments(folder, tmp_path / "out")) == 0
    capsys.readouterr()
    for command in (["eval", str(folder / "model"), *flags, "--bos", "none"], ["eval", str(tmp_path / "out"), *flags]):
        assert main(command) == 0
        assert "BOS" not in capsys.readouterr().err


@pytest.mark.parametrize("flags", [(), ("--eval", "missing.txt")])
def test_eval_of_a_folder_that_is_not_there_says_so(flags, tmp_path, capsys):
    assert main(["eval", str(tmp_path / "nothere"), *flags]) == 2
    check_one_line(capsys, f"model '{tmp_path}/nothere': no such folder")


def test_a_folder_without_a_tokenizer_is_refused_before_its_weights_are_read(folder, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    shutil.copy(folder / "model" / "config.json", tmp_path / "model")
    text = str(folder / "eval.txt")
    for command in (["prune", "--calibration", text, "--output", str(tmp_path / "out")], ["eval", "--eval", text]):
        assert main([*command, str(tmp_path / "model")]) == 2
        check_one_line(capsys, "the folder has no tokenizer files; copy tokenizer.json and tokenizer_config.json")


@pytest.mark.parametrize(("bos", "length"), [(True, 23), (False, 24)])
def test_windows_that_overlap_give_one_warning_whether_bos_is_added_or_not(folder, monkeypatch, bos, length):
    monkeypatch.setattr("fwanda_pruner.run.read_texts.choose_bos", lambda *_: bos)
    text = {"calibration": str(folder / "calibration.txt"), "nsamples": 64, "seqlen": 24}
    report = prune(tiny.llama(), tiny.tokenizer(), method="wanda", no_check=True, progress=False, **text)
    (warning,) = (warning for warning in report.warnings if "overlap" in warning)
    assert f"windows of {length} tokens" in warning


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="there is no /proc")
def test_an_output_where_no_folder_can_be_made_is_one_line(folder, capsys):
    assert main(arguments(folder, Path("/proc/x"))) == 2
    check_one_line(
        capsys,
        "output /proc/x: cannot write to /proc, or another process writes the same output; choose another folder",
    )


def test_a_file_that_is_calibrated_on_and_evaluated_gives_a_warning(folder, tmp_path):
    flags = {"calibration": [str(folder / "calibration.txt")], "nsamples": 16, "seqlen": 24, "method": "wanda"}
    for name, warned in (("calibration", 1), ("eval", 0)):
        model, tokenizer = tiny.llama(), tiny.tokenizer()
        report = prune(model, tokenizer, eval=str(folder / f"{name}.txt"), guard="none", progress=False, **flags)
        assert sum("is both --calibration and --eval" in warning for warning in report.warnings) == warned


def test_settings_from_a_file_are_overridden_by_flags(folder, tmp_path):
    (tmp_path / "settings.yaml").write_text("method: magnitude\nsparsity: 0.3\n")
    command = ["prune", str(folder / "model"), "--config", str(tmp_path / "settings.yaml"), "--sparsity", "0.4"]
    assert main([*command, "--device", "cpu", "--output", str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "fwanda.json").read_text())["config"]
    assert (config["method"], config["sparsity"]) == ("magnitude", "0.4")


MISTAKES = {
    "the same text twice": (["--eval", "a.txt", "--eval", "a.txt"], "--eval names a.txt twice"),
    "a second text that is missing": (["--eval", "sample", "--eval", "nowhere/none.txt"], "nowhere/none.txt"),
    "unknown method": (["--method", "obd"], "--method must be one of magnitude, wanda"),
    "sparsity of one": (["--sparsity", "1"], "--sparsity must be in [0, 1), such as 0.5 for 50 %, got '1'"),
    "negative sparsity": (["--sparsity=-0.1"], "--sparsity must be in [0, 1)"),
    "sparsity that is no number": (["--sparsity", "half"], "--sparsity must be in [0, 1)"),
    "conflicting pattern": (["--sparsity", "0.75", "--pattern", "2:4"], "contradicts --pattern 2:4"),
    "pattern that is none": (["--pattern", "4:2"], "--pattern must be n:m"),
    "columns not a multiple": (["--pattern", "2:5"], "q_proj has 32 columns, pattern 2:5 needs a multiple of 5"),
    "allocation of another method": (["--allocation", "global"], "--allocation must be one of uniform"),
    "missing calibration": (["--calibration", "nowhere.txt"], "nowhere.txt"),
    "order without text": (["--method", "magnitude", "--order", "sequential"], "leave --order out"),
    "flag that does not exist": (
        ["--sparsty", "0.5"],
        "unrecognized arguments: --sparsty 0.5; did you mean --sparsity?; see fwanda prune --help",
    ),
    "argument too many": (["more"], "unrecognized arguments: more; see fwanda prune --help"),
    "number that is none": (["--nsamples", "many"], "argument --nsamples: invalid int value: 'many'; see fwanda prune"),
    "number of many digits": (["--nsamples", "9" * 5000], "argument --nsamples: invalid int value"),
    "mistyped method": (["--method", "wnda"], "got 'wnda'; did you mean wanda?"),
    "record of a dry run": (["--dry-run", "--json"], "leave --json and --push-to-hub out"),
    "upload of a dry run": (["--dry-run", "--push-to-hub", "me/model"], "leave --json and --push-to-hub out"),
    "nsamples of none": (["--nsamples", "0"], "--nsamples must be an integer in [1, 1000000], got 0"),
    "exponent out of range": (["--method", "fwanda", "--power", "1000"], "--power must be a number in [0, 4]"),
    "sparsity of a huge exponent": (["--sparsity", "1e-99999999"], "--sparsity must be in [0, 1)"),
    "glob that matches nothing": (["--exclude", "*.w3"], "'*.w3' matches none of 14 matrices, e.g. model.layers.0"),
    "globs that leave nothing": (["--exclude", "*"], "--include and --exclude leave no matrix"),
    "no text": (["--calibration", ""], "--calibration has an empty name; give the name of a text or a file"),
    "energy of another kind": (["--energy", "gros"], "--energy must be one of gross, net, got 'gros'"),
    "no cuda here": (["--device", "cuda"], "cuda"),
    "text whose name has a line break": (["--guard", "a\nb.txt"], "--guard holds an unprintable character, got"),
    "text whose name is not UTF-8": (["--eval", "\udcff.txt"], "--eval holds an unprintable character, got"),
    "start token of many digits": (["--calibration", "self", "--start-token", "9" * 5000], "--start-token must be"),
    "statistics that are missing": (["--statistics", "none.safetensors"], "statistics none.safetensors: no such file"),
    "statistics that are none": (
        ["--statistics", __file__],
        "is not a statistics file of `fwanda calibrate`: no safet",
    ),
    "statistics that are a folder": (
        ["--statistics", str(Path(__file__).parent)],
        "is a folder; give the file that `",
    ),
    "settings that are missing": (["--config", "no.yaml"], "cannot read the settings in no.yaml: No such file or dir"),
}


@pytest.mark.fault("wrong layers")
@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_ends_in_one_line_and_writes_nothing(name, folder, tmp_path, capsys):
    if name == "no cuda here" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    extra, expected = MISTAKES[name]
    assert main(arguments(folder, tmp_path / "out", *extra)) == 2
    check_one_line(capsys, expected)
    assert list(tmp_path.iterdir()) == []


def check_one_line(capsys, expected):
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("fwanda: error: ")]
    assert len(lines) == 1 and expected in lines[0], error
    assert "Traceback" not in error


@pytest.mark.fault("unused statistics")
@pytest.mark.parametrize("method", ["sparsegpt", "magnitude"])
def test_statistics_that_the_method_does_not_read_are_refused_before_the_model_is_read(method, tmp_path, capsys):
    command = ["prune", str(tmp_path / "no-model"), "--method", method, "--statistics", str(tmp_path / "none")]
    assert main([*command, "--output", str(tmp_path / "out")]) == 2
    check_one_line(capsys, "so it uses no statistics; leave them out")


@pytest.mark.parametrize(("text", "expected"), [("empty.txt", "empty.txt"), ("short.txt", "short.txt has 5 tokens")])
def test_text_that_is_too_short(text, expected, folder, tmp_path, capsys):
    assert main(arguments(folder, tmp_path / "out", "--calibration", str(folder / text))) == 2
    check_one_line(capsys, expected)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("output", ["{}/a.txt", "{}/nowhere/a{}", "{}/calibration.txt/a{}", "{}/" + 210 * "a" + "{}"])
@pytest.mark.parametrize(("command", "suffix"), [("calibrate", ".safetensors"), ("sample", ".jsonl")])
def test_a_file_that_cannot_be_written_is_refused_before_the_model_is_read(command, suffix, output, folder, capsys):
    before = sorted(folder.iterdir())
    assert main([command, str(folder / "no-model"), "--output", output.format(folder, suffix)]) == 2
    check_one_line(capsys, "output")
    assert sorted(folder.iterdir()) == before


def test_output_that_is_not_empty_is_refused_unless_overwritten(folder, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    assert main(arguments(folder, tmp_path / "out")) == 2
    check_one_line(capsys, "not empty")
    assert (tmp_path / "out" / "mine").read_text() == "precious"
    assert main(arguments(folder, tmp_path / "out", "--overwrite")) == 0
    assert not (tmp_path / "out" / "mine").exists()


def test_output_never_replaces_what_the_run_reads(folder, tmp_path, capsys):
    shutil.copytree(folder / "model", tmp_path / "par" / "model")
    for out in (tmp_path / "par", tmp_path / "par" / "model"):
        command = [
            "prune",
            str(tmp_path / "par" / "model"),
            "--method",
            "magnitude",
            "--overwrite",
            "--output",
            str(out),
        ]
        assert main(command) == 2
        check_one_line(capsys, "which this run reads")
    assert (tmp_path / "par" / "model" / "model.safetensors").exists()


@pytest.mark.fault("written weights")
@pytest.mark.parametrize("command", ["prune", "calibrate", "eval"])
@pytest.mark.parametrize("replaced", [True, False])
def test_weights_that_change_during_the_run_leave_no_output(folder, tmp_path, capsys, monkeypatch, command, replaced):
    shutil.copytree(folder / "model", tmp_path / "model")
    weights, text, read = tmp_path / "model" / "model.safetensors", str(folder / "eval.txt"), windows.load_documents

    def writing(*args, **options):
        if replaced:
            shutil.copy(weights, tmp_path / "new")
            (tmp_path / "new").replace(weights)
        else:
            with open(weights, "r+b") as file:
                file.write(file.read(1))
        return read(*args, **options)

    monkeypatch.setattr(windows, "load_documents", writing)
    out = str(tmp_path / ("out.safetensors" if command == "calibrate" else "out"))
    shape = ["--nsamples", "16", "--seqlen", "24"]
    flags = {
        "prune": ["--method", "wanda", "--guard", "none", "--calibration", text, *shape, "--output", out],
        "calibrate": ["--calibration", text, *shape, "--output", out],
        "eval": ["--eval", text, "--eval-seqlen", "24"],
    }
    code = main([command, str(tmp_path / "model"), "--device", "cpu", *flags[command]])
    assert code == (0 if replaced else 2)
    if not replaced:
        assert f"{weights} was changed while it was read" in capsys.readouterr().err.splitlines()[-1]
        assert not Path(out).exists()


@pytest.mark.fault("file of the user")
@pytest.mark.parametrize("flag", ["--config", "--calibration", "--guard", "--eval", "--statistics"])
def test_output_never_deletes_a_file_that_the_run_reads(folder, tmp_path, capsys, flag):
    out = tmp_path / "out"
    out.mkdir()
    file = out / {"--config": "c.yaml", "--statistics": "s.safetensors"}.get(flag, "text.txt")
    file.write_text("sparsity: 0.6")
    method = "fwanda" if flag == "--statistics" else "wanda"
    assert main(arguments(folder, out, "--overwrite", flag, str(file), method=method)) == 2
    check_one_line(capsys, f"output {out} is or contains {file}, which this run reads")
    assert file.read_text() == "sparsity: 0.6"


def test_calibrate_never_replaces_another_kind_of_file(folder, tmp_path, capsys):
    shutil.copytree(folder / "model", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    before = weights.read_bytes()
    assert main(["calibrate", str(tmp_path / "model"), "--output", str(weights)]) == 2
    check_one_line(capsys, "is not a statistics file")
    assert weights.read_bytes() == before


def test_a_killed_run_leaves_nothing_that_the_next_does_not_clean(folder, tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f".out.{dead.pid}-0123abcd.tmp").mkdir()
    (tmp_path / f".out.{dead.pid}-0123abcd.old").mkdir()
    mine = tmp_path / ".out.notes"
    mine.mkdir()
    assert main(arguments(folder, tmp_path / "out", "--overwrite")) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"out", ".out.notes"}


@pytest.mark.parametrize("line", ["method: null", "calibration: 5", "pattern: 2:4", "seed: abc", "power: true", "1: 2"])
def test_settings_of_the_wrong_type_end_in_one_line(line, folder, tmp_path, capsys):
    (tmp_path / "settings.yaml").write_text(line + "\n")
    command = [
        "prune",
        str(folder / "model"),
        "--config",
        str(tmp_path / "settings.yaml"),
        "--output",
        str(tmp_path / "out"),
    ]
    assert main(command) == 2
    check_one_line(capsys, f"error: {tmp_path / 'settings.yaml'}: {'' if line != 'pattern: 2:4' else '--pattern'}")


@pytest.mark.parametrize("name", ["/", "x" * 250, "loop/out", "\0", "\udcff", "a\nb"])
def test_impossible_output_paths_end_in_one_line(name, folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert main(arguments(folder, name)) == 2
    check_one_line(capsys, "output")


def test_an_unknown_backend_ends_in_one_line(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FWANDA_BACKEND", "xyz")
    assert main(arguments(folder, tmp_path / "out")) == 2
    check_one_line(capsys, "backend must be one of native, triton, reference")


def test_output_is_required(folder, capsys):
    assert main(["prune", str(folder / "model")]) == 2
    check_one_line(capsys, "--output DIR is required")


@pytest.mark.fault("quantised")
def test_quantised_weights_are_refused(folder, tmp_path, capsys):
    shutil.copytree(folder / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert main(["prune", str(tmp_path / "model"), "--output", str(tmp_path / "out")]) == 2
    check_one_line(capsys, "quantised (gptq)")


@pytest.mark.fault("not finite")
def test_nan_in_weights_is_refused(folder, tmp_path, capsys):
    model = tiny.llama()
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "model")
    assert main(["prune", str(tmp_path / "model"), "--method", "magnitude", "--output", str(tmp_path / "out")]) == 2
    check_one_line(capsys, "model.layers.0.mlp.up_proj.weight has NaN or inf")
    assert not (tmp_path / "out").exists()


@pytest.mark.fault("Ctrl-C")
def test_interrupt_ends_in_one_line_and_leaves_nothing_unfinished(folder, tmp_path, capsys):
    with interrupted_while_reading((tmp_path / ".out.resume").exists):
        assert main(arguments(folder, tmp_path / "out")) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "fwanda: interrupted; no stage was finished yet"
    assert list(tmp_path.iterdir()) == []  # no stage was finished


@pytest.mark.parametrize("command", ["prune", "calibrate", "sample", "eval", "sweep", "report", "demo", "doctor"])
def test_help_of_every_command(command, capsys):
    assert main([command, "--help"]) == 0
    assert "usage: fwanda" in capsys.readouterr().out


def test_help_is_answered_without_torch():
    code = "import sys, atexit, fwanda_pruner.cli as cli; atexit.register(lambda: print('torch' in sys.modules))"
    code += "; cli.main(['prune', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "--allocation" in done.stdout and done.stdout.splitlines()[-1] == "False"


def test_settings_are_grouped_once_each():
    names = [f.name for f in fields(PruneConfig)]
    assert sorted(name for group in GROUPS for name in settings_of(group)) == sorted(names)
    assert settings_of("place", "bos", "passes")[:3] == ("bos", "device", "dtype")
    with pytest.raises(ValueError, match="groups must be among method, .*, got txt"):
        settings_of("text", "txt")


def test_the_page_of_the_command_line_is_what_the_parser_says():
    render = runpy.run_path(str(DOCS / "make_cli.py"))["render"]
    assert (DOCS / "cli.md").read_text() == render(), "run: python docs/make_cli.py"


def test_fwanda_without_an_allocation_is_global(folder, tmp_path):
    assert main(arguments(folder, tmp_path / "a", "--no-check", method="fwanda")) == 0
    assert main(arguments(folder, tmp_path / "b", "--no-check", "--allocation", "global", method="fwanda")) == 0
    assert json.loads((tmp_path / "a" / "fwanda.json").read_text())["config"]["allocation"] == "global"
    a, b = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "ab")
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_doctor_says_what_is_here(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"torch           {torch.__version__.split('+')[0]}" in out and "row_topk_mask" in out


def test_doctor_names_each_package_once(capsys):
    assert main(["doctor"]) == 0
    names = [line.split("  ")[0] for line in capsys.readouterr().out.split("\n\n")[0].splitlines()]
    assert len(names) == len(set(names)) and "triton" in names


def test_what_torchao_misses_of_another_torch_is_not_shown(monkeypatch, capsys, caplog):
    def describe() -> str:
        for name in ("torchao", "torch.utils._pytree"):
            logging.getLogger(name).warning("Failed to load a library")
        return "done"

    monkeypatch.setattr("fwanda_pruner.doctor.describe", describe)
    assert main(["doctor"]) == 0
    assert capsys.readouterr() == ("done\n", "") and caplog.text == ""


def test_doctor_says_how_to_install_what_is_missing_and_only_that(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.setattr("fwanda_kernels.explain", lambda op: {"cpu": {"native": "not built; run a command"}})
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "C++ library     not built; run a command, which needs a C++ compiler" in lines
    assert "jinja2          not installed: the HTML report (pip install jinja2)" in lines
    assert not any("pip install" in line for line in lines if "  installed:" in line)


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("yaml", "pip install 'transformers>=4.57' huggingface_hub safetensors tqdm pyyaml numpy nvidia-ml-py"),
        ("flash_attn.layers", "pip install flash_attn"),
    ],
)
def test_a_missing_module_is_one_line_with_the_packages_to_install(module, command, monkeypatch, capsys):
    def describe():
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("fwanda_pruner.doctor.describe", describe)
    assert main(["doctor"]) == 2
    check_one_line(capsys, f"No module named {module!r}; run: {command}")


def test_the_command_exits_with_the_code(folder):
    done = subprocess.run([sys.executable, "-m", "fwanda_pruner", "prune"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("fwanda: error: ")


def test_evaluation_settings_without_a_text_are_refused(capsys):
    assert main(["prune", "model", "--output", "out", "--eval-windows", "2"]) == 2
    assert "need a text; add --eval TEXT" in capsys.readouterr().err


def test_a_command_that_does_not_exist_is_one_line_with_the_closest_one(capsys):
    assert main(["purne"]) == 2
    check_one_line(capsys, "there is no command 'purne'; did you mean prune?; see fwanda --help")
    assert main(["zzz"]) == 2
    check_one_line(capsys, "there is no command 'zzz'; the commands are prune, calibrate,")


def test_a_flag_cut_short_is_refused_with_the_whole_one(capsys):
    assert main(["prune", "model", "--calib", "c4", "--output", "out"]) == 2
    check_one_line(capsys, "unrecognized arguments: --calib c4; did you mean --calibration?")


def test_a_mistyped_setting_in_a_file_is_one_line_with_the_closest_one(folder, tmp_path, capsys):
    (tmp_path / "settings.yaml").write_text("sparsty: 0.3\n")
    assert main(["prune", "model", "--config", str(tmp_path / "settings.yaml"), "--output", str(tmp_path / "out")]) == 2
    check_one_line(capsys, "unknown setting 'sparsty'; did you mean sparsity?")


def test_a_current_folder_that_is_gone_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["doctor"]) == 2
    check_one_line(capsys, "the current folder cannot be used (No such file or directory); change to another one")


def test_an_error_of_the_model_itself_is_one_line(tmp_path, capsys):
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 64}
    CodeGenForCausalLM(CodeGenConfig(**sizes)).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    text = tiny.text_file(tmp_path)
    flags = ["--method", "wanda", "--calibration", text, "--seqlen", "8", "--nsamples", "16"]
    assert main(["prune", str(tmp_path / "model"), *flags, "--output", str(tmp_path / "out")]) == 2
    check_one_line(capsys, "the model's own code fails at modeling_codegen.py:")
    assert not (tmp_path / "out").exists()


def test_an_error_that_quotes_the_value_of_a_variable_of_torch_by_chance_is_not_blamed_on_it(monkeypatch, capsys):
    monkeypatch.setattr("fwanda_pruner.doctor.describe", lambda: torch.zeros(3).view(1, 2))
    for value in ("1", ""):
        monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", value)
        assert main(["doctor"]) == 1
        check_one_line(capsys, "unexpected RuntimeError at test_cli.py:")


@pytest.mark.parametrize("variable", ["TQDM_MININTERVAL", "TORCH_LOGS"])
def test_a_variable_of_another_package_with_an_odd_value_is_one_line(variable, tmp_path):
    tiny.llama().save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "fwanda_pruner", "prune", "model", "--method", "magnitude", "--output", "out"]
    env = {**os.environ, variable: "oddly"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert f"fwanda: error: the environment variable {variable}=oddly cannot be used: " in done.stderr.splitlines()[-1]


def test_an_error_that_nobody_expects_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("fwanda_pruner.doctor.describe", lambda: 1 // 0)
    assert main(["doctor"]) == 1
    check_one_line(capsys, "unexpected ZeroDivisionError at test_cli.py:")
    monkeypatch.setenv("FWANDA_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


@pytest.mark.parametrize(
    "command",
    [
        ("prune", "MODEL", "--output", "OUT", "--push-to-hub", ""),
        ("prune", "MODEL", "--output", "OUT", "--statistics", ""),
        ("prune", "MODEL", "--output", "OUT", "--config="),
        ("prune", "MODEL", "--output", ""),
        ("eval", "MODEL", "--eval-data", ""),
        ("report", "MODEL", "--html", ""),
    ],
    ids=lambda command: command[-1] or command[-2],
)
def test_an_empty_value_of_a_flag_is_not_taken_for_no_flag(command, folder, tmp_path, capsys):
    names = {"MODEL": str(folder), "OUT": str(tmp_path / "out")}
    assert main([names.get(word, word) for word in command]) == 2
    assert "expected a value, got an empty one" in capsys.readouterr().err and not (tmp_path / "out").exists()
