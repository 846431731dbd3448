"""Blocks compiled by torch.compile: the same sums, or one line that says why not."""

import measuring
import pytest
import tiny
import torch
import torch.distributed as dist
from measuring import MODELS, assert_close, engine_of, measure, sums_of
from torch import nn

import fwanda_pruner
from fwanda_pruner.engine import loop
from fwanda_pruner.engine.loop import PassSettings
from fwanda_pruner.engine.ranks import GROUPS, Ranks
from fwanda_pruner.engine.resident import ResidentEngine
from fwanda_pruner.engine.sums import Sums
from fwanda_pruner.errors import UserError
from fwanda_pruner.measure.statistics import measure_statistics
from fwanda_pruner.measure.sums import StatisticsSums
from fwanda_pruner.model.targets import find_blocks, find_targets

SAMPLES, LENGTH = 7, 24


@pytest.fixture
def quick_compile(monkeypatch):
    measuring.quick_compile(monkeypatch)


def compile_on_cpu(monkeypatch, after: int) -> None:
    """`--compile auto` compiles on a GPU alone, where it saves time; now it does so here after some passes."""
    monkeypatch.setattr(
        loop, "_should_compile", lambda _windows, compile, seconds, *_: compile == "auto" and len(seconds) >= after
    )


def test_the_forward_pass_alone_may_be_compiled(quick_compile):
    tokens = tiny.tokens(SAMPLES, LENGTH)
    found = measure(tiny.llama(), tokens, None, micro_batch=2, compile="on")
    assert found.passes["compiled"] and not found.g2
    one = measure(tiny.llama(), tokens)
    for name, x2 in one.x2.items():
        torch.testing.assert_close(found.x2[name], x2)
        assert found.n_tokens[name] == SAMPLES * LENGTH


def test_blocks_are_as_before_afterwards(quick_compile):
    model = tiny.llama()
    before = [dict(vars(module)) for module in model.modules()]
    for settings in ({"compile": "on"}, {"checkpointing": "on"}):
        measure(model, tiny.tokens(4, LENGTH), **settings)
        for module, attributes in zip(model.modules(), before, strict=True):
            assert vars(module).keys() == attributes.keys() and "forward" not in vars(module)
            assert not module._forward_hooks and module._compiled_call_impl is None


@pytest.mark.parametrize("name", MODELS)
def test_the_last_norm_is_compiled_with_the_blocks(name, monkeypatch):
    model, called = MODELS[name](), []

    def compile(call, dynamic):
        return lambda block, *args, **kwargs: called.append(block) or call(block, *args, **kwargs)

    monkeypatch.setattr(torch, "compile", compile)
    measure(model, tiny.tokens(4, LENGTH), micro_batch=2, compile="on")
    norm = next(module for path, module in model.named_modules() if path.rpartition(".")[2] in ("norm", "ln_f"))
    assert called[-1] is norm and len(set(called)) == len(find_blocks(model)[1]) + 1


def test_many_models_in_a_process_are_all_compiled(quick_compile):
    """The compiler keeps eight graphs of one function, and then quietly makes no more."""
    for hidden in range(16, 16 + 8 * 10, 8):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        measure(tiny.llama(blocks=1, hidden_size=hidden), tiny.tokens(4, LENGTH), micro_batch=2, compile="on")
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before


def broken_compile(function, **_):
    def call(*args, **kwargs):
        raise RuntimeError("no compiler\nat all")

    return call


def test_blocks_that_cannot_be_compiled_are_one_line(monkeypatch):
    monkeypatch.setattr(torch, "compile", broken_compile)
    with pytest.raises(UserError, match="--compile off: no compiler at all$"):
        measure(tiny.llama(), tiny.tokens(3, LENGTH), compile="on")


def test_auto_goes_on_without_a_compiler(monkeypatch):
    tokens = tiny.tokens(SAMPLES, LENGTH)
    one = measure(tiny.llama(), tokens)
    compile_on_cpu(monkeypatch, after=2)
    monkeypatch.setattr(torch, "compile", broken_compile)
    with pytest.warns(UserWarning, match="cannot be compiled, going on without"):
        other = measure(tiny.llama(), tokens)
    assert not other.passes["compiled"]
    assert_close(other, sums_of(one), SAMPLES * LENGTH)


def test_auto_does_not_compile_on_a_cpu():
    assert not measure(tiny.llama(), tiny.tokens(4, LENGTH)).passes["compiled"]


