"""Sizes of zero in every dimension, and memory that overlaps: exact where there is an answer, else one line."""

import copy
from decimal import Decimal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.masked import masked_tensor

import fwanda_kernels as fk
from fwanda_kernels.testing import WEIGHT_DTYPES

# sizes of zero

SHAPES = [(0, 0, 0), (0, 32, 3), (32, 0, 3), (32, 32, 0), (0, 0, 3), (0, 32, 0), (32, 0, 0)]  # R, C, T


def inputs(rows: int, cols: int, tokens: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.ones(rows, cols, dtype=dtype),
        "scale": torch.ones(cols),
        "keep": torch.zeros(rows, dtype=torch.int64),
        "x": torch.ones(tokens, cols, dtype=dtype),
        "mask": torch.ones(rows, cols, dtype=torch.bool),
        "packed": torch.zeros(rows, (cols + 7) // 8, dtype=torch.uint8),
    }


def obs(i, **choice):
    weight = i["weight"].clone()
    fk.obs_prune_(weight, torch.eye(weight.shape[1]), **choice)
    return weight.sum()


def prune(function, i, *rest):
    weight = i["weight"].clone()
    function(weight, i["scale"], *rest)
    return weight.sum()


def sums(function, i, shape, **settings):
    total = torch.zeros(shape)
    function(total, i["x"], **settings)
    return total.sum()


EMPTY_CALLS = {  # what is left of nothing: each value is 0
    "accumulate_sq_sums_": lambda i, r, c, t: sums(fk.accumulate_sq_sums_, i, c) - t * c,
    "accumulate_sq_sums_ of a batch": lambda i, r, c, t: sums(
        fk.accumulate_sq_sums_, i | {"x": i["x"][None]}, c, token_mask=torch.zeros(1, t, dtype=torch.bool)
    ),
    "accumulate_gram_": lambda i, r, c, t: sums(fk.accumulate_gram_, i, (c, c)) - t * c * c,
    "accumulate_gram_ of a batch": lambda i, r, c, t: sums(
        fk.accumulate_gram_, i | {"x": i["x"][None]}, (c, c)
    ) - t * c * c,
    "row_topk_mask": lambda i, r, c, t: fk.row_topk_mask(i["weight"], i["scale"], i["keep"]).sum(),
    "row_topk_mask among": lambda i, r, c, t: fk.row_topk_mask(i["weight"], i["scale"], 0, among=i["mask"]).sum(),
    "row_topk_prune_": lambda i, r, c, t: prune(fk.row_topk_prune_, i, i["keep"]),
    "foreach_accumulate_sq_sums_": lambda i, r, c, t: fk.foreach_accumulate_sq_sums_([torch.zeros(c)], [i["x"]]),
    "foreach_row_topk_prune_": lambda i, r, c, t: fk.foreach_row_topk_prune_([i["weight"]], [i["scale"]], [i["keep"]]),
    "nm_mask": lambda i, r, c, t: fk.nm_mask(i["weight"], i["scale"], 2, 4).sum() - r * c // 2,
    "nm_mask 1:1": lambda i, r, c, t: fk.nm_mask(i["weight"], i["scale"], 1, 1).sum() - r * c,
    "nm_prune_": lambda i, r, c, t: prune(fk.nm_prune_, i, 2, 4) - r * c // 2,
    "compress_24": lambda i, r, c, t: fk.compress_24(i["weight"], i["scale"])[0].sum() - r * c // 2,
    "select_threshold": lambda i, r, c, t: fk.select_threshold(
        [i["weight"]], [torch.ones(r)], [i["scale"]], 0
    )[0].sum(),
    "select_threshold of two": lambda i, r, c, t: fk.select_threshold(
        [i["weight"], torch.ones(3, 4)], [torch.zeros(r), torch.ones(3)], [i["scale"], torch.ones(4)], 5
    )[1].sum() - 5,
    "pack_mask": lambda i, r, c, t: fk.pack_mask(i["mask"]).sum() - r * c // 8 * 255,
    "masked_weight": lambda i, r, c, t: fk.masked_weight(i["weight"], i["packed"]).sum(),
    "unpack_weight": lambda i, r, c, t: fk.unpack_weight(fk.pack_weight(i["weight"], i["mask"])).numel() - r * c,
    "packed_linear": lambda i, r, c, t: fk.packed_linear(i["x"], fk.pack_weight(i["weight"])).numel() - t * r,
    "removed_sums": lambda i, r, c, t: sum(
        s.sum() for s in fk.removed_sums(torch.zeros(t, r, dtype=i["x"].dtype), i["x"], i["weight"], i["packed"])
    ),
    "obs_factor": lambda i, r, c, t: fk.obs_factor(torch.eye(c))[1],
    "obs_prune_ sparsity": lambda i, r, c, t: obs(i, sparsity=1),
    "obs_prune_ keep": lambda i, r, c, t: obs(i, keep=i["keep"]),
    "obs_prune_ mask": lambda i, r, c, t: obs(i, mask=~i["mask"]),
    "obs_prune_ pattern": lambda i, r, c, t: obs(i, pattern=(0, 4)),
}  # fmt: skip


@pytest.mark.fault("zero sizes")
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", EMPTY_CALLS)
def test_every_op_serves_sizes_of_zero(name, shape, dtype):
    if name == "compress_24" and dtype == torch.float32:
        pytest.skip("bf16 and fp16 only")
    assert int(EMPTY_CALLS[name](inputs(*shape, dtype), *shape) or 0) == 0


def test_every_op_has_a_call_with_sizes_of_zero():
    assert {name.split()[0] for name in EMPTY_CALLS} == set(fk.backends())


@pytest.mark.fault("zero sizes")
@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_global_row_scales_of_an_empty_matrix_are_empty_or_zero(shape):
    weights, norms = [torch.ones(shape), torch.ones(2, 3)], [torch.ones(shape[1]), torch.ones(3)]
    first, second = fk.global_row_scales(weights, [torch.ones(shape[0]), torch.ones(2)], norms)
    assert first.tolist() == [0.0] * shape[0] and second.isfinite().all()


@pytest.mark.fault("zero sizes")
def test_batches_without_a_token_are_measured_as_nothing():
    layer = torch.nn.Linear(4, 4)
    with fk.collect_statistics({"fc": layer}) as stats, fk.collect_hessians({"fc": layer}) as hessians:
        layer(torch.ones(0, 4)).sum().backward()
        layer(torch.ones(2, 0, 4)).sum().backward()
    assert stats["fc"].n_tokens == 0 and not stats["fc"].x2.any() and not hessians["fc"].any()
    assert stats["fc"].norm.tolist() == [1.0] * 4


# overlapping memory

OVERLAPPING = {  # [6, 16] fp32
    "rows": lambda: torch.ones(1, 16).expand(6, 16),
    "columns": lambda: torch.ones(6, 1).expand(6, 16),
    "windows": lambda: torch.ones(21).unfold(0, 16, 1),
    "as_strided": lambda: torch.ones(96).as_strided((6, 16), (4, 2)),
}
APART = {
    "transposed": lambda: torch.ones(16, 6).T,
    "every second column": lambda: torch.ones(6, 32)[:, ::2],
    "interleaved": lambda: torch.ones(96).as_strided((6, 16), (1, 6)),
    "coprime strides": lambda: torch.ones(201).as_strided((6, 16), (7, 11)),
}
WEIGHT_CALLS = {
    "row_topk_mask": lambda w: fk.row_topk_mask(w, torch.ones(16), 3),
    "row_topk_prune_": lambda w: fk.row_topk_prune_(w, torch.ones(16), 3),
    "nm_mask": lambda w: fk.nm_mask(w, torch.ones(16), 2, 4),
    "nm_prune_": lambda w: fk.nm_prune_(w, torch.ones(16), 2, 4),
    "obs_prune_": lambda w: fk.obs_prune_(w, factor=torch.eye(16), sparsity=0.5),
    "select_threshold": lambda w: fk.select_threshold([w], [torch.ones(6)], [torch.ones(16)], 9),
    "foreach_row_topk_prune_": lambda w: fk.foreach_row_topk_prune_(
        [w], [torch.ones(16)], [torch.full((6,), 3)], bad=torch.zeros(1, dtype=torch.int32)
    ),
}


@pytest.mark.fault("overlap")
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("make", OVERLAPPING.values(), ids=OVERLAPPING)
@pytest.mark.parametrize("op", WEIGHT_CALLS)
def test_weights_that_overlap_themselves_are_refused_in_one_line(op, make):
    weight = make()
    with pytest.raises(ValueError) as error:
        WEIGHT_CALLS[op](weight)
    text = str(error.value)
    assert text.startswith(f"{op}: the entries of weight") and "overlap" in text and "\n" not in text
    assert bool((weight == 1).all())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("make", APART.values(), ids=APART)
@pytest.mark.parametrize("op", WEIGHT_CALLS)
def test_any_strides_without_an_overlap_are_served(op, make):
    strided, plain = make(), torch.ones(6, 16)
    found, expected = WEIGHT_CALLS[op](strided), WEIGHT_CALLS[op](plain)
    assert torch.equal(strided, plain)
    if expected is not None:
        found, expected = ([r] if isinstance(r, torch.Tensor) else r for r in (found, expected))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.fault("overlap")
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    "op, argument, call",
    [
        ("accumulate_sq_sums_", "acc", lambda: fk.accumulate_sq_sums_(torch.ones(1).expand(4), torch.ones(2, 4))),
        ("accumulate_gram_", "hessian", lambda: fk.accumulate_gram_(torch.ones(4).expand(4, 4), torch.ones(2, 4))),
        (
            "foreach_row_topk_prune_",
            "bad",
            lambda: fk.foreach_row_topk_prune_(
                list(torch.ones(2, 3, 4)), [torch.ones(4)] * 2, [torch.ones(3).long()] * 2,
                bad=torch.zeros(1, dtype=torch.int32).expand(2),
            ),
        ),
    ],
)  # fmt: skip
def test_other_changed_arguments_that_overlap_themselves_are_refused(op, argument, call):
    with pytest.raises(ValueError, match=f"^{op}: the entries of {argument} must not overlap"):
        call()


