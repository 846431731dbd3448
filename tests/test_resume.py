"""Interrupted runs go on where they stopped, with the same bits; nothing stale is ever taken for a stage."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import kill
import pytest
import tiny
import torch
from interrupt import interrupted_after

import fwanda_pruner
from fwanda_pruner import cli
from fwanda_pruner.engine.resident import ResidentEngine
from fwanda_pruner.errors import UserError
from fwanda_pruner.run import stage as stages
from fwanda_pruner.run.state import RunState


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    kill.prepare(folder)
    return folder


@pytest.fixture
def argv(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "SAVE_SECONDS", 0)
    text = str(folder / "text.txt")
    start = ["prune", str(folder / "model"), *kill.SETTINGS, "--calibration", text, "--eval", text]
    return [*start, "--output", str(tmp_path / "out")]


def interrupt(argv, after: str) -> None:
    """Runs a command until it has kept a stage."""
    with interrupted_after(after):
        assert cli.main(argv) == 130


def state_of(argv) -> Path:
    output = Path(argv[argv.index("--output") + 1])
    return output.with_name(f".{output.name}.resume")


@pytest.mark.fault("kill -9", trials=5)
def test_kill_9_at_random_points_changes_no_bit():
    """In a process of its own, which has started no threads before it forks."""
    command = [sys.executable, str(Path(kill.__file__)), "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.count("same bits") == 5, done.stdout + done.stderr


@pytest.mark.fault("long run dies", trials=21)
@pytest.mark.fault("Ctrl-C", trials=21)
@pytest.mark.parametrize(
    "settings, kept",
    [
        (["--method", "fwanda"], ["text", "eval_dense", "calibrate-backward", "calibrate", "budgets", "check"]),
        (["--method", "fwanda", "--fisher-samples", "4"], ["calibrate-backward", "calibrate-forward", "calibrate"]),
        (["--method", "fsparsegpt"], ["calibrate", "prune-00000", "prune-00003"]),
        (["--method", "fsparsegpt", "--pattern", "2:4"], ["calibrate-part", "calibrate", "prune-00000"]),
        (["--method", "wanda", "--order", "sequential"], ["prune-00001"]),
        (["--method", "sparsegpt", "--engine", "streamed", "--segment", "1"], ["text", "prune-00001"]),
        (["--method", "fwanda", "--allocation", "response"], ["choose-00000", "choose-00001", "choose"]),
    ],
    ids=["fwanda", "fisher-samples", "fsparsegpt", "fsparsegpt-2:4", "wanda", "streamed", "response"],
)
def test_ctrl_c_after_each_stage_is_one_line_and_resume_gives_the_same_bits(argv, settings, kept, capsys, tmp_path):
    argv += settings
    assert cli.main(argv) == 0 and not state_of(argv).exists()
    expected = kill.result(tmp_path / "out")[0]
    for stage in kept:
        argv[argv.index("--output") + 1] = str(tmp_path / stage)
        capsys.readouterr()
        interrupt(argv, after=stage)
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last == "fwanda: interrupted; continue with the same command and --resume"
        assert not (tmp_path / stage).exists() and (state_of(argv) / f"{stage}.safetensors").is_file()
        assert cli.main([*argv, "--resume"]) == 0
        assert kill.result(tmp_path / stage)[0] == expected and not state_of(argv).exists()
        report = json.loads((tmp_path / stage / "fwanda.json").read_text())
        assert "resumed: seconds and energy are those of the last part" in report["warnings"]


@pytest.mark.fault("long run dies")
def test_finished_stages_are_not_done_again(argv, monkeypatch, tmp_path):
    argv += ["--method", "fwanda"]
    interrupt(argv, after="calibrate")
    monkeypatch.setattr(ResidentEngine, "measure", None)
    assert cli.main([*argv, "--resume"]) == 0
    seconds = json.loads((tmp_path / "out" / "fwanda.json").read_text())["seconds"]
    done = {"text", "eval_dense", "calibrate"}
    assert not done & seconds.keys() and {"budgets", "check", "prune", "eval_pruned"} <= seconds.keys()


@pytest.mark.fault("other model")
def test_files_written_after_a_finished_run_that_read_them_are_warned_of(argv, tmp_path, capsys):
    assert cli.main(argv) == 0
    written, out = (tmp_path / "out" / "fwanda.json").stat().st_mtime, tmp_path / "out"
    text, weights = Path(argv[argv.index("--calibration") + 1]), Path(argv[1], "model.safetensors")
    for file in (text, weights):
        before = file.stat().st_mtime
        for later in (0, 1):
            os.utime(file, times=(before + later, written + later))
            capsys.readouterr()
            assert cli.main([*argv, "--resume"]) == 0
            warned = f"{file} was written after {out}; pass --overwrite to run the command again with it"
            assert (warned in capsys.readouterr().err) == bool(later)
        os.utime(file, times=(before, before))
    Path(argv[1], "README.md").write_text("edited later")
    capsys.readouterr()
    assert cli.main([*argv, "--resume"]) == 0 and "was written after" not in capsys.readouterr().err
    Path(argv[1], "README.md").unlink()


def test_an_output_inside_a_folder_of_texts_is_refused(argv, tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    shutil.copy(argv[argv.index("--calibration") + 1], tmp_path / "texts" / "train.txt")
    argv[argv.index("--calibration") + 1] = str(tmp_path / "texts")
    argv[argv.index("--output") + 1] = str(tmp_path / "texts" / "out")
    flags = ["--calibration", str(tmp_path / "texts"), "--output", str(tmp_path / "texts" / "st.safetensors")]
    for command in (argv, ["calibrate", argv[1], *flags]):
        assert cli.main(command) == 2
        assert "a text of this run; choose a folder outside it" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "texts").iterdir()] == ["train.txt"]


@pytest.mark.parametrize("stage", ["eval_dense", "eval_pruned"])
def test_a_text_that_was_measured_is_not_measured_again(argv, stage, tmp_path):
    text = tmp_path / "second.txt"
    text.write_text(tiny.text(200, seed=3))
    argv += ["--method", "wanda", "--eval", str(text)]
    assert cli.main(argv) == 0
    expected = kill.result(tmp_path / "out")[1]
    argv[argv.index("--output") + 1] = str(tmp_path / "again")
    interrupt(argv, after=f"{stage}-00000")
    RunState(tmp_path / "again", resume=True).keep(f"{stage}-00000", {}, 7.5)  # a value that only this file has
    assert cli.main([*argv, "--resume"]) == 0
    report = json.loads((tmp_path / "again" / "fwanda.json").read_text())
    key = stage.removeprefix("eval_")
    assert [t[key] for t in report["perplexity"]] == [7.5, expected[1][1][key]]


@pytest.mark.fault("kill -9")
@pytest.mark.parametrize("flags", [["--resume"], ["--overwrite"]], ids=str)
def test_what_a_killed_process_was_writing_is_removed(argv, flags):
    interrupt(argv, after="text")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    half = state_of(argv) / f".calibrate.safetensors.{dead.pid}-0123abcd.tmp"
    half.mkdir()
    (half / ".tmpAbC123").write_bytes(b"half")  # safetensors writes to such a file first
    found = []
    with interrupted_after("calibrate"):
        assert cli.main([*argv, *flags]) == 130
    found += state_of(argv).iterdir()
    assert half not in found and {path.name for path in found} >= {"lock", "text.safetensors"}
    assert cli.main([*argv, "--resume"]) == 0


@pytest.mark.fault("state thrown away")
def test_finished_work_is_not_thrown_away_unless_asked(argv, capsys):
    argv += ["--method", "fwanda"]
    interrupt(argv, after="calibrate")
    kept = sorted(path.read_bytes() for path in state_of(argv).iterdir())
    for other in ([], ["--allocation", "row"]):
        capsys.readouterr()
        assert cli.main([*argv, *other]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"fwanda: error: an interrupted run left finished work in {state_of(argv)}; go on")
        assert "--resume" in line and "--overwrite" in line
    assert sorted(path.read_bytes() for path in state_of(argv).iterdir()) == kept
    assert cli.main([*argv, "--allocation", "row", "--overwrite"]) == 0
    assert f"the finished work of an interrupted run was removed from {state_of(argv)}" in capsys.readouterr().err
    assert not state_of(argv).exists()


def test_overwrite_and_resume_go_on_with_an_interrupted_run_and_replace_a_finished_one(argv, capsys, tmp_path):
    argv += ["--method", "wanda", "--overwrite", "--resume"]
    interrupt(argv, after="calibrate")
    for kept in (True, False):
        capsys.readouterr()
        assert cli.main(argv) == 0
        out, error = capsys.readouterr()
        assert "(kept from the interrupted run)" in error if kept else "starting from the beginning" in error
        assert not out.startswith("finished")


def test_resume_without_a_state_starts_afresh_and_says_so(argv, capsys):
    assert cli.main([*argv, "--method", "wanda", "--resume"]) == 0
    assert "no interrupted run was found: starting from the beginning" in capsys.readouterr().err


def test_another_command_does_not_go_on(argv, capsys):
    interrupt([*argv, "--method", "fwanda"], after="calibrate")
    assert cli.main([*argv, "--method", "fwanda", "--allocation", "row", "--resume"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert 'the interrupted run had allocation "global", this one has "row"' in line and state_of(argv).exists()


def test_another_model_does_not_go_on(argv, capsys, folder, tmp_path):
    argv += ["--method", "fwanda"]
    interrupt(argv, after="calibrate")
    tiny.llama(blocks=4, seed=5).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    argv[1] = str(tmp_path / "model")
    assert cli.main([*argv, "--resume"]) == 2
    assert "the interrupted run had weights" in capsys.readouterr().err


@pytest.mark.fault("other model")
@pytest.mark.parametrize("change", ["norm", "config", "tokenizer"])
def test_a_model_that_changed_in_its_folder_does_not_go_on(argv, capsys, folder, tmp_path, change):
    shutil.copytree(argv[1], tmp_path / "model")
    argv[1] = str(tmp_path / "model")
    argv += ["--method", "fwanda"]
    interrupt(argv, after="calibrate")
    if change == "norm":
        model = tiny.LlamaForCausalLM.from_pretrained(argv[1])
        model.model.norm.weight.data[0] += 1
        model.save_pretrained(argv[1])
    elif change == "tokenizer":
        tiny.tokenizer(turned=True).save_pretrained(argv[1])
    else:
        path = tmp_path / "model" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-3}))
    assert cli.main([*argv, "--resume"]) == 2
    assert f"the interrupted run had {'tokenizer' if change == 'tokenizer' else 'weights'}" in capsys.readouterr().err


@pytest.mark.fault("changed state")
@pytest.mark.parametrize("damage", ["truncated", "random", "empty"])
def test_a_broken_state_is_one_line(argv, capsys, damage):
    argv += ["--method", "fwanda"]
    interrupt(argv, after="calibrate")
    path = state_of(argv) / "calibrate.safetensors"
    path.write_bytes({"truncated": path.read_bytes()[:-9], "random": os.urandom(400), "empty": b""}[damage])
    capsys.readouterr()
    assert cli.main([*argv, "--resume"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "is broken" in line and line.endswith("start over by --overwrite")
    assert cli.main([*argv, "--overwrite"]) == 0


def test_resume_of_a_finished_run_verifies_it(argv, capsys, tmp_path):
    argv += ["--method", "wanda"]
    assert cli.main(argv) == 0
    before = kill.result(tmp_path / "out")
    capsys.readouterr()
    assert cli.main([*argv, "--resume"]) == 0
    assert capsys.readouterr().out.startswith("finished    ")
    assert kill.result(tmp_path / "out") == before


def test_resume_of_a_finished_run_with_statistics_verifies_it(argv, capsys, tmp_path):
    """The length of the evaluation windows then follows the statistics, whose text the command does not name."""
    file = str(tmp_path / "statistics.safetensors")
    model, text = argv[1], argv[argv.index("--calibration") + 1]
    calibrate = ["calibrate", model, "--calibration", text, "--nsamples", "16", "--seqlen", "24", "--output", file]
    assert cli.main(calibrate) == 0
    command = ["prune", model, "--statistics", file, "--output", str(tmp_path / "out")]
    assert cli.main(command) == 0
    capsys.readouterr()
    assert cli.main([*command, "--resume"]) == 0
    assert capsys.readouterr().out.startswith("finished    ")
    assert cli.main([*command, "--eval", text, "--eval-seqlen", "12", "--resume"]) == 2
    assert "is finished with" in capsys.readouterr().err


def test_texts_that_share_memory_are_kept(tmp_path):
    tokens = tiny.tokens(16, 24)
    with RunState(tmp_path / "out") as state:
        report = fwanda_pruner.prune(
            tiny.llama(), method="wanda", calibration=tokens, eval=tokens[:3], state=state, progress=False
        )
        assert report.perplexity[0]["windows"] == 3
        calibration, evaluation = (state.recall("text")[0][name] for name in ("calibration", "evaluation0"))
        assert torch.equal(calibration, tokens) and torch.equal(evaluation, tokens[:3])


def test_a_finished_run_of_another_command_is_not_taken_for_this_one(argv, capsys):
    assert cli.main([*argv, "--method", "wanda"]) == 0
    assert cli.main([*argv, "--method", "magnitude", "--resume"]) == 2
    assert "is finished with method 'wanda', this command has 'magnitude'" in capsys.readouterr().err


def test_a_finished_run_whose_files_changed_is_refused(argv, capsys, tmp_path):
    from safetensors.torch import load_file, save_file

    assert cli.main([*argv, "--method", "wanda"]) == 0
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"].fill_(1)
    save_file(tensors, path, metadata={"format": "pt"})
    assert cli.main([*argv, "--method", "wanda", "--resume"]) == 2
    assert "model.layers.1.mlp.up_proj holds 0 zeros" in capsys.readouterr().err


def test_two_processes_do_not_write_one_output(tmp_path):
    with RunState(tmp_path / "out") as state:
        state.keep("text", {})
        with pytest.raises(UserError, match="another process is writing"):
            RunState(tmp_path / "out", resume=True)
        assert state.recall("text") is not None


@pytest.mark.fault("full disk")
def test_a_full_disk_leaves_the_last_good_stage(tmp_path, monkeypatch):
    state = RunState(tmp_path / "out")
    state.keep("calibrate", {"x": torch.ones(3)})

    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(UserError, match="no space left"):
        state.keep("calibrate", {"x": torch.zeros(3)})
    assert state.recall("calibrate")[0]["x"].tolist() == [1, 1, 1]


@pytest.mark.fault("vanishing file")
def test_a_state_folder_that_vanishes_is_one_line(tmp_path):
    state = RunState(tmp_path / "out")
    state.keep("text", {})
    shutil.rmtree(state.folder)
    with pytest.raises(UserError, match="is gone"):
        state.keep("eval_dense", {}, 1.0)


def test_a_run_that_keeps_nothing_leaves_nothing(argv, tmp_path, capsys):
    argv[1] = str(tmp_path / "nowhere")
    assert cli.main(argv) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "file", "dangling", "foreign file", "subfolder", "lock is a folder"])
def test_what_is_no_state_folder_is_refused_and_left_alone(argv, tmp_path, capsys, kind):
    state, precious = state_of(argv), tmp_path / "precious"
    precious.mkdir()
    (precious / "data.txt").write_text("keep")
    if kind in ("link", "dangling"):
        state.symlink_to(precious if kind == "link" else tmp_path / "nowhere")
    elif kind == "file":
        state.write_text("keep")
    else:
        state.mkdir()
        (state / "text.safetensors").write_text("stage")
        foreign = state / {"foreign file": "notes.txt", "subfolder": "folder", "lock is a folder": "lock"}[kind]
        foreign.write_text("keep") if kind == "foreign file" else foreign.mkdir()
    before = sorted(path.name for path in tmp_path.rglob("*"))
    for resumed in ([], ["--resume"]):
        assert cli.main([*argv, "--method", "magnitude", *resumed]) == 2
        assert "move it away, or choose another --output" in capsys.readouterr().err.strip().splitlines()[-1]
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert (precious / "data.txt").read_text() == "keep"


def test_a_text_that_changed_does_not_go_on(argv, capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(Path(argv[argv.index("--calibration") + 1]).read_text())
    argv[argv.index("--calibration") + 1] = str(text)
    interrupt([*argv, "--method", "fwanda"], after="calibrate")
    text.write_text(text.read_text() + " w5")
    assert cli.main([*argv, "--method", "fwanda", "--resume"]) == 2
    assert "the interrupted run had calibration_sha256" in capsys.readouterr().err


def test_a_stage_under_the_name_of_another_is_refused(tmp_path):
    state = RunState(tmp_path / "out")
    state.keep("choose-00000", {}, {})
    (state.folder / "choose-00000.safetensors").rename(state.folder / "choose-00001.safetensors")
    with pytest.raises(UserError, match="choose-00001.safetensors is broken .*it holds the stage choose-00000"):
        state.recall("choose-00001")


@pytest.mark.fault("Ctrl-C")
def test_the_end_of_a_block_of_code_lets_others_go_on(tmp_path):
    with pytest.raises(KeyboardInterrupt), RunState(tmp_path / "out") as state:
        state.keep("text", {}, 7.5)
        raise KeyboardInterrupt
    with RunState(tmp_path / "out", resume=True) as again:
        assert again.resumed and again.recall("text")[1] == 7.5
