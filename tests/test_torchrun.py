"""Commands on several ranks: one rank prints and writes, and a rank that fails ends the job with one line."""

import json
import time
from pathlib import Path

import pytest
import torch
from helpers_cli import arguments, fwanda, make_folder
from helpers_ranks import Launcher, torchrun

METHOD = "fsparsegpt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("torchrun"))


@pytest.fixture(scope="module")
def launcher():
    with Launcher() as running:
        yield running


@pytest.fixture(scope="module")
def whole(folder, launcher) -> bytes:
    """The weights that one rank writes."""
    done = launcher.run(1, folder / "streams", arguments(folder, folder / "whole", method=METHOD))
    assert done.codes == [0], done.stderr
    return (folder / "whole" / "model.safetensors").read_bytes()


def own_lines(text: str) -> list[str]:
    """The lines of the command, without those of torchrun and torch."""
    return [line for line in text.splitlines() if line.startswith(("fwanda:", "warning:"))]


def left(folder: Path) -> list[str]:
    """Names in a folder, without those of streams."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("streams"))


def test_prune_under_torchrun_writes_the_files_of_one_rank_and_prints_its_record_once(folder, tmp_path, whole):
    out = tmp_path / "out"
    done = torchrun(2, *arguments(folder, out, "--json", method=METHOD))
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["ranks"], record["engine"]) == (2, "resident")
    assert record == json.loads((out / "fwanda.json").read_text())
    assert (out / "model.safetensors").read_bytes() == whole
    assert sum("stage 1 of" in line for line in done.stderr.splitlines()) == 1
    assert sorted(line.removeprefix("warning: ") for line in own_lines(done.stderr)) == sorted(record["warnings"])
    assert left(tmp_path) == ["out"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("method", ["fwanda", "fsparsegpt"])
def test_two_gpus_give_the_bits_of_one_on_gpu(folder, tmp_path, method):
    fixed = ["--device", "auto", "--deterministic", "--micro-batch", "4", "--compile", "off"]
    written = []
    for ranks in (1, 2):
        done = torchrun(ranks, *arguments(folder, tmp_path / str(ranks), method=method), *fixed)
        assert done.returncode == 0, done.stderr
        written.append((tmp_path / str(ranks) / "model.safetensors").read_bytes())
    assert written[0] == written[1]


def commands(folder: Path) -> dict[str, tuple[list, str]]:
    """Name -> a command that writes to OUT, and what it prints once."""
    model = folder / "model"
    size = ["--nsamples", 16, "--seqlen", 24, "--device", "cpu"]
    text = ["--calibration", folder / "calibration.txt", *size]
    evaluation = ["--eval", folder / "eval.txt", "--eval-seqlen", 24]
    (folder / "recipe.yaml").write_text("cells: [{method: [magnitude, wanda]}]\n")
    return {
        "calibrate": (["calibrate", model, *text, "--output", "OUT.safetensors"], "statistics of 14 matrices saved"),
        "sample": (["sample", model, *size, "--output", "OUT.jsonl"], "16 windows of 24 tokens"),
        "eval": (["eval", model, *evaluation, "--device", "cpu"], '"perplexity": ['),
        "sweep": (["sweep", model, folder / "recipe.yaml", *text, *evaluation, "--output", "OUT"], "| magnitude"),
    }


@pytest.mark.parametrize("name", ["calibrate", "sample", "eval", "sweep"])
def test_other_commands_print_their_result_once(folder, tmp_path, launcher, name):
    command, printed = commands(folder)[name]
    command = [str(part).replace("OUT", str(tmp_path / "out")) for part in command]
    done = launcher.run(2, tmp_path / "streams", command)
    assert done.codes == [0, 0], done.stderr
    assert done.stdout.count(printed) == 1
    assert len(left(tmp_path)) == (name != "eval")


@pytest.mark.parametrize(
    ("ranks", "fault", "line"),
    [
        (2, (1, "calibrate", "kill"), "rank 1 of 2 was killed, perhaps because memory ran out, so all ranks stop"),
        (3, (0, "prune", "kill"), "rank 0 of 3 was killed, perhaps because memory ran out, so all ranks stop"),
        (2, (0, "save", "kill"), "rank 0 of 2 was killed, perhaps because memory ran out, so all ranks stop"),
        (3, (1, "eval_pruned", "kill"), "rank 1 of 3 was killed, perhaps because memory ran out, so all ranks stop"),
        (3, (2, "prune", "memory"), "rank 2 of 3: CUDA out of memory; use a smaller --micro-batch"),
        (2, (1, "check", "disk"), "rank 1 of 2: [Errno 28] No space left on device"),
        (2, (0, "check", "disk"), "rank 0 of 2: [Errno 28] No space left on device"),
    ],
)
@pytest.mark.fault("rank fails")
def test_a_rank_that_fails_ends_all_with_one_line_and_the_run_resumes_on_other_ranks(
    folder, tmp_path, launcher, whole, ranks, fault, line
):
    out = tmp_path / "out"
    command, begin = arguments(folder, out, "--eval", str(folder / "eval.txt"), method=METHOD), time.monotonic()
    done = launcher.run(ranks, tmp_path / "streams", command, fault)
    assert all(done.codes) and time.monotonic() - begin < 30
    (error,) = [text for text in own_lines(done.stderr) if text.startswith("fwanda")]
    assert error.startswith(f"fwanda: error: {line}") and "Traceback" not in done.stderr
    assert left(tmp_path) == [".out.resume"]
    done = launcher.run(5 - ranks, tmp_path / "streams again", [*command, "--resume"])
    assert not any(done.codes), done.stderr
    assert (out / "model.safetensors").read_bytes() == whole
    assert json.loads((out / "fwanda.json").read_text())["ranks"] == 5 - ranks
    assert left(tmp_path) == ["out"]


@pytest.mark.fault("rank fails")
@pytest.mark.parametrize(("more", "name"), [("--engine sharded", "engine"), ("--dry-run", "dry_run")])
def test_ranks_with_other_arguments_are_one_line(folder, tmp_path, more, name):
    done = torchrun(2, *arguments(folder, tmp_path / "out", method=METHOD), more=more)
    assert done.returncode == 1
    (error,) = [text for text in done.stderr.splitlines() if text.startswith("fwanda")]
    assert error.endswith(f": rank 1 differs from rank 0 in {name}: give all ranks the same")
    assert left(tmp_path) == []


@pytest.mark.fault("Ctrl-C")
def test_ctrl_c_is_one_line_that_says_how_to_go_on(folder, tmp_path, launcher):
    command = arguments(folder, tmp_path / "out", method=METHOD)
    done = launcher.run(2, tmp_path / "streams", command, (None, "prune", "Ctrl-C"))
    assert done.codes == [130, 130]
    expected = "fwanda: error: rank 0 of 2: interrupted; continue with the same command and --resume"
    assert own_lines(done.stderr)[-1] == expected and done.stderr.count("interrupted") == 1


@pytest.mark.fault("ranks resume")
def test_one_process_does_not_resume_what_ranks_began(folder, tmp_path, launcher):
    command = arguments(folder, tmp_path / "out", method=METHOD)
    launcher.run(2, tmp_path / "streams", command, (1, "prune", "kill"))
    done = fwanda([*command, "--resume"])
    assert done.returncode == 2
    assert 'had started "by torchrun", this one has "without torchrun"' in own_lines(done.stderr)[-1]


@pytest.mark.parametrize("command", [["doctor"], ["prune", "--methd", "wanda"]])
def test_a_mistake_that_all_ranks_make_is_one_line(tmp_path, launcher, command):
    done = launcher.run(2, tmp_path / "streams", command)
    assert all(done.codes) and done.stdout == ""
    assert len(own_lines(done.stderr)) == 1


def test_what_only_the_first_rank_meets_is_its_error(folder, tmp_path, launcher):
    out = tmp_path / "out"
    out.mkdir()
    (out / "file").write_text("")
    done = launcher.run(3, tmp_path / "streams", arguments(folder, out))
    assert set(done.codes) <= {2, 130}
    (line,) = own_lines(done.stderr)
    assert line.startswith(f"fwanda: error: rank 0 of 3: output {out}")
    assert [path.name for path in out.iterdir()] == ["file"]


def test_a_command_that_ranks_cannot_share_is_refused(tmp_path, launcher):
    done = launcher.run(2, tmp_path / "streams", ["doctor"])
    assert own_lines(done.stderr)[0].endswith("fwanda doctor runs in one process; start it without torchrun")
