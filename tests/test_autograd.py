"""Ops under autograd: an in-place change is noticed, and refused where torch refuses it."""

import copy

import pytest
import torch

import fwanda_kernels as fk
from fwanda_kernels.testing import sample_arguments

ARGUMENTS = {
    name: getattr(torch.ops.fwanda, name).default._schema.arguments for name in (*fk.backends(), "observe_input_")
}
CHANGED = {
    name: [
        i for i, argument in enumerate(arguments) if argument.alias_info is not None and argument.alias_info.is_write
    ]
    for name, arguments in ARGUMENTS.items()
}
IN_PLACE = [name for name in CHANGED if name.endswith("_")]
contexts = pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])


def samples(name: str) -> list:
    if name == "observe_input_":
        return [torch.zeros(4), torch.zeros(1, dtype=torch.int64), torch.ones(3, 4), None]
    return list(sample_arguments()[name])


def changed_tensors(name: str, args: list) -> list[torch.Tensor]:
    values = [args[i] for i in CHANGED[name]]
    return [t for value in values for t in (value if isinstance(value, list) else [value])]


def op(name: str):
    return getattr(torch.ops.fwanda, name).default


def with_first(name: str, make) -> list:
    """Sample arguments with make(tensor) in the place of the first tensor that the op changes."""
    args = samples(name)
    index = CHANGED[name][0]
    args[index] = [make(args[index][0]), *args[index][1:]] if isinstance(args[index], list) else make(args[index])
    return args


@pytest.mark.fault("in-place change")
@pytest.mark.usefixtures("backend")
@contexts
@pytest.mark.parametrize("name", [name for name, indices in CHANGED.items() if indices])
def test_a_change_bumps_the_version_of_each_changed_tensor_once(name, context):
    args = samples(name)
    before = [t._version for t in changed_tensors(name, args)]
    with context():
        op(name)(*args)
    assert [t._version for t in changed_tensors(name, args)] == [version + 1 for version in before]


def leaf(tensor):
    return torch.nn.Parameter(tensor)


def view_of_leaf(tensor):
    return torch.nn.Parameter(tensor)[:]


def view_made_without_grad(tensor):
    leaf = torch.nn.Parameter(tensor)
    with torch.no_grad():
        return leaf[:]


def part_of_several(tensor):
    return (torch.nn.Parameter(torch.stack([tensor, tensor])) * 1).unbind()[0]


def made_in_inference_mode(tensor):
    with torch.inference_mode():
        return tensor.clone()


REFUSED_BY_TORCH = [leaf, view_of_leaf, view_made_without_grad, part_of_several, made_in_inference_mode]


