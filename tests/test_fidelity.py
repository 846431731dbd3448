"""The pruner against direct restatements of the methods on tiny models."""

import copy
from fractions import Fraction

import oracle
import pytest
import tiny
import torch

import fwanda_kernels as fk
import fwanda_pruner
from fwanda_pruner import PruneConfig, Statistics, UserError

TOKENS = tiny.tokens(6, 24)
OMEGA_FLOOR = 1e-8


def prune(model, **settings):
    """Prune with TOKENS and no second opinion: what a comparison with Wanda would add is not asked here."""
    return fwanda_pruner.prune(model, **{"calibration": TOKENS, "no_check": True, "progress": False, **settings})


def weights(model) -> dict[str, torch.Tensor]:
    return {name: oracle.weight_of(module) for name, module in oracle.linear_layers(model).items()}


def kept_in_rows(model) -> dict[str, torch.Tensor]:
    """name -> [R] weights that are not zero."""
    return {name: (weight != 0).sum(1) for name, weight in weights(model).items()}


def random_statistics(model, seed=0) -> Statistics:
    torch.manual_seed(seed)
    statistics = Statistics(fisher="empirical", bos=False)
    for name, weight in weights(model).items():
        rows, cols = weight.shape
        statistics.x2[name] = torch.rand(cols) + 0.1
        statistics.g2[name] = torch.randn(rows).exp() ** 2
        statistics.n_tokens[name] = 100
    return statistics


def layers(statistics) -> dict[str, fk.LayerStatistics]:
    return {
        name: fk.LayerStatistics(x2, statistics.g2[name], statistics.n_tokens[name])
        for name, x2 in statistics.x2.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequential_wanda_equals_its_block_loop(dtype):
    model = tiny.llama(dtype=dtype)
    expected = copy.deepcopy(model)
    prune(model, method="wanda", order="sequential", sparsity="0.6")
    oracle.sequential_wanda(expected, TOKENS, "0.6")
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_onepass_wanda_uses_the_dense_model_s_inputs():
    model = tiny.llama()
    expected = copy.deepcopy(model)
    prune(model, method="wanda", sparsity="0.5")
    oracle.wanda(expected, TOKENS, "0.5")
    for name, weight in weights(expected).items():
        assert torch.equal(weights(model)[name], weight), name


def test_onepass_sparsegpt_equals_a_walk_in_float64():
    model, dense = tiny.llama(), tiny.llama()
    prune(model, method="sparsegpt", order="onepass", sparsity="0.5")
    for name, x in oracle.inputs_of(dense, TOKENS).items():
        expected, gone = oracle.obs_walk(weights(dense)[name], x.double().T @ x.double(), sparsity="0.5")
        found = weights(model)[name]
        assert torch.equal(found == 0, gone), name
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_statistics_equal_retained_gradients_of_the_summed_loss(checkpointing):
    model = tiny.llama()
    expected = oracle.sums_of_squares(model, TOKENS)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    statistics = fwanda_pruner.collect(model, config=PruneConfig(), calibration=TOKENS, progress=False)
    assert statistics.x2.keys() == statistics.g2.keys() == expected.keys()
    for name, (x2, g2) in expected.items():
        assert statistics.n_tokens[name] == TOKENS.numel()
        torch.testing.assert_close(statistics.x2[name].double(), x2, rtol=1e-5, atol=0)
        torch.testing.assert_close(statistics.g2[name].double(), g2, rtol=1e-4, atol=1e-12)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("allocation", "exponent"),
    # the published rule has a floor, which small omegas meet
    [("global", -40), ("global", -7), ("global", 13), ("global", 40), ("row", 13), ("row", 40)],
)
def test_budgets_do_not_depend_on_the_scale_of_omega(allocation, exponent):
    mine, theirs = tiny.llama(), tiny.llama()
    statistics = random_statistics(mine)
    prune(mine, method="fwanda", allocation=allocation, sparsity="0.5", statistics=statistics)
    scaled = copy.deepcopy(statistics)
    scaled.g2 = {name: g2 * 2.0**exponent for name, g2 in statistics.g2.items()}
    prune(theirs, method="fwanda", allocation=allocation, sparsity="0.5", statistics=scaled)
    assert all(torch.equal(weight, weights(theirs)[name]) for name, weight in weights(mine).items())


