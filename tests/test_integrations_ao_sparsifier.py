"""torch.ao.pruning as a host."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.ao.pruning import BaseSparsifier, LambdaSL, WeightNormSparsifier
from torch.nn.utils import parametrize, prune

import fwanda_kernels as fk
from fwanda_kernels.testing import assert_masks_equal
from fwanda_pruner import UserError
from fwanda_pruner.allocate.budgets import OMEGA_FLOOR
from fwanda_pruner.integrations.ao_sparsifier import WandaSparsifier

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))


def stepped(config=None, *, backward=False, **settings):
    """A model with its masks, and a dense copy of it."""
    model = network()
    dense = copy.deepcopy(model)
    sparsifier = WandaSparsifier(**settings)
    sparsifier.prepare(model, config)
    loss = model(X).square().sum()
    if backward:
        loss.backward()
    sparsifier.step()
    return model, dense, sparsifier


def mask_of(module) -> torch.Tensor:
    return module.parametrizations.weight[0].mask != 0


def norm_of(x: torch.Tensor) -> torch.Tensor:
    return x.double().square().sum(0).float().sqrt()


def test_a_mask_is_a_stable_sort_of_each_row_by_the_rooted_sum_of_squares():
    model, dense, _ = stepped(sparsity_level=0.3)
    with torch.no_grad():
        inputs = {0: X, 2: dense[:2](X)}
    for index, x in inputs.items():
        weight = dense[index].weight.detach()
        cols = weight.shape[1]
        removed = torch.sort(weight.abs() * norm_of(x), dim=1, stable=True).indices[:, : cols * 3 // 10]
        assert_masks_equal(mask_of(model[index]), torch.ones_like(weight, dtype=torch.bool).scatter_(1, removed, False))


def test_squash_mask_leaves_the_product_that_the_hosts_own_sparsifiers_leave():
    model, dense, sparsifier = stepped()
    theirs, host = copy.deepcopy(dense), WeightNormSparsifier()
    host.prepare(theirs, None)
    for ours, layer in ((model[0], theirs[0]), (model[2], theirs[2])):
        layer.parametrizations.weight[0].mask.copy_(mask_of(ours))
    sparsifier.squash_mask(params_to_keep=("sparsity_level",))
    host.squash_mask()
    for ours, layer in ((model[0], theirs[0]), (model[2], theirs[2])):
        assert not parametrize.is_parametrized(ours)
        assert torch.equal(ours.weight, layer.weight)
        assert (ours.weight == 0).sum(1).unique().tolist() == [ours.in_features // 2]
    assert model[0].sparse_params == {"sparsity_level": 0.5}
    assert not model[0]._forward_hooks


@pytest.mark.parametrize(("level", "block", "n"), [(0.5, 4, 2), (0.75, 4, 1), (0.25, 4, 3), (0.5, 8, 4)])
def test_a_block_loses_the_share_that_the_level_says(level, block, n):
    model, dense, _ = stepped(sparsity_level=level, semi_structured_block_size=block)
    expected = fk.nm_mask(dense[0].weight.detach(), norm_of(X), n, block)
    assert_masks_equal(mask_of(model[0]), expected)
    assert (mask_of(model[2]).view(8, -1, block).sum(2) == n).all()


def test_row_allocation_follows_the_papers_rule_with_an_exact_total():
    model, dense, sparsifier = stepped(sparsity_level=0.4, allocation="row", backward=True)
    state = sparsifier.state["0.weight"]
    y = dense[0](X).detach().requires_grad_()
    dense[2](y.relu()).square().sum().backward()
    omega = y.grad.double().square().sum(0) / len(X)
    assert torch.allclose(state["g2"].double() / state["n_tokens"], omega)
    expected = fk.allocate_row_budgets(
        (state["g2"].double() / len(X)).clamp(min=OMEGA_FLOOR) ** 0.5, 16 * 24 - 16 * 24 * 4 // 10, k_max=16
    )
    assert torch.equal(mask_of(model[0]).sum(1), expected)


def test_settings_of_one_tensor_override_the_defaults():
    config = [{"tensor_fqn": "0.weight", "sparsity_level": 0.25}]
    model, _, sparsifier = stepped(config)
    assert mask_of(model[0]).sum(1).unique().tolist() == [12]
    assert not parametrize.is_parametrized(model[2])
    assert isinstance(sparsifier, BaseSparsifier)


def test_a_schedule_of_levels_keeps_exact_counts_and_the_dense_statistics():
    model, _, sparsifier = stepped(sparsity_level=0.5)
    statistics = sparsifier.state["0.weight"]["x2"].clone()
    schedule = LambdaSL(sparsifier, sl_lambda=lambda epoch: 1 + 0.25 * epoch)
    for kept_in_a_row in (8, 6, 4):
        with torch.no_grad():
            model(X * 100)
        sparsifier.step()
        assert mask_of(model[0]).sum(1).unique().tolist() == [kept_in_a_row]
        assert torch.equal(sparsifier.state["0.weight"]["x2"], statistics)
        schedule.step()


def test_a_step_while_updates_are_off_goes_on_collecting():
    model, sparsifier = network(), WandaSparsifier()
    sparsifier.prepare(model, None)
    sparsifier.enable_mask_update = False
    sparsifier.step()
    model(X)
    sparsifier.enable_mask_update = True
    sparsifier.step()
    assert sparsifier.state["0.weight"]["n_tokens"] == 64


def test_a_step_before_any_input_is_refused_and_can_be_made_good():
    model, sparsifier = network(), WandaSparsifier()
    sparsifier.prepare(model, None)
    with pytest.raises(UserError, match="saw no input"):
        sparsifier.step()
    model(X)
    sparsifier.step()
    assert mask_of(model[0]).sum(1).unique().tolist() == [8]


def test_row_allocation_without_a_backward_pass_is_refused_and_can_be_made_good():
    model, sparsifier = network(), WandaSparsifier(allocation="row")
    sparsifier.prepare(model, None)
    model(X)
    with pytest.raises(UserError, match="0.weight has no output gradient"):
        sparsifier.step()
    model(X).square().sum().backward()
    sparsifier.step()
    assert int(mask_of(model[0]).sum()) == 16 * 24 // 2


def test_a_module_without_input_is_ranked_by_magnitude_with_a_warning():
    model, sparsifier = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)]), WandaSparsifier()
    sparsifier.prepare(model, None)
    model[0](X)
    with pytest.warns(UserWarning, match="1.weight saw no calibration token"):
        sparsifier.step()
    expected = fk.row_topk_mask(model[1].parametrizations.weight.original.detach(), torch.ones(16), 8)
    assert_masks_equal(mask_of(model[1]), expected)


def bad_models():
    pruned, quantised, tied, parametrised = network(), network(), network(), network()
    prune.l1_unstructured(pruned[0], "weight", amount=0.5)
    quantised[0].weight = nn.Parameter(torch.zeros(24, 16, dtype=torch.int8), requires_grad=False)
    tied = nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24, bias=False))
    tied[1].weight = tied[0].weight
    WeightNormSparsifier().prepare(parametrised, None)
    return [
        (pruned, {}, "0.weight is under torch.nn.utils.prune"),
        (quantised, {}, "0.weight is quantised or parametrised .*int8"),
        (tied, {}, "1.weight is shared"),
        (parametrised, {}, "0.weight is already parametrised"),
        (network(), {"sparsity_level": 1.0}, "decimal in"),
        (network(), {"sparsity_level": 0.7, "semi_structured_block_size": 4}, "whole number of a block of 4"),
        (network(), {"semi_structured_block_size": 10, "sparsity_level": 0.5}, "not a multiple of the block of 10"),
        (network(), {"allocation": "global"}, "uniform or row"),
        (network(), {"allocation": "row", "semi_structured_block_size": 4}, "cancels inside a block"),
    ]


@pytest.mark.parametrize("case", range(9))
def test_what_step_could_not_serve_is_refused_by_name_before_anything_changes(case):
    model, settings, message = bad_models()[case]
    before = [type(m) for m in model.modules()]
    sparsifier = WandaSparsifier(**settings)
    config = None if case != 3 else [{"tensor_fqn": "0.weight"}]
    with pytest.raises(UserError, match=message):
        sparsifier.prepare(model, config)
    assert [type(m) for m in model.modules()] == before
    assert not sparsifier.groups


@pytest.mark.parametrize("name", ["0.bias", "nothing.weight", "1.weight"])
def test_a_tensor_that_is_no_linear_weight_is_refused_by_name(name):
    with pytest.raises(UserError, match=name.removesuffix(".weight")):
        WandaSparsifier().prepare(network(), [{"tensor_fqn": name}])


def test_a_second_prepare_is_refused():
    _, _, sparsifier = stepped()
    with pytest.raises(UserError, match="prepare\\(\\) was called before"):
        sparsifier.prepare(network(), None)


def test_weights_that_are_not_finite_are_refused_by_name():
    model, sparsifier = network(), WandaSparsifier()
    sparsifier.prepare(model, None)
    model(X)
    with torch.no_grad():
        model[2].parametrizations.weight.original[0, 0] = torch.inf
    with pytest.raises(UserError, match="2.weight: weight has NaN or inf"):
        sparsifier.step()
    assert not (mask_of(model[2]) == 0).any()


@pytest.mark.parametrize("block", [None, 4])
def test_inputs_that_are_not_finite_are_refused_by_name(block):
    model, sparsifier = network(), WandaSparsifier(semi_structured_block_size=block)
    sparsifier.prepare(model, None)
    model(X * 1e30)
    with pytest.raises(UserError, match="0.weight: scale must be finite .* norm of each input column"):
        sparsifier.step()


def test_nothing_is_warned_of_in_a_plain_run():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepped(sparsity_level=0.5, semi_structured_block_size=4)[2].squash_mask()


@pytest.mark.fault("not finite")
def test_a_step_that_refuses_one_tensor_changes_the_mask_of_none():
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    sparsifier = WandaSparsifier(sparsity_level=0.5)
    sparsifier.prepare(model, None)
    model(torch.randn(9, 8))
    original = model[1].parametrizations.weight.original
    with torch.no_grad():
        original[0, 0] = torch.nan
    with pytest.raises(UserError, match="1.weight: weight has NaN or inf"):
        sparsifier.step()
    assert all(bool(layer.parametrizations.weight[0].mask.all()) for layer in model)
    with torch.no_grad():
        original[0, 0] = 1.0
    sparsifier.step()
    assert [int((layer.weight == 0).sum()) for layer in model] == [24, 12]


def test_calls_without_masks_are_refused_in_one_line():
    model, _, sparsifier = stepped()
    sparsifier.squash_mask()
    weights = [parameter.clone() for parameter in model.parameters()]
    for call, name in ((sparsifier.step, "step"), (sparsifier.squash_mask, "squash_mask")):
        with pytest.raises(UserError, match=rf"^{name}\(\) finds no mask of .*weight: squash_mask\(\) has removed it"):
            call()
        with pytest.raises(UserError, match=rf"^{name}\(\) comes after prepare\(\), which was not called"):
            getattr(WandaSparsifier(), name)()
    assert all(map(torch.equal, weights, model.parameters()))


@pytest.mark.parametrize(
    "config, message",
    [
        ("0.weight", "^config must be a list of dicts"),
        (["0.weight"], "^each entry of config must be a dict with a tensor_fqn"),
        ([{}], "^each entry of config must be a dict with a tensor_fqn"),
        ([{"tensor_fqn": 3}], "^each entry of config must be a dict with a tensor_fqn"),
        ([{"tensor_fqn": "0.weight"}] * 2, "^0.weight is in the config twice"),
        ([{"tensor_fqn": "0.weight", "tensor_name": "bias"}], "^config does not fit the model: Given both"),
    ],
)
def test_a_config_of_another_form_is_one_line_and_changes_nothing(config, message):
    model, sparsifier = network(), WandaSparsifier()
    with pytest.raises(UserError, match=message):
        sparsifier.prepare(model, config)
    assert not any(parametrize.is_parametrized(module) for module in model)
    sparsifier.prepare(model)


@pytest.mark.parametrize(
    "change", [{"allocation": "nonsense"}, {"sparsity_level": 2}, {"semi_structured_block_size": 2.5}]
)
def test_settings_that_were_changed_later_are_checked_by_step(change):
    _, _, sparsifier = stepped()
    sparsifier.groups[1].update(change)
    with pytest.raises(UserError, match=next(iter(change))):
        sparsifier.step()
