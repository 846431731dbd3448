"""N:M selection: each thread holds whole groups of m, ranks them by comparison and writes mask or pruned weight.

Convention: tiles are [BLOCK_R rows, BLOCK_G groups, M2 columns], M2 the power of two at or above m. compress_24 packs
tiles of 32 rows, within which the metadata of two words of columns is one contiguous stretch.
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
from .launch import launch

MAX_GROUP = 32
TILE, WARPS = 2048, 4
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
    m2 = triton.next_power_of_2(m)
    tile = TILE if m2 <= 8 else TILE // 2
    groups = min(triton.next_power_of_2(triton.cdiv(cols, m)), max(1, tile // 4 // m2))
    return max(1, min(triton.next_power_of_2(rows), tile // (groups * m2))), groups, m2


def _launch(weight: Tensor, scale: Tensor, out: Tensor, n: int, m: int, bad: Tensor, prune: bool) -> None:
    rows, cols = weight.shape
    block_r, block_g, m2 = tile_of(rows, cols, m)
    launch(
        _nm_kernel, (triton.cdiv(rows, block_r), triton.cdiv(cols, block_g * m), 1),
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
def _compress_24_kernel(
    weight, scale, values, meta, bad, rows, cols, stride_r, stride_c, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    strips = (cols + BLOCK_C - 1) // BLOCK_C
    band = tl.program_id(0) // strips
    start = tl.program_id(0) % strips * BLOCK_C
    row = (band * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)[:, None]
    c = start + tl.arange(0, BLOCK_C)
    address = weight + row * stride_r + c.to(tl.int64)[None, :] * stride_c
    w = tl.load(address, mask=(c < cols)[None, :], other=0.0)
    s = tl.load(scale + c, mask=c < cols, other=0.0)
    w0, w1, w2, w3 = _quarters(w)
    k0, k1, k2, k3 = _quarters(score_key(w, s[None, :]))
    # 1 where the second of two columns goes before the first; of equals the lowest is removed first
    a01, a02, a03 = (k1 >= k0).to(tl.int32), (k2 >= k0).to(tl.int32), (k3 >= k0).to(tl.int32)
    a12, a13, a23 = (k2 >= k1).to(tl.int32), (k3 >= k1).to(tl.int32), (k3 >= k2).to(tl.int32)
    keep0 = a01 + a02 + a03 < 2
    keep1 = a12 + a13 - a01 < 1
    keep2 = a23 - a02 - a12 < 0
    keep3 = a03 + a13 + a23 > 1
    low = tl.where(keep0, w0, tl.where(keep1, w1, w2))
    high = tl.where(keep3, w3, tl.where(keep2, w2, w1))
    packed = tl.reshape(tl.join(low, high), (BLOCK_R, BLOCK_C // 2))
    half = start // 2 + tl.arange(0, BLOCK_C // 2)
    tl.store(values + row * (cols // 2) + half[None, :], packed, mask=(half < cols // 2)[None, :])
    nibble = tl.where(keep0, 0, tl.where(keep1, 1, 2)) | (tl.where(keep3, 3, tl.where(keep2, 2, 1)) << 2)
    places = 4 * tl.arange(0, 4)[None, None, :]
    word = tl.sum(tl.reshape(nibble, (BLOCK_R, BLOCK_C // 16, 4)) << places, axis=2).to(tl.int16)
    # row bits 43210 and column bit 0 of a word are stored in the order 2 1 0 4 c 3
    word = tl.permute(tl.reshape(word, (2, 2, 8, BLOCK_C // 32, 2)), (3, 2, 0, 4, 1))
    pair = start // 32 + tl.arange(0, BLOCK_C // 32)[:, None]
    target = meta + pair.to(tl.int64) * (2 * rows) + (band * 64 + tl.arange(0, 64))[None, :]
    tl.store(target, tl.reshape(word, (BLOCK_C // 32, 64)), mask=pair < cols // 32)
    flag(bad, tl.where(tl.max(tl.max(magnitude_bits(w), axis=1), axis=0) < INFINITE_BITS, 0, BAD_WEIGHT))
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
        _compress_24_kernel, (rows // 32 * triton.cdiv(cols, PACK_C), 1, 1),
        weight, scale.contiguous(), values, meta, codes, rows, cols, *weight.stride(),
        BLOCK_R=32, BLOCK_C=PACK_C, num_warps=PACK_WARPS,
    )  # fmt: skip
    if bad is None:
        raise_if_bad("compress_24", codes)
    return values, meta
