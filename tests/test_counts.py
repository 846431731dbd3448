"""Counts must be integers: those of Python and numpy are read, everything else is refused in one line."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import fwanda_kernels as fk

WEIGHT, SCALE = torch.arange(1.0, 25).view(2, 12), torch.ones(12)
SIGNAL = torch.tensor([1.0, 2.0, 3.0])

CALLS = {  # "op: argument" -> a call with the value in that place; 4 is right everywhere
    "row_topk_mask: keep": lambda k: fk.row_topk_mask(WEIGHT, SCALE, k),
    "row_topk_prune_: keep": lambda k: fk.row_topk_prune_(WEIGHT.clone(), SCALE, k),
    "nm_mask: n": lambda k: fk.nm_mask(WEIGHT, SCALE, k, 4),
    "nm_mask: m": lambda k: fk.nm_mask(WEIGHT, SCALE, 2, k),
    "nm_prune_: n": lambda k: fk.nm_prune_(WEIGHT.clone(), SCALE, k, 4),
    "nm_prune_: m": lambda k: fk.nm_prune_(WEIGHT.clone(), SCALE, 2, k),
    "select_threshold: total": lambda k: fk.select_threshold([WEIGHT], [torch.ones(2)], [SCALE], k),
    "obs_prune_: n": lambda k: fk.obs_prune_(WEIGHT.clone(), factor=torch.eye(12), pattern=(k, 4)),
    "obs_prune_: m": lambda k: fk.obs_prune_(WEIGHT.clone(), factor=torch.eye(12), pattern=(2, k)),
    "obs_prune_: block": lambda k: fk.obs_prune_(WEIGHT.clone(), factor=torch.eye(12), sparsity=0.5, block=k),
    "allocate_row_budgets: total": lambda k: fk.allocate_row_budgets(SIGNAL, k, k_max=4),
    "allocate_row_budgets: k_max": lambda k: fk.allocate_row_budgets(SIGNAL, 9, k_max=k),
    "allocate_row_budgets: k_min": lambda k: fk.allocate_row_budgets(SIGNAL, 15, k_min=k, k_max=9),
    "allocate_budgets: totals[0]": lambda k: fk.allocate_budgets([SIGNAL], [k], k_max=[4]),
    "allocate_budgets: k_max[0]": lambda k: fk.allocate_budgets([SIGNAL], [9], k_max=[k]),
    "allocate_budgets: k_min": lambda k: fk.allocate_budgets([SIGNAL], [15], k_min=k, k_max=[9]),
    "LayerStatistics: n_tokens": lambda k: fk.LayerStatistics(SCALE, None, n_tokens=k),
    "LayerStatistics: g2_tokens": lambda k: fk.LayerStatistics(SCALE, SCALE, n_tokens=9, g2_tokens=k),
}
NO_INTEGERS = [
    4.0, 9.999999, 100 * (1 - 0.9), float("nan"), True, np.float32(4), np.bool_(True), "4", None, 4 + 0j, [4],
    np.ones(2), torch.tensor(4), torch.tensor(4.0),
]  # fmt: skip
INTEGERS = [4, np.int64(4), np.int32(4), np.uint8(4)]


def plain(value):
    """Results as nested lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else None


@pytest.mark.fault("counts")
@pytest.mark.parametrize("value", NO_INTEGERS, ids=lambda v: f"{type(v).__name__}-{v}".replace("\n", ""))
@pytest.mark.parametrize("place", CALLS)
def test_what_is_no_integer_is_refused_in_one_line(place, value):
    if place.endswith("g2_tokens") and value is None:
        pytest.skip("None is the default")
    with pytest.raises(ValueError) as error:
        CALLS[place](value)
    text = str(error.value)
    expected = "[2] int64 on cpu" if isinstance(value, torch.Tensor) and place.endswith("keep") else "an integer"
    assert text.startswith(f"{place} must be {expected}, got ") and "\n" not in text


