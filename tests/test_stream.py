"""Blocks run one at a time: orders, groups of one input, batches, and where the hidden states are kept."""

import pytest
import tiny
import torch

import fwanda_kernels as fk
import fwanda_pruner
from fwanda_pruner.engine import walk as stream
from fwanda_pruner.engine.walk import BlockStream
from fwanda_pruner.model.targets import find_targets

TOKENS = tiny.tokens(5, 24)
GROUPS = [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


def prune(model, method="sparsegpt", **settings):
    fwanda_pruner.prune(model, method=method, sparsity=0.5, calibration=TOKENS, progress=False, **settings)
    return model


def weights(model) -> dict[str, torch.Tensor]:
    return {target.name: target.weight for target in find_targets(model)[0]}


def inputs_of(model, modules: dict) -> dict[str, torch.Tensor]:
    """[T, C] inputs of modules in a forward pass of the whole model."""
    seen = {}
    handles = [
        module.register_forward_pre_hook(lambda _m, args, n=name: seen.update({n: args[0].flatten(0, 1)}))
        for name, module in modules.items()
    ]
    with torch.no_grad():
        model(TOKENS, use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def prune_group_by_group(model, method: str, groups: list[list[str]]) -> None:
    """The method restated: inputs of each group from the whole model as it is then."""
    for index in range(len(model.model.layers)):
        targets = [t for t in find_targets(model)[0] if t.block == index]
        for names in groups:
            group = {t.name: t for t in targets if t.name.rsplit(".", 1)[1] in names}
            for name, x in inputs_of(model, {n: t.module for n, t in group.items()}).items():
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
    for name, weight in weights(expected).items():
        assert float(((weight == 0) != (found[name] == 0)).float().mean()) < 0.01, name
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


def test_modules_are_grouped_by_their_input():
    model = tiny.llama()
    modules = {t.name: t.module for t in find_targets(model)[0] if t.block == 1}
    groups = BlockStream(model, TOKENS).input_groups(1, modules)
    assert [[name.rsplit(".", 1)[1] for name in names] for names in groups] == GROUPS


def test_a_module_that_is_not_called_is_a_group_of_its_own():
    model = tiny.llama()
    extra = torch.nn.Linear(4, 4)
    assert BlockStream(model, TOKENS).input_groups(0, {"extra": extra})[-1] == ["extra"]


@pytest.mark.parametrize("family", ["mistral", "gemma3", "bloom"])
@pytest.mark.parametrize("micro_batch", ["2", "3", "5", "9"])
def test_batches_change_nothing(family, micro_batch):
    """Five windows, so that a batch is left over; BLOOM's blocks take an argument with an entry for each window."""
    one, other = (
        weights(prune(tiny.build(family), "wanda", order="sequential", micro_batch=size)) for size in ("1", micro_batch)
    )
    for name, weight in one.items():
        assert float(((weight == 0) != (other[name] == 0)).float().mean()) < 0.01, name


@pytest.mark.parametrize("order", ["onepass", "sequential"])
def test_hidden_states_may_lie_on_disk(order, monkeypatch):
    expected = weights(prune(tiny.llama(), order=order))
    monkeypatch.setattr(stream, "_RAM_SHARE", 0)
    found = weights(prune(tiny.llama(), order=order))
    assert all(torch.equal(weight, found[name]) for name, weight in expected.items())


@pytest.mark.fault("full disk")
def test_a_disk_that_is_full_is_one_line(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stream, "_RAM_SHARE", 0)
    monkeypatch.setattr(stream.os, "posix_fallocate", full)
    with pytest.raises(fwanda_pruner.UserError, match="hidden states .* No space left on device"):
        prune(tiny.llama())


@pytest.mark.fault("memory in blocks")
@pytest.mark.parametrize("fits", [1, 2, 0])
def test_out_of_memory_halves_the_batches_and_changes_nothing(monkeypatch, fits):
    expected = weights(prune(tiny.llama(), "wanda", order="sequential", micro_batch="1"))
    plain = BlockStream._capture_arguments

    def capture(self, ids):
        if len(ids) > max(fits, 1) or (not fits and len(self.blocks) == 2 and hasattr(self, "_arguments")):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self, ids)

    monkeypatch.setattr(BlockStream, "_capture_arguments", capture)
    if not fits:
        with (
            pytest.warns(UserWarning),
            pytest.raises(fwanda_pruner.UserError, match="a window of 24 tokens does not fit"),
        ):
            prune(tiny.llama(), "wanda", order="sequential", micro_batch="4")
        return
    with pytest.warns(UserWarning, match=f"ran out of memory: going on with batches of {fits} windows"):
        found = weights(prune(tiny.llama(), "wanda", order="sequential", micro_batch="4"))
    for name, weight in expected.items():
        assert float(((weight == 0) != (found[name] == 0)).float().mean()) < 0.01, name
