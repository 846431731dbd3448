"""OBS: the Gram matrix from its upper triangle, and the pruning of a block with a tile of its rows in registers.

Convention: that of walk() in _obs.py. A key is the bits of the score w^2 * (weighting_c * row_weight_r). The k-th
lowest key of a block is found digit by digit in three histograms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._obs import MAX_BLOCK, Block, ObsCall, walk
from .common import nvidia_major, serves
from .launch import cdiv, launch, power_of_2

GRAM_R, GRAM_T, GRAM_BAND, GRAM_WARPS = 128, 64, 8, 8

WALK_R, WALK_WARPS = 16, 4
COUNT_R, COUNT_WARPS = 32, 4
# three digits of a key, from the top; the first histogram has copies, as most scores share few exponents
FIRST_BINS, LATER_BINS, LATER_BITS, COPIES = tl.constexpr(2048), tl.constexpr(1024), tl.constexpr(10), tl.constexpr(8)
STATE = tl.constexpr(COPIES.value * FIRST_BINS.value + 2 * LATER_BINS.value)
COUNTERS = STATE.value + 4


@triton.jit
def _add(hessian, first_r, first_c, tile, cols, STRIP: tl.constexpr):
    """Add the part of a tile on or above the diagonal and mirror the sum, in strips of columns to save registers."""
    if tile.shape[1] > STRIP:
        half: tl.constexpr = tile.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, half)), (0, 2, 1)))
        _add(hessian, first_r, first_c, left, cols, STRIP)
        _add(hessian, first_r, first_c + half, right, cols, STRIP)
    else:
        r, c = tl.arange(0, tile.shape[0])[:, None], tl.arange(0, tile.shape[1])[None, :]
        inside = (first_r + r <= first_c + c) & (first_c + c < cols)
        target = hessian + (first_r.to(tl.int64) * cols + first_c) + (r * cols + c)
        total = tl.load(target, mask=inside, other=0.0) + tile
        tl.store(target, total, mask=inside)
        r, c = tl.arange(0, tile.shape[1])[:, None], tl.arange(0, tile.shape[0])[None, :]
        inside = (first_c + r > first_r + c) & (first_c + r < cols)
        target = hessian + (first_c.to(tl.int64) * cols + first_r) + (r * cols + c)
        tl.store(target, tl.trans(total), mask=inside)


@triton.jit
def _gram_kernel(
    x, hessian, tokens, cols, tiles, stride_t,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BAND: tl.constexpr,
    STRIP: tl.constexpr,
):  # fmt: skip
    """A tile on or above the diagonal and its mirror image; a band of BAND tile rows is walked column by column."""
    RATIO: tl.constexpr = BLOCK_C // BLOCK_R
    program = tl.program_id(0)
    band = tl.zeros((), tl.int32)
    while program >= BAND * (tiles - band // RATIO):
        program -= BAND * (tiles - band // RATIO)
        band += BAND
    r = (band + program % BAND) * BLOCK_R
    c = (band // RATIO + program // BAND) * BLOCK_C
    if (r < c + BLOCK_C) & (r < cols):
        # columns beyond the last are read as others, and not written
        t = tl.arange(0, BLOCK_T)[:, None]
        left = t * stride_t + ((r + tl.arange(0, BLOCK_R)) % cols)[None, :]
        right = t * stride_t + ((c + tl.arange(0, BLOCK_C)) % cols)[None, :]
        total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        for start in range(0, tokens, BLOCK_T):
            a = tl.load(x + left, mask=start + t < tokens, other=0.0)
            b = tl.load(x + right, mask=start + t < tokens, other=0.0)
            total = tl.dot(tl.trans(a), b, total)
            x += (tl.zeros((), tl.int64) + BLOCK_T) * stride_t
        _add(hessian, r, c, total, cols, STRIP)


def accumulate_gram_(hessian: Tensor, x: Tensor, token_mask: Tensor | None) -> None:
    """bf16 and fp16 only, as tensor cores round fp32. Of the symmetric Hessian the upper triangle is read."""
    x = x.flatten(0, -2)
    if not serves(x) or x.dtype == torch.float32 or not hessian.is_contiguous():
        return NotImplemented
    if token_mask is not None:
        x = x.masked_fill(~token_mask.reshape(-1, 1), 0)
    if not x.is_cuda:
        x = x.float()  # interpreted products take bf16 for integers
    x = x if x.stride(1) == 1 else x.contiguous()
    tokens, cols = x.shape
    tile = gram_tile(nvidia_major(x), cols)
    tiles = cdiv(cols, tile["BLOCK_C"])
    bands = range(0, cdiv(cols, GRAM_R), GRAM_BAND)
    programs = sum(GRAM_BAND * (tiles - band * GRAM_R // tile["BLOCK_C"]) for band in bands)
    launch(
        _gram_kernel, (programs, 1, 1), x, hessian, tokens, cols, tiles, x.stride(0),
        BLOCK_R=GRAM_R, BLOCK_T=GRAM_T, BAND=GRAM_BAND, num_warps=GRAM_WARPS, fma=True, **tile,
    )  # fmt: skip
    return None


def gram_tile(major: int, cols: int) -> dict[str, int]:
    """Width and stages of a tile for a compute capability's shared memory; measured at C = 4096 and 11008 on Hopper."""
    large = major in (9, 10)
    if large and cols > 4096:
        return {"BLOCK_C": 256, "STRIP": 64, "num_stages": 4}
    return {"BLOCK_C": 128, "STRIP": 32, "num_stages": 4 if large else 3}


