"""What the Triton ops share: where they run, the key of a score, and the checks of values on the device.

Convention: a key is the int32 bit pattern of a non-negative fp32 score, so that integer order is score order.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ... import _checks
from .launch import launch, power_of_2

INFINITE_BITS = tl.constexpr(0x7F800000)
BAD_WEIGHT = tl.constexpr(_checks.BAD_WEIGHT)
BAD_SCALE = tl.constexpr(_checks.BAD_SCALE)
BAD_KEEP = tl.constexpr(_checks.BAD_KEEP)


@triton.jit
def exact_float(w):
    """w in fp32; bf16 by bits, as interpreted conversions lose its denormals."""
    if w.dtype == tl.bfloat16:
        return (w.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return w.to(tl.float32)


@triton.jit
def magnitude_bits(w):
    """Bits of fp32 |w|; at least INFINITE_BITS where w is NaN or inf."""
    return exact_float(w).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def score_key(w, scale):
    """Key of fp32(|w| * scale): one rounded multiply. The mask turns -0.0 (from a scale of -0.0) into +0.0."""
    return (magnitude_bits(w).to(tl.float32, bitcast=True) * scale).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def flag(bad, code):
    """OR a code into bad [1] int32, unless it is 0."""
    if code != 0:
        tl.atomic_or(bad, code, sem="relaxed")


@triton.jit
def flag_scale(scale, bad, size, start, BLOCK: tl.constexpr):
    """Flag a value of scale[start : start + BLOCK] that is not finite or negative; -0.0 is fine."""
    i = start + tl.arange(0, BLOCK)
    s = tl.load(scale + i, mask=i < size, other=0.0)
    wrong = (s.to(tl.int32, bitcast=True) & 0x7FFFFFFF >= INFINITE_BITS) | (s < 0)
    flag(bad, tl.max(wrong.to(tl.int32), axis=0) * BAD_SCALE)


@triton.jit
def _check_kernel(weight, scale, keep, bad, rows, cols, stride_r, stride_c, KEEP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    worst = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        w = tl.load(weight + row * stride_r + c.to(tl.int64) * stride_c, mask=c < cols, other=0.0)
        worst = tl.maximum(worst, magnitude_bits(w))
        if row == 0:
            flag_scale(scale, bad, cols, start, BLOCK)
    flag(bad, (tl.max(worst, axis=0) >= INFINITE_BITS).to(tl.int32) * BAD_WEIGHT)
    if KEEP:
        k = tl.load(keep + row)
        flag(bad, ((k < 0) | (k > cols)).to(tl.int32) * BAD_KEEP)


def check_values(op: str, weight: Tensor, scale: Tensor, keep: Tensor | None = None) -> None:
    """Raise ValueError if a value does not fit; waits for the device, and reads the weight once more."""
    rows, cols = weight.shape
    bad = _checks.new_flag(weight)
    block = min(4096, max(128, power_of_2(cols)))
    launch(
        _check_kernel, (rows, 1, 1), weight, scale, keep, bad, rows, cols, *weight.stride(),
        KEEP=keep is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    _checks.raise_if_bad(op, bad)


def serves(tensor: Tensor) -> bool:
    """Whether kernels run on this tensor: not empty, on a GPU of compute capability 8.0 or newer or interpreted."""
    if not tensor.numel():
        return False
    if not isinstance(_check_kernel, triton.JITFunction):
        return True
    return tensor.is_cuda and _capable(tensor.device.index)


def nvidia_major(tensor: Tensor) -> int:
    """Major compute capability of the NVIDIA GPU that holds the tensor, or 0 elsewhere."""
    return _nvidia_major(tensor.device.index) if tensor.is_cuda else 0


def in_vectors(matrix: Tensor) -> bool:
    """Whether rows can be read 16 bytes at a time: dense, and pointer, row stride and columns multiples of 16."""
    rows, cols = matrix.stride()
    return cols == 1 and not (matrix.data_ptr() | rows | matrix.shape[1]) % 16


@cache
def _capable(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= (8, 0)


@cache
def _nvidia_major(index: int) -> int:
    return torch.cuda.get_device_capability(index)[0] if torch.version.hip is None else 0
