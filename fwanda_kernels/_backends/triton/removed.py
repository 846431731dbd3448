"""Packed masks, and a product whose tiles are added up by rows and by columns instead of written.

Convention: tiles begin at multiples of 8 columns, where a byte of the packed mask begins. Each program of
removed_sums() writes the sums of its tile to partial [tiles, R] and [tiles, C] fp32, which are then added in fp64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import exact_float, nvidia_major, serves
from .launch import cdiv, launch

BLOCK_R, BLOCK_C, WARPS = 32, 256, 4
BAND = 8  # tile rows that run together, so that they find x in the cache


@triton.jit
def _tile(rows, cols, first_r, first_c, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Rows [R, 1] and columns [1, C] of a tile, and which weights lie inside."""
    r = (first_r + tl.arange(0, BLOCK_R))[:, None]
    c = (first_c + tl.arange(0, BLOCK_C))[None, :]
    return r, c, (r < rows) & (c < cols)


@triton.jit
def _load(weight, packed, rows, cols, stride_r, stride_c, first_r, first_c,
          BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """Weights of a tile and whether each is kept; beyond the matrix a weight is 0."""
    r, c, inside = _tile(rows, cols, first_r, first_c, BLOCK_R, BLOCK_C)
    w = tl.load(weight + r.to(tl.int64) * stride_r + c.to(tl.int64) * stride_c, mask=inside, other=0.0)
    count = (cols + 7) // 8
    r, b, inside = _tile(rows, count, first_r, first_c // 8, BLOCK_R, BLOCK_C // 8)
    byte = tl.load(packed + r.to(tl.int64) * count + b, mask=inside, other=0).to(tl.int32)
    bits = (byte[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return w, tl.reshape(bits, (BLOCK_R, BLOCK_C)) != 0


@triton.jit
def _pack_mask_kernel(mask, packed, rows, cols, stride_r, stride_c, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    first_r, first_c = tl.program_id(0) * BLOCK_R, tl.program_id(1) * BLOCK_C
    r, c, inside = _tile(rows, cols, first_r, first_c, BLOCK_R, BLOCK_C)
    kept = tl.load(mask + r.to(tl.int64) * stride_r + c.to(tl.int64) * stride_c, mask=inside, other=0).to(tl.int32)
    byte = tl.sum(tl.reshape(kept << c % 8, (BLOCK_R, BLOCK_C // 8, 8)), axis=2)
    count = (cols + 7) // 8
    r, b, inside = _tile(rows, count, first_r, first_c // 8, BLOCK_R, BLOCK_C // 8)
    tl.store(packed + r.to(tl.int64) * count + b, byte.to(tl.uint8), mask=inside)


@triton.jit
def _masked_weight_kernel(
    weight, packed, out, rows, cols, stride_r, stride_c, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    first_r, first_c = tl.program_id(0) * BLOCK_R, tl.program_id(1) * BLOCK_C
    w, kept = _load(weight, packed, rows, cols, stride_r, stride_c, first_r, first_c, BLOCK_R, BLOCK_C)
    r, c, inside = _tile(rows, cols, first_r, first_c, BLOCK_R, BLOCK_C)
    tl.store(out + r.to(tl.int64) * cols + c, tl.where(kept, w, 0.0), mask=inside)


def _grid(rows: int, cols: int) -> tuple[int, int, int]:
    return cdiv(rows, BLOCK_R), cdiv(cols, BLOCK_C), 1


def pack_mask(mask: Tensor) -> Tensor:
    if not serves(mask):
        return NotImplemented
    rows, cols = mask.shape
    packed = torch.empty(rows, cdiv(cols, 8), dtype=torch.uint8, device=mask.device)
    launch(
        _pack_mask_kernel, _grid(rows, cols), mask.view(torch.uint8), packed, rows, cols, *mask.stride(),
        BLOCK_R=BLOCK_R, BLOCK_C=BLOCK_C, num_warps=WARPS,
    )  # fmt: skip
    return packed


def masked_weight(weight: Tensor, packed: Tensor) -> Tensor:
    if not serves(weight):
        return NotImplemented
    rows, cols = weight.shape
    out = torch.empty(rows, cols, dtype=weight.dtype, device=weight.device)
    launch(
        _masked_weight_kernel, _grid(rows, cols), weight, packed.contiguous(), out, rows, cols, *weight.stride(),
        BLOCK_R=BLOCK_R, BLOCK_C=BLOCK_C, num_warps=WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _place(program, rows, cols, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BAND: tl.constexpr):
    """Row and column of a program's tile in units of tiles; a band of BAND tile rows is walked column by column."""
    down, across = tl.cdiv(rows, BLOCK_R), tl.cdiv(cols, BLOCK_C)
    first = program // (BAND * across) * BAND
    height = tl.minimum(down - first, BAND)
    return first + program % (BAND * across) % height, program % (BAND * across) // height


@triton.jit
def _gains(slope, weight, packed, col_sums, rows, cols, stride_r, stride_c, first_r, first_c, STRIP: tl.constexpr):
    """Sums of -slope * weight over the removed weights of a tile: returned by rows, written by columns.

    Takes the columns in strips to save registers.
    """
    BLOCK_R: tl.constexpr = slope.shape[0]
    BLOCK_C: tl.constexpr = slope.shape[1]
    if BLOCK_C > STRIP:
        HALF: tl.constexpr = BLOCK_C // 2
        left, right = tl.split(tl.permute(tl.reshape(slope, (BLOCK_R, 2, HALF)), (0, 2, 1)))
        sums = _gains(left, weight, packed, col_sums, rows, cols, stride_r, stride_c, first_r, first_c, STRIP)
        first_c += HALF
        sums += _gains(right, weight, packed, col_sums, rows, cols, stride_r, stride_c, first_r, first_c, STRIP)
    else:
        w, kept = _load(weight, packed, rows, cols, stride_r, stride_c, first_r, first_c, BLOCK_R, BLOCK_C)
        removed = exact_float(tl.where(kept, 0.0, w))
        gain = tl.where(removed != 0, -slope * removed, 0.0)  # a NaN at a kept weight does not count
        c = first_c + tl.arange(0, BLOCK_C)
        tl.store(col_sums + c, tl.sum(gain, axis=0), mask=c < cols)
        sums = tl.sum(gain, axis=1)
    return sums


@triton.jit(do_not_specialize=["tokens"])
def _removed_sums_kernel(
    gradient, x, weight, packed, row_sums, col_sums, tokens, rows, cols,
    gradient_stride, x_stride, stride_r, stride_c,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BAND: tl.constexpr,
    STRIP: tl.constexpr,
):  # fmt: skip
    tile_r, tile_c = _place(tl.program_id(0), rows, cols, BLOCK_R, BLOCK_C, BAND)
    # rows and columns beyond the last are read as others; their weights are 0
    r, c = (tile_r * BLOCK_R + tl.arange(0, BLOCK_R)) % rows, (tile_c * BLOCK_C + tl.arange(0, BLOCK_C)) % cols
    t = tl.arange(0, BLOCK_T)[:, None]
    left, right = gradient + (t * gradient_stride + r[None, :]), x + (t * x_stride + c[None, :])
    slope = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(0, tokens, BLOCK_T):
        a = tl.load(left, mask=start + t < tokens, other=0.0)
        b = tl.load(right, mask=start + t < tokens, other=0.0)
        slope = tl.dot(tl.trans(a), b, slope)
        left += (tl.zeros((), tl.int64) + BLOCK_T) * gradient_stride
        right += (tl.zeros((), tl.int64) + BLOCK_T) * x_stride
    first_r, first_c = tile_r * BLOCK_R, tile_c * BLOCK_C
    col_sums += tile_r.to(tl.int64) * cols
    sums = _gains(slope, weight, packed, col_sums, rows, cols, stride_r, stride_c, first_r, first_c, STRIP)
    r = first_r + tl.arange(0, BLOCK_R)
    tl.store(row_sums + tile_c.to(tl.int64) * rows + r, sums, mask=r < rows)


def product_tile(major: int) -> dict[str, int]:
    """Tile, warps and stages of removed_sums() for a compute capability's registers and shared memory."""
    if major in (9, 10):
        return {"BLOCK_R": 128, "BLOCK_C": 256, "BLOCK_T": 64, "STRIP": 64, "num_warps": 8, "num_stages": 4}
    return {"BLOCK_R": 128, "BLOCK_C": 128, "BLOCK_T": 32, "STRIP": 64, "num_warps": 8, "num_stages": 3}


def removed_sums(gradient: Tensor, x: Tensor, weight: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 and fp16 only, as tensor cores round fp32."""
    if not (serves(x) and serves(weight)) or x.dtype == torch.float32:
        return NotImplemented
    if not x.is_cuda:
        gradient, x = gradient.float(), x.float()  # interpreted products take bf16 for integers
    gradient = gradient if gradient.stride(1) == 1 else gradient.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, cols = weight.shape
    tile = product_tile(nvidia_major(x))
    down, across = cdiv(rows, tile["BLOCK_R"]), cdiv(cols, tile["BLOCK_C"])
    row_sums = torch.empty(across, rows, dtype=torch.float32, device=x.device)
    col_sums = torch.empty(down, cols, dtype=torch.float32, device=x.device)
    launch(
        _removed_sums_kernel, (down * across, 1, 1),
        gradient, x, weight, packed.contiguous(), row_sums, col_sums, x.shape[0], rows, cols,
        gradient.stride(0), x.stride(0), *weight.stride(), BAND=BAND, fma=True, **tile,
    )  # fmt: skip
    return row_sums.sum(0, dtype=torch.float64), col_sums.sum(0, dtype=torch.float64)
