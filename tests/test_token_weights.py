"""F-SparseGPT under a pattern: tokens weighed by their gradients."""

import measuring
import oracle
import pytest
import tiny
import torch
from measuring import engine_of

import fwanda_kernels as fk
import fwanda_pruner
from fwanda_pruner import PruneConfig, UserError
from fwanda_pruner.engine.resident import ResidentEngine
from fwanda_pruner.measure.token_weights import measure_token_sq_grads, token_weights
from fwanda_pruner.model.targets import find_targets

TOKENS = tiny.tokens(6, 16)
RUN = {"pattern": "2:4", "calibration": TOKENS, "progress": False}


@pytest.mark.parametrize(
    "settings", [{"micro_batch": 1}, {"micro_batch": 4}, {"micro_batch": 2, "checkpointing": "on"}], ids=str
)
@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_squared_gradients_equal_those_of_retained_gradients(family, settings):
    found, passes = measure_token_sq_grads(engine_of(tiny.build(family), **settings), TOKENS)
    expected = oracle.token_sq_grads(tiny.build(family), TOKENS)
    assert found.keys() == expected.keys() and passes.micro_batch == settings["micro_batch"]
    for name, squares in expected.items():
        torch.testing.assert_close(found[name].double(), squares, rtol=1e-4, atol=1e-9)


def test_true_draws_the_labels_by_the_seed():
    found, _ = measure_token_sq_grads(engine_of(tiny.llama()), TOKENS, fisher="true", seed=7)
    grads = oracle.inputs_and_gradients(tiny.llama(), TOKENS, oracle.drawn_labels(TOKENS, 7))[1]
    for name, gradient in grads.items():
        torch.testing.assert_close(found[name].double(), gradient.square().sum(1), rtol=1e-4, atol=1e-9)


@pytest.mark.fault("memory while calibrating")
def test_out_of_memory_counts_no_token_twice():
    model = tiny.llama()
    with (
        measuring.input_sizes(model.get_input_embeddings()) as calls,
        measuring.out_of_memory(model.model.norm, lambda _x: calls == [4, 2]),
        pytest.warns(UserWarning, match="starting again with 2 windows"),
    ):
        found, _ = measure_token_sq_grads(engine_of(model, micro_batch=4), TOKENS)
    assert calls == [4, 2, 2, 2, 2]
    for name, squares in oracle.token_sq_grads(tiny.llama(), TOKENS).items():
        torch.testing.assert_close(found[name].double(), squares, rtol=1e-4, atol=1e-9)


def test_the_run_is_that_of_the_restatement():
    """The first block, whose inputs are those of the dense model: squares summed over the matrices with one input."""
    dense, (weights, _) = tiny.llama(), pruned("fsparsegpt", power=1.0)
    squares, inputs = oracle.token_sq_grads(dense, TOKENS), oracle.inputs_of(dense, TOKENS)
    targets = [t for t in find_targets(dense)[0] if t.block == 0]
    for target, found in zip(targets, weights, strict=False):
        x = inputs[target.name]
        same = [other.name for other in targets if torch.equal(inputs[other.name], x)]
        assert len(same) == {"q": 3, "k": 3, "v": 3, "g": 2, "u": 2}.get(target.name.split(".")[-1][0], 1)
        weight = sum(squares[name] for name in same).sqrt().float()
        factor, _ = fk.obs_factor(x.T @ (x * (weight / weight.mean())[:, None]), 0.01)
        expected = target.weight.clone()
        fk.obs_prune_(expected, factor=factor, pattern=(2, 4))
        assert torch.equal(expected != 0, found != 0), target.name
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_experts_have_none_even_where_all_see_each_token():
    model = tiny.build("mixtral")
    model.config.num_experts_per_tok = model.config.num_local_experts
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = model.config.num_local_experts
    found, _ = measure_token_sq_grads(engine_of(model), TOKENS)
    assert found and not any("expert" in name for name in found)


def test_experts_in_a_list_have_none():
    class Experts(torch.nn.Module):
        def __init__(self, expert):
            super().__init__()
            self.experts = torch.nn.ModuleList([expert])

        def forward(self, x):
            return self.experts[0](x)

    model = tiny.llama()
    model.model.layers[0].mlp = Experts(model.model.layers[0].mlp)
    engine = engine_of(model)
    found, _ = measure_token_sq_grads(engine, TOKENS)
    assert {t.name for t in engine.targets} - found.keys() == {
        f"model.layers.0.mlp.experts.0.{name}_proj" for name in ("gate", "up", "down")
    }


@pytest.mark.parametrize("settings", [{"micro_batch": 2}, {"micro_batch": 3, "checkpointing": "on"}], ids=str)
def test_squared_gradients_keep_the_order_of_calls_in_parts(settings, monkeypatch):
    model = tiny.llama()
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda x: torch.cat([forward(part) for part in x.split(1)]))
    found, _ = measure_token_sq_grads(engine_of(model, **settings), TOKENS)
    name = "model.layers.0.mlp.up_proj"
    expected = oracle.token_sq_grads(tiny.llama(), TOKENS)[name]
    torch.testing.assert_close(found[name].double(), expected, rtol=1e-4, atol=1e-9)


