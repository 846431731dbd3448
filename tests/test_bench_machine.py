"""Benchmarks on a busy machine say so, and new results go where git ignores them."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from lib.machine import busy  # noqa: E402
from lib.results import RESULTS, UNSHARED, OpRows  # noqa: E402

FACTS = {"card": "a card", "threads": 2, "date": "2026-11-29"}


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))


def earlier(folder: Path, *rates: float, **changes) -> Path:
    for i, rate in enumerate(rates):
        result = {**FACTS, "copy_gb_per_s": rate, "rows": [], **changes}
        (folder / f"ops-a-card-{i}.json").write_text(json.dumps(result))
    return folder


@pytest.mark.parametrize("rate, is_busy", [(25.0, False), (16.0, False), (14.0, True), (0.5, True)])
def test_copies_far_below_the_usual_rate_mean_a_busy_machine(rate, is_busy, quiet, tmp_path):
    found = busy({**FACTS, "copy_gb_per_s": rate}, "cpu", earlier(tmp_path, 20.0, 25.0))
    assert (found is not None) == is_busy
    if is_busy:
        assert found == f"copies run at {rate} GB/s, usually at 25.0 on this machine; it is busy"


@pytest.mark.parametrize("changes", [{"card": "another"}, {"threads": 8}, {"busy": "it was busy"}])
def test_results_of_other_machines_and_of_busy_ones_say_nothing_of_this_one(changes, quiet, tmp_path):
    folder = earlier(tmp_path, 25.0, **changes)
    assert busy({**FACTS, "copy_gb_per_s": 1.0}, "cpu", folder) is None


def test_many_waiting_processes_mean_a_busy_cpu_and_say_nothing_of_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "getloadavg", lambda: (1e6, 1e6, 1e6))
    facts = {**FACTS, "copy_gb_per_s": 25.0, "threads": torch.get_num_threads()}
    assert busy(facts, "cpu", tmp_path).endswith("the machine is busy") and busy(facts, "cuda", tmp_path) is None


def test_new_results_are_ignored_by_git_unless_asked_for(tmp_path):
    assert UNSHARED != RESULTS and f"{UNSHARED.relative_to(ROOT)}/" in (ROOT / ".gitignore").read_text().splitlines()
    rows = OpRows(tmp_path / "new", FACTS)
    rows.add({"op": "x"})
    assert json.loads(rows.path.read_text())["rows"] == [{"op": "x"}]
