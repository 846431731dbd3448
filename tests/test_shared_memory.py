"""Arguments that share memory with one that the call changes, and views that hold negatives: refused or exact."""

import copy

import pytest
import torch
from test_ops import WRAPPERS, assert_same_bits

import fwanda_kernels as fk
from fwanda_kernels.testing import make_weight, sample_arguments


def tensor_arguments(op: str) -> list[tuple[int, bool]]:
    """Place of each argument of tensors that the samples give, and whether the op changes it."""
    arguments = getattr(torch.ops.fwanda, op).default._schema.arguments
    given = sample_arguments()[op]
    return [
        (i, argument.alias_info is not None and argument.alias_info.is_write)
        for i, argument in enumerate(arguments)
        if isinstance(given[i], (torch.Tensor, list)) and "Tensor" in str(argument.type)
    ]


PAIRS = [  # op, an argument that it changes, another argument
    (op, i, j)
    for op in WRAPPERS
    for i, changed in tensor_arguments(op)
    for j, _ in tensor_arguments(op)
    if changed and i != j
]
pairs = pytest.mark.parametrize("op, i, j", PAIRS, ids=[f"{op}-{i}-{j}" for op, i, j in PAIRS])


def arguments_in_one_buffer(op: str, i: int, j: int, *, overlapping: bool) -> list:
    """Sample arguments; the last tensors of arguments i and j lie in one buffer, the second in or after the first."""
    args = [list(arg) if isinstance(arg, list) else arg for arg in sample_arguments()[op]]
    first, second = (args[k][-1] if isinstance(args[k], list) else args[k] for k in (i, j))
    at = (first.nbytes - 1) // 8 * 8 if overlapping else -(-first.nbytes // 8) * 8
    buffer = torch.zeros(at + first.nbytes + second.nbytes, dtype=torch.uint8)
    for k, tensor, start in ((i, first, 0), (j, second, at)):
        moved = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        args[k] = [*args[k][:-1], moved] if isinstance(args[k], list) else moved
    return args


@pytest.mark.fault("overlap")
@pytest.mark.usefixtures("backend")
@pairs
def test_what_a_call_changes_must_not_overlap_another_argument(op, i, j):
    args = arguments_in_one_buffer(op, i, j, overlapping=True)
    before = copy.deepcopy(args)
    with pytest.raises(ValueError) as error:
        WRAPPERS[op](*args)
    text = str(error.value)
    assert text.startswith(f"{op}: ") and "must not overlap" in text and "\n" not in text
    assert_same_bits(args, before)


@pytest.mark.usefixtures("backend")
@pairs
def test_neighbours_in_one_buffer_are_served(op, i, j):
    args, apart = arguments_in_one_buffer(op, i, j, overlapping=False), sample_arguments()[op]
    assert_same_bits([WRAPPERS[op](*args), args], [WRAPPERS[op](*apart), list(apart)])


@pytest.mark.fault("overlap")
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda m: fk.foreach_row_topk_prune_([m, m + 1], [torch.ones(16), m[0]], [torch.full((16,), 3)] * 2),
            "foreach_row_topk_prune_: weights is changed and must not overlap scales in memory; pass a copy of scales",
        ),
        (lambda m: fk.accumulate_gram_(m, m), "accumulate_gram_: hessian is changed and must not overlap x in memory"),
        (lambda m: fk.accumulate_sq_sums_(m[3], m), "accumulate_sq_sums_: acc is changed and must not overlap x in"),
        (lambda m: fk.row_topk_prune_(m, m[:, 3], 3), "row_topk_prune_: weight is changed and must not overlap scale"),
        (lambda m: fk.obs_prune_(m, m, sparsity=0.5), "obs_prune_: weight is changed and must not overlap hessian in"),
    ],
)
def test_a_view_of_what_the_call_changes_is_refused_by_name(call, message):
    matrix = torch.eye(16)
    with pytest.raises(ValueError) as error:
        call(matrix)
    assert str(error.value).startswith(message) and torch.equal(matrix, torch.eye(16))


