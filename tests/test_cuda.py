"""Every backend on a CUDA device against the reference there: bits, tracing, capture, sizes beyond 2^31."""

import copy
from itertools import product

import pytest
import torch

import fwanda_kernels as fk
from fwanda_kernels.testing import KINDS, WEIGHT_DTYPES, make_keep, make_scale, make_weight, sample_arguments

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

COLUMNS = (1, 7, 33, 100, 1000, 4096, 4097, 16384, 57344)


def served(op: str) -> list[str]:
    return fk.backends()[op]["cuda"]


def flag(size: int = 1) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32, device="cuda")


def both(backend: str, run):
    """run() on a backend and on the reference."""
    results = []
    for name in (backend, "reference"):
        with fk.use_backend(name):
            results.append(run())
    return results


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_row_topk_has_the_reference_s_bits(kind, dtype, backend):
    if backend not in served("row_topk_mask"):
        pytest.skip(fk.explain("row_topk_mask")["cuda"][backend])
    for cols in COLUMNS:
        weight = make_weight(9, cols, dtype, kind=kind, device="cuda")
        scale, keep = make_scale(cols, device="cuda"), make_keep(9, cols, device="cuda")
        for scales in (scale, torch.ones_like(scale), scale * 1e36):
            mask, expected = both(backend, lambda w=weight, s=scales, k=keep: fk.row_topk_mask(w, s, k))
            assert torch.equal(mask, expected), (cols, int((mask != expected).sum()))
            pruned = weight.clone()
            with fk.use_backend(backend):
                fk.row_topk_prune_(pruned, scales, keep, bad=flag())
            assert torch.equal(pruned, weight.masked_fill(~expected, 0)), cols
            assert not torch.signbit(pruned[~expected]).any()


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_strided_rows_and_lists(backend):
    if backend not in served("foreach_row_topk_prune_"):
        pytest.skip(fk.explain("foreach_row_topk_prune_")["cuda"][backend])
    wide = make_weight(40, 700, torch.bfloat16, device="cuda")
    weights = [
        wide[:, :512],
        wide.clone()[::2],
        wide[:, 3:99].clone(),
        make_weight(5, 5000, torch.bfloat16, device="cuda"),
    ]
    scales = [make_scale(w.shape[1], device="cuda") for w in weights]
    keeps = [make_keep(*w.shape, device="cuda") for w in weights]
    expected = [w.masked_fill(~fk.row_topk_mask(w, s, k), 0) for w, s, k in zip(weights, scales, keeps, strict=True)]
    outside = wide[:, 512:].clone()
    with fk.use_backend(backend):
        fk.foreach_row_topk_prune_(weights, scales, keeps, bad=flag(len(weights)))
    assert all(torch.equal(w, e) for w, e in zip(weights, expected, strict=True))
    assert torch.equal(wide[:, 512:], outside)


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_sq_sums_are_near_fp64_and_the_same_however_they_are_called(dtype, backend):
    if backend not in served("foreach_accumulate_sq_sums_"):
        pytest.skip(fk.explain("foreach_accumulate_sq_sums_")["cuda"][backend])
    for tokens in (1, 7, 127, 129, 4096, 4097, 5000):
        base = make_weight(tokens, 1400, dtype, device="cuda")
        mask = torch.arange(tokens, device="cuda") % 3 != 0
        base[~mask] = float("nan")  # padding must not count, whatever it holds
        xs = [base, base[:, :7], base[:, 3:700], base[:, 8:264]]
        for counted, rows in ((mask, mask), (None, ~mask)):
            inputs = xs if counted is not None else [x.nan_to_num(2.0) for x in xs]
            with fk.use_backend(backend):
                grouped = [torch.full((x.shape[1],), 0.5, device="cuda") for x in inputs]
                single = [a.clone() for a in grouped]
                packed = [a.clone() for a in grouped]
                fk.foreach_accumulate_sq_sums_(grouped, inputs, token_mask=counted)
                for a, p, x in zip(single, packed, inputs, strict=True):
                    fk.accumulate_sq_sums_(a, x, token_mask=counted)
                    fk.accumulate_sq_sums_(p, x.contiguous(), token_mask=counted)
            for a, s, p, x in zip(grouped, single, packed, inputs, strict=True):
                exact = (x if counted is None else x[rows]).double().square().sum(0) + 0.5
                assert torch.equal(a, s) and torch.equal(a, p), (tokens, x.shape)
                torch.testing.assert_close(a.double(), exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_a_group_of_sq_sums_may_hold_few_and_many_tokens(backend):
    if backend not in served("foreach_accumulate_sq_sums_"):
        pytest.skip(fk.explain("foreach_accumulate_sq_sums_")["cuda"][backend])
    dtypes = [torch.bfloat16, torch.float16, torch.float32]
    inputs = [make_weight((3, 4100)[i % 2], 31 + i, dtypes[i % 3], device="cuda") for i in range(140)]
    grouped = [torch.full((x.shape[1],), 0.5, device="cuda") for x in inputs]
    single = [acc.clone() for acc in grouped]
    with fk.use_backend(backend):
        fk.foreach_accumulate_sq_sums_(grouped, inputs)
        for acc, x in zip(single, inputs, strict=True):
            fk.accumulate_sq_sums_(acc, x)
    assert all(map(torch.equal, grouped, single))
    for acc, x in zip(grouped, inputs, strict=True):
        torch.testing.assert_close(acc.double(), x.double().square().sum(0) + 0.5, rtol=2e-6, atol=0)


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_nm_and_pack_have_the_reference_s_bits(kind, dtype, backend):
    if backend not in served("nm_mask"):
        pytest.skip(fk.explain("nm_mask")["cuda"][backend])
    for rows, cols in ((1, 4), (9, 12), (65, 256), (32, 288), (96, 4096), (33, 11008)):
        wide = make_weight(rows, cols + 8, dtype, kind=kind, device="cuda")
        weights = [wide[:, :cols].contiguous(), wide[:, :cols], wide[:, 3 : cols + 3]]
        scale = make_scale(cols, device="cuda")
        for weight, scales in product(weights, (scale, torch.ones_like(scale), scale * 1e36, -0.0 * scale)):
            for n in (2, 1, 3):
                mask, expected = both(backend, lambda w=weight, s=scales, n=n: fk.nm_mask(w, s, n, 4, bad=flag()))
                assert torch.equal(mask, expected), (rows, cols, n)
            expected = weight.masked_fill(~fk.nm_mask(weight, scales, 2, 4), 0)
            buffer = wide.clone()
            pruned = torch.as_strided(buffer, weight.shape, weight.stride(), weight.storage_offset())
            if weight.stride(0) == cols:
                pruned = weight.clone()
            with fk.use_backend(backend):
                fk.nm_prune_(pruned, scales, 2, 4, bad=flag())
            assert torch.equal(pruned, expected)
            assert not torch.signbit(pruned[~fk.nm_mask(weight, scales, 2, 4)]).any()
            if weight.stride(0) != cols:
                pruned.copy_(weight)
                assert torch.equal(buffer, wide)  # nothing beside it was touched
            if dtype != torch.float32 and rows % 32 == 0 and cols % 32 == 0:
                found, wanted = both(backend, lambda w=weight, s=scales: fk.compress_24(w, s, bad=flag()))
                assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1]), (rows, cols)


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_select_threshold_counts_as_the_reference(kind, dtype, backend):
    if backend not in served("select_threshold"):
        pytest.skip(fk.explain("select_threshold")["cuda"][backend])
    shapes = [(5, 7), (1, 1), (130, 1000), (64, 256), (7, 4097), (300, 4096), (3, 20000)]
    weights = [make_weight(r, c, dtype, kind=kind, seed=i, device="cuda") for i, (r, c) in enumerate(shapes)]
    weights.append(make_weight(64, 256, dtype, kind=kind, seed=9, device="cuda")[:, 1:201])
    size = sum(w.numel() for w in weights)
    spread = [[make_scale(w.shape[i], device="cuda") for w in weights] for i in (0, 1)]
    plain = [[torch.ones_like(s) for s in scales] for scales in spread]
    extreme = [s**8 * 1e-38 for s in spread[0]], [s * 1e36 for s in spread[1]]
    zero = [torch.zeros_like(s) for s in spread[0]], spread[1]
    for rows, cols in (plain, spread, extreme, zero):
        for total in (0, 1, size // 3, size // 2, size - 1, size):
            args = (weights, rows, cols, total)
            found, expected = both(backend, lambda a=args: fk.select_threshold(*a, bad=flag()))
            assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True)), total
            assert sum(int(f.sum()) for f in found) == total


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_select_threshold_recovers_from_a_misleading_sample(backend):
    """One weight of each stretch is sampled; here those are all larger, or all smaller, than the rest."""
    if backend not in served("select_threshold"):
        pytest.skip(fk.explain("select_threshold")["cuda"][backend])
    size, stretch = 1 << 24, 2
    place = torch.arange(size, device="cuda")
    sampled = place % stretch == (place // stretch * 0x9E3779B1 & 0xFFFFFF) * stretch >> 24
    for larger in (sampled, ~sampled, place % 4096 == 5):
        weight = (torch.rand(size, device="cuda") + 2 * larger).view(4096, 4096)
        for total in (5, size // 8, size // 2, size - size // 8):
            compare_thresholds(backend, weight, total)


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_select_threshold_recovers_from_a_row_full_of_close_scores(backend):
    """All scores that a sample cannot tell apart from the wanted one are in neighbouring rows."""
    if backend not in served("select_threshold"):
        pytest.skip(fk.explain("select_threshold")["cuda"][backend])
    weight = torch.rand(4096, 4096, device="cuda")
    weight[2048:] += 2
    for close in (1, 4, 16):
        weight[2000 : 2000 + close] = 1.5 + torch.rand(close, 4096, device="cuda") / 1000
        for wanted in (1, close * 2000, close * 4096):
            compare_thresholds(backend, weight, (4096 - 2048) * 4096 + wanted)


def compare_thresholds(backend: str, weight: torch.Tensor, total: int) -> None:
    args = [weight], [torch.ones(weight.shape[0], device="cuda")], [torch.ones(weight.shape[1], device="cuda")], total
    found, expected = both(backend, lambda: fk.select_threshold(*args, bad=flag()))
    assert torch.equal(found[0], expected[0]), total


@pytest.mark.parametrize("op", ["nm_mask", "nm_prune_", "compress_24", "select_threshold"])
def test_bad_values_of_other_selections_are_flagged(op):
    for backend in served(op):
        args = list(sample_arguments("cuda", torch.bfloat16)[op])
        weight = args[0][0] if op == "select_threshold" else args[0]
        scale = args[2][1] if op == "select_threshold" else args[1]
        call = getattr(torch.ops.fwanda, op).default
        for value, code in ((float("inf"), 1), (float("nan"), 1)):
            args[-1].zero_()
            spoiled = weight.clone()
            weight[3, 5] = value
            with fk.use_backend(backend):
                call(*args)
            assert args[-1].item() == code, (backend, value)
            with fk.use_backend(backend), pytest.raises(ValueError, match="NaN or inf"):
                call(*args[:-1], None)
            weight.copy_(spoiled)
        scale[1] = -1
        args[-1].zero_()
        with fk.use_backend(backend):
            call(*args)
        assert args[-1].item() == 2, backend


@pytest.mark.parametrize("value, code", [(float("nan"), 1), (float("-inf"), 1)])
def test_bad_values_are_flagged_on_the_device(value, code):
    for backend in served("row_topk_prune_"):
        weight, scale, keep = (t.cuda() for t in sample_arguments()["row_topk_prune_"][:3])
        weight[1, 2], bad = value, flag()
        with fk.use_backend(backend):
            fk.row_topk_prune_(weight, scale, keep, bad=bad)
            assert bad.item() == code, backend
            scale[0], keep[0] = -1, 99
            fk.row_topk_prune_(weight, scale, keep, bad=bad)
            assert bad.item() == 7, backend


@pytest.mark.parametrize("op", [op for op in sample_arguments() if op not in ("obs_factor", "obs_prune_")])
def test_opcheck(op):
    torch.library.opcheck(getattr(torch.ops.fwanda, op).default, sample_arguments("cuda", torch.bfloat16)[op])


@pytest.mark.parametrize("op", [op for op in sample_arguments() if op.endswith("_")])
def test_in_place_ops_keep_torch_s_contract(op):
    call = getattr(torch.ops.fwanda, op).default
    for backend in served(op):
        args = list(sample_arguments("cuda", torch.bfloat16)[op])
        changed = args[0][0] if isinstance(args[0], list) else args[0]
        with fk.use_backend(backend):
            call(*args)
            assert changed._version == 1, backend
            leaf = torch.nn.Parameter(changed.clone())
            args[0] = [leaf, *args[0][1:]] if isinstance(args[0], list) else leaf
            with pytest.raises(RuntimeError, match="requires grad"):
                call(*args)
            with torch.no_grad():
                call(*args)
            assert leaf._version == 1, backend


@pytest.mark.parametrize("shape", [(0, 32), (32, 0)])
def test_sizes_of_zero_and_overlapping_weights(shape):
    rows, cols = shape
    scale, keep = torch.ones(cols, device="cuda"), torch.zeros(rows, dtype=torch.int64, device="cuda")
    x, token_mask = torch.ones(3, 0, cols, device="cuda"), torch.ones(3, 0, dtype=torch.bool, device="cuda")
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.ones(shape, dtype=dtype, device="cuda")
        assert fk.row_topk_mask(weight, scale, keep).shape == fk.nm_mask(weight, scale, 2, 4).shape == shape
        fk.row_topk_prune_(weight, scale, keep)
        fk.nm_prune_(weight, scale, 2, 4)
        fk.obs_prune_(weight, torch.eye(cols, device="cuda"), sparsity=0.5)
        fk.accumulate_sq_sums_(scale.clone(), x.to(dtype), token_mask=token_mask)
        fk.accumulate_gram_(torch.eye(cols, device="cuda"), x.to(dtype), token_mask=token_mask)
        assert int(fk.select_threshold([weight], [torch.ones(rows, device="cuda")], [scale], 0)[0].sum()) == 0
        assert fk.masked_weight(weight, fk.pack_mask(weight != 0)).shape == shape
    with pytest.raises(ValueError, match="must not overlap"):
        fk.row_topk_prune_(torch.ones(1, 8, device="cuda").expand(4, 8), torch.ones(8, device="cuda"), 3)


@pytest.mark.parametrize("op", sample_arguments())
def test_graph_capture_replays_the_op(op):
    call = getattr(torch.ops.fwanda, op).default
    args = sample_arguments("cuda", torch.bfloat16)[op]
    expected_args = copy.deepcopy(args)
    expected = call(*expected_args)  # also compiles what the capture needs
    fresh = copy.deepcopy(args)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(*copy.deepcopy(args))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(*args)
    for tensor, start in zip(tensors(args), tensors(fresh), strict=True):
        tensor.copy_(start)
    graph.replay()
    torch.cuda.synchronize()
    for found, want in zip(tensors([result, args]), tensors([expected, expected_args]), strict=True):
        assert torch.equal(found, want)


def tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


def test_no_op_waits_for_the_device():
    arguments = sample_arguments("cuda", torch.bfloat16)
    for op in arguments:
        getattr(torch.ops.fwanda, op).default(*copy.deepcopy(arguments[op]))
    signal, bad = torch.rand(64, device="cuda"), flag()
    fk.allocate_budgets([signal, signal], [640, 320], k_max=[32, 32], bad=bad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for op in arguments:
            getattr(torch.ops.fwanda, op).default(*copy.deepcopy(arguments[op]))
        fk.allocate_budgets([signal, signal], [640, 320], k_max=[32, 32], bad=bad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_more_than_two_to_the_31_elements():
    rows, cols = (1 << 31) // 4096 + 2, 4096
    weight = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda")
    weight[:-2].fill_(1.0)
    tail = make_weight(2, cols, torch.bfloat16, device="cuda")
    scale, keep = make_scale(cols, device="cuda"), torch.full((rows,), 7, device="cuda")
    for backend in served("row_topk_prune_"):
        if backend == "reference":
            continue
        weight[-2:] = tail
        with fk.use_backend(backend):
            fk.row_topk_prune_(weight, scale, keep, bad=flag())
        expected = tail.masked_fill(~fk.row_topk_mask(tail, scale, keep[-2:]), 0)
        assert torch.equal(weight[-2:], expected), backend
    for backend in [b for b in served("nm_prune_") if b != "reference"]:
        acc = torch.zeros(cols, device="cuda")
        weight.fill_(0)
        weight[-1] = 2.0
        with fk.use_backend(backend):
            fk.accumulate_sq_sums_(acc, weight)
            assert torch.equal(acc, torch.full_like(acc, 4.0))
            one = [torch.ones(rows, device="cuda")], [torch.ones_like(scale)]
            counts = fk.select_threshold([weight], *one, cols + 5)
            assert counts[0][-1] == cols and counts[0][-2] == 5 and int(counts[0].sum()) == cols + 5
            fk.nm_prune_(weight, scale, 2, 4, bad=flag())
        assert int((weight[-1] != 0).sum()) == cols // 2
