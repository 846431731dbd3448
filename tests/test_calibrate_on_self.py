"""`--calibration self`: a run in which the model writes the text that it is calibrated on."""

import json

import kill
import pytest
import tiny
import torch
from interrupt import interrupted_after

import fwanda_pruner
from fwanda_pruner import PruneConfig, Statistics, UserError
from fwanda_pruner.cli import main
from fwanda_pruner.run import stage as stages
from fwanda_pruner.text.own_text import sample_tokens
from fwanda_pruner.text.windows import calibration_tokens, tokens_sha256

LENGTH = 24
FURTHER = 16  # windows beside those of the calibration


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("self")
    tiny.llama().save_pretrained(path / "model")
    tiny.tokenizer().save_pretrained(path / "model")
    (path / "text.txt").write_text(tiny.text(1500))
    return path


@pytest.fixture
def argv(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "SAVE_SECONDS", 0)
    return [
        "prune", str(folder / "model"), "--nsamples", "20", "--seqlen", str(LENGTH), "--bos", "none", "--guard", "none",
        "--output", str(tmp_path / "out"), "--calibration", "self", "--device", "cpu",
    ]  # fmt: skip


def record(tmp_path, name="out") -> dict:
    return json.loads((tmp_path / name / "fwanda.json").read_text())


def own(nsamples: int, start_token: int = 1) -> torch.Tensor:
    settings = {"nsamples": nsamples, "seqlen": LENGTH, "seed": 0, "start_token": start_token, "progress": False}
    return sample_tokens(tiny.llama(), **settings)


def prune(**settings):
    settings = {"nsamples": 20, "seqlen": LENGTH, "guard": "none", "bos": "none", "progress": False, **settings}
    return fwanda_pruner.prune(settings.pop("model", None) or tiny.llama(), **settings)


@pytest.mark.parametrize("method", ["wanda", "fwanda", "sparsegpt"])
def test_a_model_is_calibrated_on_what_it_writes(method, argv, tmp_path, capsys):
    assert main([*argv, "--method", method]) == 0
    found = record(tmp_path)
    assert found["config"]["calibration"] == ["self"] and found["config"]["start_token"] is None
    assert found["tokens_sha256"] == tokens_sha256(own(20 + FURTHER)[:20])
    (domain,) = found["domains"]
    assert (domain["source"], domain["calibrated"], domain["unread"], domain["windows"]) == ("self", True, True, 8)
    assert found["seconds"]["sample"] > 0 and "sample" in found["energy_details"]["phases"]
    assert "sample " in capsys.readouterr().out  # among the seconds of the summary


def test_a_file_and_own_text_are_mixed(argv, folder, tmp_path):
    file = str(folder / "text.txt")
    assert main([*argv, "--calibration", f"{file}:3", "--allocation", "response"]) == 0
    found = record(tmp_path)
    assert found["config"]["calibration"] == ["self", f"{file}:3"]
    written, text = (
        own(5 + FURTHER),
        calibration_tokens(file, tiny.tokenizer(), nsamples=15, seqlen=LENGTH, seed=0, bos=False),
    )
    order = fwanda_pruner.source_shares.interleaved([5, 15])
    parts = [iter(written[:5]), iter(text)]
    assert found["tokens_sha256"] == tokens_sha256(torch.stack([next(parts[label]) for label in order]))
    assert [d["source"] for d in found["domains"]] == ["self", file]
    assert found["config"]["chosen"]["losses"]["dense"].keys() == {"self", file}


def test_the_python_call_does_the_same(argv, tmp_path):
    assert main(argv) == 0
    report = prune(tokenizer=tiny.tokenizer(), calibration="self")
    assert report.to_dict()["matrices"] == record(tmp_path)["matrices"]
    assert report.domains == record(tmp_path)["domains"]


def test_the_seed_decides_the_text():
    hashes = {prune(tokenizer=tiny.tokenizer(), calibration="self", seed=seed).tokens_sha256 for seed in (0, 0, 1)}
    assert len(hashes) == 2


@pytest.mark.parametrize("start", ["5", "w5"])
def test_another_start_token_is_recorded_and_changes_the_text(start, argv, tmp_path):
    assert main([*argv, "--start-token", start]) == 0
    assert record(tmp_path)["config"]["start_token"] == start
    assert record(tmp_path)["tokens_sha256"] == tokens_sha256(own(20 + FURTHER, start_token=5)[:20])


def test_own_text_as_a_guard(folder):
    report = prune(tokenizer=tiny.tokenizer(), calibration=str(folder / "text.txt"), guard="self")
    assert [(d["source"], d["calibrated"], d["windows"]) for d in report.domains] == [
        (str(folder / "text.txt"), True, 8), ("self", False, 8),
    ]  # fmt: skip
    assert report.seconds["sample"] > 0


def test_own_text_as_a_guard_is_not_what_the_command_wrote_for_calibration(folder, tmp_path):
    """`fwanda sample` draws with the same default seed; the guard must hold windows that calibration did not read."""
    file, tokenizer = tmp_path / "own.jsonl", tiny.tokenizer()
    text = ["--nsamples", "20", "--seqlen", str(LENGTH), "--device", "cpu"]
    assert main(["sample", str(folder / "model"), "--output", str(file), *text]) == 0
    own_file, guard = prune(tokenizer=tokenizer, calibration=str(file), guard="self").domains
    assert not own_file["unread"] and guard["unread"] and guard["dense"] != own_file["dense"]