def pruned(weights: list[torch.Tensor]) -> None:
    scales = [torch.ones(w.shape[1]) for w in weights]
    fk.foreach_row_topk_prune_(weights, scales, [torch.full((len(w),), 2) for w in weights])


@pytest.mark.fault("overlap")
@pytest.mark.usefixtures("backend")
def test_matrices_of_a_list_that_share_memory_are_refused_and_neighbours_are_not():
    whole = torch.ones(8, 12)
    for shared in ([whole, whole], [whole[:5], whole[4:]], [whole[:, :7], whole[:, 6:]], [whole, whole.T]):
        with pytest.raises(ValueError, match="^foreach_row_topk_prune_: weights must not overlap each other"):
            pruned(shared)
    with pytest.raises(ValueError, match="^foreach_accumulate_sq_sums_: accs must not overlap each other"):
        fk.foreach_accumulate_sq_sums_([whole[0], whole[0]], [torch.ones(2, 12)] * 2)
    assert bool((whole == 1).all())
    for parts in ([whole[:4], whole[4:]], [whole[:, :6], whole[:, 6:]], [whole[:4, :6], whole[2:, 6:]]):
        copies = copy.deepcopy(parts)
        pruned(copies)
        assert all((part != 0).sum(1).eq(2).all() for part in copies)


