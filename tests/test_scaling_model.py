"""The cost model on paper: sizes of models, measurements that it must predict, and what follows from its arithmetic."""

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny

from fwanda_pruner.engine.model_windows import ModelWindows
from fwanda_pruner.engine.ranks import Ranks

FOLDER = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(FOLDER))
import scaling_model  # noqa: E402
from lib import cost, scaling_tables  # noqa: E402
from lib.cost import Engine, Text  # noqa: E402
from lib.rates import CARDS, DISK, NVLINK, PCIE  # noqa: E402
from lib.results import read_all  # noqa: E402
from lib.sizes import Block, Linears, Shape, shape_of  # noqa: E402

H200, H100 = CARDS["NVIDIA H200"], CARDS["NVIDIA H100 80GB HBM3"]
STAGES = {"calibration": cost.calibration, "sparsegpt": cost.sparsegpt}
COMPARISONS = scaling_tables.comparisons()


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("llama-2-7b", 6.738, 6.738),
        ("llama-2-13b", 13.016, 13.016),
        ("llama-3-70b", 70.554, 70.554),
        ("llama-3-405b", 405.853, 405.853),
        ("deepseek-v3", 671.0, 37.0),
    ],
)
def test_the_shapes_have_the_published_number_of_weights(name, billions, active):
    shape = shape_of(name)
    assert shape.weights / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.active / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("one", COMPARISONS, ids=lambda one: f"{one.card} {one.run} {one.stage} {one.figure}")
def test_a_measured_figure_is_predicted_within_25_percent(one):
    assert 1 / 1.25 <= one.ratio <= 1.25, f"measured {one.measured:.2f}, predicted {one.predicted:.2f}"


def test_both_cards_both_sizes_and_both_stages_are_compared():
    assert {one.card for one in COMPARISONS} == {"H100", "H200"}
    assert {one.stage for one in COMPARISONS} == {"calibrate", "prune"}
    assert {one.figure for one in COMPARISONS} == {"warm, s", "cold, s", "peak, GB"}
    for run in ("llama-2-7b, fwanda row", "llama-2-13b, fwanda row", "llama-2-7b, sparsegpt uniform"):
        assert any(one.run.startswith(run) for one in COMPARISONS)


@pytest.mark.parametrize(
    ("file", "fisher"),
    [
        ("prune-llama-2-7b-fwanda-row-0.5-128x2048-bfloat16-compile-on-nvidia-h200-2026-11-28.json", 128),
        ("prune-llama-2-13b-fwanda-row-0.5-128x2048-bfloat16-compile-on-nvidia-h200-2026-11-28.json", 128),
        ("prune-llama-2-7b-fwanda-auto-0.5-128x2048-bfloat16-fisher-samples-96-nvidia-h200-2026-11-29.json", 96),
        ("prune-llama-2-7b-wanda-uniform-0.5-128x2048-bfloat16-compile-on-nvidia-h200-2026-11-28.json", 0),
    ],
)
def test_the_flops_are_those_of_the_results(file, fisher):
    result = json.loads((FOLDER / "results" / file).read_text())
    text = scaling_tables.text_of_result(result)
    assert text == Text(128, 2048, fisher)
    found = cost.calibration_flops(scaling_tables.shape_of_result(result), text)
    assert found == pytest.approx(result["flops"], rel=1e-9)


@pytest.mark.parametrize("name", CARDS)
def test_the_rates_of_a_card_are_those_of_its_results(name):
    card = CARDS[name]
    roofs = [result["roof"]["tflop_per_s"] for result in read_all("prune").values() if result["card"] == name]
    assert card.matmul / 1e12 == pytest.approx(statistics.median(roofs), rel=0.02)
    ops = [result for result in read_all("ops").values() if result["card"] == name]
    assert card.hbm / 1e9 == pytest.approx(max(result["copy_gb_per_s"] for result in ops), rel=0.02)
    rows = [row for result in ops for row in result["rows"] if (row["op"], row["case"]) == ("obs_factor", "11008")]
    assert card.fp32 == pytest.approx(11008**3 / (rows[0]["us"] / 1e6), rel=0.02)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["llama-2-13b", "deepseek-v3"])
