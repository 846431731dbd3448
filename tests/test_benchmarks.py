"""The benchmarks: a tiny whole run, the masks of the baseline, and the tables that pages hold."""

import copy
import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

import fwanda_pruner

FOLDER = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(FOLDER))
import bench_decode  # noqa: E402
import bench_prune  # noqa: E402
import paper_tables  # noqa: E402
import render  # noqa: E402
from lib import markdown, naive, pictures, repeats, shapes  # noqa: E402
from lib.cases import budgets, obs, packed, removed, select, sparse24, stats, threshold  # noqa: E402
from lib.cases import case as case_module  # noqa: E402
from lib.copies import share_under_kernels  # noqa: E402
from lib.decoding import decode  # noqa: E402
from lib.masks import agreement, packed_masks  # noqa: E402
from lib.repeats import Spread, repeated  # noqa: E402


def run_bench_prune(*arguments):
    paths = [str(FOLDER.parent), str(FOLDER.parent / "python")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(FOLDER / "bench_prune.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_a_tiny_run_measures_everything_and_leaves_one_file(tmp_path):
    done = run_bench_prune(
        "--shape", "tiny", "--method", "fwanda", "--tokens", "4x32", "--dtype", "float32", "--repeats", "2",
        "--set", "micro_batch=2", "--naive", "--overhead", "--inference", "--save", "--results", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.splitlines()[-1])
    assert [path] == list(tmp_path.iterdir())
    result = json.loads(path.read_text())
    for key in ("card", "driver", "torch", "transformers", "triton", "python", "date", "build_seconds", "parameters"):
        assert key in result
    asked = {"shape": "tiny", "method": "fwanda", "allocation": "row", "sparsity": "0.5", "tokens": "4x32"}
    assert asked.items() <= result.items() and result["settings"] == {"micro_batch": "2"}
    assert result["roof"]["tflop_per_s"] > 0 and result["floor_seconds"] > 0
    runs = [result["ours"]["cold"], *result["ours"]["warm"], *result["naive"]["warm"]]
    assert len(runs) == 5
    for run in runs:
        assert {"calibrate", "budgets"} <= run["seconds"].keys()
        outside = sum(run["seconds"].get(phase, 0) for phase in ("text", "check", "save"))
        assert run["total_seconds"] == pytest.approx(sum(run["seconds"].values()) - outside)
        assert run["energy"]["total"] == "not measured: the device is cpu"
        assert 0 < run["share_of_roof"] < 2 and run["times_floor"] > 0
    assert result["ours"]["cold"]["peak_memory_bytes"] > 0 and result["ours"]["warm"][-1]["seconds"]["save"] > 0
    assert result["ours"]["spread"]["total_seconds"]["n"] == 2 and result["ours"]["spread"]["gross_joules"] is None
    assert result["naive"]["masks_agree"] > 0.999 and result["speedup"] > 0
    assert math.isfinite(result["overhead"]["percent"]) and result["inference"]["dense"].startswith("not measured")
    head, _, *lines = done.stdout.splitlines()
    assert head.startswith("tiny, fwanda row, 0.5 removed, 4x32 tokens, float32")
    assert any(line.startswith("calibrate, s") and len(line.split()) == 5 for line in lines)
    paper_tables.main([str(path)])


def test_a_streamed_run_is_compared_with_a_resident_one(tmp_path):
    done = run_bench_prune(
        "--shape", "tiny", "--method", "fwanda", "--tokens", "2x32", "--dtype", "float32", "--repeats", "0",
        "--engine", "streamed", "--segment", "1", "--copies", "--against-resident", "--results", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(Path(done.stdout.splitlines()[-1]).read_text())
    assert result["settings"] == {"engine": "streamed", "segment": "1"}
    assert result["ours"]["cold"]["bytes_loaded"] > 0 and result["resident"]["cold"]["bytes_loaded"] is None
    assert result["resident"]["masks_agree"] == 1 and result["times_resident"] > 0
    assert result["copies"]["to_device"]["under_kernels"] is None  # a CPU copies nothing
    assert "times the resident engine, masks agree 100.000 %" in done.stdout


def test_the_share_of_copies_under_kernels():
    def event(category, name, start, end, **args):
        return {"cat": category, "name": name, "ts": start, "dur": end - start, "args": args}

    events = [
        event("kernel", "gemm", 10, 20), event("kernel", "norm", 15, 30), event("kernel", "gemm", 40, 50),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, 10, bytes=7),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 25, 45, bytes=3),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 11, 12, bytes=5),
        event("cpu_op", "aten::copy_", 0, 100),
    ]  # fmt: skip
    assert share_under_kernels(events, "HtoD") == {"seconds": 30e-6, "bytes": 10, "under_kernels": 10 / 30}
    assert share_under_kernels(events, "DtoH")["under_kernels"] == 1
    assert share_under_kernels([], "HtoD")["under_kernels"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "wanda", "--copies"), "need --engine streamed"),
        (("--method", "fwanda", "--allocation", "global", "--naive"), "--naive has fwanda with --allocation row"),
        (("--method", "wanda", "--tokens", "128"), "--tokens must be windows x length"),
        (("--method", "wanda", "--set", "speed=fast"), "unknown setting 'speed'"),
        (("--method", "wanda", "--set", "no_check=yes"), "--no-check must be true or false, got 'yes'"),
        (("--method", "wanda", "--sparsity", "1.5"), "--sparsity must be in [0, 1)"),
        (("--method", "wanda", "--results", __file__), f"--results {__file__}: File exists"),
    ],
    ids=["copies", "allocation", "tokens", "setting", "bool", "sparsity", "results"],
)
def test_a_wrong_argument_is_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        bench_prune.main(["--shape", "tiny", *arguments])
    assert error.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("method", list(naive.ALLOCATIONS))
