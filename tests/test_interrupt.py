"""Ctrl-C where Python or a library would answer with a traceback, or with another error."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_cli import arguments, environment, make_folder

from fwanda_pruner.cli import main
from fwanda_pruner.text import windows

# Runs fwanda. {when} is code that calls interrupt() at some moment.
PROCESS = """
import atexit, os, runpy, signal, sys

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

class Dying:
    def __del__(self):
        interrupt()

def at_import(name, act):
    sys.addaudithook(lambda event, arguments: act() if event == "import" and arguments[0] == name else None)

{when}
runpy.run_module("fwanda_pruner", run_name="__main__")
"""
MOMENTS = {
    "the first import": "at_import('fwanda_pruner.cli', interrupt)",
    "the import of torch": "at_import('torch', interrupt)",
    "an import of torch's own": "at_import('torch.nn', interrupt)",
    "a destructor": "at_import('transformers', Dying)",
    "the end": "atexit.register(interrupt)",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("interrupt"))


def test_a_rank_ends_after_its_exit_functions_and_with_all_its_output():
    code = (
        "import atexit; from fwanda_pruner import __main__; atexit.register(print, 'last'); print('first', end=' '); "
    )
    argv = [sys.executable, "-c", code + "__main__._end(3)"]
    done = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (3, "first last\n", "")


@pytest.mark.fault("Ctrl-C")
@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_shows_no_traceback(moment, folder, tmp_path):
    argv = ["--version"] if moment == "the end" else arguments(folder, tmp_path / "out")
    code = [sys.executable, "-c", PROCESS.format(when=MOMENTS[moment]), *argv]
    done = subprocess.run(code, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1:] == ([] if moment == "the end" else ["fwanda: interrupted"])
    assert "Traceback" not in done.stderr and "ignored" not in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.fault("Ctrl-C")
def test_ctrl_c_ends_a_build_in_one_line():
    code = "import os, runpy, signal, sys\nsys.argv[1:] = ['--build', 'cpu']\n"
    code += "kill = lambda event, _: os.kill(os.getpid(), signal.SIGINT) if event == 'subprocess.Popen' else None\n"
    code += "import fwanda_kernels\nsys.addaudithook(kill)\nrunpy.run_module('fwanda_kernels', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, "fwanda_kernels: interrupted\n")


@pytest.mark.fault("Ctrl-C")
def test_an_error_that_ctrl_c_causes_in_a_library_is_ctrl_c(folder, tmp_path, capsys, monkeypatch):
    def load(*_args, **_options):
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            raise RuntimeError("cannot release un-acquired lock")  # as the lock of a progress bar does

    monkeypatch.setattr(windows, "load_documents", load)
    assert main(arguments(folder, tmp_path / "out", "--eval", str(folder / "eval.txt"))) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "fwanda: interrupted" and not (tmp_path / "out").exists()
