"""Progress: every stage is counted, and a pipe gets a line now and then."""

import re
import sys
import time

import pytest
import tiny
from interrupt import interrupted_after

import fwanda_pruner
from fwanda_pruner import progress
from fwanda_pruner.progress import begin_stage, planned, progress_bar
from fwanda_pruner.run.state import RunState

RUNS = [
    {"method": "wanda"},
    {"method": "magnitude", "no_check": True},
    {"method": "magnitude", "pattern": "2:4"},
    {"method": "fwanda", "allocation": "global"},
    {"method": "fwanda", "allocation": "auto"},
    {"method": "fwanda", "allocation": "response", "pattern": "2:4"},
    {"method": "wanda", "order": "sequential", "no_check": True},
    {"method": "sparsegpt"},
    {"method": "fsparsegpt"},
    {"method": "fsparsegpt", "pattern": "2:4"},
]


def stages(error: str) -> list[tuple[int, int, str]]:
    """(number, of how many, title) of each stage that was announced."""
    found = re.findall(r"^\[[\d:]+\] stage (\d+) of (\d+): (.*)$", error, re.MULTILINE)
    return [(int(number), int(count), title) for number, count, title in found]


def prune(model=None, **settings):
    given = {"calibration": tiny.tokens(16, 24), "eval": tiny.tokens(2, 24, seed=1), **settings}
    return fwanda_pruner.prune(model or tiny.llama(), tiny.tokenizer(), guard="none", **given)


@pytest.mark.parametrize("settings", RUNS, ids=lambda s: "-".join(map(str, s.values())))
def test_every_stage_of_a_run_is_counted(settings, capsys):
    prune(**settings)
    numbers, counts, titles = zip(*stages(capsys.readouterr().err), strict=True)
    assert list(numbers) == list(range(1, counts[0] + 1)) and len(set(counts)) == 1
    assert "prune" in titles and titles[-1] == "perplexity of the pruned model"


def test_a_run_that_reads_no_text_announces_none(capsys):
    prune(method="magnitude", no_check=True, eval=None, calibration=None)
    assert [title for *_, title in stages(capsys.readouterr().err)] == [
        "decide how many weights each row keeps", "prune",
    ]  # fmt: skip


def test_given_statistics_leave_a_stage_out(capsys):
    config = fwanda_pruner.PruneConfig(nsamples=16, seqlen=24)
    statistics = fwanda_pruner.collect(tiny.llama(), config=config, calibration=tiny.tokens(16, 24))
    assert stages(capsys.readouterr().err) == [(1, 1, "calibrate")]
    prune(statistics=statistics)
    found = stages(capsys.readouterr().err)
    assert "calibrate" not in [title for *_, title in found] and [n for n, *_ in found] == list(
        range(1, found[0][1] + 1)
    )


def test_a_resumed_run_says_what_it_kept(capsys, tmp_path):
    with interrupted_after("calibrate"), pytest.raises(KeyboardInterrupt):
        prune(method="fwanda", state=RunState(tmp_path / "out"))
    capsys.readouterr()
    prune(method="fwanda", state=RunState(tmp_path / "out", resume=True))
    kept = {
        title for *_, title in stages(capsys.readouterr().err) if title.endswith(" (kept from the interrupted run)")
    }
    assert {title.split(" (")[0] for title in kept} == {
        "read the texts", "perplexity of the dense model", "calibrate",
    }  # fmt: skip


def test_without_progress_there_is_no_line(capsys):
    prune(progress=False)
    assert capsys.readouterr().err == ""


def test_a_pipe_gets_a_line_now_and_then(capsys, monkeypatch):
    for _ in progress_bar(range(4), label="work", unit="steps"):
        pass
    assert capsys.readouterr().err == ""  # shorter than LINE_SECONDS
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    with planned(["first", "second"]):
        begin_stage("second")
        for _ in progress_bar(range(4), label="work", unit="steps"):
            pass
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "[0:00] stage 2 of 2: second"
    assert lines == [f"[0:00]   work: {done} of 4 steps, about 0:00 left" for done in (1, 2, 3)]


def test_a_long_pass_of_a_run_is_not_silent(capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    prune(method="fwanda", micro_batch="1")
    assert re.search(
        r"calibrate \(forward and backward\): \d+ of 16 windows, about 0:\d\d left", capsys.readouterr().err
    )


def test_what_was_done_before_does_not_shorten_the_estimate(capsys, monkeypatch):
    start = time.monotonic()
    clock = iter([start, start + 10, start + 10])
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with progress_bar(total=100, initial=50, label="work", unit="windows") as bar:
        bar.update(10)
    assert capsys.readouterr().err == "work: 60 of 100 windows, about 0:40 left\n"


def test_a_terminal_gets_a_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for _ in progress_bar(range(4), label="work", unit="steps"):
        pass
    assert "work:   0%|" in capsys.readouterr().err


def test_a_closed_error_stream_gets_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    with progress_bar(total=2, label="work", unit="steps") as bar:
        bar.update(2)
    assert bar.n == 2 and capsys.readouterr().out == ""