def test_a_segment_of_all_blocks_costs_what_the_resident_engine_does(stage, name):
    shape = shape_of(name)
    found = STAGES[stage](H200, shape, Engine("streamed", segment=shape.depth), Text(fisher=32))
    assert found == STAGES[stage](H200, shape, Engine(), Text(fisher=32))


# an H100 has room for hardly more than the three blocks of DeepSeek-V3 that a sharded pass holds
NEVER_SLOWER = [(H200, name) for name in ("llama-2-7b", *scaling_tables.LARGE)]
NEVER_SLOWER += [(H100, name) for name in ("llama-2-7b", "llama-3-70b", "llama-3-405b")]


@pytest.mark.parametrize(("card", "name"), NEVER_SLOWER, ids=lambda value: getattr(value, "name", value))
def test_more_gpus_of_a_machine_are_never_slower(card, name):
    shape, text = shape_of(name), Text()
    calibrations, walks = [], []
    for ranks in (1, 2, 4, 8):
        best = cost.best_engine(card, shape, cost.engine_for(card, shape, ranks, text), text)
        calibrations.append(cost.calibration(card, shape, best, text).seconds)
        engine = cost.engine_for(card, shape, ranks, text, walks=True)
        walks.append(cost.sparsegpt(card, shape, engine, text).seconds)
    for seconds in (calibrations, walks):
        assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("name", ["llama-3-70b", "llama-3-405b"])
def test_more_machines_are_never_slower_with_the_best_micro_batch(name):
    shape, text, seconds = shape_of(name), Text(), []
    for ranks in (8, 16, 64):
        best = cost.best_engine(H200, shape, cost.engine_for(H200, shape, ranks, text), text)
        seconds.append(cost.calibration(H200, shape, best, text).seconds)
    assert seconds[0] > seconds[1] > 0.9 * seconds[2]  # 16 ranks have all groups; more have room for larger passes


def test_the_70b_on_8_gpus_recomputed_by_hand():
    hidden, inner, keys, vocab, blocks, window = 8192, 28672, 1024, 128256, 80, 2048
    block = hidden * (hidden + 2 * keys) + hidden * hidden + 3 * hidden * inner
    products, attention = 2 * block * window / 672e12, 2 * window * hidden * window / 310e12
    read, gradients = 3 * hidden + inner, 2 * hidden + 2 * keys + 2 * inner + hidden
    forward = products + attention + 2 * window * (62 * hidden + 5 * inner + read) / 4244e9
    backward = products + 2.5 * attention + 2 * window * (115 * hidden + 9 * inner + gradients) / 4244e9
    head = 4 * vocab * window * hidden / 672e12 + 20 * vocab * window / 4244e9
    gathers = 2 * blocks * 2 * block * 7 / 8 / 400e9
    seconds = 128 / 8 * (blocks * (forward + backward) + head + gathers)

    activations = 2 * window * (blocks * (4 * hidden + 4 * hidden + 3 * inner))
    working = 2 * window * (2 * hidden + 3 * inner)
    peak = 2 * (2 * vocab * hidden + blocks * block / 8 + 3 * block) + activations + max(working, 12 * (1 << 24))

    engine = cost.engine_for(H200, shape_of("llama-3-70b"), 8, Text())
    assert (engine.name, engine.checkpointing, engine.offload) == ("sharded", False, False)
    found = cost.calibration(H200, shape_of("llama-3-70b"), engine, Text())
    assert found.seconds == pytest.approx(seconds, rel=0.001) and found.bound == "GPU"
    assert found.peak == pytest.approx(peak, rel=1e-6)
    (row,) = (line for line in scaling_tables.large().splitlines() if line.startswith("| llama-3-70b | 8 |"))
    assert row.split(" | ")[3:5] == [f"{seconds:.0f}", f"{peak / 1e9:.0f}"]


def test_the_first_window_of_a_rank_is_not_compiled():
    shape, compiled = shape_of("llama-2-7b"), Engine(ranks=2, compiled=True)
    window = max(cost.pass_seconds(H200, shape, compiled, 1, 2048, True).values())
    first = Engine(ranks=2, checkpointing=True)
    slow = max(cost.pass_seconds(H200, shape, first, 1, 2048, True).values())
    found = cost.calibration(H200, shape, compiled, Text())
    assert slow > 2 * window and found.seconds == pytest.approx(63 * window + slow, rel=1e-3)