def test_the_plain_torch_pipeline_gives_our_masks(method):
    model, tokens, names = tiny.llama(), tiny.tokens(6, 24), []
    other = copy.deepcopy(model)
    allocation = naive.ALLOCATIONS[method]
    fwanda_pruner.prune(model, method=method, allocation=allocation, sparsity=0.5, calibration=tokens, progress=False)

    def phase(name):
        names.append(name)
        return torch.autograd.profiler.record_function(name)

    naive.prune(other, tokens, method, 0.5, phase)
    ours, theirs = weights_of(model), weights_of(other)
    assert agreement(packed_masks(theirs), packed_masks(ours)) == 1
    for weight, expected in zip(theirs, ours, strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-3, atol=1e-4)
    assert all(p.requires_grad for p in other.parameters()) and names[-1] == "prune"


def weights_of(model):
    return [module.weight for module in naive.linears(model).values()]


SMALL = {
    "sq_sums": (stats.sq_sums, (64, 96)),
    "sq_sums_block": (stats.sq_sums_block, (32, [48, 64])),
    "row_topk": (select.row_topk, (32, 64)),
    "row_topk_equal": (select.row_topk_equal, (32, 64)),
    "row_topk_model": (select.row_topk_model, ([(16, 32), (32, 16)],)),
    "threshold": (threshold.threshold, ([(32, 64)] * 4, 2)),
    "nm": (sparse24.nm, (32, 64)),
    "compress": (sparse24.compress, (64, 64)),
    "budgets": (budgets.budgets, ([(32, 64), (64, 32)],)),
    "gram": (obs.gram, (64, 96)),
    "factor": (obs.factor, (96,)),
    "obs": (obs.obs, (32, 256)),
    "pack": (removed.pack, (32, 64)),
    "masked": (removed.masked, (32, 64)),
    "removed_sums": (removed.sums, (48, 32, 64)),
    "packed_linear": (packed.product, (2, 32, 64, 50)),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_op_and_its_baseline_agree_and_both_run(name, monkeypatch):
    monkeypatch.setitem(case_module.ROTATE_BYTES, "cpu", 1)
    torch.manual_seed(0)
    make, arguments = SMALL[name]
    case = make("cpu", *arguments)
    case.check()
    for call in (case.ours[0], case.naive[0]):
        call()
        if case.reset is not None:
            case.reset()
    case.check()


def test_the_share_of_equal_masks_counts_each_weight():
    weights = [weight.data for weight in weights_of(tiny.llama(blocks=1))]
    packed = packed_masks(weights)
    assert agreement(packed_masks(weights), packed) == 1
    weights[0][0, :3] = 0
    assert agreement(packed_masks(weights), packed) == pytest.approx(1 - 3 / sum(w.numel() for w in weights), abs=1e-12)


def test_equal_seeds_give_equal_weights_in_place_and_anew():
    first = shapes.build("tiny", torch.float32, "cpu", 0)
    second = shapes.build("tiny", torch.float32, "cpu", 1)
    assert not torch.equal(first.lm_head.weight, second.lm_head.weight)
    shapes.reinitialise(second, 0)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert first.lm_head.weight is not first.get_input_embeddings().weight and not first.training


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        ("llama-2-7b", 6.738),
        ("llama-2-13b", 13.016),
        ("llama-3-8b", 8.030),
        ("mistral-7b", 7.248),
        ("qwen2.5-7b", 7.616),
    ],
)
def test_the_shapes_have_the_published_number_of_parameters(shape, billions):
    with torch.device("meta"):
        family, numbers = shapes.SHAPES[shape]
        config = getattr(shapes.transformers, f"{family}Config")(**numbers, tie_word_embeddings=False)
        model = getattr(shapes.transformers, f"{family}ForCausalLM")(config)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=5e-4)