def test_global_budgets_equal_a_sort_of_all_scores():
    model = tiny.llama()
    statistics, dense = random_statistics(model), copy.deepcopy(weights(model))
    found = layers(statistics)
    settings = {"sparsity": "0.7", "row_exponent": 0.75, "layer_exponent": 0.5}
    prune(model, method="fwanda", allocation="global", statistics=statistics, **settings)
    omegas, norms = ([getattr(found[name], key) for name in dense] for key in ("omega", "norm"))
    scales = oracle.global_row_scales(list(dense.values()), omegas, norms, 0.75, 0.5)
    scores = [
        weight.abs() * norm * scale.float()[:, None]
        for weight, norm, scale in zip(dense.values(), norms, scales, strict=True)
    ]
    size = sum(weight.numel() for weight in dense.values())
    total = size - int(Fraction("0.7") * size)
    for (name, kept), mask in zip(kept_in_rows(model).items(), oracle.global_keep(scores, total), strict=True):
        # the scale is computed in another order: rows at the threshold may differ by one
        assert (kept - mask.sum(1)).abs().max() <= 1, name
    assert sum(int(kept.sum()) for kept in kept_in_rows(model).values()) == total


def test_a_global_budget_without_fisher_information_is_the_users_error():
    statistics = random_statistics(tiny.llama())
    statistics.g2 = {name: torch.zeros_like(g2) for name, g2 in statistics.g2.items()}
    with pytest.raises(UserError, match="the Fisher information is 0 everywhere"):
        prune(tiny.llama(), method="fwanda", allocation="global", sparsity="0.5", statistics=statistics)


def test_a_bad_value_that_only_the_selection_meets_is_named():
    """The weight breaks after the run has checked it: once the last window is through."""
    model, windows = tiny.llama(), []
    module = model.model.layers[0].self_attn.o_proj

    def break_the_weight(_module, _args, _output):
        windows.append(1)
        if len(windows) == len(TOKENS):
            module.weight.data[2, 1] = torch.inf

    model.model.layers[-1].register_forward_hook(break_the_weight)
    with pytest.raises(UserError, match=r"model\.layers\.0\.self_attn\.o_proj: weight has NaN or inf values"):
        prune(model, method="wanda", sparsity="0.5", micro_batch=1)


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_row_budgets_are_proportional_to_the_power_of_omega(power):
    model = tiny.llama()
    statistics = random_statistics(model)
    prune(model, method="fwanda", allocation="row", sparsity="0.5", power=power, statistics=statistics)
    for name, keep in kept_in_rows(model).items():
        rows, cols = weights(model)[name].shape
        keep = keep.double()
        assert int(keep.sum()) == rows * cols - rows * cols // 2
        free = (keep > 1) & (keep < cols)
        # k_i = lambda * omega_i^p up to rounding by less than one: one lambda must fit all rows
        shares = layers(statistics)[name].omega[free] ** power
        assert free.sum() > 2 and ((keep[free] - 1) / shares).max() < ((keep[free] + 1) / shares).min()


def test_rows_that_meet_the_floor_are_counted():
    settings = {"method": "fwanda", "allocation": "row", "sparsity": 0.5}
    assert prune(tiny.llama(), **settings).omega_floored_rows == 0
    statistics = random_statistics(tiny.llama())
    for g2 in statistics.g2.values():
        g2.fill_(1.0)  # omega = 0.01
        g2[:3] = 0.99 * OMEGA_FLOOR * 100
    assert prune(tiny.llama(), statistics=statistics, **settings).omega_floored_rows == 3 * 14
