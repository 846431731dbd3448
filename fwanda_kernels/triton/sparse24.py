"""N:M selection: each thread holds whole groups of m, ranks them by comparison and writes mask or pruned weight.

Convention: tiles are [BLOCK_R rows, BLOCK_G groups, M2 columns], M2 the power of two at or above m.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import (
    BAD_WEIGHT,
    INFINITE_BITS,
    check_values,
    flag,
    flag_scale,
    magnitude_bits,
    new_flag,
    on_device,
    raise_if_bad,
    score_key,
    serves,
)

MAX_GROUP = 32
TILE, WARPS = 2048, 4


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
    with on_device(weight):
        _nm_kernel[(triton.cdiv(rows, block_r), triton.cdiv(cols, block_g * m))](
            weight, scale, out, bad, rows, cols, *weight.stride(), *out.stride(), n,
            M=m, M2=m2, BLOCK_R=block_r, BLOCK_G=block_g, PRUNE=prune, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def nm_mask(weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> Tensor:
    if not serves(weight) or m > MAX_GROUP:
        return NotImplemented
    mask = torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
    found = new_flag(weight) if bad is None else bad
    _launch(weight, scale.contiguous(), mask.view(torch.uint8), n, m, found, prune=False)
    if bad is None:
        raise_if_bad("nm_mask", found)
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
