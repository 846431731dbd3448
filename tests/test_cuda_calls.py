"""The CUDA backend on a GPU, called from new threads, on several devices, and first of all inside a capture."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import fwanda_kernels as fk
from fwanda_kernels.testing import make_keep, make_scale, make_weight

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif("native" not in fk.backends()["nm_mask"]["cuda"], reason="the CUDA backend does not serve here"),
]


def mask_on(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask by the CUDA backend, and the reference's."""
    weight, scale = make_weight(64, 4096, torch.bfloat16, device=device), make_scale(4096, device=device)
    keep, bad = make_keep(64, 4096, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    with fk.use_backend("native"):
        mask = fk.row_topk_mask(weight, scale, keep, bad=bad)
    with fk.use_backend("reference"):
        return mask, fk.row_topk_mask(weight, scale, keep)


def test_explain_says_where_the_kernels_are_from():
    mask_on("cuda")
    text = fk.explain("row_topk_mask")["cuda"]["native"]
    assert text.startswith("serves (") and re.search(r"bf16-mask: \w+ by (NVRTC|nvcc) ", text), text


@pytest.mark.fault("wrong CUDA context")
def test_threads_that_use_the_gpu_first_in_an_op_get_right_masks():
    mask_on("cuda")  # so that the threads find memory in torch's cache and call nothing else of CUDA
    results = []
    threads = [threading.Thread(target=lambda: results.append(mask_on("cuda"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and all(torch.equal(*pair) for pair in results)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.fault("wrong CUDA context")
def test_devices_take_turns_in_one_process_whatever_the_current_one_is():
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        assert torch.equal(*mask_on(device))
        assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert torch.equal(*mask_on("cuda:0"))


FIRST = """
import torch, fwanda_kernels as fk
from fwanda_kernels.testing import sample_arguments
arguments = sample_arguments("cuda", torch.bfloat16)["row_topk_prune_"]
expected = arguments[0].clone()
with fk.use_backend("reference"):
    fk.row_topk_prune_(expected, *arguments[1:3])
torch.cuda.synchronize()
with fk.use_backend("native"):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.fwanda.row_topk_prune_.default(*arguments)
graph.replay()
torch.cuda.synchronize()
assert torch.equal(arguments[0], expected)
"""


def test_the_first_call_of_a_process_may_be_captured(tmp_path):
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FIRST], capture_output=True, text=True, timeout=120,
        env={**os.environ, "FWANDA_CACHE": str(tmp_path), "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_compiled_code_calls_the_backend():
    weight, scale = make_weight(32, 256, torch.bfloat16, device="cuda"), make_scale(256, device="cuda")
    bad = torch.zeros(1, dtype=torch.int32, device="cuda")
    compiled = torch.compile(lambda w, s: fk.nm_mask(w * 2, s, 2, 4, bad=bad), fullgraph=True)
    with fk.use_backend("native"):
        assert torch.equal(compiled(weight, scale), fk.nm_mask(weight * 2, scale, 2, 4))
