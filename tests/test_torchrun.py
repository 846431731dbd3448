"""Commands under torchrun: one rank prints and writes, and a rank that fails ends the job with one line."""

import json
import time
from pathlib import Path

import pytest
from helpers_cli import arguments, make_folder
from helpers_ranks import TESTS, torchrun

METHOD = "fsparsegpt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("torchrun"))


@pytest.fixture(scope="module")
def whole(folder) -> bytes:
    """The weights that one rank writes."""
    done = torchrun(1, "-m", "fwanda_pruner", *arguments(folder, folder / "whole", method=METHOD))
    assert done.returncode == 0, done.stderr
    return (folder / "whole" / "model.safetensors").read_bytes()


def own_lines(text: str) -> list[str]:
    """The lines of the command, without those of torchrun and torch."""
    return [line for line in text.splitlines() if line.startswith(("fwanda:", "warning:"))]


def commands(folder: Path, out: Path) -> list[list[str]]:
    """One of each command that ranks share, with results in a new folder."""
    out.mkdir()
    text = ["--calibration", str(folder / "calibration.txt"), "--nsamples", "8", "--seqlen", "24", "--device", "cpu"]
    model = str(folder / "model")
    recipe = out / "recipe.yaml"
    recipe.write_text("methods: [wanda, fwanda]\nsparsities: [0.5]\n")
    return [
        ["calibrate", model, *text, "--output", str(out / "statistics.safetensors")],
        ["sample", model, "--nsamples", "3", "--seqlen", "16", "--device", "cpu", "--output", str(out / "own.jsonl")],
        ["prune", model, *text, "--allocation", "row", "--output", str(out / "pruned"), "--json"],
        ["eval", str(out / "pruned"), "--eval", str(folder / "eval.txt"), "--eval-seqlen", "24", "--device", "cpu"],
    ]


def test_commands_write_the_same_files_on_two_ranks_as_on_one_and_print_once(folder, tmp_path):
    printed = []
    for ranks in (1, 2):
        done = torchrun(ranks, TESTS / "rank_commands.py", json.dumps(commands(folder, tmp_path / str(ranks))))
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("statistics of 14 matrices saved") == 1
        assert done.stdout.count('"ranks": ') == 1 and f'"ranks": {ranks}' in done.stdout
        printed.append(done.stdout[done.stdout.rindex('"perplexity"') :].replace(f"/{ranks}/", "/"))
    assert printed[0] == printed[1]
    for name in ("statistics.safetensors", "own.jsonl", "pruned/model.safetensors"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


@pytest.mark.parametrize(
    ("ranks", "fault", "line"),
    [
        (2, (1, "calibrate", "kill"), "rank 1 of 2 was killed, so all ranks stop; continue with --resume"),
        (3, (0, "prune", "kill"), "rank 0 of 3 was killed, so all ranks stop; continue with --resume"),
        (3, (2, "prune", "memory"), "rank 2 of 3: CUDA out of memory; use a smaller --micro-batch"),
        (2, (1, "check", "disk"), "rank 1 of 2: [Errno 28] No space left on device"),
    ],
)
@pytest.mark.fault("rank fails")
def test_a_rank_that_fails_ends_all_with_one_line_and_resumes_on_other_ranks(
    folder, tmp_path, whole, ranks, fault, line
):
    out = tmp_path / "out"
    command = arguments(folder, out, method=METHOD)
    begin = time.monotonic()
    done = torchrun(ranks, TESTS / "rank_fault.py", *fault, *command)
    assert done.returncode != 0 and time.monotonic() - begin < 60
    errors = [text for text in own_lines(done.stderr) if text.startswith("fwanda")]
    assert len(errors) == 1 and errors[0].startswith(f"fwanda: error: {line}")
    assert [path.name for path in tmp_path.iterdir()] == [".out.resume"]
    done = torchrun(5 - ranks, "-m", "fwanda_pruner", *command, "--resume")
    assert done.returncode == 0, done.stderr
    assert (out / "model.safetensors").read_bytes() == whole
    assert json.loads((out / "fwanda.json").read_text())["ranks"] == 5 - ranks
    assert not (tmp_path / ".out.resume").exists()


@pytest.mark.fault("ranks resume")
def test_a_run_of_ranks_is_not_resumed_in_one_process_without_groups(folder, tmp_path):
    from helpers_cli import fwanda

    command = arguments(folder, tmp_path / "out", method=METHOD)
    torchrun(2, TESTS / "rank_fault.py", 1, "prune", "kill", *command)
    done = fwanda([*command, "--resume"])
    assert done.returncode == 2 and len(done.stderr.splitlines()) >= 1
    assert 'had windows "16 groups", this one has "one group"' in done.stderr


def test_a_command_that_ranks_cannot_share_is_refused_in_one_line():
    done = torchrun(2, "-m", "fwanda_pruner", "doctor")
    assert done.returncode != 0 and done.stdout == ""
    (line,) = own_lines(done.stderr)
    assert line.endswith("fwanda doctor runs in one process; start it without torchrun")