def refusal(call) -> str | None:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.fault("in-place change")
@pytest.mark.usefixtures("backend")
@contexts
@pytest.mark.parametrize("make", REFUSED_BY_TORCH, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", [name for name in IN_PLACE if name != "observe_input_"])
def test_a_change_is_refused_where_torch_refuses_one(name, make, context):
    args = with_first(name, make)
    target = changed_tensors(name, args)[0]
    before = target.detach().clone()
    with context():
        found = refusal(lambda: op(name)(*args))
        expected = refusal(lambda: make(before.clone()).mul_(1))
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.startswith(f"{name}: ") and "\n" not in found
        with torch.no_grad():
            assert torch.equal(target.detach(), before)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_tensor_that_is_part_of_a_graph_is_refused_in_grad_mode(name):
    args = with_first(name, lambda tensor: tensor.clone().requires_grad_() * 1)
    with pytest.raises(RuntimeError, match=rf"^{name}: .* requires grad.*torch.no_grad\(\)"):
        op(name)(*args)
    args = with_first(name, lambda tensor: (tensor.clone().requires_grad_() * 1).detach())
    op(name)(*args)


@pytest.mark.fault("in-place change")
@pytest.mark.usefixtures("backend")
def test_backward_through_a_weight_pruned_meanwhile_is_an_error():
    weight, x = torch.nn.Parameter(torch.ones(1, 4)), torch.ones(1, 4, requires_grad=True)
    y = torch.nn.functional.linear(x, weight)
    fk.row_topk_prune_(weight.detach(), torch.ones(4), 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    assert weight._version > 0


@pytest.mark.fault("in-place change")
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_code_keeps_the_contract(compiler):
    torch._dynamo.reset()
    prune = torch.compile(lambda w: fk.row_topk_prune_(w, torch.ones(4), 2), fullgraph=True, backend=compiler)
    weight, x = torch.nn.Parameter(torch.ones(1, 4)), torch.ones(1, 4, requires_grad=True)
    with pytest.raises(Exception, match="requires grad"):
        prune(weight)
    assert weight.tolist() == [[1, 1, 1, 1]]
    y = torch.nn.functional.linear(x, weight)
    with torch.no_grad():
        prune(weight)
    assert weight.tolist() == [[0, 0, 1, 1]]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_fake_tensors_keep_the_contract():
    with torch._subclasses.FakeTensorMode():
        weight, scale = torch.nn.Parameter(torch.ones(1, 4)), torch.ones(4)
        with pytest.raises(RuntimeError, match="requires grad"):
            fk.row_topk_prune_(weight, scale, 2)
        with torch.no_grad():
            fk.row_topk_prune_(weight, scale, 2)
        assert weight._version > 0


def is_floating(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def has_floating_result(name: str) -> bool:
    result = op(name)(*samples(name))
    return any(map(is_floating, result if isinstance(result, tuple) else [result]))


WITH_RESULTS = [  # unpack_weight has no floating argument
    name for name in fk.backends() if has_floating_result(name) and name != "unpack_weight"
]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", WITH_RESULTS)
def test_backward_through_a_result_is_an_error(name):
    args = samples(name)
    index = next(i for i, value in enumerate(args) if is_floating(value))
    args[index] = args[index].clone().requires_grad_()
    expected = op(name)(*copy.deepcopy([a.detach() if isinstance(a, torch.Tensor) else a for a in args]))
    result = op(name)(*args)
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    for a, b in zip(results, [expected] if isinstance(expected, torch.Tensor) else expected, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match=f"^{name} has no derivative"):
        results[0].sum().backward()
    with torch.no_grad():
        result = op(name)(*args)
    assert not any(t.requires_grad for t in ([result] if isinstance(result, torch.Tensor) else result))


@pytest.mark.fault("in-place change")
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", [*IN_PLACE, *WITH_RESULTS])
def test_forward_mode_never_loses_a_derivative_in_silence(name):
    args = samples(name)
    with torch.autograd.forward_ad.dual_level():
        index = next(i for i, value in enumerate(args) if is_floating(first(value)))
        dual = torch.autograd.forward_ad.make_dual(first(args[index]).clone(), torch.ones_like(first(args[index])))
        args[index] = [dual, *args[index][1:]] if isinstance(args[index], list) else dual
        with pytest.raises(RuntimeError, match=f"^{name} has no derivative, in forward mode neither"):
            op(name)(*args)


def first(value):
    return value[0] if isinstance(value, list) and value else value


@pytest.mark.fault("in-place change")
@pytest.mark.usefixtures("backend")
def test_a_mask_is_a_constant_for_every_derivative():
    weight, scale, mask = torch.tensor([[1.0, -3.0, 2.0, 0.5]]), torch.ones(4), torch.tensor([[0.0, 1.0, 1.0, 0.0]])

    def kept(weight):
        return (weight * fk.row_topk_mask(weight, scale, 2)).sum()

    assert torch.func.jvp(kept, (weight,), (torch.ones(1, 4),))[1] == 2
    leaf = weight.clone().requires_grad_()
    kept(leaf).backward()
    assert torch.equal(leaf.grad, mask)


def moved(args: list, x: torch.Tensor) -> list:
    """The arguments with x added to the first floating tensor."""
    for i, value in enumerate(args):
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, torch.Tensor) and first.is_floating_point():
            new = first + x
            return [*args[:i], [new, *value[1:]] if isinstance(value, list) else new, *args[i + 1 :]]
    return args


@pytest.mark.fault("transforms")
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.vmap])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_transforms_of_torch_func_serve_an_op_or_are_refused_in_one_line(name, transform):
    args, x = samples(name), torch.zeros(2) if transform is torch.func.vmap else torch.tensor(0.0)

    def call(x):
        op(name)(*moved(args, x))
        return x + 1

    try:
        assert transform(call)(x).shape == x.shape
    except RuntimeError as error:
        text = str(error)
        starts = (f"{name} has no derivative", f"{name} does not work under", f"{name}: ")
        assert text.startswith(starts) and "\n" not in text


@pytest.mark.fault("transforms")
def test_measuring_a_module_under_a_transform_is_one_line():
    layer, x = torch.nn.Linear(4, 3), torch.ones(5, 2, 4)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,)).sum()

    for call in (lambda: torch.func.grad(loss)(parameters, x), lambda: torch.func.vmap(layer)(x)):
        with pytest.raises(RuntimeError, match="^(foreach_)?accumulate_sq_sums_ does not work under") as error:
            with fk.collect_statistics({"fc": layer}):
                call()
        assert "\n" not in str(error.value)
