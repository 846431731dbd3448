"""Sums: measured in parts, merged, and gone on with, they equal those of the whole text."""

from functools import partial

import measuring
import oracle
import pytest
import tiny
import torch
from interrupt import InterruptedState
from measuring import engine_of

from fwanda_pruner.engine.sums import Sums
from fwanda_pruner.measure.statistics import Statistics, measure_statistics
from fwanda_pruner.measure.sums import HessianSums, SignedStatisticsSums, StatisticsSums, TokenSqGradSums
from fwanda_pruner.measure.token_weights import measure_token_sq_grads
from fwanda_pruner.run import stage
from fwanda_pruner.run.stage import Stages
from fwanda_pruner.stage_names import StageName

TOKENS = tiny.tokens(7, 24)
CASES = {
    "statistics": (StatisticsSums, True),
    "statistics, forward alone": (StatisticsSums, False),
    "signed statistics": (SignedStatisticsSums, True),
    "squared gradients of tokens": (TokenSqGradSums, True),
    "Hessians": (HessianSums, False),
}
EXACT = [name for name in CASES if name != "Hessians"]  # these go on adding where they stopped; Hessians are merged


@pytest.fixture(scope="module")
def engine():
    return engine_of(tiny.llama())


@pytest.fixture(params=CASES)
def case(request, engine):
    """The name of a case; a function that makes its sums; and one that adds windows to them."""
    kind, backward = CASES[request.param]
    modules = {target.name: target.module for target in engine.targets}
    return request.param, lambda: kind(modules), partial(measured, engine, backward=backward)


def measured(engine, sums: Sums, tokens, *, backward: bool) -> dict[str, torch.Tensor]:
    engine.measure(tokens, sums, backward=backward)
    return copied(sums.tensors())


def copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, exact: bool) -> None:
    """Up to the order of additions, or to the last bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        bounds = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-5 * float(tensor.abs().max())}
        torch.testing.assert_close(found[name], tensor, **bounds, msg=name)


def test_two_halves_merged_equal_the_whole(case):
    _, make, add = case
    whole, first, second = add(make(), TOKENS), make(), make()
    add(first, TOKENS[:3])
    later = add(second, TOKENS[3:])
    first.merge(second.tensors())
    assert_equal(first.tensors(), whole, exact=False)
    assert_equal(second.tensors(), later, exact=True)


def test_going_on_from_tensors_equals_the_whole(case):
    name, make, add = case
    whole, sums = add(make(), TOKENS), make()
    sums.load(add(make(), TOKENS[:3]))
    assert_equal(add(sums, TOKENS[3:]), whole, exact=name in EXACT)


def test_sums_entered_twice_go_on(case):
    name, make, add = case
    sums = make()
    add(sums, TOKENS[:3])
    assert_equal(add(sums, TOKENS[3:]), add(make(), TOKENS), exact=name in EXACT)


def test_cleared_sums_start_again_from_nothing(case):
    _, make, add = case
    sums = make()
    add(sums, TOKENS[:3])
    sums.clear()
    assert sums.tensors() == {}
    assert_equal(add(sums, TOKENS), add(make(), TOKENS), exact=True)


def test_sums_merged_into_none_are_those_and_stay_as_they_were(case):
    """The other process may still use its tensors."""
    _, make, add = case
    other, sums = make(), make()
    before = add(other, TOKENS[:3])
    sums.merge(other.tensors())
    assert_equal(sums.tensors(), before, exact=True)
    add(sums, TOKENS[3:])
    assert_equal(other.tensors(), before, exact=True)
    assert_equal(sums.tensors(), add(make(), TOKENS), exact=False)


def test_windows_of_several_lengths_are_merged(case):
    _, make, add = case
    sums, short = make(), make()
    add(sums, TOKENS[:3])
    add(short, TOKENS[3:, :12])
    sums.merge(short.tensors())
    one = add(make(), TOKENS[:3])
    expected = make()
    expected.load(one)
    assert_equal(sums.tensors(), add(expected, TOKENS[3:, :12]), exact=False)


def test_an_error_leaves_no_hook_and_adds_nothing(case, engine):
    _, make, add = case
    sums = make()
    before = add(sums, TOKENS[:3])

    def fails(_x):
        raise RuntimeError("stop")

    with measuring.out_of_memory(engine.model.model.norm, fails), pytest.raises(RuntimeError, match="stop"):
        add(sums, TOKENS[3:])
    assert_equal(sums.tensors(), before, exact=True)
    assert not any(module._forward_hooks for module in engine.model.modules())


# What the tensors are


def test_statistics_are_squares_of_inputs_and_gradients_and_counts(engine):
    modules = {target.name: target.module for target in engine.targets}
    found = measured(engine, SignedStatisticsSums(modules), TOKENS, backward=True)
    inputs, grads = oracle.inputs_and_gradients(engine.model, TOKENS)
    expected = {}
    for name, x in inputs.items():
        expected |= {f"{name}.x2": x.square().sum(0).float(), f"{name}.g2": grads[name].square().sum(0).float()}
        expected |= {f"{name}.g1": grads[name].sum(0), f"{name}.n_tokens": torch.tensor(TOKENS.numel())}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        size = float(tensor.abs().max())  # gradients cancel in g1
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4 * size, msg=name)


def test_gradients_of_a_forward_pass_alone_are_zeros(engine):
    modules = {target.name: target.module for target in engine.targets}
    found = measured(engine, StatisticsSums(modules), TOKENS, backward=False)
    assert all(int(found[f"{name}.g2"].count_nonzero()) == 0 for name in modules)


def test_modules_with_one_input_share_one_hessian(engine):
    modules = {t.name: t.module for t in engine.targets if t.block == 0}
    sums = HessianSums(modules)
    found = measured(engine, sums, TOKENS, backward=False)
    prefix = "model.layers.0."
    assert [name.replace(prefix, "") for name in found] == [
        "self_attn.q_proj+self_attn.k_proj+self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj+mlp.up_proj",
        "mlp.down_proj",
    ]  # fmt: skip
    by_module = sums.by_module()
    assert by_module.keys() == modules.keys()
    assert by_module[f"{prefix}self_attn.v_proj"] is by_module[f"{prefix}self_attn.q_proj"]
    for name, x in oracle.inputs_of(engine.model, TOKENS, modules).items():
        torch.testing.assert_close(by_module[name], x.T @ x, rtol=1e-4, atol=1e-3, msg=name)


def test_hessians_weigh_tokens(engine):
    name = "model.layers.0.mlp.up_proj"
    module, weight = engine.model.get_submodule(name), torch.rand(TOKENS.numel())
    sums = HessianSums({name: module}, {name: weight})
    found = measured(engine, sums, TOKENS, backward=False)[name]
    x = oracle.inputs_of(engine.model, TOKENS, {name: module})[name]
    torch.testing.assert_close(found, x.T @ (x * weight[:, None]), rtol=1e-4, atol=1e-3)


# Interrupted measurements


def part_of(stages: Stages, measure: partial):
    """Where a measurement saves its state; statistics have two parts, the passes with and without gradients."""
    if measure.func is measure_statistics:
        return partial(stages.unfinished, StageName.CALIBRATE)
    return stages.unfinished(StageName.CALIBRATE)


def tensors_of(result) -> dict[str, torch.Tensor]:
    return result.to_parts()[0] if isinstance(result, Statistics) else result[0]


@pytest.mark.fault("long run dies")
@pytest.mark.parametrize("saves", [1, 4])
@pytest.mark.parametrize(
    "measure",
    [
        partial(measure_statistics, fisher=None),
        partial(measure_statistics, fisher="empirical"),
        partial(measure_statistics, fisher="true", seed=3),
        partial(measure_statistics, fisher="mean"),
        partial(measure_token_sq_grads, fisher="empirical"),
        partial(measure_token_sq_grads, fisher="true", seed=3),
    ],
    ids=lambda measure: f"{measure.func.__name__}-{measure.keywords['fisher']}",
)
def test_an_interrupted_measurement_goes_on_with_the_same_bits(measure, saves, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "SAVE_SECONDS", 0)
    expected = tensors_of(measure(engine_of(tiny.llama()), TOKENS))
    state = InterruptedState(tmp_path / "out")
    state.saves_left = saves
    stages, model = Stages(state, torch.device("cpu")), tiny.llama()
    with pytest.raises(KeyboardInterrupt):
        measure(engine_of(model), TOKENS, unfinished=part_of(stages, measure))
    assert not any(module._forward_hooks for module in model.modules())
    model = tiny.llama()
    with measuring.input_sizes(model.get_input_embeddings()) as sizes:
        found = tensors_of(measure(engine_of(model), TOKENS, unfinished=part_of(stages, measure)))
    assert sizes == [1] * (len(TOKENS) - 1 - saves)  # nothing is saved after the first pass
    assert_equal(found, expected, exact=True)


@pytest.mark.fault("memory while calibrating")
@pytest.mark.parametrize("fisher", ["true", "mean"])
def test_out_of_memory_after_an_interruption_starts_from_the_first_window(fisher, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "SAVE_SECONDS", 0)
    expected = measure_statistics(engine_of(tiny.llama()), TOKENS, fisher=fisher)
    state = InterruptedState(tmp_path / "out")
    state.saves_left = 1
    stages, model = Stages(state, torch.device("cpu")), tiny.llama()
    measure = partial(measure_statistics, engine_of(model, micro_batch=2), TOKENS, fisher=fisher)
    with pytest.raises(KeyboardInterrupt):
        measure(unfinished=part_of(stages, measure))
    with (
        measuring.input_sizes(model.get_input_embeddings()) as sizes,
        measuring.out_of_memory(model.model.norm, lambda _x: sizes == [2, 1]),
        pytest.warns(UserWarning, match="starting again with 1 windows"),
    ):
        found = measure(unfinished=part_of(stages, measure))
    assert sizes == [2, 1] + [1] * len(TOKENS)
    for name in expected.g2:
        torch.testing.assert_close(found.layer(name).omega, expected.layer(name).omega, rtol=1e-3, atol=1e-9)
        assert found.n_tokens[name] == TOKENS.numel()