@pytest.mark.usefixtures("backend")
def test_arguments_between_each_other_s_entries_and_arguments_that_are_only_read_are_served():
    whole = make_weight(6, 17).abs()
    weight, row = whole[:, :16], whole[:, 16]
    plain = weight.clone(), row.clone()
    for w, r in ((weight, row), plain):
        fk.obs_prune_(w, factor=torch.eye(16), sparsity=0.5, row_weight=r)
    assert_same_bits([weight, row], list(plain))
    even, odd = whole.flatten()[:96].view(6, 16).view(6, 8, 2).unbind(2)
    expected = even.clone()
    fk.row_topk_prune_(even, odd[0], 3)
    fk.row_topk_prune_(expected, odd[0].clone(), 3)
    assert_same_bits(even, expected)
    matrix = make_weight(16, 16).abs()
    assert_same_bits(fk.row_topk_mask(matrix, matrix[2], 5), fk.row_topk_mask(matrix, matrix[2].clone(), 5))
    bad = torch.zeros(1, dtype=torch.int32)
    assert_same_bits(fk.nm_mask(matrix, matrix[2], 2, 4, bad=bad), fk.nm_mask(matrix, matrix[2].clone(), 2, 4))


# negated views


def negated(tensor: torch.Tensor) -> torch.Tensor:
    """A view with the values of a tensor, whose memory holds their negatives."""
    return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag


def with_negated(op: str, place: int) -> list | None:
    """Sample arguments with one negated view, or None if the argument does not have floats."""
    args = [list(arg) if isinstance(arg, list) else arg for arg in sample_arguments()[op]]
    tensor = args[place][-1] if isinstance(args[place], list) else args[place]
    if tensor.dtype != torch.float32:
        return None
    args[place] = [*args[place][:-1], negated(tensor)] if isinstance(args[place], list) else negated(tensor)
    return args


@pytest.mark.fault("negated view")
def test_a_contiguous_negated_view_is_refused_or_read_with_its_values():
    weight, scale, keep = negated(torch.ones(1, 1)), torch.ones(1), torch.ones(1, dtype=torch.int64)
    assert weight.is_contiguous()
    with pytest.raises(ValueError, match="row_topk_prune_: weight must not be a negated view"):
        fk.row_topk_prune_(weight, scale, keep)
    assert fk.row_topk_mask(weight, scale, keep).all() and fk.row_topk_mask(scale[None], weight[0], keep).all()


NEGATED = [(op, i, changed) for op in WRAPPERS for i, changed in tensor_arguments(op) if with_negated(op, i)]
modes = pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
ways = pytest.mark.parametrize("way", ["function", "op"])


def callee(op: str, way: str):
    return WRAPPERS[op] if way == "function" else getattr(torch.ops.fwanda, op).default


@pytest.mark.fault("negated view")
@pytest.mark.usefixtures("backend")
@modes
@ways
@pytest.mark.parametrize("op, place", [(op, place) for op, place, changed in NEGATED if changed])
def test_a_negated_view_is_not_changed_but_refused_in_one_line(op, place, way, mode):
    args = with_negated(op, place)
    before = copy.deepcopy(args)
    with mode(), pytest.raises(ValueError) as error:
        callee(op, way)(*args)
    text = str(error.value)
    assert text.startswith(f"{op}: ") and "must not be a negated view" in text and "\n" not in text
    assert all(torch.equal(a, b) for a, b in zip(_flat(args), _flat(before), strict=True))


def _flat(args: list) -> list[torch.Tensor]:
    return [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if isinstance(t, torch.Tensor)]


@pytest.mark.fault("negated view")
@pytest.mark.usefixtures("backend")
@modes
@ways
@pytest.mark.parametrize("op, place", [(op, place) for op, place, changed in NEGATED if not changed])
def test_a_negated_view_is_read_as_its_values(op, place, way, mode):
    args, plain = with_negated(op, place), list(sample_arguments()[op])
    with mode():
        found, expected = callee(op, way)(*args), callee(op, way)(*plain)
    del args[place], plain[place]
    assert_same_bits([found, args], [expected, plain])


@pytest.mark.fault("negated view")
def test_a_negated_view_is_packed_as_its_values():
    weight = make_weight(24, 40)
    assert_same_bits(fk.pack_weight(negated(weight)), fk.pack_weight(weight))
    assert fk.packed_size(negated(weight)) == fk.packed_size(weight)
