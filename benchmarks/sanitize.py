"""Runs small cases of every op on a CUDA device, for compute-sanitizer:

compute-sanitizer --tool memcheck python benchmarks/sanitize.py
compute-sanitizer --tool racecheck python benchmarks/sanitize.py --backends native --ops obs_prune_
"""

import argparse
from collections.abc import Iterator

import torch

from fwanda_kernels import backends, use_backend
from fwanda_kernels.testing import make_keep, make_scale, make_weight, sample_arguments


def cases() -> Iterator[tuple[str, tuple]]:
    """(op, arguments): the samples, and rows that several warps share, aligned or not, with ties or without."""
    yield from sample_arguments("cuda", torch.bfloat16).items()
    bad = torch.zeros(2, dtype=torch.int32, device="cuda")
    for cols in (6152, 6153):
        for kind in ("normal", "all_equal", "heavy_ties"):
            weight = make_weight(40, cols, torch.bfloat16, kind=kind, device="cuda")
            scale, keep = make_scale(cols, device="cuda"), make_keep(40, cols, device="cuda")
            row_scale = torch.ones(40, device="cuda")
            yield "row_topk_mask", (weight, scale, keep, bad[:1])
            yield "foreach_row_topk_prune_", ([weight.clone(), weight.clone()], [scale] * 2, [keep] * 2, bad)
            yield "select_threshold", ([weight], [row_scale], [scale], 20 * cols, bad[:1])
        acc, x = torch.zeros(cols, device="cuda"), make_weight(700, cols, torch.bfloat16, device="cuda")
        yield "accumulate_sq_sums_", (acc, x, torch.arange(700, device="cuda") % 3 > 0)
    weight, scale = make_weight(96, 2080, torch.float16, device="cuda"), make_scale(2080, device="cuda")
    yield "nm_prune_", (weight.clone(), scale, 2, 4, bad[:1])
    yield "compress_24", (weight, scale, bad[:1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", help="run these ops only")
    parser.add_argument("--backends", nargs="+", default=["native", "triton"])
    args = parser.parse_args()
    for op, arguments in cases():
        if args.ops and op not in args.ops:
            continue
        for backend in backends()[op]["cuda"]:
            if backend in args.backends:
                with use_backend(backend):
                    getattr(torch.ops.fwanda, op).default(*arguments)
                torch.cuda.synchronize()
                print(f"ran {op} on {backend}")


if __name__ == "__main__":
    main()
