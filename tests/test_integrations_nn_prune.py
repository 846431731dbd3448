"""torch.nn.utils.prune as a host."""

import copy
import warnings
from fractions import Fraction

import pytest
import tiny
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import fwanda_kernels as fk
import fwanda_pruner
from fwanda_kernels.testing import assert_masks_equal
from fwanda_pruner import UserError
from fwanda_pruner.allocate.budgets import OMEGA_FLOOR
from fwanda_pruner.config import PruneConfig
from fwanda_pruner.integrations.nn_prune import (
    WandaUnstructured,
    fwanda_unstructured,
    global_fwanda_unstructured,
    wanda_unstructured,
)


def measured(*, dead=0, backward=True, dtype=torch.float32):
    """Two layers, and their statistics; `dead` input columns are always zero."""
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 6)).to(dtype)
    x = torch.randn(64, 12, dtype=dtype)
    x[:, :dead] = 0
    layers = {(module, "weight"): module for module in (model[0], model[2])}
    with fk.collect_statistics(layers) as statistics:
        loss = model(x).float().square().sum()
        if backward:
            loss.backward()
    return model, statistics


def zeros(module) -> torch.Tensor:
    return (module.weight_mask == 0).sum(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mask_is_that_of_the_kernels_and_of_a_stable_sort(dtype):
    model, statistics = measured(dtype=dtype)
    layer, weight = model[0], model[0].weight.detach().clone()
    norm = statistics[layer, "weight"].x2.sqrt()
    wanda_unstructured(layer, "weight", statistics[layer, "weight"], amount=0.3)
    removed = torch.sort(weight.float().abs() * norm, dim=1, stable=True).indices[:, :3]
    expected = torch.ones(20, 12, dtype=torch.bool).scatter_(1, removed, False)
    assert_masks_equal(layer.weight_mask.bool(), expected)
    assert layer.weight_mask.dtype == dtype
    assert torch.equal(layer.weight, weight * expected)


def test_with_scores_of_one_number_a_row_the_mask_is_the_hosts_own():
    """On one row the host's unstructured method ranks the same scores."""
    ours, scale = nn.Linear(40, 1), torch.rand(40)
    theirs = copy.deepcopy(ours)
    WandaUnstructured.apply(ours, "weight", scale=scale, keep=torch.tensor([28]))
    prune.l1_unstructured(theirs, "weight", amount=0.3, importance_scores=theirs.weight * scale)
    assert torch.equal(ours.weight_mask, theirs.weight_mask)
    assert torch.equal(ours.weight, theirs.weight)


def test_the_host_sees_a_pruned_module_and_can_remove_the_pruning():
    model, statistics = measured()
    layer = model[0]
    wanda_unstructured(layer, "weight", statistics[layer, "weight"], amount=0.5)
    assert prune.is_pruned(model)
    sparse, output = layer.weight.detach().clone(), model(torch.ones(1, 12))
    prune.remove(layer, "weight")
    assert not prune.is_pruned(model)
    assert isinstance(layer.weight, nn.Parameter)
    assert torch.equal(layer.weight, sparse)
    assert torch.equal(model(torch.ones(1, 12)), output)


def test_amount_is_of_what_is_left_and_pruned_weights_stay_pruned():
    model, statistics = measured()
    layer = model[0]
    wanda_unstructured(layer, "weight", statistics[layer, "weight"], amount=0.5)
    first = layer.weight_mask.clone()
    wanda_unstructured(layer, "weight", statistics[layer, "weight"], amount=0.5)
    assert zeros(layer).tolist() == [9] * 20
    assert not ((layer.weight_mask != 0) & (first == 0)).any()
    assert isinstance(next(iter(layer._forward_pre_hooks.values())), prune.PruningContainer)
    prune.remove(layer, "weight")
    assert ((layer.weight == 0).sum(1) == 9).all()


def test_counts_are_exact_after_another_method_even_where_all_scores_are_zero():
    model, statistics = measured(dead=12)
    layer = model[0]
    prune.random_unstructured(layer, "weight", amount=0.4)
    before = layer.weight_mask.clone()
    left = (before != 0).sum(1)
    wanda_unstructured(layer, "weight", statistics[layer, "weight"], amount="0.3")
    assert ((layer.weight_mask != 0).sum(1) == left - left * 3 // 10).all()
    assert not ((layer.weight_mask != 0) & (before == 0)).any()
    assert layer.weight_mask.dtype == layer.weight.dtype


def test_the_method_of_the_class_selects_among_what_another_left():
    layer, scale = nn.Linear(12, 20), torch.rand(12)
    weight = layer.weight.detach().clone()
    prune.random_unstructured(layer, "weight", amount=0.4)
    before = layer.weight_mask != 0
    WandaUnstructured.apply(layer, "weight", scale=scale, keep=5)
    assert_masks_equal(layer.weight_mask != 0, fk.row_topk_mask(weight, scale, 5, among=before))


def test_fwanda_divides_the_matrix_by_the_papers_rule_with_an_exact_total():
    model, statistics = measured()
    layer = model[0]
    layer_statistics = statistics[layer, "weight"]
    omega = (layer_statistics.g2.double() / layer_statistics.n_tokens).clamp(min=OMEGA_FLOOR)
    expected = fk.allocate_row_budgets(omega**0.5, 240 - 72, k_max=12)
    fwanda_unstructured(layer, "weight", layer_statistics, amount=0.3)
    assert torch.equal(12 - zeros(layer), expected)
    assert expected.unique().numel() > 1


def test_fwanda_after_wanda_divides_what_is_left():
    model, statistics = measured()
    layer = model[0]
    wanda_unstructured(layer, "weight", statistics[layer, "weight"], amount=0.5)
    fwanda_unstructured(layer, "weight", statistics[layer, "weight"], amount=0.25)
    assert int(zeros(layer).sum()) == 120 + 30
    assert int(zeros(layer).min()) >= 6


def test_fwanda_refuses_rows_that_have_different_numbers_left():
    model, statistics = measured()
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    with pytest.raises(UserError, match="unpruned weights in a row"):
        fwanda_unstructured(model[0], "weight", statistics[model[0], "weight"], amount=0.5)


def test_the_global_masks_are_those_of_the_pruner():
    ours, theirs = tiny.llama(), tiny.llama()
    statistics = fwanda_pruner.collect(
        theirs, config=PruneConfig(method="fwanda"), calibration=tiny.tokens(16, 24), progress=False
    )
    modules = {name: ours.get_submodule(name) for name in statistics.x2}
    layers = {(module, "weight"): statistics.layer(name) for name, module in modules.items()}
    global_fwanda_unstructured(layers, layers, amount=0.45)
    fwanda_pruner.prune(
        theirs,
        method="fwanda",
        allocation="global",
        sparsity=0.45,
        statistics=statistics,
        no_check=True,
        progress=False,
    )
    for name, module in modules.items():
        assert_masks_equal(module.weight_mask != 0, theirs.get_submodule(name).weight != 0)
    size = sum(module.weight.numel() for module in modules.values())
    assert sum(int(zeros(module).sum()) for module in modules.values()) == size * 45 // 100


@pytest.mark.parametrize("dead", [0, 11])
def test_global_counts_are_exact_on_pruned_modules_even_where_scores_tie_at_zero(dead):
    model, statistics = measured(dead=dead)
    prune.random_unstructured(model[0], "weight", amount=0.5)
    before = model[0].weight_mask.clone()
    global_fwanda_unstructured(list(statistics), statistics, amount="0.1")
    assert sum(int(zeros(m).sum()) for m in (model[0], model[2])) == 120 + 24
    assert not ((model[0].weight_mask != 0) & (before == 0)).any()
    prune.remove(model[0], "weight")
    prune.remove(model[2], "weight")


def test_a_bad_call_leaves_the_module_as_it_was():
    model, statistics = measured(backward=False)
    layer, own = model[0], statistics[model[0], "weight"]
    before = dict(layer.named_parameters())
    for call, message in [
        (lambda: wanda_unstructured(layer, "weight", own, amount=1), "not a number of weights"),
        (lambda: wanda_unstructured(layer, "weight", own, amount=1.5), "decimal in"),
        (lambda: wanda_unstructured(layer, "bias", own, amount=0.5), "name must be 'weight'"),
        (lambda: wanda_unstructured(layer, "weight", statistics[model[2], "weight"], amount=0.5), "another module"),
        (lambda: wanda_unstructured(nn.Conv1d(2, 2, 1), "weight", own, amount=0.5), "Conv1d must be an nn.Linear"),
        (lambda: fwanda_unstructured(layer, "weight", own, amount=0.5), "SUM of the losses"),
        (lambda: global_fwanda_unstructured(statistics, statistics, amount=0.5), "SUM of the losses"),
        (lambda: global_fwanda_unstructured([], statistics, amount=0.5), "at least one"),
        (lambda: global_fwanda_unstructured([(nn.Linear(2, 2), "weight")], statistics, amount=0.5), "no entry"),
    ]:
        with pytest.raises(UserError, match=message):
            call()
    assert dict(layer.named_parameters()) == before and not prune.is_pruned(model)


def test_weights_that_are_parametrised_quantised_or_not_finite_are_refused():
    _, statistics = measured()
    own = next(iter(statistics.values()))
    cases = {"already parametrised": parametrizations.weight_norm(nn.Linear(12, 20))}
    quantised = nn.Linear(12, 20)
    quantised.weight = nn.Parameter(torch.zeros(20, 12, dtype=torch.int8), requires_grad=False)
    cases["int8"] = quantised
    cases["float64"] = nn.Linear(12, 20).double()
    broken = nn.Linear(12, 20)
    broken.weight.data[3, 3] = torch.nan
    cases["NaN or inf"] = broken
    for message, layer in cases.items():
        with pytest.raises(UserError, match=message):
            wanda_unstructured(layer, "weight", own, amount=0.5)


def spoilt(what: str):
    """A model with one pruned layer, and statistics of which one value is not finite."""
    model, statistics = measured()
    sums = {key: fk.LayerStatistics(s.x2.clone(), s.g2.clone(), s.n_tokens) for key, s in statistics.items()}
    wanda_unstructured(model[2], "weight", sums[model[2], "weight"], amount=0.5)
    if what == "weight":
        model[2].weight_orig.data[1, 2] = torch.inf
        model(torch.zeros(1, 12))  # the host multiplies the mask into the weight before a forward pass
    else:
        getattr(sums[model[2], "weight"], what)[1] = torch.nan
    return model, sums


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("weight", r"Linear\(20, 6\).* has NaN or inf"),
        ("x2", r"Linear\(20, 6\)(: scale must be finite| has NaN or inf)"),
        ("g2", r"the output gradient of Linear\(20, 6\) has NaN or inf"),
    ],
)
def test_what_is_not_finite_is_refused_by_name_and_nothing_is_pruned(what, message):
    model, sums = spoilt(what)
    calls = {
        "global": lambda: global_fwanda_unstructured(list(sums), sums, amount=0.5),
        "row": lambda: fwanda_unstructured(model[2], "weight", sums[model[2], "weight"], amount=0.5),
        "wanda": lambda: wanda_unstructured(model[2], "weight", sums[model[2], "weight"], amount=0.5),
    }
    mask, hooks = model[2].weight_mask.clone(), dict(model[2]._forward_pre_hooks)
    for name, call in calls.items():
        if what != "g2" or name != "wanda":
            with pytest.raises(UserError, match=message):
                call()
    assert "weight" in model[0]._parameters and torch.equal(model[2].weight_mask, mask)
    assert dict(model[2]._forward_pre_hooks) == hooks


