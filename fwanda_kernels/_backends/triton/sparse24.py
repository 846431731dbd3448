"""N:M selection: each thread holds whole groups of m, ranks them by comparison and writes mask or pruned weight.

Convention: tiles are [BLOCK_R rows, BLOCK_G groups, M2 columns], M2 the power of two at or above m. 2:4 has kernels of
its own, which hold the four columns of a group in four tensors and decide by bits. compress_24 packs tiles of 32 rows,
within which the metadata of two words of columns is one contiguous stretch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._checks import new_flag, raise_if_bad
from .common import (
    BAD_WEIGHT,
    INFINITE_BITS,
    check_values,
    flag,
    flag_scale,
    magnitude_bits,
    score_key,
    serves,
)
from .launch import cdiv, launch, power_of_2

MAX_GROUP = 32
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
TILE, WARPS = 2048, 4
TILE_R, TILE_C = 8, 512  # of 2:4
PACK_C, PACK_WARPS = 256, 8


@triton.jit
def _nm_kernel(
    weight, scale, out, bad, rows, cols, stride_r, stride_c, out_stride_r, out_stride_c, n,
    M: tl.constexpr, M2: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_G: tl.constexpr, PRUNE: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    i = tl.arange(0, M2)
    c = g[:, None] * M + i[None, :]
    real = (c < cols) & (i < M)[None, :]
    inside = (r < rows)[:, None, None] & real[None, :, :]
    row = r.to(tl.int64)[:, None, None]
    w = tl.load(weight + row * stride_r + c.to(tl.int64)[None, :, :] * stride_c, mask=inside, other=0.0)
    s = tl.load(scale + c, mask=real, other=0.0)
    key = tl.where(inside, score_key(w, s[None, :, :]), -1)
    place = i[None, None, :]
    rank = tl.zeros((BLOCK_R, BLOCK_G, M2), tl.int32)
    for j in tl.static_range(M):
        other = tl.sum(tl.where(place == j, key, 0), axis=2)[:, :, None]
        # the lowest column of equals is removed first, so a later equal goes before
        rank += ((other > key) | ((other == key) & (place < j))).to(tl.int32)
    keep = rank < n
    finite = tl.max(tl.reshape(magnitude_bits(w), (BLOCK_R * BLOCK_G * M2,)), axis=0) < INFINITE_BITS
    flag(bad, tl.where(finite, 0, BAD_WEIGHT))
    if tl.program_id(0) == 0:
        flag_scale(scale, bad, tl.minimum(cols, (tl.program_id(1) + 1) * BLOCK_G * M), tl.program_id(1) * BLOCK_G * M,
                   BLOCK_G * M2)  # fmt: skip
    target = out + row * out_stride_r + c.to(tl.int64)[None, :, :] * out_stride_c
    if PRUNE:
        if finite:
            tl.store(target, tl.where(keep, w, 0.0), mask=inside)
    else:
        tl.store(target, keep.to(tl.uint8), mask=inside)


def tile_of(rows: int, cols: int, m: int) -> tuple[int, int, int]:
    """(BLOCK_R, BLOCK_G, M2) of about TILE weights, half of it where a thread ranks long groups."""
    m2 = power_of_2(m)
    tile = TILE if m2 <= 8 else TILE // 2
    groups = min(power_of_2(cdiv(cols, m)), max(1, tile // 4 // m2))
    return max(1, min(power_of_2(rows), tile // (groups * m2))), groups, m2


def _launch(weight: Tensor, scale: Tensor, out: Tensor, n: int, m: int, bad: Tensor, prune: bool) -> None:
    rows, cols = weight.shape
    if (n, m) == (2, 4):
        launch(
            _24_kernel, (cdiv(rows, TILE_R) * cdiv(cols, TILE_C), 1, 1),
            weight, scale, out, bad, rows, cols, *weight.stride(), *out.stride(),
            BLOCK_R=TILE_R, BLOCK_C=TILE_C, PRUNE=prune, num_warps=WARPS,
        )  # fmt: skip
        return
    block_r, block_g, m2 = tile_of(rows, cols, m)
    launch(
        _nm_kernel, (cdiv(rows, block_r), cdiv(cols, block_g * m), 1),
        weight, scale, out, bad, rows, cols, *weight.stride(), *out.stride(), n,
        M=m, M2=m2, BLOCK_R=block_r, BLOCK_G=block_g, PRUNE=prune, num_warps=WARPS,
    )  # fmt: skip


def nm_mask(weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> Tensor:
    if not serves(weight) or m > MAX_GROUP:
        return NotImplemented
    mask = torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
    codes = new_flag(weight) if bad is None else bad
    _launch(weight, scale.contiguous(), mask.view(torch.uint8), n, m, codes, prune=False)
    if bad is None:
        raise_if_bad("nm_mask", codes)
    return mask


def nm_prune_(weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> None:
    """With `bad`, a tile that holds a weight that is not finite stays as it was; without, values are checked first."""
    if not serves(weight) or m > MAX_GROUP:
        return NotImplemented
    scale = scale.contiguous()
    if bad is None:
        check_values("nm_prune_", weight, scale)
        bad = new_flag(weight)
    _launch(weight, scale, weight, n, m, bad, prune=True)
    return None


@triton.jit
def _quarters(v):
    """The columns 0, 1, 2 and 3 of each group of 4 of v [R, C], each [R, C / 4]."""
    even, odd = tl.split(tl.reshape(v, (v.shape[0], v.shape[1] // 4, 2, 2)))
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    return v0, v1, v2, v3


@triton.jit
def _majority(a, b, c):
    return (a & b) | ((a | b) & c)


@triton.jit
def _larger(a, b):
    """-1 where score a is larger than score b, else 0: the sign of a difference, which costs least on a GPU.

    On a GPU the difference of two infinities has no sign bit; interpreted it has one.
    """
    if INTERPRETED:
        return tl.where(a > b, -1, 0)
    else:
        return (b - a).to(tl.int32, bitcast=True) >> 31


@triton.jit
def _two_of(k0, k1, k2, k3):
    """-1 for each key that is among the two largest, else 0; of equal keys the lowest column is removed first."""
    g01, g02, g03 = _larger(k0, k1), _larger(k0, k2), _larger(k0, k3)
    g12, g13, g23 = _larger(k1, k2), _larger(k1, k3), _larger(k2, k3)
    keep0, keep1 = _majority(g01, g02, g03), _majority(~g01, g12, g13)
    keep2, keep3 = _majority(~g02, ~g12, g23), _majority(~g03, ~g13, ~g23)
    return keep0, keep1, keep2, keep3


@triton.jit
def _choose(mask, a, b):
    return (a & mask) | (b & ~mask)


@triton.jit
def _wide(w):
    """Bits of w as int32; a bf16 in the upper half, as its conversion to fp32 has it in a register."""
    if w.dtype == tl.bfloat16:
        return w.to(tl.int16, bitcast=True).to(tl.int32) << 16
    elif w.dtype == tl.float16:
        return w.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        return w.to(tl.int32, bitcast=True)


@triton.jit
def _narrow(bits, dtype: tl.constexpr):
    """The weight that _wide() took."""
    if dtype == tl.bfloat16:
        return (bits >> 16).to(tl.int16).to(dtype, bitcast=True)
    elif dtype == tl.float16:
        return bits.to(tl.int16).to(dtype, bitcast=True)
    else:
        return bits.to(dtype, bitcast=True)


@triton.jit
def _tile_24(weight, scale, bad, rows, cols, stride_r, stride_c, r, start, BLOCK_C: tl.constexpr):
    """Weights and keys of rows r and BLOCK_C columns; whether the weights are finite, and flags them if not."""
    c = start + tl.arange(0, BLOCK_C)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    address = weight + r.to(tl.int64)[:, None] * stride_r + c.to(tl.int64)[None, :] * stride_c
    w = tl.load(address, mask=inside, other=0.0)
    key = score_key(w, tl.load(scale + c, mask=c < cols, other=0.0)[None, :])
    finite = True
    # a weight that is not finite has a key that is not finite
    if tl.max(tl.reshape(key, (w.shape[0] * BLOCK_C,)), axis=0) >= INFINITE_BITS:
        finite = tl.max(tl.reshape(magnitude_bits(w), (w.shape[0] * BLOCK_C,)), axis=0) < INFINITE_BITS
    flag(bad, tl.where(finite, 0, BAD_WEIGHT))
    return w, key, finite


@triton.jit
def _24_kernel(
    weight, scale, out, bad, rows, cols, stride_r, stride_c, out_stride_r, out_stride_c,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PRUNE: tl.constexpr,
):  # fmt: skip
    strips = (cols + BLOCK_C - 1) // BLOCK_C
    r = tl.program_id(0) // strips * BLOCK_R + tl.arange(0, BLOCK_R)
    start = tl.program_id(0) % strips * BLOCK_C
    w, key, finite = _tile_24(weight, scale, bad, rows, cols, stride_r, stride_c, r, start, BLOCK_C)
    if tl.program_id(0) < strips:
        flag_scale(scale, bad, tl.minimum(cols, start + BLOCK_C), start, BLOCK_C)
    k0, k1, k2, k3 = _quarters(key.to(tl.float32, bitcast=True))
    keep0, keep1, keep2, keep3 = _two_of(k0, k1, k2, k3)
    if PRUNE:
        w0, w1, w2, w3 = _quarters(_wide(w))
        v0, v1 = _narrow(keep0 & w0, w.dtype), _narrow(keep1 & w1, w.dtype)
        v2, v3 = _narrow(keep2 & w2, w.dtype), _narrow(keep3 & w3, w.dtype)
    else:
        v0, v1 = (keep0 & 1).to(tl.uint8), (keep1 & 1).to(tl.uint8)
        v2, v3 = (keep2 & 1).to(tl.uint8), (keep3 & 1).to(tl.uint8)
    tile = tl.reshape(tl.join(tl.join(v0, v2), tl.join(v1, v3)), (BLOCK_R, BLOCK_C))
    c = start + tl.arange(0, BLOCK_C)
    inside = (r < rows)[:, None] & (c < cols)[None, :]
    target = out + r.to(tl.int64)[:, None] * out_stride_r + c.to(tl.int64)[None, :] * out_stride_c
    if PRUNE:
        if finite:
            tl.store(target, tile, mask=inside)
    else:
        tl.store(target, tile, mask=inside)


@triton.jit
def _compress_24_kernel(
    weight, scale, values, meta, bad, rows, cols, stride_r, stride_c, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    strips = (cols + BLOCK_C - 1) // BLOCK_C
    band = tl.program_id(0) // strips
    start = tl.program_id(0) % strips * BLOCK_C
    r = band * BLOCK_R + tl.arange(0, BLOCK_R)
    w, key, _ = _tile_24(weight, scale, bad, rows, cols, stride_r, stride_c, r, start, BLOCK_C)
    k0, k1, k2, k3 = _quarters(key.to(tl.float32, bitcast=True))
    keep0, keep1, keep2, keep3 = _two_of(k0, k1, k2, k3)
    w0, w1, w2, w3 = _quarters(_wide(w))
    low = _narrow(_choose(keep0, w0, _choose(keep1, w1, w2)), w.dtype)
    high = _narrow(_choose(keep3, w3, _choose(keep2, w2, w1)), w.dtype)
    packed = tl.reshape(tl.join(low, high), (BLOCK_R, BLOCK_C // 2))
    half = start // 2 + tl.arange(0, BLOCK_C // 2)
    target = values + r.to(tl.int64)[:, None] * (cols // 2) + half[None, :]
    tl.store(target, packed, mask=(half < cols // 2)[None, :])
    nibble = (~keep0 & _choose(keep1, 1, 2)) | _choose(keep3, 12, _choose(keep2, 8, 4))
    places = 4 * tl.arange(0, 4)[None, None, :]
    word = tl.sum(tl.reshape(nibble, (BLOCK_R, BLOCK_C // 16, 4)) << places, axis=2).to(tl.int16)
    # row bits 43210 and column bit 0 of a word are stored in the order 2 1 0 4 c 3
    word = tl.permute(tl.reshape(word, (2, 2, 8, BLOCK_C // 32, 2)), (3, 2, 0, 4, 1))
    pair = start // 32 + tl.arange(0, BLOCK_C // 32)[:, None]
    target = meta + pair.to(tl.int64) * (2 * rows) + (band * 64 + tl.arange(0, 64))[None, :]
    tl.store(target, tl.reshape(word, (BLOCK_C // 32, 64)), mask=pair < cols // 32)
    if band == 0:
        flag_scale(scale, bad, tl.minimum(cols, start + BLOCK_C), start, BLOCK_C)


def compress_24(weight: Tensor, scale: Tensor, bad: Tensor | None) -> tuple[Tensor, Tensor]:
    if not serves(weight):
        return NotImplemented
    rows, cols = weight.shape
    values = torch.empty(rows, cols // 2, dtype=weight.dtype, device=weight.device)
    meta = torch.empty(rows, cols // 16, dtype=torch.int16, device=weight.device)
    codes = new_flag(weight) if bad is None else bad
    launch(
        _compress_24_kernel, (rows // 32 * cdiv(cols, PACK_C), 1, 1),
        weight, scale.contiguous(), values, meta, codes, rows, cols, *weight.stride(),
        BLOCK_R=32, BLOCK_C=PACK_C, num_warps=PACK_WARPS,
    )  # fmt: skip
    if bad is None:
        raise_if_bad("compress_24", codes)
    return values, meta
