"""Pairs of 16-bit keys: two columns in an int32, so that one instruction counts or masks both.

Convention: the even column is the low half. A half holds a key in [0, 2^15). SIMD says whether the GPU has instructions
that add and compare both halves at once (NVIDIA from compute capability 9.0 on). Elsewhere, and in the interpreter, one
32-bit subtraction compares both, because no half borrows from the other.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


def has_simd(tensor: Tensor) -> bool:
    """Value of SIMD for kernels on this tensor."""
    return tensor.is_cuda and _has_simd(tensor.device.index)


@cache
def _has_simd(index: int) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (9, 0)


@triton.jit
def pair(keys):
    """keys [N] in [0, 2^15) as [N / 2] pairs."""
    even, odd = tl.split(tl.reshape(keys, (keys.shape[0] // 2, 2)))
    return even | (odd << 16)


@triton.jit
def pair_high(bits, SIMD: tl.constexpr):
    """The upper halves of bits [N] int32, without their sign, as [N / 2] pairs."""
    even, odd = tl.split(tl.reshape(bits, (bits.shape[0] // 2, 2)))
    if SIMD:
        high = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [even, odd], dtype=tl.int32, is_pure=True, pack=1
        )
        return high & 0x7FFF7FFF
    else:
        return ((even >> 16) & 0x7FFF) | (odd & 0x7FFF0000)


@triton.jit
def bound(key, SIMD: tl.constexpr):
    """The argument `bounds` of at_least() for a key, 0 <= key <= 2^15."""
    if SIMD:
        return ((1 - key) << 16) | ((1 - key) & 0xFFFF)
    else:
        return (key << 16) | key


@triton.jit
def at_least(pairs, bounds, SIMD: tl.constexpr):
    """1 in each half that is at least the key of bounds, a scalar or [N / 2], else 0."""
    if SIMD:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 x; add.s16x2 x, $1, $2; min.s16x2.relu $0, x, $3; }", "=r,r,r,r",
            [pairs, bounds, 0x10001], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return (((pairs | -0x7FFF8000) - bounds) >> 15) & 0x10001


@triton.jit
def add_halves(pairs):
    """Sum of all halves; those of one side add up to less than 2^16."""
    n = tl.sum(pairs, axis=0)
    return (n & 0xFFFF) + ((n >> 16) & 0xFFFF)


@triton.jit
def largest_half(parts):
    """The largest half of a tuple of pairs."""
    even, odd = parts[0] & 0xFFFF, parts[0]
    for i in tl.static_range(1, len(parts)):
        even, odd = tl.maximum(even, parts[i] & 0xFFFF), tl.maximum(odd, parts[i])
    return tl.max(tl.maximum(even, odd >> 16), axis=0)


@triton.jit
def halves(ones):
    """[N] uint8 of the halves of ones [N / 2], each 0 or 1."""
    return tl.reshape(tl.join(ones.to(tl.uint8), (ones >> 16).to(tl.uint8)), (ones.shape[0] * 2,))


@triton.jit
def where_one(ones, w):
    """w [N] where the half of ones [N / 2] is 1, and +0.0 where it is 0."""
    if w.dtype.primitive_bitwidth == 16:
        every_bit = ones * 0xFFFF
        kept = tl.join(every_bit.to(tl.int16), (every_bit >> 16).to(tl.int16))
        return (w.to(tl.int16, bitcast=True) & tl.reshape(kept, w.shape)).to(w.dtype, bitcast=True)
    else:
        return tl.where(halves(ones) != 0, w, 0.0)
