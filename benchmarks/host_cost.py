"""Microseconds that the host needs for a call of each op, until its kernels are queued:

python benchmarks/host_cost.py [--backend native|triton]

Without a GPU, a stand-in for the CUDA driver takes the launches, and the tensors lie in CPU memory. All else runs as
with a GPU: checks, dispatch, plans, parameters, and the call of the driver. torch's own ops then work on the CPU, which
makes `select_threshold` through Triton much slower than on a GPU. Needs a C compiler, and NVRTC or Triton.
"""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import fwanda_kernels as fk
from fwanda_kernels import _dispatch
from fwanda_kernels.testing import make_keep, make_scale, make_weight

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, CALLS = 100, 20  # so few calls that the queue of a GPU never fills; of calls that take over 1 ms, one
SECONDS = 1.0  # for an op, at most
ROWS, COLS = 64, 512
MATRICES = 224  # of a model of 7B parameters


def calls(device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, call) of ops, on arguments that a GPU finishes at once."""
    weight, scale = make_weight(ROWS, COLS, torch.bfloat16, device=device), make_scale(COLS, device=device)
    keep, bad = make_keep(ROWS, COLS, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    yield "row_topk_mask", lambda: fk.row_topk_mask(weight, scale, keep, bad=bad)
    yield "row_topk_prune_", lambda: fk.row_topk_prune_(weight, scale, keep, bad=bad)
    yield "nm_mask", lambda: fk.nm_mask(weight, scale, 2, 4, bad=bad)
    yield "nm_prune_", lambda: fk.nm_prune_(weight, scale, 2, 4, bad=bad)
    yield "compress_24", lambda: fk.compress_24(weight, scale, bad=bad)
    accs = [torch.zeros(COLS, device=device) for _ in range(11)]
    yield "accumulate_sq_sums_", lambda: fk.accumulate_sq_sums_(accs[0], weight)
    packed, x = fk.pack_weight(weight), weight[:1].clone()
    header = fk.read_packed_header(packed)
    yield "packed_linear", lambda: fk.packed_linear(x, packed, header=header)
    weights, bads = [weight.clone() for _ in range(7)], torch.zeros(7, dtype=torch.int32, device=device)
    scales, keeps = [scale] * 7, [keep] * 7
    yield "foreach_row_topk_prune_, 7", lambda: fk.foreach_row_topk_prune_(weights, scales, keeps, bad=bads)
    yield "foreach_accumulate_sq_sums_, 11", lambda: fk.foreach_accumulate_sq_sums_(accs, [weight] * 11)
    model = [weight.clone() for _ in range(MATRICES)]
    flags, kept = torch.zeros(MATRICES, dtype=torch.int32, device=device), MATRICES * ROWS * COLS // 2
    row_scale = make_scale(ROWS, device=device)
    lists = [[tensor.clone() for _ in model] for tensor in (row_scale, scale, keep)]
    name = f"foreach_row_topk_prune_, {MATRICES}"
    yield name, lambda: fk.foreach_row_topk_prune_(model, *lists[1:], bad=flags)
    yield f"select_threshold, {MATRICES}", lambda: fk.select_threshold(model, *lists[:2], kept, bad=bad)


def host_us(call: Callable[[], object]) -> float:
    """The least mean of a few calls: other processes only add to it."""
    rounds, end, calls = [], time.perf_counter() + SECONDS, CALLS
    while len(rounds) < ROUNDS and (len(rounds) < 5 or time.perf_counter() < end):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter() - start) / calls)
        calls = CALLS if rounds[-1] < 1e-3 else 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return min(rounds) * 1e6


def pretend_gpu(backend: str) -> None:
    """Send calls on CPU tensors to the kernels for GPUs, and their launches to the stand-in for the driver."""
    sys.path.insert(0, str(ROOT / "tests"))
    driver = importlib.import_module("helpers_cuda").fake_driver()
    driver.fake_quiet(1)
    driver.fake_current(999)  # the context of device -1, as which CPU tensors count
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    for modules in _dispatch.MODULES.values():
        modules["cpu"] = modules["cuda"]
    if backend == "triton":
        pretend_gpu_to_triton(Path(driver._name).parent)


def pretend_gpu_to_triton(driver_folder: Path) -> None:
    """Make Triton compile for a Hopper card, and load and launch through the stand-in."""
    os.environ["TRITON_LIBCUDA_PATH"] = str(driver_folder)
    import triton
    from triton.backends.nvidia.driver import CudaDriver

    driver = CudaDriver()
    driver.get_current_device, driver.get_current_stream = lambda: 0, lambda index: 0
    driver.get_device_capability = lambda index=None: (9, 0)
    triton.runtime.driver.set_active(driver)
    for family in {op.family for op in _dispatch.OPS.values()}:
        name = f"fwanda_kernels._backends.triton.{family}"
        if importlib.util.find_spec(name):
            importlib.import_module(name).serves = lambda tensor: True
    os.environ["TRITON_INTERPRET"] = "1"  # so that the dispatcher offers CPU tensors; the kernels exist by now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("native", "triton"), default="native")
    backend = parser.parse_args().backend
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        pretend_gpu(backend)
    with fk.use_backend(backend):
        for name, call in calls(device):
            try:
                call()
            except fk.BackendError as error:
                print(error)
            else:
                print(f"{name:32s} {host_us(call):7.1f} us", flush=True)


if __name__ == "__main__":
    main()