def test_copies_take_the_bytes_of_the_blocks_over_the_link():
    shape = shape_of("llama-3-70b")
    inside = 2 * shape.inside
    whole = cost.pass_seconds(H200, shape, Engine("streamed", segment=4), 1, 2048, backward=True)
    inputs = 76 * 2 * 2048 * 8192
    assert whole["copies"] == pytest.approx(((2 - 4 / 80) * inside + inputs) / PCIE)
    shared = cost.pass_seconds(H200, shape, Engine("sharded", 4), 1, 2048, backward=True)
    assert shared["copies"] == 0 and shared["gathers"] == pytest.approx(2 * 0.75 * inside / NVLINK)
    offloaded = cost.pass_seconds(H200, shape, Engine("sharded", 4, offload=True), 1, 2048, backward=True)
    assert offloaded["copies"] == pytest.approx(2 * inside / 4 / PCIE) and offloaded["gathers"] == shared["gathers"]


def test_a_segment_of_one_block_hides_no_copies():
    shape, text = shape_of("llama-2-7b"), Text()
    one = cost.pass_seconds(H200, shape, Engine("streamed", segment=1, micro_batch=4), 4, 2048, backward=True)
    found = cost.calibration(H200, shape, Engine("streamed", segment=1, micro_batch=4), text)
    assert found.seconds == pytest.approx(32 * (max(one["GPU"], one["host"]) + one["copies"]))


def test_experts_with_few_tokens_wait_for_their_weights():
    linears = Linears(4096, (4096,), copies=64, share=1 / 64)
    shape = Shape("experts", 4096, 32000, 0, (Block(1, (linears,), 0),))
    reading, computing = 2 * linears.weights / H200.hbm, 2 * linears.weights / 64 / H200.matmul  # the latter by token
    for tokens, expected in ((1 << 10, reading), (1 << 20, (1 << 20) * computing)):
        values = 2 * tokens * (62 * 4096 + 4096) / H200.hbm
        found = cost.forward_seconds(H200, shape, shape.blocks[0], tokens, 1, False)
        assert found - values == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("windows", [1, 5, 16, 21, 128])
def test_the_busiest_rank_has_the_windows_that_the_engine_gives_it(windows):
    for size in range(2, 20):
        groups = [Ranks(rank, size, group=object()).groups(windows) for rank in range(size)]
        most = max(sum(len(group.windows) for group in own) for own in groups)
        assert most <= cost.busiest(windows, size) <= most + len(groups[0])
    assert cost.busiest(windows, 1) == windows


@pytest.mark.parametrize("backward", [True, False])
def test_the_micro_batch_is_that_of_the_engine(backward):
    model = tiny.llama()
    windows = ModelWindows(model, tiny.tokens(2, 24), backward=backward)
    shape = replace(shape_of("tiny"), hidden=model.config.hidden_size)
    assert cost.micro_batch(H200, shape, Engine(), 24, backward, 10**9) == windows.busy_windows


def test_a_streamed_pass_has_the_windows_that_hide_its_copies_as_far_as_they_fit():
    shape = shape_of("llama-3-70b")
    assert cost.micro_batch(H200, shape, Engine("streamed"), 2048, True, 128) == 4
    assert cost.micro_batch(H200, shape, Engine("streamed", source=DISK), 2048, True, 128) == 32
    small = replace(H200, memory=25e9)
    size = cost.micro_batch(small, shape, Engine("streamed", source=DISK), 2048, True, 128)
    assert 1 < size < 32
    assert cost.calibration(small, shape, Engine("streamed", source=DISK), Text()).peak < small.memory


def test_the_command_prints_the_machine_that_is_asked_for(capsys):
    scaling_model.main(["--card", "H100", "--gpus", "4"])
    table = capsys.readouterr().out.split("\nH100\n")[1]
    assert table.count("| 4 | sharded") == 3 and "| 8 |" not in table
    with pytest.raises(SystemExit) as stopped:
        scaling_model.main(["--gpus", "0"])
    assert stopped.value.code == 2 and "--gpus must be at least 1, got 0" in capsys.readouterr().err