@triton.jit
def _keys(w, weighting, row_weight, r, c, rows, end, ROW_WEIGHT: tl.constexpr):
    """Keys of a tile w: rows r, columns c of the weight."""
    scale = tl.load(weighting + c, mask=c < end, other=0.0)[None, :]
    if ROW_WEIGHT:
        scale = scale * tl.load(row_weight + r, mask=r < rows, other=0.0)[:, None]
    return (w * w * scale).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _load_tile(work, r, c, rows, stride, end):
    inside = (r < rows)[:, None] & (c < end)[None, :]
    return tl.load(work + r[:, None].to(tl.int64) * stride + c[None, :], mask=inside, other=0.0), inside


@triton.jit
def _find(counts, k, BINS: tl.constexpr, PARTS: tl.constexpr):
    """The bin where the count from the lowest reaches k; the count below it; and in it."""
    i = tl.arange(0, BINS)
    n = tl.load(counts + i)
    for copy in tl.static_range(1, PARTS):
        n += tl.load(counts + copy * BINS + i)
    reached = tl.cumsum(n, axis=0)
    place = tl.sum((reached < k).to(tl.int32), axis=0)
    below = tl.max(tl.where(reached < k, reached, 0), axis=0)
    return place, below, tl.sum(tl.where(i == place, n, 0), axis=0)


