"""Seconds of the first call of row_topk_prune_ in a new process, on an empty kernel cache and on a filled one."""

import os
import subprocess
import sys
import tempfile

CALL = """
import time, torch, fwanda_kernels as fk
weight = torch.randn(4096, 4096, device="cuda").bfloat16()
scale, keep = torch.ones(4096, device="cuda"), torch.full((4096,), 2048, device="cuda")
bad = torch.zeros(1, dtype=torch.int32, device="cuda")
torch.cuda.synchronize()
start = time.perf_counter()
fk.row_topk_prune_(weight, scale, keep, bad=bad)
torch.cuda.synchronize()
seconds = time.perf_counter() - start
print(f"{seconds:.3f} s; native {fk.explain('row_topk_prune_')['cuda']['native']}")
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("an empty cache", "a filled cache"):
            print(f"first call on {cache}: ", end="", flush=True)
            subprocess.run([sys.executable, "-c", CALL], env={**os.environ, "FWANDA_CACHE": folder}, check=True)


if __name__ == "__main__":
    main()
