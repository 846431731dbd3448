"""Several processes that share a run: the same bits as one, whatever their number."""

import json
import math

import pytest
import rank_worker
import tiny
import torch
from helpers_ranks import Launcher

from fwanda_pruner.engine.engine import make_engine
from fwanda_pruner.engine.ranks import GROUPS, Merging, Node, Ranks
from fwanda_pruner.engine.sums import Sums
from fwanda_pruner.evaluate.perplexity import perplexity
from fwanda_pruner.measure.statistics import measure_statistics
from fwanda_pruner.model.targets import find_targets

SIZES = (1, 2, 3)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[int, list[dict]]:
    """Number of ranks -> what each rank found."""
    base, results = tmp_path_factory.mktemp("ranks"), {}
    with Launcher() as launcher:
        for size in SIZES:
            folder = base / str(size)
            done = launcher.run(size, folder)
            assert done.codes == [0] * size, done.stderr
            results[size] = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]
    return results


def rank_of(rank: int, size: int) -> Ranks:
    """A rank that only divides windows. `group` is anything but None, which means that there is one process."""
    return Ranks(rank, size, group=object())


@pytest.mark.parametrize("size", [1, 2, 3, 8, 20])
@pytest.mark.parametrize(("count", "unit"), [(128, 1), (21, 1), (21, 4), (2, 1), (1, 8)])
def test_groups_hold_each_window_once_and_do_not_depend_on_the_ranks(count, unit, size):
    groups = [group for rank in range(size) for group in rank_of(rank, size).groups(count, unit)]
    assert groups == rank_of(0, 1).groups(count, unit) and len(groups) <= GROUPS
    assert [window for group in groups for window in group.windows] == list(range(count))
    assert [group.number for group in groups] == list(range(len(groups)))
    assert all(group.windows.start % unit == 0 and len(group.windows) for group in groups)
    assert rank_of(0, size).groups(count, unit)[0].windows.start == 0


def test_one_process_has_all_windows_in_one_group():
    assert [group.windows for group in Ranks().groups(100)] == [range(100)]


@pytest.mark.parametrize("groups", [1, 6, 11, 16])
def test_merged_sums_have_the_same_bits_for_every_number_of_ranks(groups):
    values = (torch.randn(groups, 100) * 10.0 ** torch.randint(-6, 6, (groups, 1))).split(1)
    totals = []
    for size in range(1, 8):
        ends = [-(-rank * groups // size) for rank in range(size + 1)]
        all_nodes = Merging(Sums())
        for first, last in zip(ends, ends[1:], strict=False):
            own = Merging(Sums())
            for number in range(first, last):
                own.add(Node(0, number), {} if number == 2 else {"x": values[number]})  # one lacks the tensor
            for node in sorted(own.nodes, key=lambda node: node.first):
                all_nodes.add(node, own.nodes[node])
        totals.append(all_nodes.total()["x"])
    assert all(torch.equal(total, totals[0]) for total in totals)
    assert torch.allclose(totals[0], sum(v for i, v in enumerate(values) if i != 2), rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "resident"), [("streamed", "fsparsegpt-uniform-sequential"), ("streamed-auto", "fwanda-auto-onepass")]
)
def test_streamed_runs_give_the_bits_of_resident_ones(found, name, resident):
    runs = found[2][0]["runs"]
    assert runs[name]["weights"] == runs[resident]["weights"]


@pytest.mark.fault("ranks")
@pytest.mark.parametrize("name", rank_worker.runs())
def test_every_run_gives_the_same_bits_for_every_number_of_ranks(found, name):
    one = found[1][0]["runs"][name]
    for size in SIZES[1:]:
        for rank in found[size]:
            assert rank["runs"][name]["weights"] == one["weights"]
        assert found[size][0]["runs"][name]["facts"] == one["facts"]
        assert found[size][0]["runs"][name]["ranks"] == size


def test_only_the_first_rank_shows_warnings_and_each_once(found):
    for name, run in found[1][0]["runs"].items():
        for size in SIZES[1:]:
            shown = [rank["runs"][name]["shown"] for rank in found[size]]
            assert shown == [run["shown"]] + [0] * (size - 1)
    assert any(run["shown"] for run in found[1][0]["runs"].values())


@pytest.mark.parametrize("fisher", ["empirical", "true", "mean"])
def test_sums_are_those_of_a_process_without_groups(found, fisher):
    model = tiny.llama()
    engine = make_engine(model, find_targets(model)[0], progress=False)
    alone = measure_statistics(engine, rank_worker.TEXT, fisher=fisher, seed=3).to_parts()[0]
    for size in SIZES:
        for rank in found[size]:
            for name, expected in alone.items():
                got = torch.tensor(rank["sums"][fisher][name])
                tolerance = 1e-6 if fisher != "mean" else 1e-5  # squares of sums that cancel
                assert float((got - expected).norm()) <= tolerance * float(expected.norm())


def test_perplexity_is_that_of_one_process(found):
    alone = perplexity(tiny.llama(), rank_worker.EVAL, progress=False)
    for size in SIZES:
        assert all(math.isclose(rank["sums"]["perplexity"], alone, rel_tol=1e-6) for rank in found[size])


@pytest.mark.fault("ranks differ")
def test_ranks_with_other_weights_are_refused_by_name(found):
    assert found[1][0]["refusals"] == {}
    for size in SIZES[1:]:
        expected = f"rank {size - 1} differs from rank 0 in weights: give all ranks the same"
        calls = dict.fromkeys(("prune", "collect", "evaluate_model"), expected)
        assert all(rank["refusals"] == calls for rank in found[size])


@pytest.mark.fault("memory while calibrating")
def test_a_rank_with_less_memory_goes_on_with_smaller_passes_and_the_first_says_so(found):
    for size in SIZES[1:]:
        first, *others = (rank["little memory"] for rank in found[size])
        assert all(rank["weights"] == first["weights"] for rank in others)
        assert "cpu ran out of memory: starting again with 2 windows at a time" in first["facts"]["warnings"]
        assert first["facts"]["passes"]["micro_batch"] == 2
    assert found[1][0]["little memory"]["facts"]["passes"]["micro_batch"] == 4
