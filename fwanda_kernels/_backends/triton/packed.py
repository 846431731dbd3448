"""Packed weights: unpacking, and a linear layer of up to 16 tokens that reads the packed bytes.

docs/packed.md has the layout. A program decodes chunks of 16 rows and 256 columns, 64 columns at a time: in a tensor of
[32 lanes, 32 bits] it counts the bits before each bit, and that number tells where the value of the bit stands.
Programs that share the columns of a tile write their sums to partial [splits, T, R] fp32, which are added in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from ...ops.packed import CHUNK_COLUMNS, TILE_ROWS, packed_places
from .common import exact_float, nvidia_major, serves
from .launch import cdiv, launch
from .sparse24 import INTERPRETED

BLOCK_T = 16  # most tokens of a product from packed bytes
UNPACK_WARPS = 2
PROGRAMS = 1024  # that fill a GPU: the columns of few rows are divided among more programs
BLOCK_R, ADD_WARPS = 128, 4
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@triton.jit
def _ones(word):
    """Number of ones in each int32."""
    n = word - ((word >> 1) & 0x55555555)
    n = (n & 0x33333333) + ((n >> 2) & 0x33333333)
    return (((n + (n >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24 & 0x3F


@triton.jit
def _chunk(words, offsets_at, data_at, chunk, columns):
    """Of a chunk: its place in int32, what its lanes hold in all and before, and the first words of its further values.

    columns: that the chunk has; at most 256.
    """
    start = data_at // 4 + tl.load(words + offsets_at // 4 + chunk).to(tl.int64) * 4
    pair, lane = tl.arange(0, 4)[None, :], tl.arange(0, 32)
    ones = _ones(tl.load(words + start + pair * 32 + lane[:, None], mask=pair * 64 < columns, other=0))
    return start, tl.sum(ones, axis=1)


@triton.jit
def _decode(words, values, start, first, counts, seen, pair, PER_WORD: tl.constexpr):
    """Bits of the weights of 64 columns as [16, 64], and the numbers of values that the lanes have had then.

    first: place of the values of the chunk in `values`. counts: of each lane in the chunk. seen: before this pair.
    """
    lane = tl.arange(0, 32)
    bits = tl.load(words + start + pair * 32 + lane)
    kept = (bits[:, None] >> tl.arange(0, 32)[None, :]) & 1
    index = seen[:, None] + tl.cumsum(kept, axis=1) - 1
    whole, odd = counts // PER_WORD, counts % PER_WORD
    common = tl.min(whole, axis=0)
    tail = tl.cumsum(whole - common, axis=0)
    end = (32 * common + tl.sum(whole - common, axis=0)) * PER_WORD
    word = index // PER_WORD
    further = 32 * common + tail - whole  # minus the word gives the place among the further words
    place = tl.where(word < common, word * 32 + lane[:, None], further[:, None] + word) * PER_WORD + index % PER_WORD
    place = tl.where(word < whole[:, None], place, end + (tl.cumsum(odd, axis=0) - 1)[:, None])
    value = tl.load(values + first + place, mask=kept != 0, other=0)
    value = tl.reshape(value, (8, 4, 2, 2, 8))  # g, t, step of 32 columns, half of the rows, column
    return tl.reshape(tl.permute(value, (3, 0, 2, 1, 4)), (16, 64)), seen + tl.sum(kept, axis=1)


@triton.jit
def _unpack_kernel(words, values, out, rows, cols, order_at, offsets_at, data_at, PER_WORD: tl.constexpr):
    tile, column_chunk = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, 16)
    row = tl.load(words + order_at // 4 + tile * 16 + place)[:, None]
    columns = tl.minimum(cols - column_chunk * 256, 256)
    start, counts = _chunk(words, offsets_at, data_at, tile.to(tl.int64) * tl.cdiv(cols, 256) + column_chunk, columns)
    pairs = tl.cdiv(columns, 64)
    first, seen = (start + pairs * 32) * PER_WORD, tl.zeros((32,), tl.int32)
    for pair in range(0, pairs):
        dense, seen = _decode(words, values, start, first, counts, seen, pair, PER_WORD)
        c = column_chunk * 256 + pair * 64 + tl.arange(0, 64)[None, :]
        tl.store(out + row.to(tl.int64) * cols + c, dense, mask=(row >= 0) & (c < cols))


@triton.jit
def _linear_kernel(
    words, values, x, partial, tokens, rows, cols, order_at, offsets_at, data_at, splits,
    PER_WORD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    chunks = tl.cdiv(cols, 256)
    t = tl.arange(0, BLOCK_T)
    sums = tl.zeros((16, BLOCK_T), tl.float32)
    for k in range(split * chunks // splits, (split + 1) * chunks // splits):
        columns = tl.minimum(cols - k * 256, 256)
        start, counts = _chunk(words, offsets_at, data_at, tile.to(tl.int64) * chunks + k, columns)
        pairs = tl.cdiv(columns, 64)
        first, seen = (start + pairs * 32) * PER_WORD, tl.zeros((32,), tl.int32)
        for pair in range(0, pairs):
            dense, seen = _decode(words, values, start, first, counts, seen, pair, PER_WORD)
            c = k * 256 + pair * 64 + tl.arange(0, 64)
            inside = (t < tokens)[None, :] & (c < cols)[:, None]
            tokens_of = tl.load(x + t.to(tl.int64)[None, :] * cols + c[:, None], mask=inside, other=0.0)
            if INTERPRETED:  # interpreted products take bf16 for integers
                dense, tokens_of = exact_float(dense), exact_float(tokens_of)
            sums = tl.dot(dense, tokens_of, sums, input_precision="ieee")
    row = tl.load(words + order_at // 4 + tile * 16 + tl.arange(0, 16))[:, None]
    target = partial + (split * tokens + t[None, :]).to(tl.int64) * rows + row
    tl.store(target, sums, mask=(row >= 0) & (t < tokens)[None, :])


@triton.jit
def _add_kernel(partial, bias, out, tokens, rows, splits, BIAS: tl.constexpr, BLOCK_R: tl.constexpr):
    """out [T, R] = partial [splits, T, R], added up in order, + bias."""
    r, token = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), tl.program_id(1)
    total = tl.zeros((BLOCK_R,), tl.float32)
    for split in range(0, splits):
        total += tl.load(partial + (split * tokens + token).to(tl.int64) * rows + r, mask=r < rows, other=0.0)
    if BIAS:
        total += exact_float(tl.load(bias + r, mask=r < rows, other=0.0))
    tl.store(out + token.to(tl.int64) * rows + r, total.to(out.dtype.element_ty), mask=r < rows)


def linear_options(major: int) -> dict[str, int]:
    """Launch options of packed_linear() for the value of nvidia_major()."""
    if major == 12:  # ptxas would aim at 96 registers, and spill
        return {"num_warps": 2, "maxnreg": 128}
    return {"num_warps": 2}


def unpack_weight(packed: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    if not _serves(packed, rows, columns):
        return NotImplemented
    out = torch.empty(rows, columns, dtype=dtype, device=packed.device)
    launch(
        _unpack_kernel, (cdiv(rows, TILE_ROWS), cdiv(columns, CHUNK_COLUMNS), 1),
        packed.view(torch.int32), packed.view(_BITS[dtype]), out.view(_BITS[dtype]), rows, columns,
        *packed_places(rows, columns), PER_WORD=4 // dtype.itemsize, num_warps=UNPACK_WARPS,
    )  # fmt: skip
    return out


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, rows: int, columns: int) -> Tensor:
    if not _serves(packed, rows, columns) or not len(x):
        return NotImplemented
    if len(x) > BLOCK_T:
        return linear(x, unpack_weight(packed, rows, columns, x.dtype), bias)
    tokens, tiles, chunks = len(x), cdiv(rows, TILE_ROWS), cdiv(columns, CHUNK_COLUMNS)
    splits = min(chunks, cdiv(PROGRAMS, tiles))
    partial = torch.empty(splits, tokens, rows, dtype=torch.float32, device=x.device)
    launch(
        _linear_kernel, (tiles, splits, 1),
        packed.view(torch.int32), packed.view(x.dtype), x.contiguous(), partial, tokens, rows, columns,
        *packed_places(rows, columns), splits, PER_WORD=4 // x.element_size(), BLOCK_T=BLOCK_T,
        **linear_options(nvidia_major(x)),
    )  # fmt: skip
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    launch(
        _add_kernel, (cdiv(rows, BLOCK_R), tokens, 1),
        partial, None if bias is None else bias.contiguous(), out, tokens, rows, splits,
        BIAS=bias is not None, BLOCK_R=BLOCK_R, num_warps=ADD_WARPS,
    )  # fmt: skip
    return out


def _serves(packed: Tensor, rows: int, columns: int) -> bool:
    """Whether the kernels run: neither side is empty, and views of the packed bytes as words are possible."""
    return bool(rows and columns) and serves(packed) and packed.is_contiguous() and packed.storage_offset() % 4 == 0