def test_inputs_alone_serve_wanda_and_are_refused_by_fwanda():
    model, statistics = measured()
    key = (model[0], "weight")
    inputs = fk.LayerStatistics(statistics[key].x2, None, statistics[key].n_tokens)
    for call in (
        lambda: fwanda_unstructured(*key, inputs, amount=0.5),
        lambda: global_fwanda_unstructured([key], {key: inputs}, amount=0.5),
    ):
        with pytest.raises(UserError, match="SUM of the losses"):
            call()
    wanda_unstructured(*key, inputs, amount=0.5)
    assert zeros(model[0]).tolist() == [6] * 20


def test_a_module_that_saw_no_token_is_ranked_by_magnitude_with_a_warning():
    layer = nn.Linear(8, 3)
    unseen = fk.LayerStatistics(torch.zeros(8), torch.zeros(3), n_tokens=0)
    with pytest.warns(UserWarning, match="ranked by magnitude"):
        wanda_unstructured(layer, "weight", unseen, amount=0.5)
    expected = fk.row_topk_mask(layer.weight_orig.detach(), torch.ones(8), 4)
    assert_masks_equal(layer.weight_mask.bool(), expected)


def test_amounts_are_exact_decimals():
    model, statistics = measured()
    for amount in (0.7, "0.7", Fraction(7, 10)):
        layer = nn.Linear(12, 20)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wanda_unstructured(layer, "weight", statistics[model[0], "weight"], amount=amount)
        assert zeros(layer).tolist() == [8] * 20


