"""The C++ row selection, bit for bit against a stable sort."""

import pytest
import torch

from fwanda_kernels._build import find_library

LIBRARY = find_library("cpu")
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="not built: python -m fwanda_kernels --build cpu")
if LIBRARY:
    torch.ops.load_library(str(LIBRARY))
ops = torch.ops.fwanda_C
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def stable_sort_mask(weight, scale, keep):
    score = weight.float().abs() * scale
    order = torch.sort(score, dim=1, stable=True).indices
    kept = torch.arange(weight.shape[1]) >= (weight.shape[1] - keep)[:, None]
    return torch.zeros(weight.shape, dtype=torch.bool).scatter_(1, order, kept)


def adversarial(rows, columns):
    """Each [rows, columns] fp32 with its scale [columns]."""
    torch.manual_seed(rows * columns)
    plain, ones = torch.randn(rows, columns), torch.ones(columns)
    huge = plain.clone()
    huge[:, columns // 2 : columns // 2 + 1] = 3e4
    coarse = torch.randint(-3, 4, (rows, columns)).float()
    return {
        "random": (plain, torch.rand(columns)),
        "all equal": (torch.full((rows, columns), -0.5), ones),
        "zeros of both signs": (torch.zeros(rows, columns) * plain.sign(), ones),
        "zero scales of both signs": (plain, torch.zeros(columns) * torch.randn(columns).sign()),
        "few values": (coarse, torch.randint(0, 3, (columns,)).float()),
        "denormal weights": (plain * 1e-40, ones),
        "denormal products": (plain, torch.rand(columns) * 1e-38),
        "products that overflow": (plain * 1e3, torch.rand(columns) * 3e38),
        "one huge": (huge, ones),
        "ascending": (plain.sort(dim=1).values.abs().sort(dim=1).values, ones),
        "descending": (plain.abs().sort(dim=1, descending=True).values, ones),
    }


def layouts(weight):
    """The same values contiguous, transposed, and with gaps in rows and columns."""
    rows, columns = weight.shape
    yield "contiguous", weight.clone()
    yield "transposed", weight.t().contiguous().t()
    padded = torch.full((rows, columns + 3), float("nan"), dtype=weight.dtype)
    padded[:, 1 : columns + 1] = weight
    yield "padded rows", padded[:, 1 : columns + 1]
    spaced = torch.full((rows * 2, columns * 3), float("nan"), dtype=weight.dtype)
    spaced[::2, ::3] = weight
    yield "spaced", spaced[::2, ::3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 2, 7, 64, 577, 2049])
def test_masks_and_pruned_weights_equal_the_stable_sort(dtype, columns):
    corners = torch.tensor([0, 1, columns - 1, columns, columns // 2, columns // 3])
    keep = torch.cat([corners, torch.randint(0, columns + 1, (35,))])
    for name, (weight, scale) in adversarial(len(keep), columns).items():
        weight = weight.to(dtype)
        expected = stable_sort_mask(weight, scale, keep)
        for layout, view in layouts(weight):
            mask, flag = ops.row_topk_mask(view, scale, keep)
            assert flag == 0 and torch.equal(mask, expected), (name, layout)
            assert ops.row_topk_prune_(view, scale, keep) == 0
            pruned = torch.where(expected, weight, 0)
            assert torch.equal(bits(view), bits(pruned)), (name, layout)


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def test_elements_between_the_rows_of_a_view_are_not_touched():
    whole = torch.full((8, 10), 7.0)
    ops.row_topk_prune_(whole[::2, ::3], torch.ones(4), torch.zeros(4, dtype=torch.int64))
    assert whole[::2, ::3].eq(0).all() and whole.sum() == 7 * (80 - 16)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_matrices_are_served(shape):
    weight, keep = torch.empty(shape), torch.zeros(shape[0], dtype=torch.int64)
    mask, flag = ops.row_topk_mask(weight, torch.ones(shape[1]), keep)
    assert mask.shape == shape and flag == 0 == ops.row_topk_prune_(weight, torch.ones(shape[1]), keep)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_bad_values_give_a_flag_and_leave_the_weights(dtype, transposed):
    nan, inf = float("nan"), float("inf")
    cases = [(w, s, k) for w in (None, nan, inf, -inf) for s in (None, nan, inf, -1.0) for k in (None, -1, 6)]
    for bad_weight, bad_scale, bad_keep in cases:
        weight = torch.randn(7, 5).to(dtype)
        scale, keep = torch.zeros(5), torch.full((7,), 3)
        if bad_weight is not None:
            weight[4, 2] = bad_weight
        if bad_scale is not None:
            scale[1] = bad_scale
        if bad_keep is not None:
            keep[6] = bad_keep
        expected = (bad_weight is not None) + 2 * (bad_scale is not None) + 4 * (bad_keep is not None)
        view = weight.t().contiguous().t() if transposed else weight.clone()
        mask, flag = ops.row_topk_mask(view, scale, keep)
        assert flag == expected and (flag == 0 or not mask.any())
        assert ops.row_topk_prune_(view, scale, keep) == expected
        if expected:
            assert torch.equal(bits(view), bits(weight))


def test_wrong_shapes_and_dtypes_raise():
    weight, scale, keep = torch.randn(4, 6), torch.ones(6), torch.zeros(4, dtype=torch.int64)
    for arguments in (
        (weight[0], scale, keep),
        (weight.double(), scale, keep),
        (weight, scale[1:], keep),
        (weight, scale.double(), keep),
        (weight, scale, keep[1:]),
        (weight, scale, keep.int()),
    ):
        with pytest.raises(RuntimeError, match="fwanda_C"):
            ops.row_topk_mask(*arguments)


def test_result_does_not_depend_on_threads():
    weight, scale, keep = torch.randn(300, 777), torch.rand(777), torch.randint(0, 778, (300,))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = ops.row_topk_mask(weight, scale, keep)[0]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, ops.row_topk_mask(weight, scale, keep)[0])
