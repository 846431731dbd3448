"""The C++ selections, bit for bit against a stable sort and the reference."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fwanda_kernels as fk
from fwanda_kernels._build import find_library

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = find_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="not built: python -m fwanda_kernels --build cpu")
if LIBRARY:
    torch.ops.load_library(str(LIBRARY))
ops = torch.ops.fwanda_C
REFUSED, ALTERED = 8, 16  # csrc/bad.h
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PATTERNS = [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4), (0, 8), (3, 8), (4, 8), (8, 8), (0, 1), (1, 1), (1, 2), (1, 3)]
PATTERNS += [(2, 3), (3, 5), (0, 16), (8, 16), (15, 16), (11, 32), (32, 32), (40, 100)]


def masked(op, weight, *arguments):
    """The mask that an op of the library writes, and its code. Before the call, the mask is true everywhere."""
    mask = torch.ones(weight.shape, dtype=torch.bool)
    return mask, op(weight, *arguments, mask)


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
            mask, flag = masked(ops.row_topk_mask, view, scale, keep)
            assert flag == 0 and torch.equal(mask, expected), (name, layout)
            assert ops.row_topk_prune_(view, scale, keep) == 0
            pruned = torch.where(expected, weight, 0)
            assert torch.equal(bits(view), bits(pruned)), (name, layout)


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, m", PATTERNS)
def test_nm_masks_and_pruned_weights_equal_the_reference(n, m, dtype):
    for groups in (1, 2, 19):
        for name, (weight, scale) in adversarial(37, groups * m).items():
            weight = weight.to(dtype)
            with fk.use_backend("reference"):
                expected = fk.nm_mask(weight, scale, n, m)
            assert torch.equal(expected.sum(1), torch.full((37,), groups * n))
            for layout, view in layouts(weight):
                mask, flag = masked(ops.nm_mask, view, scale, n, m)
                assert flag == 0 and mask.is_contiguous() and torch.equal(mask, expected), (name, layout)
                assert ops.nm_prune_(view, scale, n, m) == 0
                assert torch.equal(bits(view), bits(torch.where(expected, weight, 0))), (name, layout)


@pytest.mark.parametrize("m", [4, 8, 5, 16])
def test_nm_ties_remove_the_lowest_columns_of_each_group(m):
    weight = torch.tensor([0.5, -0.5]).repeat(3, m)
    for n in range(m + 1):
        mask, flag = masked(ops.nm_mask, weight, torch.ones(2 * m), n, m)
        assert flag == 0 and torch.equal(mask, (torch.arange(2 * m) % m >= m - n).expand(3, -1))


def test_elements_between_the_rows_of_a_view_are_not_touched():
    for prune, arguments in ((ops.row_topk_prune_, [torch.zeros(4, dtype=torch.int64)]), (ops.nm_prune_, [0, 4])):
        whole = torch.full((8, 10), 7.0)
        assert prune(whole[::2, ::3], torch.ones(4), *arguments) == 0
        assert whole[::2, ::3].eq(0).all() and whole.sum() == 7 * (80 - 16)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_matrices_are_served(shape):
    weight, keep = torch.empty(shape), torch.zeros(shape[0], dtype=torch.int64)
    mask, flag = masked(ops.row_topk_mask, weight, torch.ones(shape[1]), keep)
    assert mask.shape == shape and flag == 0 == ops.row_topk_prune_(weight, torch.ones(shape[1]), keep)
    mask, flag = masked(ops.nm_mask, weight, torch.ones(shape[1]), 2, 5)
    assert mask.shape == shape and flag == 0 == ops.nm_prune_(weight, torch.ones(shape[1]), 2, 5)


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
        mask, flag = masked(ops.row_topk_mask, view, scale, keep)
        assert flag == expected and (flag == 0 or not mask.any())
        assert ops.row_topk_prune_(view, scale, keep) == expected
        if expected:
            assert torch.equal(bits(view), bits(weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n, m", [(0, 4), (2, 4), (4, 4), (4, 8), (2, 3)])
def test_nm_bad_values_give_a_flag_and_leave_the_weights(n, m, dtype, transposed):
    nan, inf = float("nan"), float("inf")
    for bad_weight, bad_scale in [(w, s) for w in (None, nan, inf, -inf) for s in (None, nan, inf, -1.0)]:
        weight, scale = torch.randn(7, 24).to(dtype), torch.zeros(24)
        if bad_weight is not None:
            weight[4, 2] = bad_weight
        if bad_scale is not None:
            scale[1] = bad_scale
        expected = (bad_weight is not None) + 2 * (bad_scale is not None)
        view = weight.t().contiguous().t() if transposed else weight.clone()
        mask, flag = masked(ops.nm_mask, view, scale, n, m)
        assert flag == expected and (flag == 0 or not mask.any())
        assert ops.nm_prune_(view, scale, n, m) == expected
        if expected:
            assert torch.equal(bits(view), bits(weight))


def test_wrong_shapes_and_dtypes_are_refused_by_a_code_and_throw_nothing():
    weight, scale, keep = torch.randn(4, 6), torch.ones(6), torch.zeros(4, dtype=torch.int64)
    for arguments in (
        (weight[0], scale, keep),
        (weight.double(), scale, keep),
        (weight, scale[1:], keep),
        (weight, scale.double(), keep),
        (weight, scale, keep[1:]),
        (weight, scale, keep.int()),
    ):
        assert masked(ops.row_topk_mask, *arguments)[1] == REFUSED == ops.row_topk_prune_(*arguments)
    for arguments in (
        (weight[0], scale, 1, 2),
        (weight.double(), scale, 1, 2),
        (weight, scale[1:], 1, 2),
        (weight, scale.double(), 1, 2),
        (weight, scale, 2, 4),
        (weight, scale, 3, 2),
        (weight, scale, -1, 2),
        (weight, scale, 0, 0),
    ):
        assert masked(ops.nm_mask, *arguments)[1] == REFUSED == ops.nm_prune_(*arguments)
    packed, x = fk.pack_weight(weight), torch.ones(2, 6)
    for arguments in (
        (x[0], packed, None, 4, 6),
        (x.double(), packed, None, 4, 6),
        (x, packed.float(), None, 4, 6),
        (x, packed[None], None, 4, 6),
        (x, packed, torch.ones(3), 4, 6),
        (x, packed, None, -1, 6),
        (x[:, ::2], packed, None, 4, 3),
        (torch.ones(17, 6), packed, None, 4, 6),
    ):
        out = torch.ones(len(arguments[0]), 4, dtype=arguments[0].dtype)
        assert ops.packed_linear(*arguments, out) == REFUSED, arguments
    out = torch.ones(4, 6)
    assert ops.packed_linear(x, packed, None, 64, 6, torch.ones(2, 64)) == ALTERED
    assert ops.unpack_weight(packed, torch.ones(64, 6)) == ALTERED
    assert ops.unpack_weight(packed, out.double()) == REFUSED == ops.unpack_weight(packed, out[0])
    for other in (out.bool()[:3], out.bool()[0], out.bool().t().contiguous().t(), out):
        assert ops.row_topk_mask(weight, scale, keep, other) == REFUSED == ops.nm_mask(weight, scale, 1, 2, other)
    for other in (torch.ones(2, 5), torch.ones(3, 4), torch.ones(4, 2).t(), torch.ones(2, 4).half()):
        assert ops.packed_linear(x, packed, None, 4, 6, other) == REFUSED
    assert ops.unpack_weight(packed, out) == 0 and torch.equal(out, weight)


def test_what_the_library_refuses_is_an_error_in_python():
    weight, bad = torch.ones(2, 6), torch.zeros(1, dtype=torch.int32)
    with fk.use_backend("native"), pytest.raises(RuntimeError, match="nm_prune_: the C.. library does not take"):
        torch.ops.fwanda.nm_prune_(weight, torch.ones(6), 2, 4, bad)
    assert weight.eq(1).all() and bad == 0


def test_the_library_has_no_code_that_throws_its_own_exceptions():
    sources = "".join(path.read_text() for path in sorted((ROOT / "csrc").glob("*.cpp")))
    assert sources and not any(word in sources for word in ("throw ", "TORCH_CHECK", "Exception.h"))


def test_result_does_not_depend_on_threads():
    weight, scale, keep = torch.randn(300, 776), torch.rand(776), torch.randint(0, 777, (300,))
    calls = (
        lambda: masked(ops.row_topk_mask, weight, scale, keep)[0],
        lambda: masked(ops.nm_mask, weight, scale, 2, 4)[0],
        lambda: masked(ops.nm_mask, weight.t().contiguous().t(), scale, 37, 97)[0],
    )
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append([call() for call in calls])
    finally:
        torch.set_num_threads(before)
    one, *others = results
    assert all(torch.equal(a, b) for other in others for a, b in zip(one, other, strict=True))


OUT_OF_MEMORY = """
import resource
import torch
import fwanda_kernels as fk

weight, scale = torch.zeros(8192, 8192, dtype=torch.bfloat16), torch.ones(8192)
packed = fk.pack_weight(weight)
header = fk.read_packed_header(packed)
fk.row_topk_mask(weight[:8], scale, 9)
fk.unpack_weight(fk.pack_weight(torch.eye(64)))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**25,) * 2)
for call in (
    lambda: fk.row_topk_mask(weight, scale, 9),
    lambda: fk.nm_mask(weight, scale, 2, 4),
    lambda: fk.unpack_weight(packed, header),
):
    try:
        call()
    except torch.OutOfMemoryError as error:
        print(error)
"""


def test_no_room_for_a_result_is_one_line_that_names_the_op():
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}  # memory that is freed goes back to the system at once
    done = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    why = "out of memory: no room for the result on the CPU; free memory, or give less at a time"
    assert done.stdout.splitlines() == [f"{op}: {why}" for op in ("row_topk_mask", "nm_mask", "unpack_weight")]
