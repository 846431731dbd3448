"""Standard output and standard error in every state: closed, full, a broken pipe, not Unicode; and colours."""

import json
import os
import sys

import pytest
import tiny
from helpers_cli import arguments, fwanda, make_folder
from reports import make_report

from fwanda_pruner import prune
from fwanda_pruner.cli import main
from fwanda_pruner.terminal import say, styled


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("terminal"))


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("record") / "fwanda.json"
    path.write_text(json.dumps(make_report().to_dict()))
    return str(path)


def broken_pipe():
    """A stream whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


COMMANDS = {"report": ["report", "RECORD"], "help": ["prune", "--help"], "version": ["--version"], "doctor": ["doctor"]}


@pytest.mark.fault("broken output")
@pytest.mark.parametrize("name", [*COMMANDS, "dry run"])
def test_a_reader_that_goes_away_is_no_traceback(name, folder, record, monkeypatch, capsys, tmp_path):
    argv = COMMANDS.get(name) or [*arguments(folder, tmp_path / "out"), "--dry-run"]
    monkeypatch.setattr(sys, "stdout", broken_pipe())
    assert main([record if word == "RECORD" else word for word in argv]) == 141
    error = capsys.readouterr().err
    assert "Traceback" not in error and "error" not in error


@pytest.mark.fault("broken output")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_output_is_one_line_where_the_text_is_all_there_is(name, record, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))  # noqa: SIM115
    assert main([record if word == "RECORD" else word for word in COMMANDS[name]]) == 2
    reason = "standard output cannot be written (No space left on device)"
    assert capsys.readouterr().err == f"fwanda: error: {reason}; send it to another file or program\n"


@pytest.mark.fault("broken output")
@pytest.mark.parametrize("output", ["full", "closed", "broken"])
def test_a_saved_model_is_complete_whatever_becomes_of_the_summary(output, folder, tmp_path, monkeypatch, capsys):
    streams = {"full": lambda: open("/dev/full", "w"), "closed": lambda: None, "broken": broken_pipe}  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", streams[output]())
    code = main(arguments(folder, tmp_path / "out"))
    assert code == (141 if output == "broken" else 0)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert main([*arguments(folder, tmp_path / "out"), "--resume"]) in (0, 141)  # counts the zeros in the files
    if output != "broken":
        assert f"{tmp_path / 'out'} is complete" in capsys.readouterr().err


@pytest.mark.fault("broken output")
def test_a_record_that_cannot_be_printed_is_said_to_be_saved(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", open("/dev/full", "w"))  # noqa: SIM115
    assert main([*arguments(folder, tmp_path / "out"), "--json"]) == 0
    assert f"{tmp_path / 'out'} is complete" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.fault("broken output")
@pytest.mark.parametrize("error", ["full", "broken", "closed"])
def test_lost_lines_of_progress_and_warnings_do_not_stop_a_run(error, folder, tmp_path, monkeypatch, capsys):
    streams = {"full": lambda: open("/dev/full", "w"), "closed": lambda: None, "broken": broken_pipe}  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", streams[error]())
    assert main(arguments(folder, tmp_path / "out", "--nsamples", "8")) == 0
    out = capsys.readouterr().out
    assert "saved" in out and "stage" not in out


@pytest.mark.fault("broken output")
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_that_lacks_characters_gets_escapes(encoding, folder, tmp_path):
    (tmp_path / "мир.txt").write_text((folder / "calibration.txt").read_text())
    argv = arguments(folder, tmp_path / "выход", "--calibration", str(tmp_path / "мир.txt"))
    done = fwanda([*argv, "--eval", str(tmp_path / "мир.txt")], env={"PYTHONIOENCODING": encoding})
    assert done.returncode == 0 and "\\u0432" in done.stdout and "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "выход" / "fwanda.json").is_file()


@pytest.mark.fault("broken output")
def test_python_has_nothing_to_add_at_its_exit(record):
    done = fwanda(["report", record], stdout=broken_pipe())
    assert (done.returncode, done.stderr) == (141, "")
    with open("/dev/full", "w") as full:
        done = fwanda(["prune", "--help"], stdout=full)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
        assert fwanda(["--version"], stderr=full).returncode == 0
        assert fwanda(["purne"], stderr=full).returncode == 2


def test_json_prints_the_record_and_nothing_else(folder, tmp_path, capsys):
    argv = arguments(folder, tmp_path / "out", "--json")
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert out == (tmp_path / "out" / "fwanda.json").read_text() and json.loads(out)["sparsity"]["matrices"] == 0.5
    assert main([*argv, "--resume"]) == 0 and capsys.readouterr().out == out


def test_colours_are_for_a_terminal_that_wants_them(monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert styled("x", "red", Terminal()) == "\033[1;31mx\033[0m"
    assert styled("x", "red", None) == styled("x", "red", open(os.devnull)) == "x"  # noqa: SIM115
    monkeypatch.setenv("TERM", "dumb")
    assert styled("x", "red", Terminal()) == "x"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("x", "red", Terminal()) == "x"


def test_say_needs_no_stream(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    say("lost")
    assert capsys.readouterr().out == ""


def test_the_summary_is_plain_text_in_a_file(folder, tmp_path):
    done = fwanda(arguments(folder, tmp_path / "out"), env={"TERM": "xterm"})
    assert done.returncode == 0 and "\033" not in done.stdout + done.stderr
    assert "\nnext:\n  fwanda report " in done.stdout


class WriteOnly:
    """What logging puts in the place of standard error often has only write()."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


class NoText(WriteOnly):
    def write(self, text):
        raise TypeError("bytes are wanted")


@pytest.mark.fault("broken output")
@pytest.mark.parametrize("kind", [WriteOnly, NoText, object])
def test_an_object_in_the_place_of_standard_error_stops_no_run(kind, monkeypatch):
    stream = kind()
    monkeypatch.setattr(sys, "stderr", stream)
    report = prune(tiny.llama(), method="wanda", calibration=tiny.tokens(16, 24))
    assert report.sparsity["matrices"] == 0.5
    assert kind is not WriteOnly or "stage 1 of" in stream.text
    assert styled("x", "red", stream) == "x"