def test_the_flops_are_those_of_the_formula():
    model = shapes.build("tiny", torch.float32, "cpu", 0)
    weights = 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128)
    assert sum(weight.numel() for weight in weights_of(model)) == weights
    work = shapes.PassFlops.of(model, weights, windows=3, length=10)
    linears, attention, head = 2 * weights * 30, 3 * 2 * 2 * 10**2 * 128, 2 * 512 * 128 * 30
    assert (work.linears, work.attention, work.head) == (linears, attention, head)
    assert work.forward == linears + attention and work.forward_backward == 2 * linears + 3.5 * attention + 2 * head


def test_decoding_is_timed_dense_and_packed_at_each_sparsity(tmp_path, monkeypatch, capsys):
    arguments = "--shape tiny --dtype float32 --device cpu --batches 1 2 --tokens 2 --prompts 8 --sparsities 0.7 0.5"
    monkeypatch.setattr(sys, "argv", ["bench_decode.py", *arguments.split(), "--results", str(tmp_path)])
    bench_decode.main()
    (path,) = tmp_path.iterdir()
    assert str(path) in capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    works = [("decode eager", 1), ("decode eager", 2), ("prefill", 1)]
    forms = ["dense", "packed 50%", "packed 70%"]
    assert [(row["form"], row["work"], row["batch"]) for row in rows] == [
        (form, *work) for form in forms for work in works
    ]
    sizes = [next(row["weight_bytes"] for row in rows if row["form"] == form) for form in forms]
    assert sizes == sorted(sizes, reverse=True) and all(row["tokens_per_s"] > 0 for row in rows)


def test_random_masks_have_the_sparsity_and_rows_that_differ():
    model = shapes.build("tiny", torch.float32, "cpu", 0)
    bench_decode.prune_at_random(model, 0.5)
    first = [weight == 0 for weight in weights_of(model)]
    bench_decode.prune_at_random(model, 0.7)
    second = [weight == 0 for weight in weights_of(model)]
    for zeros, sparsity in ((first, 0.5), (second, 0.7)):
        assert sum(int(z.sum()) for z in zeros) / sum(z.numel() for z in zeros) == pytest.approx(sparsity, abs=0.03)
    assert all(bool((b | ~a).all()) for a, b in zip(first, second, strict=True))
    assert all(float(z.float().mean(1).std()) > 0.05 for z in first)


def test_decoding_continues_with_the_likeliest_token():
    model, ids = shapes.build("tiny", torch.float32, "cpu", 0), tiny.tokens(1, 5)
    found = decode(model, ids, 4)
    for _ in range(4):
        with torch.no_grad():
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, ids[:, 5:])


def test_the_spread_is_student_t_and_a_single_value_has_none():
    assert Spread.of([3.0]) == Spread(1, 3.0, None, None)
    spread = Spread.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (spread.n, spread.mean) == (5, 3.0) and spread.std == pytest.approx(math.sqrt(2.5))
    assert spread.ci95 == pytest.approx(2.776 * math.sqrt(2.5 / 5))
    assert Spread.of([0.0, 2.0] * 20).ci95 == pytest.approx(2.042 * math.sqrt(40 / 39) / math.sqrt(40))