@pytest.mark.parametrize(
    "settings", [{"method": "magnitude"}, {"no_check": True, "method": "magnitude"}], ids=["guards", "no check"]
)
def test_a_model_writes_nothing_where_nothing_is_read(settings):
    report = prune(tokenizer=tiny.tokenizer(), calibration="self", **settings)
    assert "sample" not in report.seconds and report.domains == []


# Statistics


@pytest.mark.parametrize("allocation", ["global", "response"])
def test_statistics_and_the_run_that_takes_them_read_one_text(allocation, argv, folder, tmp_path):
    file = str(tmp_path / "statistics.safetensors")
    assert main(["calibrate", *argv[1:6], "--bos", "none", "--calibration", "self", "--output", file]) == 0
    statistics = Statistics.load(file)
    assert statistics.text["calibration"] == ["self"]
    assert statistics.tokens_sha256 == tokens_sha256(own(20 + FURTHER)[:20])
    assert main([*argv, "--allocation", allocation]) == 0
    argv[argv.index("--output") + 1] = str(tmp_path / "given")
    assert main([*argv, "--allocation", allocation, "--statistics", file]) == 0
    one, other = record(tmp_path), record(tmp_path, "given")
    for key in ("matrices", "domains", "tokens_sha256", "warnings"):
        assert one[key] == other[key], key


def test_wanda_with_statistics_writes_no_text(tmp_path):
    config = PruneConfig(calibration="self", nsamples=20, seqlen=LENGTH, bos="none")
    statistics = fwanda_pruner.collect(tiny.llama(), tiny.tokenizer(), config=config, progress=False)
    report = prune(tokenizer=tiny.tokenizer(), calibration="self", statistics=statistics, method="wanda")
    assert "sample" not in report.seconds and report.domains == []


# Interruptions


@pytest.mark.fault("long run dies")
@pytest.mark.fault("Ctrl-C")
@pytest.mark.parametrize("kept", ["sample-part", "sample", "text", "calibrate"])
def test_resume_goes_on_with_the_same_text(kept, argv, folder, tmp_path, capsys):
    argv += ["--calibration", str(folder / "text.txt")]
    assert main(argv) == 0
    expected = kill.result(tmp_path / "out")
    argv[argv.index("--output") + 1] = str(tmp_path / "again")
    with interrupted_after(kept):
        assert main(argv) == 130
    assert capsys.readouterr().err.splitlines()[-1].endswith("continue with the same command and --resume")
    assert main([*argv, "--resume"]) == 0
    assert kill.result(tmp_path / "again") == expected
    assert record(tmp_path, "again")["domains"] == record(tmp_path)["domains"]
    assert ("sample" in record(tmp_path, "again")["seconds"]) == (kept == "sample-part")


def test_a_text_that_was_written_is_not_written_again(argv, monkeypatch):
    with interrupted_after("sample"):
        assert main(argv) == 130
    monkeypatch.setattr("fwanda_pruner.run.stages.sample_tokens", None)
    assert main([*argv, "--resume"]) == 0


def test_another_start_token_does_not_go_on(argv, capsys):
    with interrupted_after("sample"):
        assert main(argv) == 130
    assert main([*argv, "--start-token", "5", "--resume"]) == 2
    assert 'the interrupted run had start_token null, this one has "5"' in capsys.readouterr().err


# Bad input


def test_without_a_tokenizer_is_one_line():
    with pytest.raises(UserError, match="^the text 'self' needs a tokenizer, got none: pass one") as error:
        prune(calibration="self")
    assert "\n" not in str(error.value)


def test_a_model_without_a_start_token_is_one_line_that_names_the_flag(argv, tmp_path, capsys):
    model, tokenizer = tiny.llama(), tiny.tokenizer()
    model.config.bos_token_id = model.generation_config.bos_token_id = None
    tokenizer.bos_token = None
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    argv[1] = str(tmp_path / "model")
    assert main(argv) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fwanda: error: ")]
    assert len(lines) == 1 and "has no start token" in lines[0] and "by --start-token ID|TOKEN" in lines[0]
    assert not (tmp_path / "out").exists()
    assert main([*argv, "--start-token", "w5"]) == 0


@pytest.mark.parametrize(
    "extra, message",
    [
        (
            ["--start-token", "nothing"],
            "--start-token must be a token of the tokenizer or the number of one, got 'nothing'",
        ),
        (["--start-token", "64"], "--start-token must be a token of the model, in [0, 64), got 64"),
        (["--calibration", "self"], "--calibration names self twice"),
        (["--calibration", "self:2"], "--calibration names self twice"),
        (["--eval", "self"], "--eval self: the text that a model writes is for calibration; name another text"),
        (["--calibration", "sample:1000"], "--calibration self gets none of 20 windows"),
    ],
)
def test_a_mistake_is_one_line(extra, message, argv, tmp_path, capsys):
    assert main([*argv, *extra]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fwanda: error: ")]
    assert len(lines) == 1 and message in lines[0]
    assert not (tmp_path / "out").exists()
