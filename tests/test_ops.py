"""The contract of every tensor op (schema, tracing, errors), and the sums over tokens."""

import copy
from math import sqrt

import pytest
import torch

import fwanda_kernels as fk
from fwanda_kernels import testing
from fwanda_kernels.testing import WEIGHT_DTYPES, make_scale, make_weight, sample_arguments

dtypes = pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
EPS = torch.finfo(torch.float32).eps


def header_of(rows, cols, dtype):
    return fk.PackedHeader((rows, cols), dtype, "")


WRAPPERS = {
    "accumulate_sq_sums_": lambda acc, x, mask: fk.accumulate_sq_sums_(acc, x, token_mask=mask),
    "accumulate_gram_": lambda hessian, x, mask: fk.accumulate_gram_(hessian, x, token_mask=mask),
    "foreach_accumulate_sq_sums_": lambda accs, xs, mask: fk.foreach_accumulate_sq_sums_(accs, xs, token_mask=mask),
    "foreach_row_topk_prune_": lambda ws, s, k, bad: fk.foreach_row_topk_prune_(ws, s, k, bad=bad),
    "compress_24": lambda w, scale, bad: fk.compress_24(w, scale, bad=bad),
    "row_topk_mask": lambda w, scale, keep, bad: fk.row_topk_mask(w, scale, keep, bad=bad),
    "row_topk_prune_": lambda w, scale, keep, bad: fk.row_topk_prune_(w, scale, keep, bad=bad),
    "nm_mask": lambda w, scale, n, m, bad: fk.nm_mask(w, scale, n, m, bad=bad),
    "nm_prune_": lambda w, scale, n, m, bad: fk.nm_prune_(w, scale, n, m, bad=bad),
    "select_threshold": lambda ws, rows, cols, total, bad: fk.select_threshold(ws, rows, cols, total, bad=bad),
    "pack_mask": lambda mask: fk.pack_mask(mask),
    "masked_weight": lambda w, packed: fk.masked_weight(w, packed),
    "removed_sums": lambda gradient, x, w, packed: fk.removed_sums(gradient, x, w, packed),
    "unpack_weight": lambda packed, rows, cols, dtype: fk.unpack_weight(packed, header_of(rows, cols, dtype)),
    "packed_linear": lambda x, packed, bias, rows, cols: fk.packed_linear(
        x, packed, bias, header=header_of(rows, cols, x.dtype)
    ),
    "obs_factor": lambda hessian, damping: fk.obs_factor(hessian, damping),
    "obs_prune_": lambda w, hessian, factor, s, keep, mask, pattern, row_weight, block, damping: fk.obs_prune_(
        w,
        hessian,
        factor=factor,
        sparsity=s,
        keep=keep,
        mask=mask,
        pattern=pattern,
        row_weight=row_weight,
        block=block,
        damping=damping,
    ),
}
ops = pytest.mark.parametrize("op", WRAPPERS)


def tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits, so that NaN equals itself and -0.0 differs from 0.0."""
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def assert_same_bits(actual, expected) -> None:
    assert len(tensors(actual)) == len(tensors(expected))
    for a, b in zip(tensors(actual), tensors(expected), strict=True):
        assert a.dtype == b.dtype and torch.equal(bits(a), bits(b))


# contracts


def test_every_op_has_a_wrapper_and_sample_arguments():
    assert set(sample_arguments()) == set(WRAPPERS) == set(fk.backends())
    assert set(WRAPPERS) <= set(fk.__all__)


@dtypes
@ops
def test_opcheck(op, dtype):
    torch.library.opcheck(getattr(torch.ops.fwanda, op).default, sample_arguments(dtype=dtype)[op])


@pytest.mark.parametrize(
    "op",
    [
        "row_topk_mask",
        "row_topk_prune_",
        "nm_mask",
        "nm_prune_",
        "obs_factor",
        "obs_prune_",
        "pack_mask",
        "masked_weight",
    ],
)
def test_fake_kernels_agree_on_transposed_inputs(op):
    matrix, *rest = sample_arguments()[op]
    args = (matrix.T.contiguous().T, *rest)
    torch.library.opcheck(getattr(torch.ops.fwanda, op).default, args, test_utils=("test_schema", "test_faketensor"))


@ops
def test_compiles_without_graph_breaks(op):
    args = sample_arguments()[op]
    traced_args = copy.deepcopy(args)
    expected = WRAPPERS[op](*args)
    torch._dynamo.reset()
    traced = torch.compile(WRAPPERS[op], fullgraph=True, backend="aot_eager")(*traced_args)
    assert_same_bits([traced, traced_args], [expected, args])


# errors

WRONG = [  # op, argument index, change, what the message says
    ("accumulate_sq_sums_", 0, lambda t: t[:-1], "acc must be [16] float32 on cpu, got [15] float32 on cpu"),
    ("accumulate_sq_sums_", 0, torch.Tensor.double, "acc must be [16] float32 on cpu, got [16] float64 on cpu"),
    ("accumulate_sq_sums_", 0, lambda t: t.to("meta"), "acc must be [16] float32 on cpu, got [16] float32 on meta"),
    ("accumulate_sq_sums_", 1, lambda t: t[0], "x must be [..., C] bfloat16|float16|float32"),
    ("accumulate_sq_sums_", 1, torch.Tensor.int, "got [24, 16] int32"),
    ("accumulate_sq_sums_", 2, lambda t: t[1:], "token_mask must be [24] bool on cpu, got [23] bool on cpu"),
    ("accumulate_sq_sums_", 2, torch.Tensor.int, "token_mask must be [24] bool on cpu, got [24] int32 on cpu"),
    ("accumulate_gram_", 0, lambda t: t[1:], "hessian must be [16, 16] float32 on cpu, got [15, 16] float32 on cpu"),
    ("accumulate_gram_", 0, torch.Tensor.half, "hessian must be [16, 16] float32 on cpu, got [16, 16] float16 on cpu"),
    ("accumulate_gram_", 1, torch.Tensor.double, "x must be [..., C] bfloat16|float16|float32"),
    ("accumulate_gram_", 2, lambda t: t[None], "token_mask must be [24] bool on cpu, got [1, 24] bool on cpu"),
    *[
        case
        for op in ("row_topk_mask", "row_topk_prune_", "nm_mask", "nm_prune_")
        for case in (
            (op, 0, lambda t: t[0], "weight must be [R, C] bfloat16|float16|float32 on any device, got [16] float32"),
            (op, 0, torch.Tensor.double, "got [6, 16] float64 on cpu"),
            (op, 1, lambda t: t[:-1], "scale must be [16] float32 on cpu, got [15] float32 on cpu"),
            (op, 1, torch.Tensor.bfloat16, "scale must be [16] float32 on cpu, got [16] bfloat16 on cpu"),
            (op, 1, lambda t: t.to("meta"), "scale must be [16] float32 on cpu, got [16] float32 on meta"),
            (op, -1, torch.Tensor.long, "bad must be [1] int32 on cpu, got [1] int64 on cpu"),
            (op, -1, lambda t: t[0], "bad must be [1] int32 on cpu, got [] int32 on cpu"),
        )
    ],
    *[
        case
        for op in ("row_topk_mask", "row_topk_prune_")
        for case in (
            (op, 2, lambda t: t[:-1], "keep must be [6] int64 on cpu, got [5] int64 on cpu"),
            (op, 2, torch.Tensor.int, "keep must be [6] int64 on cpu, got [6] int32 on cpu"),
            (op, 2, lambda t: 17, "keep must be in [0, C]=[0, 16], got 17"),
            (op, 2, lambda t: -1, "keep must be in [0, C]=[0, 16], got -1"),
        )
    ],
    *[
        case
        for op in ("nm_mask", "nm_prune_")
        for case in (
            (op, 2, lambda n: 5, "got 5:4"),
            (op, 2, lambda n: -1, "got -1:4"),
            (op, 3, lambda m: 0, "got 2:0"),
            (op, 3, lambda m: 3, "C=16 columns are not a multiple of m=3"),
        )
    ],
    ("select_threshold", 0, lambda ws: [], "got 0 weights, 2 row_scales, 2 col_scales"),
    ("select_threshold", 1, lambda rows: rows[:1], "got 2 weights, 1 row_scales, 2 col_scales"),
    ("select_threshold", 0, lambda ws: [ws[0], ws[1].double()], "weights[1] must be [R, C]"),
    ("select_threshold", 0, lambda ws: [ws[0], ws[1].to("meta")], "weights[1] must be on cpu"),
    ("select_threshold", 1, lambda rows: [rows[0], rows[1][1:]], "row_scales[1] must be [6] float32 on cpu, got [5]"),
    ("foreach_accumulate_sq_sums_", 0, lambda accs: accs[:1], "accs, xs must be non-empty lists of one length, got 1"),
    ("foreach_accumulate_sq_sums_", 1, lambda xs: [xs[0], xs[1].int()], "xs[1] must be [..., C] bfloat16"),
    ("foreach_row_topk_prune_", 2, lambda ks: [ks[0], ks[1][1:]], "keeps[1] must be [6] int64 on cpu, got [5]"),
    ("foreach_row_topk_prune_", 3, lambda bad: bad[:1], "bad must be [2] int32 on cpu, got [1]"),
    ("compress_24", 0, lambda w: w[:31], "R and C must be multiples of 32, got [31, 64]"),
    ("compress_24", 0, torch.Tensor.float, "weight must be bfloat16 or float16, got float32"),
    ("select_threshold", 2, lambda cols: [cols[0].half(), cols[1]], "col_scales[0] must be [16] float32 on cpu, got"),
    ("select_threshold", 3, lambda total: 193, "total must be in [0, 192], got 193"),
    ("select_threshold", 3, lambda total: -1, "total must be in [0, 192], got -1"),
    ("select_threshold", 4, torch.Tensor.float, "bad must be [1] int32 on cpu, got [1] float32 on cpu"),
    ("unpack_weight", 0, torch.Tensor.int, "packed must be"),
    ("packed_linear", 0, lambda x: x[:, 1:], "x must be [..., 16] float32 on cpu like the packed weight, got [24, 15]"),
    ("packed_linear", 1, torch.Tensor.int, "uint8 on cpu, got"),
    ("packed_linear", 2, lambda bias: bias[1:], "bias must be [6] float32 on cpu, got [5] float32 on cpu"),
    ("pack_mask", 0, lambda mask: mask[0], "mask must be [R, C] bool on any device, got [16] bool on cpu"),
    ("pack_mask", 0, torch.Tensor.int, "mask must be [6, 16] bool on cpu, got [6, 16] int32 on cpu"),
    *[
        case
        for op, weight in (("masked_weight", 0), ("removed_sums", 2))
        for case in (
            (op, weight, torch.Tensor.double, "weight must be [R, C] bfloat16|float16|float32 on any device, got [6,"),
            (op, -1, lambda packed: packed[:, 1:], "packed must be [6, 2] uint8 on cpu, got [6, 1] uint8 on cpu"),
            (op, -1, torch.Tensor.bool, "packed must be [6, 2] uint8 on cpu, got [6, 2] bool on cpu"),
            (op, -1, lambda packed: packed.to("meta"), "packed must be [6, 2] uint8 on cpu, got [6, 2] uint8 on meta"),
        )
    ],
    ("removed_sums", 0, lambda g: g[1:], "gradient must be [24, 6] float32 on cpu, got [23, 6] float32 on cpu"),
    ("removed_sums", 0, torch.Tensor.half, "gradient must be [24, 6] float32 on cpu, got [24, 6] float16 on cpu"),
    ("removed_sums", 1, lambda x: x[None], "x must be [1, 16] bfloat16|float16|float32 on cpu, got [1, 24, 16]"),
    ("removed_sums", 1, lambda x: x[:, 1:], "x must be [24, 16] bfloat16|float16|float32 on cpu, got [24, 15]"),
]


@pytest.mark.parametrize("op, index, change, message", WRONG, ids=[f"{c[0]}-{i}" for i, c in enumerate(WRONG)])
def test_wrong_argument_is_one_line_and_nothing_is_touched(op, index, change, message):
    args = list(sample_arguments()[op])
    args[index] = change(args[index])
    before = copy.deepcopy(args)
    with pytest.raises(ValueError) as error:
        WRAPPERS[op](*args)
    text = str(error.value)
    assert text.startswith(f"{op}: ") and message in text and "\n" not in text
    real = [[t for t in tensors(a) if t.device.type == "cpu"] for a in (args, before)]
    assert_same_bits(*real)


def _set(index, position, value):
    def change(args):
        tensors(args[index])[-1][position] = value

    return change


BROKEN = [  # name, ops, change, code, message
    ("nan-weight", None, _set(0, (1, 2), float("nan")), 1, "weight has NaN or inf"),
    ("inf-weight", None, _set(0, (1, 2), float("-inf")), 1, "weight has NaN or inf"),
    ("nan-scale", None, _set(1, 0, float("nan")), 2, "scale must be finite and >= 0"),
    ("inf-scale", None, _set(1, 0, float("inf")), 2, "scale must be finite and >= 0"),
    ("negative-scale", None, _set(1, 0, -1.0), 2, "scale must be finite and >= 0"),
    ("negative-keep", "row", _set(2, 0, -1), 4, "keep must be in [0, C]"),
    ("large-keep", "row", _set(2, 0, 17), 4, "keep must be in [0, C]"),
    ("negative-col-scale", "select", _set(2, 0, -1.0), 2, "scale must be finite and >= 0"),
]
BROKEN_CALLS = [
    pytest.param(op, change, code, message, id=f"{op}-{name}")
    for op in ("row_topk_mask", "row_topk_prune_", "nm_mask", "nm_prune_", "compress_24", "select_threshold")
    for name, only, change, code, message in BROKEN
    if only is None or op.startswith(only)
]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("op, change, code, message", BROKEN_CALLS)
def test_bad_collects_the_code_instead_of_raising(op, change, code, message):
    args = copy.deepcopy(sample_arguments()[op])
    change(args)
    args[-1].fill_(8)
    WRAPPERS[op](*args)
    assert args[-1].tolist() == [8 | code]


def test_bad_message_names_every_fault_of_a_code():
    assert fk.bad_message("fc", 1) == "fc: weight has NaN or inf values"
    assert fk.bad_message("fc", 6) == "fc: scale must be finite and >= 0, keep must be in [0, C]"


@pytest.mark.parametrize("code", [0, 8, 9, -1, 2**40])
def test_bad_message_refuses_what_is_no_code(code):
    with pytest.raises(ValueError, match=rf"^bad_message: code must be in \[1, 7\], got {code}$"):
        fk.bad_message("fc", code)


def test_helpers_of_tests_refuse_an_unknown_kind_and_nothing_to_time():
    for kind in ("x", None, ["normal"]):
        with pytest.raises(ValueError, match="^make_weight: kind must be one of normal, "):
            testing.make_weight(2, 2, kind=kind)
    for calls, rounds in (([], 2), ([lambda: None], 0)):
        with pytest.raises(ValueError, match="^bench: calls and rounds must be at least one each"):
            testing.bench(calls, rounds=rounds)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("op, change, code, message", BROKEN_CALLS)
def test_bad_values_raise_without_bad_and_touch_nothing(op, change, code, message):
    args = copy.deepcopy(sample_arguments()[op])[:-1]
    change(args)
    before = copy.deepcopy(args)
    with pytest.raises(ValueError) as error:
        WRAPPERS[op](*args, None)
    text = str(error.value)
    assert text.startswith(f"{op}: ") and message in text and "\n" not in text
    assert_same_bits(args, before)


def test_bad_collects_several_codes():
    weight, scale, keep, bad = sample_arguments()["row_topk_mask"]
    weight[0, 0], scale[1], keep[2] = float("nan"), -1, 17
    fk.row_topk_mask(weight, scale, keep, bad=bad)
    assert bad.tolist() == [7]


@ops
def test_bad_stays_zero_on_valid_arguments(op):
    args = sample_arguments()[op]
    WRAPPERS[op](*args)
    assert not any(t.any() for t in tensors(args) if t.dtype == torch.int32)


def test_bad_of_a_list_names_the_matrix():
    weights, scales, keeps, bad = sample_arguments()["foreach_row_topk_prune_"]
    weights[1][0, 0] = float("nan")
    fk.foreach_row_topk_prune_(weights, scales, keeps, bad=bad)
    assert bad.tolist() == [0, 1]


@pytest.mark.usefixtures("backend")
def test_lists_give_the_bits_of_single_calls():
    weights, scales, keeps, bad = sample_arguments()["foreach_row_topk_prune_"]
    single = copy.deepcopy(weights)
    for weight, scale, keep in zip(single, scales, keeps, strict=True):
        fk.row_topk_prune_(weight, scale, keep)
    fk.foreach_row_topk_prune_(weights, scales, keeps)
    assert_same_bits(weights, single)
    accs, xs, mask = sample_arguments()["foreach_accumulate_sq_sums_"]
    single = copy.deepcopy(accs)
    for acc, x in zip(single, xs, strict=True):
        fk.accumulate_sq_sums_(acc, x, token_mask=mask)
    fk.foreach_accumulate_sq_sums_(accs, xs, token_mask=mask)
    assert_same_bits(accs, single)


# compress_24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(32, 32), (64, 256), (96, 160)])
def test_compressed_matrix_is_torch_s_own_packing_of_the_pruned_one(shape, dtype):
    conversions = pytest.importorskip("torch.sparse._semi_structured_conversions")
    weight = make_weight(*shape, dtype, kind="heavy_ties")
    weight[weight == 0] = 0.25  # torch reads the positions from the non-zeros
    scale = make_scale(shape[1]) + 0.1
    values, meta = fk.compress_24(weight, scale)
    pruned = weight.clone()
    fk.nm_prune_(pruned, scale, 2, 4)
    assert_same_bits([values, meta], list(conversions.sparse_semi_structured_from_dense_cutlass(pruned)))


def test_kept_zeros_are_packed_too():
    values, meta = fk.compress_24(torch.zeros(32, 32, dtype=torch.float16), torch.ones(32))
    assert not values.any() and set(meta.flatten().tolist()) == {0xEEEE - 0x10000}  # columns 2 and 3 of every group


# stats


def tokens(count: int, dtype=torch.float32) -> torch.Tensor:
    return (torch.randn(count, 33) * torch.logspace(-2, 1, 33)).to(dtype)


@dtypes
@pytest.mark.parametrize("count", [0, 1, 17, 4097, 20000])
def test_sums_are_within_the_bound(count, dtype):
    x = tokens(count, dtype)
    acc, hessian = torch.ones(33), torch.ones(33, 33)
    fk.accumulate_sq_sums_(acc, x)
    fk.accumulate_gram_(hessian, x)
    wide = x.double()
    bound = 4 * EPS * sqrt(max(count, 1))
    exact = 1 + wide.square().sum(0)
    assert ((acc - exact).abs() <= bound * exact).all()
    assert ((hessian - 1 - wide.T @ wide).abs() <= bound * (1 + wide.abs().T @ wide.abs())).all()


SUMS = pytest.mark.parametrize("add, shape", [(fk.accumulate_sq_sums_, [33]), (fk.accumulate_gram_, [33, 33])])


@pytest.mark.fault("padding")
@SUMS
def test_masked_tokens_do_not_count_even_if_nan(add, shape):
    x, mask = tokens(4100), torch.arange(4100) % 3 != 0
    masked, alone = torch.zeros(shape), torch.zeros(shape)
    add(alone, x[mask])
    x[~mask] = float("nan")
    x[0] = float("inf")
    add(masked, x, token_mask=mask)
    torch.testing.assert_close(masked, alone, rtol=1e-5, atol=1e-2)


@SUMS
def test_sums_accept_any_leading_shape_and_strides_and_accumulate(add, shape):
    x, mask = tokens(24), torch.arange(24) % 5 != 0
    flat, shaped = torch.zeros(shape), torch.zeros(shape)
    add(flat, torch.cat([x, x[mask]]))
    add(shaped, x.T.contiguous().T.view(2, 12, 33))
    add(shaped, x.view(2, 3, 4, 33), token_mask=mask.view(2, 3, 4))
    torch.testing.assert_close(shaped, flat)


@SUMS
def test_nan_passes_through_the_sums(add, shape):
    x, total = tokens(8), torch.zeros(shape)
    x[3, 4] = float("nan")
    add(total, x)
    expected = torch.zeros(shape, dtype=torch.bool)
    expected[4], expected[..., 4] = True, True
    assert torch.equal(total.isnan(), expected)