@pytest.mark.usefixtures("backend")
def test_arguments_that_are_only_read_may_be_expanded():
    weight, one = torch.arange(1.0, 13).view(3, 4), torch.ones(1)
    assert fk.row_topk_mask(weight, one.expand(4), torch.tensor([2]).expand(3)).sum(1).tolist() == [2, 2, 2]
    assert fk.nm_mask(weight, one.expand(4), 2, 4).sum() == 6
    fk.obs_prune_(weight, factor=torch.eye(4), mask=torch.tensor([True, False, True, False]).expand(3, 4))
    assert (weight != 0).sum(1).tolist() == [2, 2, 2]
    total = torch.zeros(4)
    fk.accumulate_sq_sums_(total, one.expand(5, 4), token_mask=torch.tensor([True]).expand(5))
    assert total.tolist() == [5] * 4


# values of other kinds

NO_TENSORS = {
    "a list": [[1.0, 2.0]] * 6,
    "an array": np.ones((6, 16), np.float32),
    "None": None,
    "sparse": torch.ones(6, 16).to_sparse(),
    "sparse rows": torch.ones(6, 16).to_sparse_csr(),
}
TENSOR_CALLS = WEIGHT_CALLS | {
    "accumulate_sq_sums_": lambda x: fk.accumulate_sq_sums_(torch.zeros(16), x),
    "accumulate_gram_": lambda x: fk.accumulate_gram_(torch.zeros(16, 16), x),
    "obs_factor": lambda h: fk.obs_factor(h),
    "pack_mask": lambda m: fk.pack_mask(m),
    "masked_weight": lambda w: fk.masked_weight(w, torch.ones(6, 2, dtype=torch.uint8)),
    "removed_sums": lambda g: fk.removed_sums(g, torch.ones(6, 16), torch.ones(16, 16), torch.ones(16, 2).byte()),
    "compress_24": lambda w: fk.compress_24(w, torch.ones(16)),
    "pack_weight": lambda w: fk.pack_weight(w),
    "packed_linear": lambda x: fk.packed_linear(x, fk.pack_weight(torch.ones(6, 16))),
    "allocate_row_budgets": lambda v: fk.allocate_row_budgets(v, 9, k_max=3),
    "global_row_scales": lambda w: fk.global_row_scales([w], [torch.ones(6)], [torch.ones(16)]),
}


