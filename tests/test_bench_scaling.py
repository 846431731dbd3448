"""The benchmark of several GPUs, with two processes on a CPU; and its tables."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_ranks import environment

FOLDER = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(FOLDER))
import bench_scaling  # noqa: E402
from lib import scaling_results  # noqa: E402
from lib.results import read_all  # noqa: E402


def measured_by_two(*arguments):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(FOLDER / "bench_scaling.py"), "--cpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment())


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """The result of all kinds of cases, and what was printed."""
    folder = tmp_path_factory.mktemp("scaling")
    cases = ["fwanda:tiny", "sparsegpt:tiny", "auto:tiny", "sharded:tiny"]
    done = measured_by_two("--cases", *cases, "--tokens", "24x32", "--dtype", "float32", "--results", str(folder))
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    *printed, last = done.stdout.splitlines()
    assert last == str(path)
    return json.loads(path.read_text()), printed


def test_two_processes_find_the_statistics_and_masks_of_one(result):
    fwanda, sparsegpt, auto, *_ = result[0]["cases"]
    checks = fwanda["checks"]
    assert checks["statistics_equal_on_all_ranks"] and checks["masks_equal_on_all_ranks"]
    assert checks["largest_relative_difference_of_statistics"] < 1e-6 and checks["masks_of_equal_statistics_equal"]
    for case in (sparsegpt, auto):
        assert case["checks"]["masks_equal_on_all_ranks"] and case["checks"]["share_of_equal_masks"] > 0.8


def test_a_sharded_model_finds_the_same_statistics_on_all_ranks(result):
    sharded = result[0]["cases"][3]
    assert sharded["checks"] == {"statistics_equal_on_all_ranks": True, "masks_equal_on_all_ranks": None}


def test_each_case_has_its_time_alone_and_together_and_its_efficiency(result):
    facts, printed = result
    assert (facts["kind"], facts["gpus"], facts["tokens"], facts["dtype"]) == ("scaling", 2, "24x32", "float32")
    for case in facts["cases"]:
        alone, together = case["alone"]["seconds"], case["together"]["seconds"]
        assert case["efficiency"] == pytest.approx(alone / (2 * together))
        assert case["together"]["peak_memory_bytes"] is None and scaling_results.predicted(facts, case) is None
    assert printed == scaling_results.table(facts).splitlines() + [""]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "fwanda:tiny"], "start it by torchrun --nproc-per-node N"),
        (["--cases", "fwanda"], "must be KIND:SHAPE"),
        (["--cases", "speed:tiny"], "must be KIND:SHAPE"),
        (["--tokens", "128"], "must be windows x length, e.g. 128x2048, got '128'"),
    ],
    ids=["alone", "shape", "kind", "tokens"],
)
def test_a_wrong_argument_is_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench_scaling.arguments(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def figures(seconds, peak=20e9):
    return {"seconds": seconds, "peak_memory_bytes": peak}


def measured(date, seconds, gpus=2):
    fwanda = {
        "statistics_equal_on_all_ranks": True,
        "masks_equal_on_all_ranks": False,
        "largest_relative_difference_of_statistics": 3e-7,
        "masks_of_equal_statistics_equal": True,
    }
    cases = [
        {"case": "fwanda", "shape": "llama-2-7b", "gpus": gpus, "alone": figures(14.5), "together": figures(seconds),
         "efficiency": 14.5 / gpus / seconds, "checks": fwanda},
        {"case": "sharded", "shape": "llama-3-70b", "gpus": gpus, "left_out": "it does not fit"},
    ]  # fmt: skip
    machine = {"card": "NVIDIA H200", "driver": "580.1", "torch": "2.11", "triton": "3.6", "transformers": "5.17"}
    facts = {"fwanda_kernels": "0.1", "python": "3.12", "date": date, "tokens": "128x2048"}
    return {**machine, **facts, "gpus": gpus, "cases": cases}


def test_the_page_shows_the_newest_result_of_each_number_of_gpus(tmp_path):
    assert scaling_results.full(tmp_path) == "Not measured yet.\n"
    facts = {
        "a": measured("2026-12-01", 9.0),
        "b": measured("2026-12-02", 7.6),
        "c": measured("2026-12-01", 4.0, gpus=4),
    }
    for name, one in facts.items():
        (tmp_path / f"scaling-{name}.json").write_text(json.dumps(one))
    page = scaling_results.full(tmp_path)
    assert page.count("NVIDIA H200, driver 580.1") == 2 and "| 9.00 |" not in page
    expected = scaling_results.predicted(facts["b"], facts["b"]["cases"][0])
    figures = f"{expected.seconds:.2f} | 20.0 | {expected.peak / 1e9:.1f}"
    start = f"| fwanda llama-2-7b | 2 | 14.50 | 7.60 | 0.95 | {figures} | statistics equal on all ranks, **NOT**"
    assert start in page
    assert "masks of equal statistics equal, statistics within 3e-07 of those alone |" in page
    assert "| sharded llama-3-70b | 4 | - | - | - | - | - | - | left out: it does not fit |" in page


@pytest.mark.parametrize(
    ("result", "case"),
    [
        (result, case)
        for result in read_all("scaling").values()
        for case in result["cases"]
        if "together" in case and scaling_results.predicted(result, case)
    ],
    ids=lambda one: f"{one['case']} {one['shape']}" if "case" in one else f"{one['gpus']} GPUs",
)
def test_measured_seconds_and_peaks_are_predicted_within_25_percent(result, case):
    expected, found = scaling_results.predicted(result, case), case["together"]
    assert abs(expected.seconds - found["seconds"]) <= 0.25 * found["seconds"]
    assert abs(expected.peak - found["peak_memory_bytes"]) <= 0.25 * found["peak_memory_bytes"]