@pytest.mark.fault("counts")
@pytest.mark.parametrize("value", INTEGERS, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("place", CALLS)
def test_integers_of_python_and_numpy_give_the_same_result(place, value):
    assert plain(CALLS[place](value)) == plain(CALLS[place](4))


@pytest.mark.parametrize("name", ["n_tokens", "g2_tokens"])
def test_negative_numbers_of_tokens_and_those_set_later_are_refused(name):
    with pytest.raises(ValueError, match=f"^LayerStatistics: {name} must be at least 0, got -1"):
        fk.LayerStatistics(SCALE, SCALE, **{"n_tokens": 3, name: -1})
    layer = fk.LayerStatistics(SCALE, SCALE, n_tokens=3)
    setattr(layer, name, 2.5)
    with pytest.raises(ValueError, match=f"^LayerStatistics: {name} must be an integer, got 2.5"):
        _ = layer.omega


@pytest.mark.parametrize("value", ["0.1", None, True, torch.tensor(0.1), float("nan"), float("inf"), 0, -1.0])
def test_a_damping_that_is_no_positive_number_is_one_line(value):
    for call in (fk.obs_factor, lambda h, d: fk.obs_prune_(WEIGHT.clone(), h, sparsity=0.5, damping=d)):
        with pytest.raises(ValueError, match="damping") as error:
            call(torch.eye(12), value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("pattern", [(2,), (1, 2, 4), "2:4"])
def test_a_pattern_that_is_no_pair_is_one_line(pattern):
    with pytest.raises(ValueError, match="^obs_prune_: pattern must be two integers"):
        fk.obs_prune_(WEIGHT.clone(), factor=torch.eye(12), pattern=pattern)


@pytest.mark.parametrize("name", ["row_exponent", "layer_exponent", "mean_omega"])
@pytest.mark.parametrize("value", ["0.5", True, float("nan"), torch.tensor(0.5)])
def test_exponents_that_are_no_numbers_are_one_line(name, value):
    with pytest.raises(ValueError, match=f"^global_row_scales: {name} must be a finite number, got "):
        fk.global_row_scales([WEIGHT], [torch.ones(2)], [SCALE], **{name: value})


# adapters


def adapter_calls() -> dict:
    from fwanda_pruner.integrations import ao_sparsifier, nn_prune, wanda_style

    def sparsifier(block):
        model = nn.Sequential(nn.Linear(12, 3))
        found = ao_sparsifier.WandaSparsifier(0.5, semi_structured_block_size=block)
        found.prepare(model, None)
        model(torch.ones(2, 12))
        found.step()
        return model[0].weight.detach()

    def unstructured(keep):
        layer = nn.Linear(12, 3)
        nn_prune.WandaUnstructured.apply(layer, "weight", SCALE, keep)
        prune.remove(layer, "weight")
        return layer.weight.detach()

    return {
        "prune_n": lambda k: wanda_style.wanda_mask(WEIGHT, SCALE, prune_n=k, prune_m=12),
        "prune_m": lambda k: wanda_style.wanda_mask(WEIGHT, SCALE, prune_n=2, prune_m=k),
        "block": sparsifier,
        "keep": unstructured,
    }


@pytest.mark.fault("counts")
@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("value", [4.0, 9.999999, True, "4", torch.tensor(4)], ids=str)
@pytest.mark.parametrize("place", ["prune_n", "prune_m", "block", "keep"])
def test_adapters_refuse_what_is_no_integer(place, value):
    with pytest.raises(ValueError, match="must be an integer|must be .*int64") as error:
        adapter_calls()[place](value)
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("place", ["prune_n", "prune_m", "block", "keep"])
def test_adapters_read_integers_of_numpy(place, seed):
    expected = adapter_calls()[place](4)
    torch.manual_seed(seed)
    assert torch.equal(adapter_calls()[place](np.int64(4)), expected)


@pytest.mark.parametrize("value", ["0.5", True, float("nan"), torch.tensor(0.5)], ids=str)
def test_adapters_refuse_ratios_and_powers_that_are_no_numbers(value):
    from fwanda_pruner.errors import UserError
    from fwanda_pruner.integrations import nn_prune, wanda_style

    with pytest.raises(UserError, match="^sparsity_ratio must be a finite number"):
        wanda_style.wanda_mask(WEIGHT, SCALE, value)
    layer = nn.Linear(12, 3)
    statistics = fk.LayerStatistics(torch.ones(12), torch.ones(3), n_tokens=4)
    with pytest.raises(UserError, match="^power must be a finite number"):
        nn_prune.fwanda_unstructured(layer, "weight", statistics, 0.5, power=value)