@pytest.mark.parametrize("how", ["on", "auto"])
def test_compiled_blocks_that_hide_inputs_are_noticed(how, monkeypatch, quick_compile):
    """A block may compute otherwise when it is compiled, past the hooks: its sums would be silently wrong."""
    tokens, model = tiny.tokens(SAMPLES, LENGTH), tiny.llama()
    mlp = model.model.layers[0].mlp

    def forward(x):
        if torch.compiler.is_compiling():
            gate, up = (nn.functional.linear(x, m.weight) for m in (mlp.gate_proj, mlp.up_proj))
            return mlp.down_proj(mlp.act_fn(gate) * up)
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))

    mlp.forward = forward
    if how == "on":
        with pytest.raises(UserError, match="compiled blocks do not show all inputs"):
            measure(model, tokens, compile="on")
        return
    one = measure(tiny.llama(), tokens)
    compile_on_cpu(monkeypatch, after=0)
    with pytest.warns(UserWarning, match="going on without: compiled blocks do not show"):
        other = measure(model, tokens)
    assert_close(other, sums_of(one), SAMPLES * LENGTH)


@pytest.fixture
def one_rank():
    """A process group of this process alone: the windows form several groups."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_only_the_first_of_several_groups_has_an_uncompiled_pass(one_rank, quick_compile):
    tokens, model = tiny.tokens(SAMPLES * GROUPS, LENGTH), tiny.llama()
    one, uncompiled = measure(tiny.llama(), tokens), []

    def hook(_block, args):
        if not torch.compiler.is_compiling():
            uncompiled.append(len(args[0]))

    model.model.layers[0].register_forward_pre_hook(hook)
    engine = ResidentEngine(model, find_targets(model)[0], PassSettings(1, "on"), progress=False, ranks=Ranks.current())
    found = measure_statistics(engine, tokens)
    assert found.passes["compiled"] and uncompiled == [1]
    assert_close(found, sums_of(one), SAMPLES * GROUPS * LENGTH)


def test_compiled_calls_without_hooks_are_not_mistaken_for_those_with(quick_compile):
    tokens, model = tiny.tokens(SAMPLES, LENGTH), tiny.llama()
    one = measure(tiny.llama(), tokens)
    assert engine_of(model, micro_batch=2, compile="on").measure(tokens, Sums(), backward=True).compiled
    other = measure(model, tokens, micro_batch=2, compile="on")
    assert other.passes["compiled"]
    assert_close(other, sums_of(one), SAMPLES * LENGTH)


@pytest.mark.parametrize("skipped", ["layers.0.mlp.up_proj", "layers.0.self_attn.k_proj", "layers.1.", "down_proj"])
def test_compiled_blocks_with_other_hooks_share_no_graph(skipped, quick_compile):
    """Neither within a run nor with one before it in the process."""
    tokens = tiny.tokens(SAMPLES, LENGTH)
    one = measure(tiny.llama(), tokens)
    for wanted in (lambda name: skipped not in name, lambda name: True):
        engine = engine_of(tiny.llama(), micro_batch=2, compile="on")
        names = {target.name: target.module for target in engine.targets if wanted(target.name)}
        sums = StatisticsSums(names)
        assert engine.measure(tokens, sums, backward=True).compiled
        found = sums.tensors()
        assert found.keys() == {f"{name}.{kind}" for name in names for kind in ("x2", "g2", "n_tokens")}
        for name in names:
            torch.testing.assert_close(found[f"{name}.x2"], one.x2[name], rtol=1e-4, atol=1e-6, msg=name)
            torch.testing.assert_close(found[f"{name}.g2"], one.g2[name], rtol=1e-3, atol=1e-6, msg=name)
            assert found[f"{name}.n_tokens"] == SAMPLES * LENGTH


def test_a_wrapper_of_torch_compile_is_refused_in_one_line():
    with pytest.raises(UserError, match="give the model itself, model._orig_mod"):
        fwanda_pruner.prune(torch.compile(tiny.llama()), calibration=tiny.tokens(4, LENGTH), progress=False)


@pytest.mark.fault("compiled")
@pytest.mark.parametrize("call", ["masks", "unpack_", "to_semi_structured", "evaluate_model", "pack_", "keep_zeros"])
def test_a_wrapper_is_one_line_for_every_function(call):
    arguments = (None,) if call == "masks" else ()
    with pytest.raises(UserError, match="^the model is a wrapper of torch.compile; give the model itself"):
        result = getattr(fwanda_pruner, call)(torch.compile(tiny.llama(), backend="eager"), *arguments)
        list(result) if call == "masks" else None


@pytest.mark.fault("compiled")
def test_a_wrapper_is_saved_as_the_model_that_it_wraps(tmp_path):
    model = tiny.llama()
    report = fwanda_pruner.prune(model, method="magnitude", guard="none", progress=False)
    fwanda_pruner.save_pruned(torch.compile(model, backend="eager"), None, report, tmp_path / "out")
    loaded = fwanda_pruner.load_model(tmp_path / "out", device="cpu").model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