@pytest.mark.fault("not a tensor")
@pytest.mark.parametrize("value", NO_TENSORS)
@pytest.mark.parametrize("op", TENSOR_CALLS)
def test_what_is_no_dense_tensor_is_one_line(op, value):
    with pytest.raises(ValueError, match=r"must be a (torch.Tensor, got|dense tensor, got the layout)") as error:
        TENSOR_CALLS[op](NO_TENSORS[value])
    assert "\n" not in str(error.value)


LIST_CALLS = {
    "foreach_row_topk_prune_": lambda w: fk.foreach_row_topk_prune_([w], [torch.ones(16)], [torch.full((6,), 3)]),
    "select_threshold": lambda w: fk.select_threshold([w], [torch.ones(6)], [torch.ones(16)], 9),
    "foreach_accumulate_sq_sums_": lambda x: fk.foreach_accumulate_sq_sums_([torch.zeros(16)], [x]),
}


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.fault("not a tensor", trials=3 * len(TENSOR_CALLS | LIST_CALLS))
@pytest.mark.parametrize("op", TENSOR_CALLS | LIST_CALLS)
def test_tensors_that_stand_for_others_are_one_line_that_says_what_to_give(op, mesh):
    dense = torch.ones(6, 16)
    odd = {
        "must be a plain tensor, got a DTensor; pass its to_local() or full_tensor()": distribute_tensor(
            dense, mesh, [Shard(0)]
        ),
        "must be a plain tensor, got a MaskedTensor; pass the tensor that it holds": masked_tensor(dense, dense > 0),
        "must have memory, got a tensor of zeros without any; pass tensor.clone()": torch._efficientzerotensor((6, 16)),
    }
    for message, value in odd.items():
        with pytest.raises(ValueError) as error:
            (TENSOR_CALLS | LIST_CALLS)[op](value)
        assert str(error.value).endswith(message) and "\n" not in str(error.value)


