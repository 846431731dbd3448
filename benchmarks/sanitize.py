"""One small case of every op on a CUDA device, for compute-sanitizer:

compute-sanitizer --tool memcheck python benchmarks/sanitize.py
compute-sanitizer --tool racecheck python benchmarks/sanitize.py
"""

import torch

from fwanda_kernels import backends, use_backend
from fwanda_kernels.testing import sample_arguments


def main() -> None:
    for op, arguments in sample_arguments("cuda", torch.bfloat16).items():
        for backend in backends()[op]["cuda"]:
            if backend != "reference":
                with use_backend(backend):
                    getattr(torch.ops.fwanda, op).default(*arguments)
                torch.cuda.synchronize()
                print(f"ran {op} on {backend}")


if __name__ == "__main__":
    main()
