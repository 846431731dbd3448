"""Files and variables that a command reads, and that are not what it expects: pipes, devices, YAML, ranks by hand."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_cli import arguments, environment, fwanda, make_folder

from fwanda_pruner import PruneConfig, Statistics, UserError
from fwanda_pruner.cli import main
from fwanda_pruner.report.record import Report
from fwanda_pruner.run.sample import check_sample_file
from fwanda_pruner.sweep.recipe import Recipe

READERS = {
    "report": (Report.load, "fwanda.json"),
    "config": (PruneConfig.load, "c.yaml"),
    "recipe": (Recipe.load, "r.yaml"),
    "statistics": (Statistics.load, "s.safetensors"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("odd"))


@pytest.mark.fault("pipe")
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_or_a_device_is_refused_at_once(reader, kind, tmp_path):
    read, name = READERS[reader]
    path = tmp_path / name
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="is a pipe or a device; write .* to a file first"):
        read(path)


@pytest.mark.fault("pipe")
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_is_no_file_of_sample(kind, tmp_path):
    path = tmp_path / "own.jsonl"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match="is a device, a pipe or a socket; choose another name"):
        check_sample_file(path)


@pytest.mark.fault("pipe")
def test_a_pipe_in_the_place_of_the_record_of_a_folder_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fwanda.json")
    with pytest.raises(UserError, match="fwanda.json: is a pipe"):
        Report.load(tmp_path)


YAML = {
    "compile: on": '--compile must be one of auto, on, off, got True (quote it in YAML: "on")',
    "checkpointing: off": 'got False (quote it in YAML: "off")',
    "seed: 1\nmethod: wanda\nseed: 2": "it gives 'seed' twice; leave one of them out",
    '{"seed": 1, "seed": 1}': "it gives 'seed' twice",
    "save: packed\nsparsity: 0.149": "got 14.9 %",
}


@pytest.mark.fault("yaml")
@pytest.mark.parametrize("text", YAML)
def test_settings_that_yaml_reads_otherwise_than_meant_are_one_line(text, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        PruneConfig.load(tmp_path / "c.yaml")
    assert YAML[text] in str(error.value) and "\n" not in str(error.value)


RECIPES = {
    "cells: [{method: wanda}]\ncells: [{method: magnitude}]": "it gives 'cells' twice",
    "cells: [{method: wanda, sparsity: 0.5, sparsity: 0.6}]": "it gives 'sparsity' twice",
    "base: {save: packed}\ncells: [{method: wanda}]": "a sweep saves no models, so save has no effect; leave it out",
    "cells: [{method: wanda, save: [dense, masks]}]": "a sweep saves no models",
}


@pytest.mark.fault("yaml")
@pytest.mark.parametrize("text", RECIPES)
def test_what_a_recipe_would_drop_in_silence_is_refused(text, tmp_path):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        Recipe.load(tmp_path / "r.yaml")
    assert RECIPES[text] in str(error.value)


def test_a_line_break_in_the_name_of_the_cache_breaks_no_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FWANDA_CACHE", f"{tmp_path}/a\nb")
    assert main(["doctor"]) == 0
    assert f"{tmp_path}/a\ufffdb holds" in capsys.readouterr().out


# Sends itself a signal when the folder that will become the output is flushed to the disk.
HANGUP = """
import os, runpy, signal, sys

def audit(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".tmp/fwanda.json"):
        os.kill(os.getpid(), signal.SIGHUP)

sys.addaudithook(audit)
runpy.run_module("fwanda_pruner", run_name="__main__")
"""


@pytest.mark.fault("closed terminal")
@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_leaves_no_half_output_and_nohup_finishes(nohup, folder, tmp_path):
    argv = [sys.executable, "-c", HANGUP, *arguments(folder, tmp_path / "out")]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)  # a new process inherits it
    try:
        done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=300)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done.returncode == (0 if nohup else 130), done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == (["out"] if nohup else [".out.resume"])


RANKS = {"too large": ("5", "2"), "negative": ("-1", "2"), "of no ranks": ("0", "0")}


@pytest.mark.fault("ranks by hand")
@pytest.mark.parametrize("ranks", RANKS)
def test_a_rank_that_cannot_be_is_refused_at_once(ranks, folder, tmp_path):
    rank, size = RANKS[ranks]
    place = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = fwanda(arguments(folder, tmp_path / "out"), env=place)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("fwanda: error: the variable RANK must be in [0, WORLD_SIZE), got")


@pytest.mark.fault("ranks by hand")
@pytest.mark.parametrize("place", [("127.0.0.1", "0"), ("127.0.0.1", "99999"), ("127.0.0.1", "-1"), ("", "29500")])
def test_an_address_that_cannot_be_is_refused_at_once(place, folder, tmp_path):
    address, port = place
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": port}
    done = fwanda(arguments(folder, tmp_path / "out"), env=given)
    assert done.returncode == 2
    assert f"a host and a port from 1 to 65535, got {address!r} and {port}; start" in done.stderr.splitlines()[-1]


def test_settings_in_json_are_read(tmp_path):
    (tmp_path / "c.json").write_text(json.dumps({"method": "wanda", "eval": [str(tmp_path)]}))
    assert PruneConfig.load(tmp_path / "c.json").method == "wanda"
