"""N:M selection: each thread holds whole groups of m, ranks them by comparison and writes mask or pruned weight.

Convention: tiles are [BLOCK_R rows, BLOCK_G groups, M2 columns], M2 the power of two at or above m. 2:4 has kernels of
its own: a program takes a strip of columns over a few rows, holds the four columns of a group in four tensors, and
decides by the signs of differences.
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
    exact_float,
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
# of 2:4: a thread holds 8 columns of each row, so that no value goes from one thread to another
STRIP, STRIP_WARPS = 256, 1
ROWS_24 = 4


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
            _24_kernel, (cdiv(rows, ROWS_24) * cdiv(cols, STRIP), 1, 1),
            weight, scale, out, bad, rows, cols, *weight.stride(), *out.stride(),
            ROWS=ROWS_24, BLOCK_C=STRIP, PRUNE=prune, num_warps=STRIP_WARPS,
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
    """The columns 0, 1, 2 and 3 of each group of 4 of v [C], each [C / 4]."""
    even, odd = tl.split(tl.reshape(v, (v.shape[0] // 4, 2, 2)))
    v0, v2 = tl.split(even)
    v1, v3 = tl.split(odd)
    return v0, v1, v2, v3


@triton.jit
def _majority(a, b, c):
    return (a & b) | ((a | b) & c)


@triton.jit
def _excess(a, b):
    """|b| - |a|: negative where score |a| is larger. Of two infinities it is NaN, whose sign depends on the device."""
    if INTERPRETED:
        difference = tl.abs(b) - tl.abs(a)
        return tl.where(tl.abs(a) == tl.abs(b), tl.abs(difference), difference)
    else:
        return tl.abs(b) - tl.abs(a)


@triton.jit
def _two_of(p):
    """For scores p [C], whose signs do not count: -1 where a column of a group is among the two largest, else 0.

    Of equal scores the lowest column is removed first. The last value is NaN for a group with a score that is not
    finite, else 0.
    """
    p0, p1, p2, p3 = _quarters(p)
    d01, d23 = _excess(p0, p1), _excess(p2, p3)
    # only the signs of these bits count
    g01, g23 = d01.to(tl.int32, bitcast=True), d23.to(tl.int32, bitcast=True)
    g02, g03 = _excess(p0, p2).to(tl.int32, bitcast=True), _excess(p0, p3).to(tl.int32, bitcast=True)
    g12, g13 = _excess(p1, p2).to(tl.int32, bitcast=True), _excess(p1, p3).to(tl.int32, bitcast=True)
    keep0, keep1 = _majority(g01, g02, g03), _majority(~g01, g12, g13)
    keep2, keep3 = _majority(~g02, ~g12, g23), _majority(~g03, ~g13, ~g23)
    return keep0 >> 31, keep1 >> 31, keep2 >> 31, keep3 >> 31, tl.fma(d01, 0.0, d23 * 0.0)


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
def _load_row(source, stride_r, r, rows, c, cols, BELOW: tl.constexpr):
    """Weights of row r + BELOW, 0 beyond the matrix; source points to row r."""
    inside = c < tl.where(r + BELOW < rows, cols, 0)
    return tl.load(source + BELOW * stride_r, mask=inside, other=0.0)


@triton.jit
def _check_24(source, stride_r, r, rows, c, cols, poison, bad, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Whether the weights are finite; flags them if not. poison is NaN in groups with a score that is not finite.

    It reads the weights again, because keeping them would take registers that a finite matrix does not need.
    """
    finite = True
    if tl.max((poison != 0.0).to(tl.int32), axis=0) != 0:
        worst = tl.zeros(c.shape, tl.int32)
        for q in tl.static_range(ROWS):
            w = _load_row(source, stride_r, r, rows, c, cols, q * STEP)
            worst = tl.maximum(worst, magnitude_bits(w))
        finite = tl.max(worst, axis=0) < INFINITE_BITS
        flag(bad, tl.where(finite, 0, BAD_WEIGHT))
    return finite


