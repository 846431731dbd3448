"""Hooks belong to one module: copies do not count; odd calls of a module are measured or refused in one line."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import fwanda_kernels as fk

COLLECTORS = {"collect_statistics": fk.collect_statistics, "collect_hessians": fk.collect_hessians}
collectors = pytest.mark.parametrize("collect", COLLECTORS.values(), ids=COLLECTORS)


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved_and_loaded,
    "deepcopy of the parent": lambda module: copy.deepcopy(nn.Sequential(nn.Sequential(module)))[0][0],
    "copy of a copy": lambda module: copy.deepcopy(copy.deepcopy(module)),
}


def first_sum(collected) -> float:
    """Sum of squares of the first column."""
    found = collected["fc"]
    return float(found[0, 0] if isinstance(found, torch.Tensor) else found.x2[0])


def own_attributes(module: nn.Module) -> set[str]:
    return set(vars(module)) - set(vars(nn.Linear(1, 1)))


@pytest.mark.fault("copied hook")
@collectors
@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
def test_a_copy_made_inside_carries_no_hook_and_does_not_count(make, collect):
    layer, x = nn.Linear(4, 4), torch.ones(10, 4, requires_grad=True)
    with collect({"fc": layer}) as collected:
        early = make(layer)
        layer(x).sum().backward()
        late = make(layer)
        for twin in (early, late):
            assert not twin._forward_hooks and not twin._forward_hooks_with_kwargs and not own_attributes(twin)
            twin(x).sum().backward()
            assert torch.equal(twin.weight, layer.weight)
        assert first_sum(collected) == 10
        layer(x).sum().backward()
    assert first_sum(collected) == 20
    assert not layer._forward_hooks and not own_attributes(layer)
    layer(x)
    make(layer)(x)
    assert first_sum(collected) == 20


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.fault("copied hook")
@collectors
def test_a_copy_of_a_parametrised_module_does_not_count(collect):
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Doubled())
    with collect({"fc": layer}) as collected:
        layer(torch.ones(10, 4))
        twin = copy.deepcopy(layer)
        assert not twin._forward_hooks
        twin(torch.ones(10, 4))
    assert first_sum(collected) == 10
    assert not any(name.startswith(("_fwanda", "__getstate", "__deepcopy")) for m in (layer, twin) for name in vars(m))


@pytest.mark.fault("copied hook")
def test_a_copy_keeps_the_hooks_of_others_and_what_its_class_does_when_copied():
    class Counting(nn.Linear):
        def __getstate__(self):
            return {**self.__dict__, "copies": getattr(self, "copies", 0) + 1}

    layer, called = Counting(4, 4), []
    layer.register_forward_hook(lambda *_: called.append(1))
    with fk.collect_statistics({"fc": layer}):
        twin = copy.deepcopy(layer)
        assert len(twin._forward_hooks) == 1 and twin.copies == 1
        twin(torch.ones(2, 4))
    assert called == [1] and len(layer._forward_hooks) == 1


@pytest.mark.fault("copied hook")
@pytest.mark.parametrize("name", ["deepcopy", "pickle"])
def test_a_copied_collector_has_the_sums_and_measures_its_own_modules(name):
    layer, x = nn.Linear(4, 4), torch.ones(10, 4)
    with fk.collect_statistics({"fc": layer}) as stats:
        layer(x)
        model, twin = COPIES[name]([layer, stats])
        layer(x)
        model(x)
    assert (first_sum(stats), first_sum(twin)) == (20, 10)
    with twin:
        model(x)
        layer(x)
    assert (first_sum(stats), first_sum(twin)) == (20, 20) and twin.of(model).n_tokens == 20


@pytest.mark.fault("copied hook")
def test_nested_collectors_count_each_for_itself_in_any_order_of_leaving():
    layer, x = nn.Linear(4, 4), torch.ones(10, 4)
    outer, inner = (fk.collect_statistics({"fc": layer}) for _ in range(2))
    outer.start()
    layer(x)
    inner.start()
    layer(x)
    outer.stop()
    copy.deepcopy(layer)(x)
    layer(x)
    inner.stop()
    layer(x)
    assert (first_sum(outer), first_sum(inner)) == (20, 20) and not own_attributes(layer)


def test_nested_collectors_see_compiled_code_too():
    torch._dynamo.reset()
    layer, x = nn.Linear(4, 4), torch.ones(10, 4)
    with fk.collect_statistics({"fc": layer}) as outer, fk.collect_statistics({"fc": layer}) as inner:
        layer(x)
        torch.compile(layer, backend="eager", fullgraph=True)(x)
    assert first_sum(outer) == first_sum(inner) == 20


@pytest.mark.fault("copied hook")
@collectors
def test_threads_lose_no_token(collect):
    layer, x = nn.Linear(4, 4), torch.ones(5, 4)
    with collect({"fc": layer}) as collected, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: layer(x.clone()).sum().backward(), range(200)))
    assert first_sum(collected) == 1000
    if collect is fk.collect_statistics:
        assert collected["fc"].n_tokens == 1000 and collected["fc"].g2[0] == 1000


@collectors
def test_replicas_of_data_parallel_are_refused_in_one_line(collect):
    layer = Doubled()
    with collect({"fc": layer}), pytest.raises(RuntimeError, match="fc was called through a replica") as error:
        layer._replicate_for_data_parallel()(torch.ones(1, 4))
    assert "\n" not in str(error.value)


@pytest.mark.fault("copied hook")
@collectors
def test_an_error_inside_leaves_no_hook(collect):
    layer = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="shapes"), collect({"fc": layer}):
        layer(torch.ones(2, 3))
    assert not layer._forward_hooks and not own_attributes(layer)


@collectors
@pytest.mark.parametrize("value", [None, torch.ones(2, 2), nn.Linear(2, 2).forward], ids=lambda v: type(v).__name__)
def test_what_is_no_module_is_refused_before_any_hook(collect, value):
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=": other must be an nn.Module, got "), collect({"fc": layer, "other": value}):
        pass
    assert not layer._forward_hooks and not own_attributes(layer)


def test_a_module_that_was_moved_goes_on_where_it_is():
    layer = nn.Linear(4, 4)
    with fk.collect_statistics({"fc": layer}) as stats:
        layer(torch.ones(2, 4))
        layer.to(torch.bfloat16)(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
        assert first_sum(stats) == 5 and stats["fc"].g2.tolist() == [3] * 4
        layer.to("meta")(torch.ones(3, 4, dtype=torch.bfloat16, device="meta"))
        assert stats["fc"].x2.device.type == "meta"


def test_a_second_derivative_does_not_reach_the_sums():
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    with fk.collect_statistics({"fc": layer}) as stats:
        (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        gradient.sum().backward()
    assert not stats["fc"].g2.requires_grad and bool((stats["fc"].g2 > 0).all())


# odd calls


class Odd(nn.Linear):
    """A linear module that is called and returns in a way of its own."""

    def __init__(self, result):
        super().__init__(4, 4)
        self.result = result

    def forward(self, x=None, factor=1.0, x_states=None):
        return self.result(super().forward(x_states if x is None else x) * factor)


@pytest.mark.fault("odd module")
@pytest.mark.parametrize("wrap", [lambda y: (y, None), lambda y: [y, y], lambda y: y], ids=["tuple", "list", "tensor"])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_first_entry_of_a_tuple_is_the_output(wrap, compiled):
    torch._dynamo.reset()
    layer, x = Odd(wrap), torch.ones(5, 4, requires_grad=True)
    with fk.collect_statistics({"fc": layer}) as stats:
        y = layer(x)
        if compiled:
            y = torch.compile(layer, backend="aot_eager")(x)
        (y if isinstance(y, torch.Tensor) else y[0]).sum().backward()
    assert stats["fc"].x2.tolist() == [10.0 if compiled else 5.0] * 4 and stats["fc"].g2.tolist() == [5.0] * 4


@pytest.mark.fault("odd module")
@collectors
@pytest.mark.parametrize(
    "call", [{"factor": 2, "x": True}, {"factor": torch.tensor(2.0), "x_states": True}, {"x": True}]
)
def test_the_input_is_found_among_other_keywords(call, collect):
    layer, x = Odd(lambda y: y), torch.full((5, 4), 2.0)
    with collect({"fc": layer}) as collected:
        layer(**{name: x if value is True else value for name, value in call.items()})
    assert first_sum(collected) == 20


@pytest.mark.fault("odd module")
@pytest.mark.parametrize(
    "wrap, message",
    [
        (lambda y: {"y": y}, "fc must return a floating tensor [..., R], got dict"),
        (lambda y: (), "fc must return a floating tensor [..., R], got tuple"),
        (lambda y: y.long(), "fc must return a floating tensor [..., R], got Tensor"),
    ],
)
def test_other_outputs_are_one_line_that_names_the_module(wrap, message):
    layer = Odd(wrap)
    with fk.collect_statistics({"fc": layer}), pytest.raises(ValueError) as error:
        layer(torch.ones(2, 4))
    assert str(error.value) == f"collect_statistics: {message}"


@pytest.mark.fault("odd module")
@pytest.mark.parametrize("name", COLLECTORS)
def test_a_call_without_an_input_is_one_line_that_names_the_module(name):
    class NoInput(nn.Module):
        def forward(self, ids, *, hint="x"):
            return torch.ones(2, 4)

    layer = NoInput()
    with COLLECTORS[name]({"fc": layer}), pytest.raises(ValueError) as error:
        layer(torch.ones(2, 4, dtype=torch.int64), hint="y")
    needed = f"{name}: fc must be called with a floating tensor [..., C] of two dimensions or more"
    assert str(error.value) == f"{needed}, got [2, 4] torch.int64, hint=str"


def test_statistics_of_a_module_are_found_without_its_name():
    used, idle = nn.Linear(4, 4), nn.Linear(4, 4)
    with fk.collect_statistics({"used": used, "idle": idle}) as stats:
        used(torch.ones(2, 4))
    assert stats.of(used).n_tokens == 2
    for module in (idle, nn.Linear(4, 4)):
        with pytest.raises(KeyError, match="no statistics of this Linear"):
            stats.of(module)
