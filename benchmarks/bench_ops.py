"""Every op of fwanda_kernels against naive torch. See conftest.py for what is printed and written."""

import cases
import pytest
import torch
from conftest import copy_rate

import fwanda_kernels as fk
from fwanda_kernels.testing import bench

LLAMA_7B = cases.LLAMA_7B_BLOCK * 32
BLOCK_SUMS = [4096, 4096, 4096, 11008] + [4096] * 5 + [11008] * 2
SELECT = [(4096, 4096), (11008, 4096), (4096, 11008), (13824, 5120), (5120, 13824), (28672, 8192), (8192, 28672)]
SMALL = [(1024, 1024)] * 4 + [(2048, 1024)]

# (op, case, work, arguments), for each device
CASES = {
    "cuda": [
        *[("accumulate_sq_sums_", f"8192 x {c}", cases.sq_sums, (8192, c)) for c in (4096, 11008, 13824)],
        ("foreach_accumulate_sq_sums_", "7B block, 8192 tokens", cases.sq_sums_block, (8192, BLOCK_SUMS)),
        *[("row_topk_prune_", f"{r} x {c}", cases.row_topk, (r, c)) for r, c in SELECT],
        *[("row_topk_prune_", f"{r} x {c}, all equal", cases.row_topk_equal, (r, c)) for r, c in SELECT],
        ("foreach_row_topk_prune_", "7B, 224 matrices", cases.row_topk_model, (LLAMA_7B,)),
        *[("nm_prune_", f"2:4, {r} x {c}", cases.nm, (r, c)) for r, c in SELECT[:3]],
        *[("compress_24", f"{r} x {c}", cases.compress, (r, c)) for r, c in SELECT[:3]],
        *[("compress_24_cusparselt", f"{r} x {c}", cases.compress_cusparselt, (r, c)) for r, c in SELECT[:3]],
        ("select_threshold", "7B, 224 matrices", cases.threshold, (LLAMA_7B, 32)),
        ("allocate_budgets", "7B, 224 matrices", cases.budgets, (LLAMA_7B,)),
        *[("accumulate_gram_", f"{t} x {c}", cases.gram, (t, c)) for t in (2048, 8192) for c in (4096, 11008)],
        *[("obs_factor", f"{c}", cases.factor, (c,)) for c in (4096, 11008)],
        *[("obs_prune_", f"{r} x {c}", cases.obs, (r, c)) for r, c in SELECT[:3]],
    ],
    "cpu": [
        ("accumulate_sq_sums_", "2048 x 4096", cases.sq_sums, (2048, 4096)),
        ("foreach_accumulate_sq_sums_", "4 inputs, 512 tokens", cases.sq_sums_block, (512, [1024, 1024, 1024, 2048])),
        ("row_topk_prune_", "4096 x 4096", cases.row_topk, (4096, 4096)),
        ("row_topk_prune_", "4096 x 4096, all equal", cases.row_topk_equal, (4096, 4096)),
        ("foreach_row_topk_prune_", "5 matrices", cases.row_topk_model, (SMALL,)),
        ("nm_prune_", "2:4, 1024 x 1024", cases.nm, (1024, 1024)),
        ("compress_24", "1024 x 1024", cases.compress, (1024, 1024)),
        ("select_threshold", "5 matrices", cases.threshold, (SMALL, 1)),
        ("allocate_budgets", "7B, 224 matrices", cases.budgets, (LLAMA_7B,)),
        ("accumulate_gram_", "512 x 1024", cases.gram, (512, 1024)),
        ("obs_factor", "1024", cases.factor, (1024,)),
        ("obs_prune_", "512 x 512", cases.obs, (512, 512)),
    ],
}
HERE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("op", "case", "work", "arguments"), CASES[HERE], ids=[f"{c[0]}-{c[1]}" for c in CASES[HERE]])
def test_op(op, case, work, arguments, device, results, benchmark):
    torch.manual_seed(0)
    job = work(device, *arguments)
    job.check()  # no speed is reported for a result that is not right
    ours = bench(job.ours, device=device, reset=job.reset, energy_seconds=0.3)
    naive = bench(job.naive[:2], device=device, reset=job.reset, rounds=3)
    row = {
        "op": op,
        "case": case,
        "backend": serving(op, device),
        "us": round(ours.us, 2),
        "joules": ours.joules,
        "naive_us": round(naive.us * job.naive_scale, 1),
        "bytes": job.size,
    }
    if job.size is not None:
        row["gb_per_s"] = round(ours.gb_per_s(job.size), 1)
        row["copy_us"] = round(job.size / copy_rate(job.size, device) / 1e3, 2)
        row["percent_of_copy"] = round(100 * row["copy_us"] / row["us"], 1)
    results.add(row)
    benchmark.extra_info.update(row)
    benchmark.pedantic(synchronised(job.ours[0], device), setup=job.reset, rounds=3)


def serving(op: str, device: str) -> str:
    """The backend that serves an op here; ops outside the dispatcher are plain torch."""
    names = fk.backends().get({"compress_24_cusparselt": "nm_prune_"}.get(op, op), {}).get(device, [])
    return names[0] if names else "torch"


def synchronised(call, device: str):
    def run():
        call()
        if device == "cuda":
            torch.cuda.synchronize()

    return run
