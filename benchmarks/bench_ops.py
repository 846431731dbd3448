"""Every op of fwanda_kernels against naive torch. conftest.py says what is printed and written."""

import pytest
import torch
from lib.cases import budgets, obs, packed, removed, select, sparse24, stats, threshold
from lib.machine import copy_rate, synchronize, this_device

import fwanda_kernels as fk
from fwanda_kernels.testing import bench

LLAMA_7B = ([(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]) * 32
BLOCK_SUMS = [4096, 4096, 4096, 11008] + [4096] * 5 + [11008] * 2
SELECT = [(4096, 4096), (11008, 4096), (4096, 11008), (13824, 5120), (5120, 13824), (28672, 8192), (8192, 28672)]
SMALL = [(1024, 1024)] * 4 + [(2048, 1024)]

# for each device: op, name of the case, function that makes it, its arguments
CASES = {
    "cuda": [
        *[("accumulate_sq_sums_", f"8192 x {c}", stats.sq_sums, (8192, c)) for c in (4096, 11008, 13824)],
        ("foreach_accumulate_sq_sums_", "7B block, 8192 tokens", stats.sq_sums_block, (8192, BLOCK_SUMS)),
        *[("row_topk_prune_", f"{r} x {c}", select.row_topk, (r, c)) for r, c in SELECT],
        *[("row_topk_prune_", f"{r} x {c}, all equal", select.row_topk_equal, (r, c)) for r, c in SELECT],
        ("foreach_row_topk_prune_", "7B, 224 matrices", select.row_topk_model, (LLAMA_7B,)),
        *[("nm_prune_", f"2:4, {r} x {c}", sparse24.nm, (r, c)) for r, c in SELECT[:3]],
        *[("compress_24", f"{r} x {c}", sparse24.compress, (r, c)) for r, c in SELECT[:3]],
        *[("compress_24_cusparselt", f"{r} x {c}", sparse24.compress_cusparselt, (r, c)) for r, c in SELECT[:3]],
        ("select_threshold", "7B, 224 matrices", threshold.threshold, (LLAMA_7B, 32)),
        ("allocate_budgets", "7B, 224 matrices", budgets.budgets, (LLAMA_7B,)),
        *[("accumulate_gram_", f"{t} x {c}", obs.gram, (t, c)) for t in (2048, 8192) for c in (4096, 11008)],
        *[("obs_factor", f"{c}", obs.factor, (c,)) for c in (4096, 11008)],
        *[("obs_prune_", f"{r} x {c}", obs.obs, (r, c)) for r, c in SELECT[:3]],
        *[("pack_mask", f"{r} x {c}", removed.pack, (r, c)) for r, c in SELECT[:3]],
        *[("masked_weight", f"{r} x {c}", removed.masked, (r, c)) for r, c in SELECT[:3]],
        *[
            ("removed_sums", f"{r} x {c}, {t} tokens", removed.sums, (t, r, c))
            for t in (2048, 8192)
            for r, c in SELECT[:3]
        ],
        *[
            ("packed_linear", f"{r} x {c}, {percent} %, batch {t}", packed.product, (t, r, c, percent))
            for percent in (50, 60, 70)
            for t in (1, 8, 16)
            for r, c in SELECT[:3]
        ],
        *[
            ("to_semi_structured", f"2:4, {r} x {c}, {t} tokens", sparse24.linear, (t, r, c))
            for t in (1, 16, 128, 512, 1024, 1536, 2048, 4096)
            for r, c in SELECT[:3]
        ],
    ],
    "cpu": [
        ("accumulate_sq_sums_", "2048 x 4096", stats.sq_sums, (2048, 4096)),
        ("foreach_accumulate_sq_sums_", "4 inputs, 512 tokens", stats.sq_sums_block, (512, [1024, 1024, 1024, 2048])),
        ("row_topk_prune_", "4096 x 4096", select.row_topk, (4096, 4096)),
        ("row_topk_prune_", "4096 x 4096, all equal", select.row_topk_equal, (4096, 4096)),
        ("foreach_row_topk_prune_", "5 matrices", select.row_topk_model, (SMALL,)),
        ("nm_prune_", "2:4, 1024 x 1024", sparse24.nm, (1024, 1024)),
        ("compress_24", "1024 x 1024", sparse24.compress, (1024, 1024)),
        ("select_threshold", "5 matrices", threshold.threshold, (SMALL, 1)),
        ("allocate_budgets", "7B, 224 matrices", budgets.budgets, (LLAMA_7B,)),
        ("accumulate_gram_", "512 x 1024", obs.gram, (512, 1024)),
        ("obs_factor", "1024", obs.factor, (1024,)),
        ("obs_prune_", "512 x 512", obs.obs, (512, 512)),
        ("pack_mask", "4096 x 4096", removed.pack, (4096, 4096)),
        ("masked_weight", "4096 x 4096", removed.masked, (4096, 4096)),
        ("removed_sums", "1024 x 1024, 512 tokens", removed.sums, (512, 1024, 1024)),
        *[
            ("packed_linear", f"1536 x 576, {percent} %, batch {t}", packed.product, (t, 1536, 576, percent))
            for percent in (50, 70)
            for t in (1, 4)
        ],
    ],
}
HERE = this_device()


@pytest.mark.parametrize(("op", "name", "make", "arguments"), CASES[HERE], ids=[f"{c[0]}-{c[1]}" for c in CASES[HERE]])
def test_op(op, name, make, arguments, device, backend, results, benchmark):
    if backend and backend not in serving_backends(op, device):
        pytest.skip(f"{backend} does not serve {op}")
    torch.manual_seed(0)
    case = make(device, *arguments)
    case.check()  # a wrong result gets no speed
    ours = bench(case.ours, device=device, reset=case.reset, energy_seconds=0.3)
    naive = bench(case.naive[:2], device=device, reset=case.reset, rounds=3)
    row = {
        "op": op,
        "case": name,
        "backend": backend or serving_backend(op, device),
        "us": round(ours.us / case.in_a_call, 2),
        "host_us": None if ours.host_us is None else round(ours.host_us / case.in_a_call, 1),
        "joules": None if ours.joules is None else ours.joules / case.in_a_call,
        "naive_us": round(naive.us * case.naive_scale / case.in_a_call, 1),
        "bytes": case.bytes_moved,
    }
    if case.bytes_moved is not None:
        row["gb_per_s"] = round(ours.gb_per_s(case.bytes_moved), 1)
        row["copy_us"] = round(case.bytes_moved / copy_rate(case.bytes_moved, device) / 1e3, 2)
        row["percent_of_copy"] = round(100 * row["copy_us"] / row["us"], 1)
    if case.product is not None:
        row["product_us"] = round(bench([case.product], device=device).us, 2)
        row["percent_of_product"] = round(100 * row["product_us"] / row["us"], 1)
    results.add(row)
    benchmark.extra_info.update(row)
    benchmark.pedantic(synchronised(case.ours[0], device), setup=case.reset, rounds=3)


def serving_backends(op: str, device: str) -> list[str]:
    """The backends that can serve an op on this machine, the first choice first. None is for what is plain torch."""
    return fk.backends().get({"compress_24_cusparselt": "nm_prune_"}.get(op, op), {}).get(device, [])


def serving_backend(op: str, device: str) -> str:
    """The backend that serves an op on this machine."""
    return next(iter(serving_backends(op, device)), "torch")


def synchronised(call, device: str):
    """The call, followed by a wait for the device."""

    def run():
        call()
        synchronize(device)

    return run