def test_short_work_is_repeated_until_its_window_is_long_enough(monkeypatch):
    from test_energy import IDLE, Clock, FakeNvml

    clock = Clock()
    nvml = FakeNvml(clock)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: type("P", (), {"uuid": "aa"}))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    taken = iter([3.0] + [0.5] * 100)  # the run that warms up is the slowest
    found = repeated(lambda: nvml.run(next(taken), 400), "cuda", repeats=3, units=10, timer=clock)
    assert found.runs == 4 and found.gross_joules.n == 3 and not found.flags
    assert found.seconds.mean == pytest.approx(0.05) and found.gross_joules.mean == pytest.approx(20, rel=1e-3)
    assert found.net_joules.mean == pytest.approx((400 - IDLE) * 0.05, rel=1e-3)
    assert found.gross_joules.ci95 < 0.1


def test_repeats_without_a_gpu_are_not_measured_and_do_no_work():
    assert repeated(pytest.fail, "cpu") == "not measured: the device is cpu"
    assert repeats.SHORTEST == 2


def pipeline(seconds, kilojoules=None, ci=None, peak=20e9, flag=None):
    spread = {"total_seconds": {"n": 1, "mean": seconds, "std": None, "ci95": ci}}
    for key, share in (("gross_joules", 1000), ("net_joules", 800), ("sampled_net_joules", 790)):
        value = None if kilojoules is None else {"n": 1, "mean": kilojoules * share, "std": None, "ci95": None}
        spread[key] = value
    total = "not measured: no NVML" if kilojoules is None else {"gross_joules": kilojoules * 1000, "flag": flag}
    run = {"total_seconds": seconds, "peak_memory_bytes": int(peak), "energy": {"total": total, "phases": {}}}
    return {"cold": run | {"total_seconds": seconds + 20}, "warm": [run], "spread": spread}


def result(method="fwanda", allocation="row", shape="llama-2-7b", ours=None, **changes):
    return {
        "kind": "prune", "card": "NVIDIA H100 80GB HBM3", "driver": "580.1", "torch": "2.11", "triton": "3.6",
        "transformers": "5.17", "fwanda_kernels": "0.1", "python": "3.12", "date": "2026-11-28", "shape": shape,
        "method": method, "allocation": allocation, "sparsity": "0.5", "tokens": "128x2048", "dtype": "bfloat16",
        "settings": {}, "floor_seconds": 10.0, "ours": ours or pipeline(12.5, 8.0), **changes,
    }  # fmt: skip


def make_tables(folder, results, *arguments):
    paths = []
    folder.mkdir(exist_ok=True)
    for index, facts in enumerate(results):
        paths.append(folder / f"result-{index}.json")
        paths[-1].write_text(json.dumps(facts))
    paper_tables.main([*map(str, paths), "--out", str(folder / "out"), *arguments])
    return {path.name: path for path in (folder / "out").iterdir()}


def cells(path):
    """Rows of the first Markdown table in a file: {(model, method): {column: text}}."""
    lines = [line.strip("| ").split(" | ") for line in path.read_text().splitlines() if line.startswith("| ")]
    return {tuple(row[:2]): dict(zip(lines[0], row, strict=True)) for row in lines[1:]}


def test_the_table_has_a_row_for_each_pipeline_in_the_order_of_the_paper_with_the_best_in_bold(tmp_path):
    inference = {"dense": {"gross_joules": {"mean": 2.5, "ci95": 0.1}}, "pruned": "not resolved: 1 s of work"}
    results = [
        result(naive=pipeline(25.3, 16.5, peak=23.4e9), inference=inference),
        result("sparsegpt", "uniform", ours=pipeline(200, 70, peak=22e9), floor_seconds=None),
        result("wanda", "uniform", ours=pipeline(6.5, 3, peak=14e9)),
        result(shape="llama-2-13b", ours=pipeline(24, 15)),
    ]
    written = make_tables(tmp_path, results)
    table = cells(written["efficiency-nvidia-h100-80gb-hbm3.md"])
    assert [row[1] for row in table if row[0] == "llama-2-7b"] == [
        "wanda uniform", "sparsegpt uniform", "fwanda row", "fwanda row, plain torch",
    ]  # fmt: skip
    assert table["llama-2-7b", "wanda uniform"]["time, s"] == "**6.50**"
    ours = table["llama-2-7b", "fwanda row"]
    assert ours["time, s"] == "12.50" and ours["cold, s"] == "32.50" and ours["x floor"] == "1.25"
    assert ours["peak GPU, GB"] == "20.0" and ours["gross, kJ"] == "8.00" and ours["net at 10 Hz, kJ"] == "6.32"
    assert ours["dense, gross J/token"] == "2.50 ± 0.10" and "pruned, gross J/token" not in ours
    assert table["llama-2-7b", "sparsegpt uniform"]["x floor"] == "-"
    assert table["llama-2-13b", "fwanda row"]["time, s"] == "24.00"  # nothing to compare with
    text = written["efficiency-nvidia-h100-80gb-hbm3.md"].read_text()
    assert text.startswith("NVIDIA H100 80GB HBM3, driver 580.1, torch 2.11") and "2026-11-28." in text
    assert "- llama-2-7b, pruned decoding: not resolved" in text
    with written["efficiency-nvidia-h100-80gb-hbm3.csv"].open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["gross_kj"]) for row in rows if row["shape"] == "llama-2-7b"] == [3, 70, 8, 16.5]
    assert rows[0]["card"] == "NVIDIA H100 80GB HBM3" and rows[0]["gross_kj_ci95"] == ""


