"""Blocks run one at a time: orders, groups of one input, batches, memory, and where the hidden states are kept."""

import os
import tempfile

import measuring
import oracle
import pytest
import tiny
import torch
from measuring import batch_above, out_of_memory

import fwanda_kernels as fk
import fwanda_pruner
from fwanda_pruner import UserError
from fwanda_pruner.engine import memory
from fwanda_pruner.engine.sums import Sums
from fwanda_pruner.engine.walk import BlockWalk
from fwanda_pruner.measure.sums import StatisticsSums
from fwanda_pruner.model.targets import find_targets

TOKENS = tiny.tokens(5, 24)
GROUPS = [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


def prune(model, method="sparsegpt", **settings):
    fwanda_pruner.prune(model, method=method, sparsity=0.5, calibration=TOKENS, progress=False, **settings)
    return model


def weights(model) -> dict[str, torch.Tensor]:
    return {target.name: target.weight for target in find_targets(model)[0]}


def assert_same_masks(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """But for ties that rounding breaks another way."""
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert float(((weight == 0) != (other[name] == 0)).float().mean()) < 0.01, name


# Orders


def prune_group_by_group(model, method: str, groups: list[list[str]]) -> None:
    """The method restated: inputs of each group from the whole model as it is then."""
    for index in range(len(model.model.layers)):
        targets = [t for t in find_targets(model)[0] if t.block == index]
        for names in groups:
            group = {t.name: t for t in targets if t.name.rsplit(".", 1)[1] in names}
            for name, x in oracle.inputs_of(model, TOKENS, {n: t.module for n, t in group.items()}).items():
                weight = group[name].weight
                if method == "wanda":
                    fk.row_topk_prune_(weight, x.square().sum(0).sqrt(), weight.shape[1] // 2)
                else:
                    fk.obs_prune_(weight, x.T @ x, sparsity=0.5)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("order, groups", [("sequential", [sum(GROUPS, [])]), ("true-sequential", GROUPS)], ids=str)
def test_an_order_measures_what_was_pruned_before(order, groups, method):
    expected = tiny.llama()
    prune_group_by_group(expected, method, groups)
    found = weights(prune(tiny.llama(), method, order=order))
    assert_same_masks(weights(expected), found)
    for name, weight in weights(expected).items():
        torch.testing.assert_close(found[name], weight, rtol=0.02, atol=0.02)


def test_true_sequential_differs_from_sequential():
    one, other = (weights(prune(tiny.llama(), order=order)) for order in ("sequential", "true-sequential"))
    first = "model.layers.0.self_attn."
    assert torch.equal(one[first + "q_proj"], other[first + "q_proj"])
    assert not torch.equal(one[first + "o_proj"], other[first + "o_proj"])


@pytest.mark.parametrize("method", ["fwanda", "fsparsegpt"])
def test_a_sequential_run_takes_the_fisher_information_of_given_statistics(method):
    """And the inputs, or the Hessians, of the pruned blocks from the text."""
    settings = {"order": "sequential", "allocation": "row"}
    expected = weights(prune(tiny.llama(), method, **settings))
    config = fwanda_pruner.PruneConfig()
    statistics = fwanda_pruner.collect(tiny.llama(), config=config, calibration=TOKENS, progress=False)
    found = weights(prune(tiny.llama(), method, statistics=statistics, **settings))
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())


# Groups of one input


def test_modules_are_grouped_by_their_input():
    model = tiny.llama()
    modules = {t.name: t.module for t in find_targets(model)[0] if t.block == 1}
    groups = BlockWalk(model, TOKENS).input_groups(1, modules)
    assert [[name.rsplit(".", 1)[1] for name in names] for names in groups] == GROUPS


def test_a_module_that_is_not_called_is_a_group_of_its_own():
    extra = torch.nn.Linear(4, 4)
    assert BlockWalk(tiny.llama(), TOKENS).input_groups(0, {"extra": extra})[-1] == ["extra"]


# Hidden states and batches


@pytest.mark.parametrize("family", ["mistral", "gemma3", "bloom"])
@pytest.mark.parametrize("micro_batch", [None, 2, 5])
def test_a_walk_holds_the_hidden_states_of_the_whole_model(family, micro_batch):
    model = tiny.build(family)
    with torch.no_grad():
        expected = model(TOKENS, output_hidden_states=True, use_cache=False).hidden_states
    walk = BlockWalk(model, TOKENS, micro_batch=micro_batch)
    torch.testing.assert_close(walk.hidden, expected[0])
    walk.run(0, Sums(), advance=False)
    torch.testing.assert_close(walk.hidden, expected[0])
    walk.advance(0)
    torch.testing.assert_close(walk.hidden, expected[1])


@pytest.mark.parametrize("family", ["mistral", "gemma3", "bloom"])
@pytest.mark.parametrize("micro_batch", ["2", "3", "5", "9"])
def test_batches_change_nothing(family, micro_batch):
    """Five windows, so that a batch is left over; BLOOM's blocks take an argument with an entry for each window."""
    one, other = (
        weights(prune(tiny.build(family), "wanda", order="sequential", micro_batch=size)) for size in ("1", micro_batch)
    )
    assert_same_masks(one, other)


def no_free_ram(monkeypatch) -> None:
    """The system says that no page of RAM is free."""
    monkeypatch.setattr(memory, "free_ram", lambda: 0)


@pytest.mark.parametrize("order", ["onepass", "sequential"])
def test_hidden_states_may_lie_on_disk(order, tmp_path, monkeypatch):
    expected = weights(prune(tiny.llama(), order=order))
    no_free_ram(monkeypatch)
    allocated, allocate = [], os.posix_fallocate
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", lambda file, *span: allocated.append(span) or allocate(file, *span))
    found = weights(prune(tiny.llama(), order=order))
    assert allocated == [(0, TOKENS.numel() * 32 * 4)]
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())


@pytest.mark.fault("full disk")
def test_a_disk_that_is_full_is_one_line(monkeypatch):
    no_free_ram(monkeypatch)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match="hidden states .* No space left on device"):
        prune(tiny.llama())