class Doubled(torch.Tensor):
    """A subclass that unwraps itself in every op."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held):
        self = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        self.held = held
        return self

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        held = [value.held if isinstance(value, cls) else value for value in args]
        return function(*held, **(kwargs or {}))


def test_subclasses_that_serve_an_op_are_served():
    weight, scale = torch.randn(6, 16), torch.rand(16)
    for given in (Doubled(weight), torch.nn.Parameter(weight), weight.as_subclass(type("Own", (torch.Tensor,), {}))):
        with torch.no_grad():
            assert torch.equal(fk.row_topk_mask(given, scale, 5), fk.row_topk_mask(weight, scale, 5))


META_CALLS = {
    "allocate_row_budgets": lambda w: fk.allocate_row_budgets(w[:, 0], 9, k_max=16),
    "global_row_scales": lambda w: fk.global_row_scales([w], [w[:, 0]], [w[0]]),
    "pack_weight": fk.pack_weight,
}


@pytest.mark.fault("not a tensor")
@pytest.mark.parametrize("op", META_CALLS)
def test_what_reads_numbers_refuses_the_meta_device(op):
    with pytest.raises(ValueError, match="is on the meta device and holds no numbers; give it on a real device$"):
        META_CALLS[op](torch.empty(6, 16, device="meta"))


@pytest.mark.fault("not a tensor")
def test_collectors_refuse_sums_and_weights_on_the_meta_device():
    layer, meta = torch.nn.Linear(4, 5), torch.ones(5, device="meta")
    sums = fk.LayerStatistics(torch.ones(4, device="meta"), meta, 2)
    with fk.collect_statistics({"fc": layer}, {"fc": sums}), pytest.raises(ValueError, match=r"x2 is on the meta"):
        layer(torch.ones(2, 4))
    with pytest.raises(ValueError, match="token_weight of fc is on the meta device"):
        with fk.collect_hessians({"fc": layer}, {"fc": meta}):
            pass


def test_weights_of_tokens_may_be_of_eight_bits():
    layer, x, found = torch.nn.Linear(4, 5), torch.randn(3, 4), []
    weight = torch.tensor([1.0, 0.5, 2.0])
    for given in (weight, weight.to(torch.float8_e4m3fn)):
        with fk.collect_hessians({"fc": layer}, {"fc": given}) as hessians:
            layer(x)
        found.append(hessians["fc"])
    assert torch.equal(*found)


@pytest.mark.fault("not a tensor")
@pytest.mark.parametrize("weights", [None, "w", {"a": 1}, (torch.ones(6, 16) for _ in range(1)), torch.ones(6, 16)])
def test_lists_of_matrices_are_lists(weights):
    with pytest.raises(ValueError, match=r"^foreach_row_topk_prune_: weights(\[0\])? must be"):
        fk.foreach_row_topk_prune_(weights, [torch.ones(16)] * 6, [torch.full((6,), 3)] * 6)


@pytest.mark.fault("not a tensor")
@pytest.mark.parametrize("modules", [None, [torch.nn.Linear(2, 2)], torch.nn.Linear(2, 2)])
@pytest.mark.parametrize("collect", [fk.collect_statistics, fk.collect_hessians])
def test_modules_are_given_by_name(collect, modules):
    with pytest.raises(ValueError, match="modules must map names to modules"), collect(modules):
        pass


@pytest.mark.fault("not a tensor")
@pytest.mark.parametrize(
    "x2, g2, message",
    [
        (torch.ones(3), torch.ones(5), r"initial\['fc'\].x2 must be \[4\] float32"),
        (torch.ones(4), torch.ones(4), r"initial\['fc'\].g2 must be \[5\] float32"),
        (torch.ones(4), None, r"initial\['fc'\].g2 must be a torch.Tensor, got None"),
    ],
)
def test_sums_to_continue_from_must_fit_the_module(x2, g2, message):
    layer = torch.nn.Linear(4, 5)
    with fk.collect_statistics({"fc": layer}, {"fc": fk.LayerStatistics(x2, g2, 2)}):
        with pytest.raises(ValueError, match=message):
            layer(torch.ones(2, 4))


# numbers of any size


@pytest.mark.fault("huge number")
@pytest.mark.parametrize(
    "sparsity", ["1e-999999999", "1e999999999", Decimal("1e-99999999"), "1E-1_000_000_000", 10**5000], ids=list("abcde")
)
def test_a_sparsity_of_a_billion_digits_is_refused_at_once(sparsity):
    with pytest.raises(ValueError, match=r"^obs_prune_: sparsity must be in \[0, 1\], got") as error:
        fk.obs_prune_(torch.ones(2, 4), torch.eye(4), sparsity=sparsity)
    assert len(str(error.value)) < 200


@pytest.mark.fault("huge number")
@pytest.mark.parametrize(
    "call",
    [
        lambda n: fk.obs_factor(torch.eye(4), n)[0],
        lambda n: fk.obs_prune_(torch.ones(2, 4), torch.eye(4), sparsity=0.5, damping=n),
        lambda n: fk.global_row_scales([torch.ones(2, 4)], [torch.ones(2)], [torch.ones(4)], row_exponent=n)[0],
        lambda n: fk.global_row_scales([torch.ones(2, 4)], [torch.ones(2)], [torch.ones(4)], layer_exponent=n)[0],
        lambda n: fk.global_row_scales([torch.ones(2, 4)], [torch.ones(2)], [torch.ones(4)], mean_omega=n)[0],
    ],
)
def test_an_integer_beyond_64_bits_counts_as_its_float(call):
    torch.testing.assert_close(call(10**30), call(1e30), rtol=0, atol=0, equal_nan=True)


@pytest.mark.fault("huge number")
@pytest.mark.parametrize("value", [10**30, 10**5000, -(10**5000)], ids=["30", "5000", "-5000"])
@pytest.mark.parametrize(
    "call",
    [
        lambda n: fk.row_topk_mask(torch.ones(2, 4), torch.ones(4), n),
        lambda n: fk.nm_mask(torch.ones(2, 4), torch.ones(4), 2, n),
        lambda n: fk.select_threshold([torch.ones(2, 4)], [torch.ones(2)], [torch.ones(4)], n),
        lambda n: fk.obs_prune_(torch.ones(2, 4), torch.eye(4), pattern=(2, n)),
        lambda n: fk.obs_prune_(torch.ones(2, 4), torch.eye(4), sparsity=0.5, block=n),
        lambda n: fk.obs_factor(torch.eye(4), n * 10**300),
        lambda n: fk.allocate_row_budgets(torch.ones(2), n, k_max=4),
        lambda n: fk.LayerStatistics(torch.ones(4), None, n),
    ],
)
def test_numbers_beyond_64_bits_are_one_line(call, value):
    with pytest.raises(ValueError, match="must be") as error:
        call(value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200