def test_a_run_that_was_not_repeated_has_its_time_in_the_cold_column_alone(tmp_path):
    once = {"cold": pipeline(9, 3)["cold"], "warm": [], "spread": pipeline(9, 3)["spread"]}
    written = make_tables(tmp_path, [result(ours=once)])
    row = cells(written["efficiency-nvidia-h100-80gb-hbm3.md"])["llama-2-7b", "fwanda row"]
    assert "time, s" not in row and row["cold, s"] == "29.00" and row["gross, kJ"] == "3.00"


def test_each_card_and_set_of_versions_has_its_own_table(tmp_path):
    written = make_tables(tmp_path, [result(), result(card="NVIDIA H200"), result(torch="2.12"), result("magnitude")])
    texts = [written[name].read_text() for name in sorted(written) if name.endswith(".md")]
    assert len(texts) == 3 and sorted(text.count("| llama-2-7b |") for text in texts) == [1, 1, 2]
    assert all(("H200" in text) != ("H100" in text) for text in texts)


def test_repeated_runs_show_their_interval_and_flags_and_missing_energy_are_notes(tmp_path):
    results = [
        result(ours=pipeline(12.5, 8.0, ci=0.25, flag="a mean power of 6 W is below 0.9 of the idle power, 70 W")),
        result("wanda", "uniform", ours=pipeline(6)),
    ]
    path = make_tables(tmp_path, results)["efficiency-nvidia-h100-80gb-hbm3.md"]
    assert cells(path)["llama-2-7b", "fwanda row"]["time, s"] == "12.50 ± 0.25"
    assert cells(path)["llama-2-7b", "wanda uniform"]["gross, kJ"] == "-"
    assert "- llama-2-7b, fwanda row: a mean power of 6 W" in path.read_text()
    assert "- llama-2-7b, wanda uniform: not measured: no NVML" in path.read_text()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (result("wanda", tokens="16x512"), "has tokens 16x512"),
        (result("wanda", dtype="float32"), "has dtype float32"),
        (result("wanda", card="NVIDIA H200", sparsity="0.6"), "has sparsity 0.6"),
        (result(), "are of the same run"),
        ({"kind": "ops"}, "is not a result of bench_prune.py"),
    ],
    ids=["tokens", "dtype", "sparsity", "twice", "kind"],
)
def test_results_that_cannot_be_compared_are_refused(tmp_path, capsys, other, message):
    with pytest.raises(SystemExit) as stopped:
        make_tables(tmp_path, [result(), other])
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def quality(*entries, protocol="wikitext2, 2048"):
    return [{"shape": "llama-2-7b", "method": m, "perplexity": p, "protocol": protocol} for m, p in entries]