@triton.jit(do_not_specialize=["k"])
def _count_kernel(
    work, weighting, row_weight, counts, rows, stride, start, end, k,
    DIGIT: tl.constexpr, ROW_WEIGHT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Histogram of one digit of the keys of columns [start, end), among those that share all digits before it.

    counts: the histograms in order, then, for digits 1 and 2, what their kernels found first: the digits of the k-th
    lowest key so far, and its rank among the keys that share them.
    """
    state = counts + STATE
    second = counts + (COPIES * FIRST_BINS)
    if DIGIT == 1:
        digits, below, _ = _find(counts, k, FIRST_BINS, COPIES)
        rank = k - below
    if DIGIT == 2:
        before, rank = tl.load(state), tl.load(state + 1)
        place, below, _ = _find(second, rank, LATER_BINS, 1)
        digits, rank = (before << LATER_BITS) | place, rank - below
    if DIGIT > 0:
        if tl.program_id(0) == 0:
            tl.store(state + 2 * DIGIT - 2, digits)
            tl.store(state + 2 * DIGIT - 1, rank)
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = start + tl.arange(0, BLOCK_C)
    w, counted = _load_tile(work, r, c, rows, stride, end)
    key = _keys(w, weighting, row_weight, r, c, rows, end, ROW_WEIGHT)
    if DIGIT == 0:
        target = counts + (tl.program_id(0) % COPIES) * FIRST_BINS + (key >> (2 * LATER_BITS))
    else:
        shared = key >> ((2 - DIGIT) * LATER_BITS)
        counted &= (shared >> LATER_BITS) == digits
        target = second + (DIGIT - 1) * LATER_BINS + (shared & (LATER_BINS - 1))
    tl.atomic_add(target, 1, mask=counted, sem="relaxed")


@triton.jit
def _lowest(key, inside, work, weighting, row_weight, counts, rows, stride, start, end,
            ROW_WEIGHT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """Mask of the k lowest keys of the block in this program's tile; among equal ones the lowest (row, column) goes."""
    rank = tl.load(counts + STATE + 3)
    third = counts + (COPIES * FIRST_BINS) + LATER_BINS
    place, below, equal = _find(third, rank, LATER_BINS, 1)
    kth = (tl.load(counts + STATE + 2) << LATER_BITS) | place
    removed = rank - below
    drop = (key <= kth) & inside & (removed > 0)
    if (removed < equal) & (removed > 0):
        c = start + tl.arange(0, BLOCK_C)
        for first in range(0, tl.program_id(0) * BLOCK_R, BLOCK_R):
            r = first + tl.arange(0, BLOCK_R)
            w, above = _load_tile(work, r, c, rows, stride, end)
            ties = (_keys(w, weighting, row_weight, r, c, rows, end, ROW_WEIGHT) == kth) & above
            removed -= tl.sum(tl.sum(ties.to(tl.int32), axis=1), axis=0)
        ties = ((key == kth) & inside).to(tl.int32)
        in_rows = tl.sum(ties, axis=1)
        place_of_tie = tl.cumsum(ties, axis=1) + (tl.cumsum(in_rows, axis=0) - in_rows)[:, None]
        drop &= (key < kth) | (place_of_tie <= removed)
    return drop


@triton.jit
def _lowest_of_rows(key, n, first, GROUP: tl.constexpr, BLOCK_C: tl.constexpr):
    """Mask of the n [BLOCK_R] lowest of keys [first, first + GROUP) of each row, lowest column first among ties."""
    j = tl.arange(0, BLOCK_C)[None, :]
    rank = tl.zeros_like(key)
    for other in range(first, first + GROUP):
        value = tl.sum(tl.where(j == other, key, 0), axis=1)[:, None]
        rank += ((value < key) | ((value == key) & (other < j))).to(tl.int32)
    return (rank < n[:, None]) & (j >= first) & (j < first + GROUP)


@triton.jit
def _walk_kernel(
    work, weight, factor, weighting, row_weight, errors, chosen, counts, rows, cols, start, end, dropped,
    stride, stride_r, stride_c, chosen_stride_r, chosen_stride_c,
    RULE: tl.constexpr, GROUP: tl.constexpr, ROW_WEIGHT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Prune columns [start, end) of BLOCK_R rows and hand their errors on.

    chosen: the mask [R, C] for RULE "mask", keep [R] for "keep". GROUP: columns of an n:m group, from each of which
    `dropped` go; for "keep" the whole block.
    """
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    j = tl.arange(0, BLOCK_C)
    c = start + j
    w, inside = _load_tile(work, r, c, rows, stride, end)
    n = tl.zeros((BLOCK_R,), tl.int32) + dropped
    drop = inside & (r < 0)[:, None]
    if RULE == "sparsity":
        key = _keys(w, weighting, row_weight, r, c, rows, end, ROW_WEIGHT)
        drop = _lowest(key, inside, work, weighting, row_weight, counts, rows, stride, start, end,
                       ROW_WEIGHT, BLOCK_R, BLOCK_C)  # fmt: skip
    if RULE == "mask":
        place = chosen + r[:, None].to(tl.int64) * chosen_stride_r + c[None, :].to(tl.int64) * chosen_stride_c
        drop = tl.load(place, mask=inside, other=1) == 0
    if RULE == "keep":
        pruned = cols - tl.load(chosen + r, mask=r < rows, other=0)
        n = (pruned * end // cols - pruned * start // cols).to(tl.int32)
    upper = factor + (tl.zeros((), tl.int64) + start) * (cols + 1)
    for column in range(0, end - start):
        if RULE == "pattern" or RULE == "keep":
            if (column % GROUP == 0) & ((column + GROUP <= end - start) | (RULE == "keep")):
                key = _keys(w, weighting, row_weight, r, c, rows, end, ROW_WEIGHT)
                key = tl.where((c < end)[None, :], key, 0x7FFFFFFF)
                drop = drop | _lowest_of_rows(key, n, column, GROUP, BLOCK_C)
        u = tl.load(upper + j, mask=(j > column) & (c < end), other=0.0)
        diagonal = tl.load(upper + column)
        removed = tl.sum(tl.where(drop & (j == column)[None, :], w, 0.0), axis=1)
        error = tl.div_rn(removed, tl.zeros_like(removed) + diagonal)
        tl.store(errors + r, error, mask=r < rows)
        w -= error[:, None] * u[None, :]
        upper += cols
        errors += rows
    place = weight + r[:, None].to(tl.int64) * stride_r + c[None, :].to(tl.int64) * stride_c
    tl.store(place, tl.where(drop, 0.0, w).to(weight.dtype.element_ty), mask=inside)


def _prune_block(call: ObsCall, work: Tensor, weighting: Tensor, block: Block, errors: Tensor, counts: Tensor) -> None:
    rows, cols = call.weight.shape
    stride = work.stride(0)
    columns = power_of_2(block.end - block.start)
    tile = {"ROW_WEIGHT": call.row_weight is not None, "BLOCK_C": max(16, columns)}
    for digit in range(3 if call.rule == "sparsity" else 0):
        launch(
            _count_kernel, (cdiv(rows, COUNT_R), 1, 1),
            work, weighting, call.row_weight, counts, rows, stride, *block,
            DIGIT=digit, BLOCK_R=COUNT_R, num_warps=COUNT_WARPS, **tile,
        )  # fmt: skip
    launch(
        _walk_kernel, (cdiv(rows, WALK_R), 1, 1),
        work, call.weight, call.factor, weighting, call.row_weight, errors, call.chosen, counts,
        rows, cols, *block, stride, *call.weight.stride(),
        *(call.chosen.stride() if call.rule == "mask" else (0, 0)),
        RULE=call.rule, GROUP=call.group or tile["BLOCK_C"], BLOCK_R=WALK_R, num_warps=WALK_WARPS, **tile,
    )  # fmt: skip


def obs_prune_(call: ObsCall) -> None:
    if not serves(call.weight) or call.blocks[0].end > MAX_BLOCK:
        return NotImplemented
    walk(call, _prune_block, COUNTERS)
    return None