@triton.jit
def _24_kernel(
    weight, scale, out, bad, rows, cols, stride_r, stride_c, out_stride_r, out_stride_c,
    ROWS: tl.constexpr, BLOCK_C: tl.constexpr, PRUNE: tl.constexpr,
):  # fmt: skip
    strips = (cols + BLOCK_C - 1) // BLOCK_C
    r = tl.program_id(0) // strips * ROWS
    start = tl.program_id(0) % strips * BLOCK_C
    c = start + tl.arange(0, BLOCK_C)
    source = weight + r.to(tl.int64) * stride_r + c.to(tl.int64) * stride_c
    weights, tiles = (), ()
    for q in tl.static_range(ROWS):
        weights = weights + (_load_row(source, stride_r, r, rows, c, cols, q),)
    s = tl.load(scale + c, mask=c < cols, other=0.0)
    poison = tl.zeros((BLOCK_C // 4,), tl.float32)
    for q in tl.static_range(ROWS):
        w = weights[q]
        keep0, keep1, keep2, keep3, wrong = _two_of(exact_float(w) * s)
        poison += wrong
        if PRUNE:
            w0, w1, w2, w3 = _quarters(_wide(w))
            v0, v1 = _narrow(keep0 & w0, w.dtype), _narrow(keep1 & w1, w.dtype)
            v2, v3 = _narrow(keep2 & w2, w.dtype), _narrow(keep3 & w3, w.dtype)
        else:
            v0, v1 = (keep0 & 1).to(tl.uint8), (keep1 & 1).to(tl.uint8)
            v2, v3 = (keep2 & 1).to(tl.uint8), (keep3 & 1).to(tl.uint8)
        tiles = tiles + (tl.reshape(tl.join(tl.join(v0, v2), tl.join(v1, v3)), (BLOCK_C,)),)
    finite = _check_24(source, stride_r, r, rows, c, cols, poison, bad, ROWS, STEP=1)
    if r == 0:
        flag_scale(scale, bad, tl.minimum(cols, start + BLOCK_C), start, BLOCK_C)
    if finite or not PRUNE:
        target = out + r.to(tl.int64) * out_stride_r + c.to(tl.int64) * out_stride_c
        for q in tl.static_range(ROWS):
            tl.store(target + q * out_stride_r, tiles[q], mask=c < tl.where(r + q < rows, cols, 0))


@triton.jit
def _compress_24_kernel(weight, scale, values, meta, bad, rows, cols, stride_r, stride_c, BLOCK_C: tl.constexpr):
    strips = (cols + BLOCK_C - 1) // BLOCK_C
    # rows r, r + 8, r + 16, r + 24 of a band of 32, whose metadata of 32 columns are 16 bytes in a row
    part = tl.program_id(0) // strips
    band = part // 8 * 32
    r = band + part % 8
    start = tl.program_id(0) % strips * BLOCK_C
    c = start + tl.arange(0, BLOCK_C)
    source = weight + r.to(tl.int64) * stride_r + c.to(tl.int64) * stride_c
    weights = ()
    for q in tl.static_range(4):
        weights = weights + (_load_row(source, stride_r, r, rows, c, cols, q * 8),)
    s = tl.load(scale + c, mask=c < cols, other=0.0)
    half = start // 2 + tl.arange(0, BLOCK_C // 2)
    target = values + r.to(tl.int64) * (cols // 2) + half
    poison = tl.zeros((BLOCK_C // 4,), tl.float32)
    described = ()
    for q in tl.static_range(4):
        w = weights[q]
        keep0, keep1, keep2, keep3, wrong = _two_of(exact_float(w) * s)
        poison += wrong
        w0, w1, w2, w3 = _quarters(_wide(w))
        low = _narrow(_choose(keep0, w0, _choose(keep1, w1, w2)), w.dtype)
        high = _narrow(_choose(keep3, w3, _choose(keep2, w2, w1)), w.dtype)
        packed = tl.reshape(tl.join(low, high), (BLOCK_C // 2,))
        tl.store(target + q * 8 * (cols // 2), packed, mask=half < cols // 2)
        nibble = (~keep0 & (2 + keep1)) | (keep3 & 12) | (4 - 4 * keep2)
        even, odd = tl.split(tl.reshape(nibble, (BLOCK_C // 8, 2)))
        described = described + (even | (odd << 4),)
    # a byte describes 8 columns; row bits 43210 and bits c, b of the byte's number are stored as 2 1 0 4 c 3 b
    word = start // 16 + tl.arange(0, BLOCK_C // 16)
    stretch = (word // 2).to(tl.int64) * rows + (band + r % 8 * 4)
    for q in tl.static_range(2):
        pairs = tl.reshape(described[2 * q] | (described[2 * q + 1] << 16), (BLOCK_C // 16, 2))
        four = tl.sum(pairs << tl.arange(0, 2)[None, :] * 8, axis=1)
        tl.store(meta.to(tl.pointer_type(tl.int32)) + (stretch + word % 2 + 2 * q), four, mask=word < cols // 16)
    _check_24(source, stride_r, r, rows, c, cols, poison, bad, 4, STEP=8)
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
        _compress_24_kernel, (rows // 4 * cdiv(cols, STRIP), 1, 1),
        weight, scale.contiguous(), values, meta, codes, rows, cols, *weight.stride(),
        BLOCK_C=STRIP, num_warps=STRIP_WARPS,
    )  # fmt: skip
    if bad is None:
        raise_if_bad("compress_24", codes)
    return values, meta