def test_the_picture_is_drawn_from_perplexities_of_one_protocol(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    results = [result(), result("wanda", "uniform", ours=pipeline(6, 3)), result("sparsegpt", ours=pipeline(6))]
    file = tmp_path / "quality.json"
    file.write_text(json.dumps(quality(("fwanda row", 6.9), ("wanda uniform", 7.2), ("fwanda global", 6.0))))
    written = make_tables(tmp_path, results, "--quality", str(file))
    assert written["efficiency-nvidia-h100-80gb-hbm3.png"].read_bytes().startswith(b"\x89PNG")
    unmeasured = make_tables(tmp_path / "cpu", [result(ours=pipeline(6))], "--quality", str(file))
    assert not any(name.endswith(".png") for name in unmeasured)
    file.write_text(json.dumps(quality(("fwanda row", 6.9)) + quality(("wanda uniform", 7.2), protocol="c4, 2048")))
    with pytest.raises(SystemExit):
        make_tables(tmp_path, results, "--quality", str(file))
    assert "perplexities of 2 protocols" in capsys.readouterr().err


def test_the_pareto_front_holds_what_nothing_else_beats():
    points = [(3, 7.0), (8, 6.9), (9, 6.95), (1, 9.0), (3, 8.0)]
    assert pictures.pareto(points) == [(1, 9.0), (3, 7.0), (8, 6.9)]
    assert pictures.pareto([]) == []


@pytest.mark.parametrize("page", render.default_pages(), ids=lambda page: page.name)
def test_a_page_holds_what_the_results_say(page):
    text = page.read_text(encoding="utf-8")
    assert text == render.fresh(text), f"python benchmarks/render.py {page.name} fills it"


@pytest.mark.parametrize(
    ("page", "sections"),
    [
        ("README.md", {"readme-result", "readme-quality", "readme-speed"}),
        ("docs/performance.md", {"speed", "runs"}),
        ("docs/allocation.md", {"quality"}),
        ("docs/integrating.md", {"hosts"}),
        ("docs/scaling.md", {"paper-measured", "paper-several", "paper-sizes", "paper-large", "scaling"}),
    ],
)
def test_every_table_has_its_page(page, sections):
    text = (FOLDER.parent / page).read_text(encoding="utf-8")
    assert {match[1] for match in markdown.SECTION.finditer(text)} & render.SECTIONS.keys() == sections


def test_markers_of_other_tables_and_text_around_them_stay():
    page = "a\n<!-- runs: begin -->\nold\n<!-- runs: end -->\nb <!-- other: begin -->\nx\n<!-- other: end -->"
    assert markdown.filled(page, {"runs": lambda: "new\n"}) == page.replace("old", "new")


def op_row(op, case, us, **changes):
    row = {"op": op, "case": case, "backend": "native", "us": us, "joules": None, "naive_us": 90.0, "bytes": None}
    return row | changes


def test_the_newest_row_of_a_case_counts_and_every_card_has_a_table(tmp_path):
    machine = {
        "card": "NVIDIA H100 80GB HBM3", "driver": "580.1", "threads": None, "torch": "2.11", "triton": "3.6",
        "date": "2026-11-28", "copy_gb_per_s": 3000.0,
    }  # fmt: skip
    copied = {"bytes": 1, "gb_per_s": 2000.0, "percent_of_copy": 87.3}
    first = [op_row("row_topk_prune_", "4096 x 11008", 80.0), op_row("nn.utils.prune", "Wanda", 30.0)]
    second = [op_row("row_topk_prune_", "4096 x 11008", 73.0, **copied)]
    files = {
        "ops-h100-2026-11-28.json": machine | {"rows": first},
        "ops-h100-2026-11-27.json": machine | {"date": "2026-11-27", "rows": [op_row("row_topk_prune_", "x", 5.0)]},
        "ops-h100-2026-11-29.json": machine | {"date": "2026-11-29", "rows": second},
        "ops-cpu-2026-11-28.json": machine | {"card": "a CPU", "driver": None, "threads": 2, "rows": first[1:]},
    }
    for name, facts in files.items():
        (tmp_path / name).write_text(json.dumps(facts))
    speed = render.SECTIONS["speed"](tmp_path)
    assert "| `row_topk_prune_` | 4096 x 11008 | native | 73.0 | - | 2000 | 87 | 90 | 1.2x |" in speed
    assert "80.0" not in speed and "a CPU" not in speed
    assert speed.count("NVIDIA H100") == 1 and ", 2026-11-27 to 2026-11-29. A copy" in speed
    hosts = render.SECTIONS["hosts"](tmp_path)
    assert hosts.count("| nn.utils.prune | Wanda | native | 90 | 30 | 3.0x |") == 2
    assert "a CPU, 2 threads, torch 2.11, Triton 3.6, 2026-11-28." in hosts

    run = result(card=machine["card"], settings={"compile": "on"}, speedup=2.03)
    (tmp_path / "prune-run.json").write_text(json.dumps(run))
    lines = render.SECTIONS["readme-speed"](tmp_path).splitlines()
    assert lines[2] == "|  | H100, CUDA kernels |"
    assert "| row selection, 4096 x 11008 | 73 µs, 87 %, 1x |" in lines
    assert "| a whole F-Wanda run of a 7B | 12.5 s, 8.0 kJ, 2.0x |" in lines