# Short memory


@pytest.mark.fault("memory in blocks")
@pytest.mark.parametrize("fits", [1, 2])
def test_out_of_memory_halves_the_batches_and_changes_nothing(fits):
    expected = weights(prune(tiny.llama(), "wanda", order="sequential", micro_batch="1"))
    model = tiny.llama()
    with (
        out_of_memory(model.get_input_embeddings(), batch_above(fits)),
        pytest.warns(UserWarning, match=f"ran out of memory: starting again with {fits} windows at a time"),
    ):
        found = weights(prune(model, "wanda", order="sequential", micro_batch="4"))
    assert_same_masks(expected, found)


@pytest.mark.fault("memory in blocks")
def test_a_window_that_does_not_fit_is_one_line():
    model = tiny.llama()
    with (
        out_of_memory(model.model.norm, batch_above(0)),
        pytest.warns(UserWarning, match="ran out of memory"),
        pytest.raises(UserError, match="a window of 24 tokens does not fit") as error,
    ):
        prune(model, "wanda", order="sequential", micro_batch="4")
    assert "\n" not in str(error.value)


def sums_of_block(model, walk, index: int, **run) -> dict[str, torch.Tensor]:
    sums = StatisticsSums({t.name: t.module for t in find_targets(model)[0] if t.block == index})
    walk.run(index, sums, **run)
    return sums.tensors()


@pytest.mark.parametrize("advance", [False, True])
def test_a_first_batch_that_does_not_fit_is_halved_and_counted_once(advance):
    model = tiny.llama()
    expected = sums_of_block(model, BlockWalk(model, TOKENS), 0, advance=advance)
    walk = BlockWalk(model, TOKENS, micro_batch=4)
    mlp = model.model.layers[0].mlp  # the attention has then counted its inputs
    with out_of_memory(mlp, batch_above(2)), measuring.input_sizes(mlp) as sizes, pytest.warns(match="2 windows"):
        found = sums_of_block(model, walk, 0, advance=advance)
    assert sizes[-3:] == [2, 2, 1]  # before these a pass through the whole model, for the arguments of two windows
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)
    with measuring.input_sizes(mlp) as sizes:
        walk.run(0, Sums(), advance=False)
    assert sizes == [2, 2, 1]


def test_a_later_batch_that_does_not_fit_starts_again_while_no_output_is_written():
    model = tiny.llama()
    expected = sums_of_block(model, BlockWalk(model, TOKENS), 0, advance=False)
    walk, calls = BlockWalk(model, TOKENS, micro_batch=2), []

    def fails(x) -> bool:
        calls.append(len(x))
        return calls == [2, 2]

    with out_of_memory(model.model.layers[0].mlp, fails), pytest.warns(match="starting again with 1 windows"):
        found = sums_of_block(model, walk, 0, advance=False)
    assert calls == [2, 2, 1, 1, 1, 1, 1]
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


@pytest.mark.fault("memory in blocks")
def test_a_batch_that_does_not_fit_after_outputs_were_written_is_one_line(recwarn):
    """The inputs of the block are gone by then, so that it cannot start again."""
    model, calls = tiny.llama(), []
    walk = BlockWalk(model, TOKENS, micro_batch=2)
    walk.advance(0)

    def fails(x) -> bool:
        calls.append(len(x))
        return len(calls) == 2

    message = "^cpu ran out of memory in the middle of a block; use a smaller --micro-batch$"
    with out_of_memory(model.model.layers[1].mlp, fails), pytest.raises(UserError, match=message):
        walk.advance(1)
    assert calls == [2, 2] and not recwarn.list