def of_each_form(statistics, module) -> list:
    """What a user may pass as the statistics of one module."""
    return [statistics, statistics.of(module), {(module, "weight"): statistics.of(module)}]


@pytest.mark.parametrize(
    "function", [wanda_unstructured, fwanda_unstructured, "global"], ids=["wanda", "fwanda", "global"]
)
@pytest.mark.parametrize("form", range(3))
def test_every_function_takes_the_collector_whatever_its_keys(function, form):
    torch.manual_seed(0)
    layer, twin = nn.Linear(12, 4), nn.Linear(12, 4)
    twin.load_state_dict(layer.state_dict())
    with fk.collect_statistics({"a name": layer, (twin, "weight"): twin}) as statistics:
        (layer(torch.randn(9, 12)).square().sum() + twin(torch.randn(9, 12)).square().sum()).backward()
    for module, given in ((layer, statistics), (twin, statistics)):
        if function == "global":
            global_fwanda_unstructured([(module, "weight")], of_each_form(given, module)[form], 0.5)
        else:
            function(module, "weight", of_each_form(given, module)[form], 0.5)
        assert int(module.weight_mask.sum()) == 24


@pytest.mark.parametrize("function", [wanda_unstructured, fwanda_unstructured])
@pytest.mark.parametrize("statistics", [{}, fk.collect_statistics({})], ids=["dict", "collector"])
def test_statistics_without_an_entry_of_the_module_are_refused_in_one_line(function, statistics):
    with pytest.raises(UserError, match=r"no entry \(Linear\(12, 4\), 'weight'\); was the module called") as error:
        function(nn.Linear(12, 4), "weight", statistics, 0.5)
    assert "\n" not in str(error.value)


