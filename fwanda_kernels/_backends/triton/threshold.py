"""Exact global threshold over a list of matrices, decided on the device: sample, bracket, histogram, count.

A sorted sample of about SAMPLE keys brackets the K-th largest key. A pass over the weights counts, per row, the keys
above and inside the bracket and histograms the inside ones; the bracket shrinks to one bin. A second pass makes it one
key. A bracket that missed (known from the counts) becomes the whole missing side, for which a third pass is launched
and otherwise returns at once. The last pass visits only rows with a key inside the last bracket. The sample's own
K-th key, where heavy ties would sit, is never put into the histogram: its count is the inside ones less the rest.

Convention: a table row of int64 describes a matrix (see _sample_kernel); a tile is TILE_R rows of one matrix; state is
int32 [low, high, pivot, active], the bracket being low <= key <= high. Memory beside the weights: about 60 MB + 8 B per
row, whatever the model.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._checks import new_flag, raise_if_bad
from ..._ties import keep_last_ties
from .common import (
    BAD_WEIGHT,
    INFINITE_BITS,
    exact_float,
    flag,
    flag_scale,
    in_vectors,
    serves,
)
from .launch import cdiv, launch

SAMPLE = 1 << 22
BIN_BITS = tl.constexpr(18)
BINS = 1 << 18
FIELDS = tl.constexpr(9)
PASSES = 3
TILE_R, BLOCK_C, WARPS = 4, 256, 1
PROGRAMS = 1 << 14  # of a pass, which share its tiles; if a pass is not needed, its programs end at once
BLOCK = 1024


@triton.jit
def _scaled_key(w, col_scale, row_scale):
    """Key of fp32(fp32(|w| * col_scale) * row_scale); 0 where row_scale is 0, even after an overflow."""
    score = w.to(tl.float32) * col_scale * row_scale
    return score.to(tl.int32, bitcast=True) & tl.where(row_scale == 0, 0, 0x7FFFFFFF)


@triton.jit
def _sample_kernel(
    weight, row_scale, col_scale, sample, table, tile_map, bad, index, samples, first_row, first_tile,
    rows, cols, stride_r, stride_c, TILE_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Describe matrix `index` in the table and the tile map, check its scales, and draw its part of the sample."""
    block = tl.program_id(0)
    if block == 0:
        entry = table + index * FIELDS
        tl.store(entry, weight.to(tl.int64))
        tl.store(entry + 1, row_scale.to(tl.int64))
        tl.store(entry + 2, col_scale.to(tl.int64))
        tl.store(entry + 3, rows)
        tl.store(entry + 4, cols)
        tl.store(entry + 5, stride_r)
        tl.store(entry + 6, stride_c)
        tl.store(entry + 7, first_row)
        tl.store(entry + 8, first_tile)
    i = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(tile_map + first_tile + i, tl.zeros((BLOCK,), tl.int32) + index, mask=i < (rows + TILE_R - 1) // TILE_R)
    flag_scale(row_scale, bad, rows, block * BLOCK, BLOCK)
    flag_scale(col_scale, bad, cols, block * BLOCK, BLOCK)
    # one weight from each of `samples` equal stretches of the matrix, at a golden-ratio sequence of places
    j = i.to(tl.int64)
    drawn = j < samples
    size = tl.cast(rows, tl.int64) * cols
    start = j * size // tl.maximum(samples, 1)
    span = (j + 1) * size // tl.maximum(samples, 1) - start
    flat = start + ((((j * 0x9E3779B1) & 0xFFFFFF) * span) >> 24)
    r = flat // cols
    c = flat % cols
    w = tl.load(weight + r * stride_r + c * stride_c, mask=drawn, other=0.0)
    s = tl.load(col_scale + c, mask=drawn, other=0.0)
    key = _scaled_key(exact_float(w), s, tl.load(row_scale + r, mask=drawn, other=0.0))
    tl.store(sample + i, key, mask=drawn)


@triton.jit
def _in_eights(v):
    """Sums of 8 neighbours, which one thread holds."""
    return tl.sum(tl.reshape(v, (v.shape[0] // 8, 8)), axis=1)


@triton.jit
def _count_kernel(
    like, table, tile_map, state, histogram, above, inside, bad, first, tiles,
    FINAL: tl.constexpr, VECTORS: tl.constexpr, TILE_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Count the keys above and inside the bracket in each row of some tiles; without FINAL, histogram those inside."""
    if FINAL or tl.load(state + 3) != 0:
        for tile in range(first + tl.program_id(0), first + tiles, tl.num_programs(0)):
            _count_tile(like, table, tile_map, state, histogram, above, inside, bad, tile,
                        FINAL, VECTORS, TILE_R, BLOCK_C)  # fmt: skip


@triton.jit
def _count_tile(like, table, tile_map, state, histogram, above, inside, bad, tile,
                FINAL: tl.constexpr, VECTORS: tl.constexpr, TILE_R: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    entry = table + tl.load(tile_map + tile).to(tl.int64) * FIELDS
    rows = tl.load(entry + 3).to(tl.int32)
    r = (tile - tl.load(entry + 8).to(tl.int32)) * TILE_R
    target = tl.load(entry + 7) + r
    i = tl.arange(0, TILE_R)
    run = True
    if FINAL:
        run = tl.max(tl.load(inside + target + i, mask=r + i < rows, other=0), axis=0) > 0
    if run:
        weight = tl.load(entry).to(like.dtype)
        row_scale = tl.load(entry + 1).to(tl.pointer_type(tl.float32)) + r
        col_scale = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
        cols = tl.load(entry + 4).to(tl.int32)
        stride_r = tl.load(entry + 5)
        stride_c = tl.load(entry + 6)
        if VECTORS:
            weight, col_scale = tl.multiple_of(weight, 16), tl.multiple_of(col_scale, 16)
            cols, stride_r, stride_c = tl.multiple_of(cols, 16), tl.multiple_of(stride_r, 16), 1
        weight += r.to(tl.int64) * stride_r
        low, high, pivot = tl.load(state), tl.load(state + 1), tl.load(state + 2)
        width = (high - low).to(tl.uint32, bitcast=True)
        shift = tl.sum((((high - low) >> tl.minimum(BIN_BITS + tl.arange(0, 16), 31)) > 0).to(tl.int32), axis=0)
        scales, n_above, n_below = (), (), ()
        for q in tl.static_range(TILE_R):
            scales = scales + (tl.load(row_scale + q, mask=r + q < rows, other=0.0),)
            n_above = n_above + (tl.zeros((BLOCK_C // 8,), tl.int32),)
            n_below = n_below + (tl.zeros((BLOCK_C // 8,), tl.int32),)
        poison = tl.zeros((BLOCK_C,), tl.float32)
        for start in range(0, cols, BLOCK_C):
            c = start + tl.arange(0, BLOCK_C)
            s = tl.load(col_scale + c, mask=c < cols, other=0.0)
            weights = ()
            for q in tl.static_range(TILE_R):
                address = weight + q * stride_r + c.to(tl.int64) * stride_c
                weights = weights + (tl.load(address, mask=c < tl.where(r + q < rows, cols, 0), other=0.0),)
            now_above, now_below = (), ()
            for q in tl.static_range(TILE_R):
                w = exact_float(weights[q])
                key = _scaled_key(w, s, scales[q])
                # a count adds the sign bit of a difference: the fewest instructions, which limit the speed here
                place = (key - low).to(tl.uint32, bitcast=True)
                beyond = (high - key).to(tl.uint32, bitcast=True) >> 31
                now_below = now_below + (n_below[q] + _in_eights((place >> 31).to(tl.int32, bitcast=True)),)
                now_above = now_above + (n_above[q] + _in_eights(beyond.to(tl.int32, bitcast=True)),)
                if not FINAL:
                    poison = tl.fma(w, 0.0, poison)
                    if tl.min(place, axis=0) <= width:
                        real = c < tl.where(r + q < rows, cols, 0)
                        counted = (place <= width) & real & (key != pivot)
                        tl.atomic_add(histogram + (place >> shift), 1, mask=counted, sem="relaxed")
            n_above, n_below = now_above, now_below
        # padding has key 0, so it is below the bracket, or inside if that begins at 0
        slots = tl.where(low > 0, (cols + BLOCK_C - 1) // BLOCK_C * BLOCK_C, cols)
        for q in tl.static_range(TILE_R):
            row_above = tl.sum(n_above[q], axis=0)
            tl.store(above + target + q, row_above, mask=r + q < rows)
            tl.store(inside + target + q, slots - row_above - tl.sum(n_below[q], axis=0), mask=r + q < rows)
        if not FINAL:
            flag(bad, tl.max((poison != 0).to(tl.int32), axis=0) * BAD_WEIGHT)


def first_bracket(sample: Tensor, total: int, size: int) -> Tensor:
    """First state: keys around the sample's own threshold, 4 standard deviations of its rank to either side."""
    drawn = sample.numel()
    ascending = sample.sort().values
    place = min(drawn - 1, (size - total) * drawn // size)
    margin = 0 if drawn == size else 2 * int(drawn**0.5) + 2
    state = torch.ones(4, dtype=torch.int32, device=sample.device)
    state[0] = ascending[place - margin] if place >= margin else 0
    state[1] = ascending[place + margin] if place + margin < drawn else INFINITE_BITS.value
    state[2] = ascending[place]
    return state.clamp_(max=INFINITE_BITS.value)


def _narrow(state: Tensor, histogram: Tensor, above: Tensor, inside: Tensor, total: int) -> None:
    """Shrink the bracket to the bin that holds the total-th largest key, or move it to the side where that key is.

    It never becomes empty, not even with NaN about, as the histogram is written without another bound.
    """
    low, high, pivot, active = state.clone().unbind()
    n_above, n_inside = above.sum(), inside.sum()
    shift = ((high - low) >> torch.arange(BIN_BITS.value, 32, device=state.device)).gt(0).sum()
    pivot_bin = ((pivot - low) >> shift).clamp(0, BINS - 1)
    histogram.index_add_(0, pivot_bin[None], (n_inside - histogram.sum())[None])
    from_top = histogram.flip(0).cumsum(0)
    hit = BINS - 1 - (from_top < total - n_above).sum().clamp(max=BINS - 1)
    bottom = low + (hit << shift)
    top = torch.minimum(high, bottom + (1 << shift) - 1)
    too_high, too_low = n_above + n_inside < total, n_above >= total
    new_low = torch.where(too_high, 0, torch.where(too_low, (high + 1).clamp(max=INFINITE_BITS.value), bottom))
    new_high = torch.where(too_high, low - 1, torch.where(too_low, INFINITE_BITS.value, top))
    go_on = too_high | too_low | (new_low < new_high)
    new = torch.stack((new_low, new_high, pivot, go_on)).to(torch.int32)
    state.copy_(torch.where(active != 0, new, state))
    histogram.zero_()


def select_threshold(
    weights: list[Tensor], row_scales: list[Tensor], col_scales: list[Tensor], total: int, bad: Tensor | None
) -> Tensor:
    if not all(serves(w) for w in weights):
        return NotImplemented
    codes = new_flag(weights[0]) if bad is None else bad
    row_scales, col_scales = [s.contiguous() for s in row_scales], [s.contiguous() for s in col_scales]
    keep = _select(weights, row_scales, col_scales, total, codes)
    if bad is None:
        raise_if_bad("select_threshold", codes)
    return keep


def _select(weights: list[Tensor], row_scales: list[Tensor], col_scales: list[Tensor], total: int, bad: Tensor):
    """Counts per row. The kernels search for total 1 where it is 0, so that they check the values all the same."""
    device, size = weights[0].device, sum(w.numel() for w in weights)
    all_rows = sum(w.shape[0] for w in weights)
    groups, tiles = _tiles_by_dtype(weights)
    table = torch.empty(len(weights), FIELDS.value, dtype=torch.int64, device=device)
    tile_map = torch.empty(sum(count for _, _, count in groups), dtype=torch.int32, device=device)
    sample = torch.empty(min(SAMPLE, size), dtype=torch.int32, device=device)
    _draw(weights, row_scales, col_scales, sample, table, tile_map, tiles, bad)
    state = first_bracket(sample, max(total, 1), size)
    del sample
    vectors = all(in_vectors(w) and s.data_ptr() % 16 == 0 for w, s in zip(weights, col_scales, strict=True))
    histogram = torch.zeros(BINS, dtype=torch.int64, device=device)
    above, inside = torch.zeros(2, all_rows, dtype=torch.int32, device=device)

    def count(final: bool) -> None:
        for like, first, programs in groups:
            launch(
                _count_kernel, (min(programs, PROGRAMS), 1, 1),
                like, table, tile_map, state, histogram, above, inside, bad, first, programs,
                FINAL=final, VECTORS=vectors, TILE_R=TILE_R, BLOCK_C=BLOCK_C, num_warps=WARPS,
            )  # fmt: skip

    for _ in range(PASSES):
        count(final=False)
        _narrow(state, histogram, above, inside, max(total, 1))
    count(final=True)
    keep = keep_last_ties(above.long(), inside.long(), max(total, 1) - above.sum())
    return keep if total else torch.zeros_like(keep)


def _tiles_by_dtype(weights: list[Tensor]) -> tuple[list[tuple[Tensor, int, int]], list[int]]:
    """([(a weight of the dtype, first tile, tiles)], first tile of each matrix), tiles of one dtype being adjacent."""
    groups, first, end = [], [0] * len(weights), 0
    for dtype in dict.fromkeys(w.dtype for w in weights):
        begin = end
        for i, weight in enumerate(weights):
            if weight.dtype == dtype:
                first[i], end = end, end + cdiv(weight.shape[0], TILE_R)
        groups.append((next(w for w in weights if w.dtype == dtype), begin, end - begin))
    return groups, first


def _draw(weights, row_scales, col_scales, sample, table, tile_map, tiles, bad) -> None:
    """One small launch a matrix; its share of the sample is its share of the weights."""
    size, drawn = sum(w.numel() for w in weights), sample.numel()
    first_row, before, end = 0, 0, 0
    for i, weight in enumerate(weights):
        rows, cols = weight.shape
        before += weight.numel()
        begin, end = end, before * drawn // size
        work = max(end - begin, rows, cols)
        launch(
            _sample_kernel, (cdiv(work, BLOCK), 1, 1),
            weight, row_scales[i], col_scales[i], sample[begin:], table, tile_map, bad, i, end - begin, first_row,
            tiles[i], rows, cols, *weight.stride(), TILE_R=TILE_R, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
        first_row += rows
