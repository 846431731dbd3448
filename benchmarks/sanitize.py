"""Runs one small case of every op on a CUDA device, for compute-sanitizer:

compute-sanitizer --tool memcheck python benchmarks/sanitize.py
compute-sanitizer --tool racecheck python benchmarks/sanitize.py --backends native --ops obs_prune_
"""

import argparse

import torch

from fwanda_kernels import backends, use_backend
from fwanda_kernels.testing import sample_arguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", help="run these ops only")
    parser.add_argument("--backends", nargs="+", default=["native", "triton"])
    args = parser.parse_args()
    for op, arguments in sample_arguments("cuda", torch.bfloat16).items():
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