@pytest.mark.fault("huge number")
@pytest.mark.parametrize("amount", ["1e-6000000", "1E-1_000_000_0", "1e-9999", Fraction(1, 10**6000)], ids=list("abcd"))
def test_an_amount_of_millions_of_digits_is_refused_at_once(amount):
    model, statistics = measured()
    with pytest.raises(UserError, match="amount must be the fraction removed") as error:
        wanda_unstructured(model[0], "weight", statistics, amount)
    assert len(str(error.value)) < 200


@pytest.mark.fault("huge number")
@pytest.mark.parametrize("power", [1e300, -1e300, -400])
def test_a_power_that_overflows_is_a_user_error_and_prunes_nothing(power):
    model, statistics = measured()
    with pytest.raises(UserError, match="power must be small enough"):
        fwanda_unstructured(model[0], "weight", scaled(statistics, model[0]), 0.5, power=power)
    assert "weight_orig" not in model[0]._parameters


def scaled(statistics, module) -> fk.LayerStatistics:
    """Statistics with an omega of 4 and one of 0.25 in the first rows, whose powers overflow on either side."""
    layer = statistics[module, "weight"]
    g2 = layer.g2.clone()
    g2[:2] = torch.tensor([4.0, 0.25]) * layer.n_tokens
    return fk.LayerStatistics(layer.x2, g2, layer.n_tokens)


@pytest.mark.fault("odd module")
def test_a_layer_without_a_weight_is_one_line():
    model, statistics = measured()
    model[0].weight = None
    with pytest.raises(UserError, match=r"^Linear.weight must be a tensor, got NoneType$"):
        wanda_unstructured(model[0], "weight", statistics, 0.5)


def measured_with(**modules):
    with fk.collect_statistics(modules) as statistics:
        x = torch.randn(9, 32, requires_grad=True)
        sum(module(x).square().sum() for module in modules.values()).backward()
    return statistics


def test_modules_that_are_wholly_pruned_stay_so():
    a, b = nn.Linear(32, 8), nn.Linear(32, 8)
    statistics = measured_with(a=a, b=b)
    for module in (a, b):
        prune.custom_from_mask(module, "weight", torch.zeros(8, 32))
    global_fwanda_unstructured([(a, "weight"), (b, "weight")], statistics, 0.5)
    assert not a.weight_mask.any() and not b.weight_mask.any()


def test_modules_that_share_a_weight_are_refused_by_name():
    a, b = nn.Linear(32, 8), nn.Linear(32, 8)
    b.weight = a.weight
    with pytest.raises(UserError, match=r"^parameters\[0\] and \[1\] share a weight of Linear\(32, 8\); give only one"):
        global_fwanda_unstructured([(a, "weight"), (b, "weight")], measured_with(a=a, b=b), 0.5)
    rows = nn.Parameter(torch.randn(9, 32))
    a.weight, b.weight = nn.Parameter(rows.detach()[:8]), nn.Parameter(rows.detach()[1:])
    with pytest.raises(UserError, match="^the modules cannot be ranked together: .* must not overlap"):
        global_fwanda_unstructured([(a, "weight"), (b, "weight")], measured_with(a=a, b=b), 0.5)
    assert not hasattr(a, "weight_mask")