def test_matrices_that_no_token_reaches_have_none(monkeypatch):
    model = tiny.llama()
    monkeypatch.setattr(model.model.layers[1].mlp, "forward", lambda x: x)
    targets = [t for t in find_targets(model)[0] if "layers.1.mlp" in t.name]
    assert measure_token_sq_grads(ResidentEngine(model, targets, progress=False), TOKENS)[0] == {}


def test_gradients_that_overflow_are_refused():
    model = tiny.llama()
    torch.nn.init.constant_(model.lm_head.weight, torch.inf)
    with pytest.raises(UserError, match="the model overflows on the calibration text"):
        measure_token_sq_grads(engine_of(model), TOKENS)


def test_weights_have_a_mean_of_1_and_the_power():
    weights = token_weights([torch.tensor([1.0, 2.0, 0.0]), torch.tensor([3.0, 7.0, 0.0])], 1.0)
    assert weights.tolist() == pytest.approx([2 * 3 / 5, 3 * 3 / 5, 0.0])
    assert token_weights([torch.zeros(3)], 0.5).tolist() == [1.0, 1.0, 1.0]
    assert token_weights([torch.tensor([1.0, 9.0])], 0.0).tolist() == [1.0, 1.0]


def test_hessians_weigh_each_token_in_the_order_of_the_calls():
    first, second, third = torch.nn.Linear(8, 4), torch.nn.Linear(8, 3), torch.nn.Linear(8, 3)
    x, weight = torch.randn(5, 6, 8), torch.rand(30)
    with fk.collect_hessians({"first": first, "second": second, "third": third}, {"first": weight}) as hessians:
        for part in x.split(2):
            first(part), second(part)
            third(part + 1)
    flat = x.flatten(0, 1)
    torch.testing.assert_close(hessians["first"], flat.T @ (flat * weight[:, None]), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="token_weight names 'third', which is none of the modules"):
        with fk.collect_hessians({"first": first}, {"third": weight}):
            pass
    with pytest.raises(ValueError, match=r"token_weight of first must be \[T\], got \[5, 6\]"):
        with fk.collect_hessians({"first": first}, {"first": weight.view(5, 6)}):
            pass
    with pytest.raises(ValueError, match="first saw 30 tokens, token_weight has 31"):
        with fk.collect_hessians({"first": first}, {"first": torch.ones(31)}):
            first(x)
    with pytest.raises(ValueError, match="first sees 30 tokens or more, token_weight has 29"):
        with fk.collect_hessians({"first": first}, {"first": weight[:29]}):
            first(x)


def test_a_heavy_token_does_not_overflow_in_half_precision():
    fc, x = torch.nn.Linear(8, 4).half(), torch.full((1, 4, 8), 3000.0).half()
    with fk.collect_hessians({"fc": fc}, {"fc": torch.tensor([600.0, 0.0, 0.0, 0.0])}) as hessians:
        fc(x)
    torch.testing.assert_close(hessians["fc"], torch.full((8, 8), 600 * 9e6), rtol=1e-2, atol=0)


def pruned(method: str, **settings):
    model = tiny.llama()
    report = fwanda_pruner.prune(model, method=method, **{**RUN, **settings})
    return [t.weight for t in find_targets(model)[0]], report


def test_tokens_decide_under_a_pattern():
    weights, report = pruned("fsparsegpt")
    plain, _ = pruned("sparsegpt")
    assert report.passes and "calibrate" in report.seconds
    assert all(bool(((w != 0).unflatten(1, (-1, 4)).sum(2) <= 2).all()) for w in weights)
    assert not all(torch.equal(a != 0, b != 0) for a, b in zip(weights, plain, strict=True))
    without, _ = pruned("fsparsegpt", power=0.0)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(without, plain, strict=True))


def test_micro_batches_and_orders_keep_tokens_with_their_weights():
    one, _ = pruned("fsparsegpt", micro_batch="1")
    for settings in ({"micro_batch": "4"}, {"order": "onepass"}, {"order": "true-sequential"}):
        other, _ = pruned("fsparsegpt", **settings)
        first = [torch.allclose(a, b, atol=1e-5) for a, b in zip(one[:3], other[:3], strict=True)]  # q, k, v
        assert all(first), settings


def test_fisher_true_draws_its_labels_and_mean_is_refused():
    one, two = (pruned("fsparsegpt", fisher="true", seed=seed)[0] for seed in (0, 0))
    other, _ = pruned("fsparsegpt")
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    with pytest.raises(UserError, match="--fisher mean has no weight for a token"):
        PruneConfig(method="fsparsegpt", pattern="2:4", fisher="mean")


def test_an_allocation_that_has_no_effect_is_named_where_it_is_asked_for(recwarn):
    pruned("fsparsegpt")
    assert not [warning for warning in recwarn if "allocation" in str(warning.message)]
    with pytest.warns(UserWarning, match="--allocation global has no effect with --pattern 2:4"):
        pruned("fsparsegpt", allocation="global")
