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
def pair_high(bits, SIMD: tl.constexpr):
    """The upper halves of bits [N] int32, not negative, as [N / 2] pairs; without SIMD, signs of NaN are dropped."""
    even, odd = tl.split(tl.reshape(bits, (bits.shape[0] // 2, 2)))
    if SIMD:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [even, odd], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return ((even >> 16) & 0x7FFF) | (odd & 0x7FFF0000)


@triton.jit
def moved(keys, first, end, shift, SIMD: tl.constexpr):
    """keys - first, brought into [0, end], times 2^shift."""
    if SIMD:  # a product: its units are less busy than those for shifts
        return tl.inline_asm_elementwise(
            "{ .reg .b32 x; sub.s32 x, $1, $2; min.relu.s32 x, x, $3; mul.lo.s32 $0, x, $4; }", "=r,r,r,r,r",
            [keys, first, end, 1 << shift], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.minimum(tl.maximum(keys - first, 0), end) << shift


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
def _larger(a, b, SIMD: tl.constexpr):
    """The larger of each two halves."""
    if SIMD:
        return tl.inline_asm_elementwise(
            "max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return tl.maximum(a & 0xFFFF, b & 0xFFFF) | (tl.maximum(a >> 16, b >> 16) << 16)


@triton.jit
def largest_half(parts, SIMD: tl.constexpr):
    """The largest half of a tuple of pairs."""
    largest = parts[0]
    for i in tl.static_range(1, len(parts)):
        largest = _larger(largest, parts[i], SIMD)
    return tl.max(tl.maximum(largest & 0xFFFF, largest >> 16), axis=0)


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
