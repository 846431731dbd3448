"""What a command says of files beside the weights of a model, or of a flag, that are broken: one line, and no file."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from helpers_cli import arguments, environment, fwanda, make_folder
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fwanda_pruner.cli import main
from fwanda_pruner.formats.files import atomic_folder, remove_leftovers


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path)


def refused(argv, capsys) -> str:
    """The one line with which a command is refused."""
    assert main([str(word) for word in argv]) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if "fwanda: error" in line]
    assert len(lines) == 1 and not captured.out
    return lines[0]


def said(argv, capsys) -> str:
    """What a command that succeeds writes on standard error, with its warnings."""
    capsys.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(argv) == 0
    return capsys.readouterr().err


def cut(path):
    path.write_text('{"a": ')


def empty(path):
    path.write_text("")


def binary(path):
    path.write_bytes(b"\xff\xfe\x00\x81")


def utf16(path):
    path.write_text("{}", encoding="utf-16")


def deep(path):
    path.write_text("[" * 100_000)


def dangling(path):
    path.symlink_to(path.with_name("nowhere"))


def a_folder(path):
    path.mkdir()


@pytest.mark.fault("broken generation config")
@pytest.mark.parametrize("make", [cut, empty, binary, utf16, deep, dangling, a_folder])
def test_a_generation_config_that_cannot_be_read_is_refused(make, folder, tmp_path, capsys):
    file = folder / "model" / "generation_config.json"
    file.unlink()
    make(file)
    line = refused(arguments(folder, tmp_path / "out", "--no-check"), capsys)
    assert "generation_config.json cannot be read" in line and not (tmp_path / "out").exists()


def test_a_model_needs_no_generation_config(folder, tmp_path):
    (folder / "model" / "generation_config.json").unlink()
    assert main(arguments(folder, tmp_path / "out", "--no-check")) == 0


@pytest.mark.fault("pipe")
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("device", [False, True], ids=["pipe", "device"])
@pytest.mark.parametrize("command", ["prune", "eval", "unpack", "bench"])
def test_a_pipe_among_the_files_of_a_model_is_refused(command, device, name, folder, tmp_path, capsys):
    path = folder / "model" / name
    path.unlink()
    path.symlink_to("/dev/zero") if device else os.mkfifo(path)
    model, out = str(folder / "model"), str(tmp_path / "out")
    commands = {
        "prune": arguments(folder, out),
        "eval": ["eval", model, "--eval", str(folder / "eval.txt")],
        "unpack": ["unpack", model, "--output", out],
        "bench": ["bench", model],
    }
    assert f"{name}: is a pipe or a device" in refused(commands[command], capsys)


@pytest.mark.fault("broken generation config")
@pytest.mark.parametrize("command", ["prune", "pack", "unpack", "eval"])
def test_a_deeply_nested_config_is_one_line(command, folder, tmp_path, capsys):
    deep(folder / "model" / "config.json")
    model, out = str(folder / "model"), str(tmp_path / "out")
    commands = {
        "prune": arguments(folder, out),
        "pack": ["pack", model, "--output", out],
        "unpack": ["unpack", model, "--output", out],
        "eval": ["eval", model, "--eval", str(folder / "eval.txt")],
    }
    assert "unexpected" not in refused(commands[command], capsys)


@pytest.mark.fault("odd config")
@pytest.mark.parametrize("key", ["output_hidden_states", "output_attentions", "use_cache"])
def test_a_switch_of_a_config_that_is_a_text_is_refused(key, folder, tmp_path, capsys):
    file = folder / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: "x"}))
    line = refused(arguments(folder, tmp_path / "out"), capsys)
    assert key in line and not (tmp_path / "out").exists()


@pytest.mark.fault("tokenizer without unknown token")
@pytest.mark.parametrize("command", ["prune", "eval", "calibrate"])
def test_a_tokenizer_without_its_unknown_token_is_one_line(command, folder, tmp_path, capsys):
    words = Tokenizer(models.WordLevel({"a": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder / "model")
    model, text = str(folder / "model"), str(folder / "eval.txt")
    commands = {
        "prune": arguments(folder, tmp_path / "out"),
        "eval": ["eval", model, "--eval", text, "--eval-seqlen", "16"],
        "calibrate": ["calibrate", model, "--calibration", text, "--output", str(tmp_path / "s.safetensors")],
    }
    line = refused(commands[command], capsys)
    assert "the tokenizer cannot read the text" in line and "unexpected" not in line


@pytest.mark.fault("file of the user")
@pytest.mark.parametrize("below", [False, True])
def test_overwrite_never_deletes_what_a_link_of_the_model_points_to(below, folder, tmp_path, capsys):
    out, model = tmp_path / "out", folder / "model"
    out.mkdir()
    shutil.move(model / "model.safetensors", out / "weights")
    if below:
        (model / "more").mkdir()
        (model / "more" / "link").symlink_to(out)
        shutil.copy(out / "weights", model / "model.safetensors")
    else:
        (model / "model.safetensors").symlink_to(out / "weights")
    assert "links to, which this run reads" in refused(arguments(folder, out, "--overwrite"), capsys)
    assert (out / "weights").stat().st_size > 0


@pytest.mark.parametrize("flag", ["--config", "--statistics", "--include", "--nsamples", "--guard", "--save"])
def test_two_dashes_are_no_value_of_a_flag(flag, folder, tmp_path, capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--flag")
    taken = parser.parse_args(["--flag=--"]).flag == "--"  # by newer versions of Python; older ones drop the dashes
    line = refused([*arguments(folder, tmp_path / "out"), f"{flag}=--"], capsys)
    assert (f"argument {flag}: expected a value, got an empty one" in line) != taken


@pytest.mark.fault("warnings")
def test_a_warning_is_shown_where_python_makes_errors_of_warnings(folder, tmp_path):
    argv = [*arguments(folder, tmp_path / "out"), "--nsamples", "4", "--no-check"]
    done = fwanda(argv, env={"PYTHONWARNINGS": "error"})
    assert done.returncode == 0 and "warning: " in done.stderr


@pytest.mark.parametrize("command", ["prune", "unpack"])
@pytest.mark.parametrize("name", ["LICENSE", "processor_config.json"])
def test_a_dangling_link_among_the_files_to_be_copied_is_told(name, command, folder, tmp_path, capsys):
    out = tmp_path / "out"
    if command == "unpack":
        assert main(arguments(folder, tmp_path / "packed", "--save", "packed", "--no-check")) == 0
        (tmp_path / "packed" / "fwanda.json").unlink()
        dangling(tmp_path / "packed" / name)
        argv = ["unpack", str(tmp_path / "packed"), "--output", str(out)]
    else:
        dangling(folder / "model" / name)
        argv = arguments(folder, out, "--no-check")
    assert f"warning: {name} could not be read and copied" in said(argv, capsys) and not (out / name).exists()


def test_leftovers_of_an_earlier_process_with_the_same_id_go_and_own_ones_stay(tmp_path):
    left = tmp_path / f".out.{os.getpid()}-0123abcd.tmp"
    left.mkdir()
    with atomic_folder(tmp_path / "out") as own:
        assert not left.exists()
        remove_leftovers(tmp_path / "out")
        assert own.exists()


@pytest.mark.parametrize("command", ["eval", "calibrate", "sample", "bench"])
def test_tensors_that_the_model_ignores_are_told(command, folder, tmp_path, capsys):
    model, text = folder / "model", str(folder / "eval.txt")
    if command == "bench":
        assert main(arguments(folder, tmp_path / "pruned", "--no-check")) == 0
        model = tmp_path / "pruned"
    weights = load_file(model / "model.safetensors")
    save_file({**weights, "extra.weight": torch.ones(2, 2)}, model / "model.safetensors", metadata={"format": "pt"})
    commands = {
        "eval": ["eval", str(model), "--eval", text, "--eval-seqlen", "16", "--eval-windows", "2"],
        "calibrate": [
            "calibrate", str(model), "--calibration", text, "--nsamples", "4", "--seqlen", "16", "--output",
            str(tmp_path / "s.safetensors"),
        ],
        "sample": ["sample", str(model), "--nsamples", "2", "--seqlen", "8", "--output", str(tmp_path / "s.jsonl")],
        "bench": ["bench", str(model), "--batches", "1", "--tokens", "1", "--prompts", "2"],
    }  # fmt: skip
    told = said(commands[command], capsys)
    lines = [line for line in told.splitlines() if "does not use 1 tensors of the files" in line]
    assert len(lines) == 1 and lines[0].endswith("the first is extra.weight")


@pytest.mark.parametrize("flag", ["--include", "--exclude", "--statistics", "--config", "--calibration"])
def test_a_very_long_value_is_not_shown_whole(flag, folder, tmp_path, capsys):
    line = refused([*arguments(folder, tmp_path / "out", method="fwanda"), flag, "x" * 100_000], capsys)
    assert len(line) < 1500


def test_a_library_without_room_in_memory_is_one_line(folder, tmp_path):
    script = f"ulimit -v 300000; exec {sys.executable} -m fwanda_pruner eval {folder / 'model'}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment(), timeout=120)
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and "not enough memory" in lines[-1] and "Traceback" not in done.stderr


@pytest.mark.fault("endless work")
@pytest.mark.parametrize("count", [10_001, 1001])
def test_a_folder_of_very_many_files_is_refused_and_a_large_one_is_told(count, folder, tmp_path, capsys):
    many = tmp_path / "many"
    for number in range(count):
        place = many / str(number // 5000)
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number}.xyz").touch()
    argv = [*arguments(folder, tmp_path / "out"), "--calibration", str(many)]
    assert main(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    expected = f"{many}: holds more than 10000 files" if count > 10_000 else f"looking through the 1001 files of {many}"
    assert any(expected in line for line in lines) and not (tmp_path / "out").exists()
