"""Launches of kernels that cost the host little, and that may serve many tensors at once.

Triton's own launch inspects every argument and option again, which costs the host 20 to 40 us. launch() remembers each
compiled kernel under what Triton specialises on, and then passes the arguments straight to it.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from itertools import starmap

import torch
import triton
import triton.language as tl
from torch import Tensor

_compiled: dict[tuple, tuple] = {}


def launch(
    kernel, grid: tuple[int, int, int], like: Tensor, *args: Tensor | int | None, fma=False, **constants
) -> None:
    """Run a kernel on the device of `like`.

    Args:
        kernel: a function under @triton.jit, whose constexpr parameters come last.
        grid: programs along three axes.
        like: the first argument of the kernel.
        args: the next arguments, in order; None where the kernel does not read one.
        fma: whether multiplications and additions may be fused; always the same for one kernel.
        constants: the constexpr parameters and options such as num_warps, in the same order at each call.
    """
    device = like.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, like, *args, fma=fma, **constants)
    key, values = [id(kernel), device.index, *constants.values()], []
    for arg in (like, *args):
        # what Triton specialises on: the dtype and alignment of a tensor, the width and divisibility of an integer
        value = arg
        if isinstance(arg, Tensor):
            value = arg.data_ptr()  # an address costs Triton less than a tensor
            key.append((arg.dtype, not value & 15))
        elif arg is None or arg == 1:
            key.append(arg)
        else:
            key.append((not arg & 15, -(1 << 31) <= arg < 1 << 31))
        values.append(value)
    key = tuple(key)
    found = _compiled.get(key)
    if found is not None:
        compiled, tail = found
        compiled[grid](*values, *tail, stream=_stream(like))
        return None
    compiled = kernel[grid](like, *args, **constants, enable_fp_fusion=fma)
    if compiled is not None:  # interpreted kernels return nothing
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names if name in constants)
    return None


def _stream(like: Tensor) -> int:
    """Handle of the current stream of a tensor's device."""
    return torch._C._cuda_getCurrentRawStream(like.get_device())


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; Triton's own costs the host 2 us."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n, for n > 0."""
    return 1 << (n - 1).bit_length()


@triton.jit
def find(starts, count, BLOCK_L: tl.constexpr):
    """Index of the tensor that this program works on, of `count`, and the number of the program within that tensor.

    starts: the first program of each tensor, in order.
    """
    i = tl.arange(0, BLOCK_L)
    started = (i < count) & (tl.load(starts + i, mask=i < count, other=0) <= tl.program_id(0))
    found = tl.sum(started.to(tl.int32), axis=0) - 1
    return found, tl.program_id(0) - tl.load(starts + found).to(tl.int32)


def table_of(entries: list[tuple[int, ...]], like: Tensor) -> Tensor:
    """Table [fields, L] int64 for one launch over L tensors, on the device of `like`, from an entry for each tensor."""
    if capturing(like):
        return written_table(entries, like)
    return _table(tuple(entries), like.device, _stream(like) if like.is_cuda else 0)


@lru_cache(maxsize=64)
def _table(entries: tuple[tuple[int, ...], ...], device: torch.device, stream: int) -> Tensor:
    """Copied without waiting, so it is valid only on this stream; later calls on the same tensors reuse it."""
    width = len(entries[0])
    data = bytearray().join(starmap(struct.Struct(f"{width}q").pack, entries))
    table = torch.frombuffer(data, dtype=torch.int64).view(-1, width).T.contiguous()
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def written_table(entries: list[tuple[int, ...]], like: Tensor) -> Tensor:
    """table_of() without a copy from the host: torch._foreach_add_ takes about 90 values as arguments of a launch."""
    values = [value for field in zip(*entries, strict=True) for value in field]
    table = torch.zeros(len(values), dtype=torch.int64, device=like.device)
    torch._foreach_add_(list(table), values)
    return table.view(-1, len(entries))


def capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured: it would read a table's host memory again at each replay."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
