"""How an op launches its kernels: at little cost to the host, and over many tensors at once.

Triton's own launch looks at every argument and option anew, which costs the host 20 to 40 us. launch() remembers the
compiled kernel by what Triton would specialise on, and then hands the arguments straight to it.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_compiled: dict[tuple, tuple] = {}


def launch(kernel, grid: tuple[int, int, int], *args: Tensor | int | None, fma: bool = False, **constants) -> None:
    """Run a kernel on the device of the first tensor.

    Args:
        kernel: a function under @triton.jit, whose constexpr parameters come last.
        grid: programs along three axes.
        args: for the other parameters, in their order; None where the kernel does not read it.
        fma: whether products and sums may be fused; one value for each kernel.
        constants: the constexpr parameters and options such as num_warps, in the same order at each call.
    """
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        place = torch.cuda.device(device)
    else:
        place = contextlib.nullcontext()
    key = (id(kernel), device.index, *constants.values(), *map(_kind, args))
    found = _compiled.get(key)
    with place:
        if found is None:
            compiled = kernel[grid](*args, **constants, enable_fp_fusion=fma)
            if compiled is not None:  # interpreted kernels return nothing
                tail = tuple(constants[name] for name in kernel.arg_names if name in constants)
                _compiled[key] = (compiled, tail)
        else:
            compiled, tail = found
            compiled[grid](*args, *tail)


def _kind(arg: Tensor | int | None):
    """What Triton specialises on: the dtype and alignment of a tensor, the width and divisibility of an integer."""
    if isinstance(arg, Tensor):
        return arg.dtype, not arg.data_ptr() & 15
    if arg is None or arg == 1:
        return arg
    return not arg & 15, -(1 << 31) <= arg < 1 << 31


@triton.jit
def find(starts, count, BLOCK_L: tl.constexpr):
    """Which of `count` tensors this program works for, and which of its programs this is.

    starts: the first program of each, in order.
    """
    i = tl.arange(0, BLOCK_L)
    started = (i < count) & (tl.load(starts + i, mask=i < count, other=0) <= tl.program_id(0))
    found = tl.sum(started.to(tl.int32), axis=0) - 1
    return found, tl.program_id(0) - tl.load(starts + found).to(tl.int32)


def table_of(entries: list[tuple[int, ...]], like: Tensor) -> Tensor:
    """[fields, L] int64 on the device of `like`, for a grouped launch, from an entry for each of L tensors."""
    stream = torch.cuda.current_stream(like.device).cuda_stream if like.is_cuda else 0
    return _table(tuple(entries), like.device, stream)


@lru_cache(maxsize=64)
def _table(entries: tuple[tuple[int, ...], ...], device: torch.device, stream: int) -> Tensor:
    """Copied without waiting; kept for calls on the same tensors and the same stream."""
    table = torch.tensor(entries, dtype=torch.int64, device="cpu").T.contiguous()
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured: it would read a table's host memory again at each replay."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
