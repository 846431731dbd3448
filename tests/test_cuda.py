"""Every backend on a CUDA device against the reference there: bits, tracing, capture, sizes beyond 2^31."""

import copy

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


@pytest.mark.parametrize("op", [op for op in sample_arguments() if not op.startswith(("obs", "accumulate_gram"))])
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
        if not op.startswith(("obs", "accumulate_gram")):
            getattr(torch.ops.fwanda, op).default(*copy.deepcopy(arguments[op]))
    signal, bad = torch.rand(64, device="cuda"), flag()
    fk.allocate_budgets([signal, signal], [640, 320], k_max=[32, 32], bad=bad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for op in arguments:
            if not op.startswith(("obs", "accumulate_gram")):
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
    acc = torch.zeros(cols, device="cuda")
    weight.fill_(0)
    weight[-1] = 2.0
    fk.accumulate_sq_sums_(acc, weight)
    assert torch.equal(acc, torch.full_like(acc, 4.0))
    fk.nm_prune_(weight, scale, 2, 4, bad=flag())
    assert int((weight[-1] != 0).sum()) == cols // 2
