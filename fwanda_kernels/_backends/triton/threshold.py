"""Exact global threshold over a list of matrices, decided on the device: sample, bracket, histogram, count.

A sorted sample of about SAMPLE keys brackets the K-th largest key. A pass over the weights counts, per row, the keys
above and inside the bracket, marks the stretches of a row that hold a key inside, and histograms these keys; the
bracket shrinks to one bin. If a bin is several keys wide, a second pass makes it one key. A bracket that missed (known
from the counts) becomes the whole missing side, for which a third pass is launched and otherwise returns at once. The
last pass reads only the marked stretches. The sample's own K-th key, where heavy ties would sit, is never put into the
histogram: its count is the inside ones less the rest.

Convention: a table row of int64 describes a matrix (see _groups()); a tile is TILE_R rows of one matrix; marks has a
bit for each of up to 32 equal stretches of a row; state is int32 [low, high, pivot, active, counted]: the bracket is
low <= key <= high, and the last pass that was not skipped counted the keys above `counted`. Memory beside the weights:
6 MB + 12 B per row, and about 40 B per key of the sample while that is sorted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._checks import new_flag, raise_if_bad
from ..._ties import keep_last_ties
from .common import BAD_WEIGHT, INFINITE_BITS, exact_float, flag, flag_scale, in_vectors, serves
from .launch import cdiv, find, launch, power_of_2, table_of

SAMPLE = 1 << 23
STANDARD_DEVIATIONS = 3  # of the wanted rank in the sample: what the first bracket spans to either side
BIN_BITS = tl.constexpr(18)
MARK_BITS = tl.constexpr(5)  # a row has at most 2 ** MARK_BITS marks
BINS, PARTS = 1 << 18, 256
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
    like, entries, count, sample, table, tile_map, bad,
    TILE_R: tl.constexpr, BLOCK: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    """Describe a matrix in the table and the tile map, check its scales, and draw its part of the sample.

    entries: _Group.entries, by table_of().
    """
    matrix, block = find(entries, count, BLOCK_L)
    entry = entries + matrix
    if block == 0:
        for field in tl.static_range(FIELDS):
            tl.store(table + matrix * FIELDS + field, tl.load(entry + (field + 1) * count))
    weight = tl.load(entry + count).to(like.dtype)
    row_scale = tl.load(entry + 2 * count).to(tl.pointer_type(tl.float32))
    col_scale = tl.load(entry + 3 * count).to(tl.pointer_type(tl.float32))
    rows = tl.load(entry + 4 * count).to(tl.int32)
    cols = tl.load(entry + 5 * count).to(tl.int32)
    stride_r = tl.load(entry + 6 * count)
    stride_c = tl.load(entry + 7 * count)
    first_tile = tl.load(entry + 9 * count)
    begin = tl.load(entry + 10 * count)
    samples = tl.load(entry + 11 * count)
    i = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(tile_map + first_tile + i, tl.zeros((BLOCK,), tl.int32) + matrix, mask=i < (rows + TILE_R - 1) // TILE_R)
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
    tl.store(sample + begin + i, key, mask=drawn)


@triton.jit(do_not_specialize=["drawn", "place", "margin"])
def _bracket_kernel(ascending, state, drawn, place, margin):
    """The keys `margin` places to either side of `place` in the sorted sample, as the first state."""
    below, beyond = place - margin, place + margin
    low = tl.load(ascending + below, mask=below >= 0, other=0)
    high = tl.load(ascending + beyond, mask=beyond < drawn, other=INFINITE_BITS)
    tl.store(state, tl.minimum(low, INFINITE_BITS))
    tl.store(state + 1, tl.minimum(high, INFINITE_BITS))
    tl.store(state + 2, tl.minimum(tl.load(ascending + place), INFINITE_BITS))
    tl.store(state + 3, 1)
    tl.store(state + 4, INFINITE_BITS)


@triton.jit(do_not_specialize=["rows"])
def _sum_kernel(histogram, above, inside, state, sums, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """sums [3, programs]: of WIDTH bins, and of the counts of some rows above and inside the bracket."""
    if tl.load(state + 3) != 0:
        part, parts = tl.program_id(0), tl.num_programs(0)
        n_above = tl.zeros((BLOCK,), tl.int64)
        n_inside = tl.zeros((BLOCK,), tl.int64)
        for start in range(part * BLOCK, rows, parts * BLOCK):
            row = start + tl.arange(0, BLOCK)
            n_above += tl.load(above + row, mask=row < rows, other=0)
            n_inside += tl.load(inside + row, mask=row < rows, other=0)
        tl.store(sums + part, tl.sum(tl.load(histogram + part * WIDTH + tl.arange(0, WIDTH)), axis=0))
        tl.store(sums + parts + part, tl.sum(n_above, axis=0))
        tl.store(sums + 2 * parts + part, tl.sum(n_inside, axis=0))


@triton.jit
def _last_with(counts, wanted):
    """The last place from which on the counts sum up to at least `wanted`, or 0."""
    from_here = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
    return tl.maximum(tl.sum((from_here >= wanted).to(tl.int32), axis=0) - 1, 0)


@triton.jit(do_not_specialize=["total"])
def _narrow_kernel(histogram, sums, state, total, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """Shrink the bracket to the bin that holds the total-th largest key, or move it to the side where that key is.

    It never becomes empty, not even if scores are NaN: nothing else bounds the writes to the histogram.
    """
    if tl.load(state + 3) != 0:
        low, high, pivot = tl.load(state), tl.load(state + 1), tl.load(state + 2)
        part, i = tl.arange(0, PARTS), tl.arange(0, WIDTH)
        n_part = tl.load(sums + part)
        n_above = tl.sum(tl.load(sums + PARTS + part), axis=0)
        n_inside = tl.sum(tl.load(sums + 2 * PARTS + part), axis=0)
        shift = _least_shift(high - low, BIN_BITS)
        pivot_bin = tl.minimum(tl.maximum((pivot - low) >> shift, 0), PARTS * WIDTH - 1)
        n_pivot = n_inside - tl.sum(n_part, axis=0)
        n_part += tl.where(part == pivot_bin // WIDTH, n_pivot, 0)
        wanted = total - n_above
        hit = _last_with(n_part, wanted)
        wanted -= tl.sum(tl.where(part > hit, n_part, 0), axis=0)
        n_bin = tl.load(histogram + hit * WIDTH + i) + tl.where(hit * WIDTH + i == pivot_bin, n_pivot, 0)
        hit = hit * WIDTH + _last_with(n_bin, wanted)
        bottom = tl.minimum(low + (hit.to(tl.int64) << shift), high)
        top = tl.minimum(bottom + (tl.full((), 1, tl.int64) << shift) - 1, high)
        too_high, too_low = n_above + n_inside < total, n_above >= total
        new_low = tl.where(too_high, 0, tl.where(too_low, tl.minimum(high, INFINITE_BITS - 1) + 1, bottom))
        new_high = tl.where(too_high, tl.maximum(low - 1, 0), tl.where(too_low, INFINITE_BITS, top))
        tl.store(state, new_low.to(tl.int32))
        tl.store(state + 1, new_high.to(tl.int32))
        tl.store(state + 4, high)
        tl.store(state + 3, (too_high | too_low | (new_low < new_high)).to(tl.int32))


@triton.jit
def _least_shift(value, BITS: tl.constexpr):
    """The least shift to the right that brings a value below 2 ** BITS."""
    return tl.sum(((value >> tl.minimum(BITS + tl.arange(0, 32), 31)) > 0).to(tl.int32), axis=0)


@triton.jit
def _in_eights(v):
    """Sums of 8 neighbours, which one thread holds."""
    return tl.sum(tl.reshape(v, (v.shape[0] // 8, 8)), axis=1)


@triton.jit
def _place_of(tile, table, tile_map, TILE_R: tl.constexpr):
    """Of a tile: the table row of its matrix, its first row in the matrix and in all rows, and the rows from there."""
    entry = table + tl.load(tile_map + tile).to(tl.int64) * FIELDS
    r = (tile - tl.load(entry + 8).to(tl.int32)) * TILE_R
    return entry, r, tl.load(entry + 7) + r, tl.load(entry + 3).to(tl.int32) - r


@triton.jit
def _matrix_of(entry, like, r, VECTORS: tl.constexpr):
    """Of a table row: pointers to row r of the weight, to its scale and to the column scales; columns, strides."""
    weight = tl.load(entry).to(like.dtype)
    row_scale = tl.load(entry + 1).to(tl.pointer_type(tl.float32)) + r
    col_scale = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
    cols = tl.load(entry + 4).to(tl.int32)
    stride_r = tl.load(entry + 5)
    stride_c = tl.load(entry + 6)
    if VECTORS:
        weight, col_scale = tl.multiple_of(weight, 16), tl.multiple_of(col_scale, 16)
        cols, stride_r, stride_c = tl.multiple_of(cols, 16), tl.multiple_of(stride_r, 16), 1
    return weight + r.to(tl.int64) * stride_r, row_scale, col_scale, cols, stride_r, stride_c


@triton.jit
def _count_kernel(
    like, table, tile_map, state, histogram, above, inside, marks, bad, tiles,
    VECTORS: tl.constexpr, TILE_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Count the keys above and inside the bracket in each row of some tiles; mark and histogram those inside."""
    if tl.load(state + 3) != 0:
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            _count_tile(like, table, tile_map, state, histogram, above, inside, marks, bad, tile,
                        VECTORS, TILE_R, BLOCK_C)  # fmt: skip


@triton.jit
def _count_tile(like, table, tile_map, state, histogram, above, inside, marks, bad, tile,
                VECTORS: tl.constexpr, TILE_R: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    entry, r, target, rows = _place_of(tile, table, tile_map, TILE_R)
    weight, row_scale, col_scale, cols, stride_r, stride_c = _matrix_of(entry, like, r, VECTORS)
    low, high, pivot = tl.load(state), tl.load(state + 1), tl.load(state + 2)
    width = (high - low).to(tl.uint32, bitcast=True)
    shift = _least_shift(high - low, BIN_BITS)
    mark_shift = _least_shift((cols - 1) // BLOCK_C, MARK_BITS)
    scales, n_above, n_inside, hits = (), (), (), ()
    for q in tl.static_range(TILE_R):
        scales = scales + (tl.load(row_scale + q, mask=q < rows, other=0.0),)
        n_above = n_above + (tl.zeros((BLOCK_C // 8,), tl.int32),)
        n_inside = n_inside + (tl.zeros((BLOCK_C // 8,), tl.int32),)
        hits = hits + (tl.full((), 0, tl.int32),)
    poison = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(0, cols, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        s = tl.load(col_scale + c, mask=c < cols, other=0.0)
        weights = ()
        for q in tl.static_range(TILE_R):
            address = weight + q * stride_r + c.to(tl.int64) * stride_c
            weights = weights + (tl.load(address, mask=c < tl.where(q < rows, cols, 0), other=0.0),)
        now_above, now_inside, now_hits = (), (), ()
        for q in tl.static_range(TILE_R):
            w = exact_float(weights[q])
            key = _scaled_key(w, s, scales[q])
            # a count adds the sign bit of a difference: the fewest instructions, which limit the speed here
            place = (key - low).to(tl.uint32, bitcast=True)
            beyond = (high - key).to(tl.uint32, bitcast=True) >> 31
            now_above = now_above + (n_above[q] + _in_eights(beyond.to(tl.int32, bitcast=True)),)
            poison = tl.fma(w, 0.0, poison)
            more, hit = n_inside[q], hits[q]
            if tl.min(place, axis=0) <= width:
                counted = (place <= width) & (c < tl.where(q < rows, cols, 0))
                more += _in_eights(counted.to(tl.int32))
                hit = hit | (tl.full((), 1, tl.int32) << (start // BLOCK_C >> mark_shift))
                tl.atomic_add(histogram + (place >> shift), 1, mask=counted & (key != pivot), sem="relaxed")
            now_inside, now_hits = now_inside + (more,), now_hits + (hit,)
        n_above, n_inside, hits = now_above, now_inside, now_hits
    for q in tl.static_range(TILE_R):
        tl.store(above + target + q, tl.sum(n_above[q], axis=0), mask=q < rows)
        tl.store(inside + target + q, tl.sum(n_inside[q], axis=0), mask=q < rows)
        tl.store(marks + target + q, hits[q], mask=q < rows)
    flag(bad, tl.max((poison != 0).to(tl.int32), axis=0) * BAD_WEIGHT)


@triton.jit
def _finish_kernel(
    like, table, tile_map, state, above, inside, marks, tiles,
    VECTORS: tl.constexpr, TILE_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Complete the counts above the threshold, and count the keys equal to it, in the marked stretches of each row."""
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        entry, r, target, rows = _place_of(tile, table, tile_map, TILE_R)
        hits, any_hit = (), tl.full((), 0, tl.int32)
        for q in tl.static_range(TILE_R):
            hits = hits + (tl.load(marks + target + q, mask=q < rows, other=0),)
            any_hit = any_hit | hits[q]
        if any_hit != 0:
            weight, row_scale, col_scale, cols, stride_r, stride_c = _matrix_of(entry, like, r, VECTORS)
            threshold, counted = tl.load(state), tl.load(state + 4)
            mark_shift = _least_shift((cols - 1) // BLOCK_C, MARK_BITS)
            scales, n_above, n_ties = (), (), ()
            for q in tl.static_range(TILE_R):
                scales = scales + (tl.load(row_scale + q, mask=q < rows, other=0.0),)
                n_above = n_above + (tl.zeros((BLOCK_C // 8,), tl.int32),)
                n_ties = n_ties + (tl.zeros((BLOCK_C // 8,), tl.int32),)
            for start in range(0, cols, BLOCK_C):
                mark = start // BLOCK_C >> mark_shift
                if ((any_hit >> mark) & 1) != 0:
                    c = start + tl.arange(0, BLOCK_C)
                    s = tl.load(col_scale + c, mask=c < cols, other=0.0)
                    weights = ()
                    for q in tl.static_range(TILE_R):
                        address = weight + q * stride_r + c.to(tl.int64) * stride_c
                        here = tl.where(((hits[q] >> mark) & 1) != 0, cols, 0)
                        weights = weights + (tl.load(address, mask=c < here, other=0.0),)
                    now_above, now_ties = (), ()
                    for q in tl.static_range(TILE_R):
                        larger, ties = n_above[q], n_ties[q]
                        if ((hits[q] >> mark) & 1) != 0:
                            key = _scaled_key(exact_float(weights[q]), s, scales[q])
                            larger += _in_eights(((key > threshold) & (key <= counted)).to(tl.int32))
                            ties += _in_eights(((key == threshold) & (c < cols)).to(tl.int32))
                        now_above, now_ties = now_above + (larger,), now_ties + (ties,)
                    n_above, n_ties = now_above, now_ties
            for q in tl.static_range(TILE_R):
                before = tl.load(above + target + q, mask=q < rows, other=0)
                tl.store(above + target + q, before + tl.sum(n_above[q], axis=0), mask=q < rows)
                tl.store(inside + target + q, tl.sum(n_ties[q], axis=0), mask=q < rows)


class _Group:
    """Matrices of one dtype, which share launches.

    table, tile_map: [L, FIELDS] int64 and [tiles] int32, which draw() writes.
    grid: of a pass over the tiles.
    """

    def __init__(self, like: Tensor):
        self.like, self.programs, self.tiles = like, 0, 0
        self.entries: list[tuple[int, ...]] = []  # first program of draw(), FIELDS of the table, place in the sample

    def draw(self, sample: Tensor, bad: Tensor) -> None:
        count, device = len(self.entries), sample.device
        self.grid = min(self.tiles, PROGRAMS), 1, 1
        self.table = torch.empty(count, FIELDS.value, dtype=torch.int64, device=device)
        self.tile_map = torch.empty(self.tiles, dtype=torch.int32, device=device)
        launch(
            _sample_kernel, (self.programs, 1, 1),
            self.like, table_of(self.entries, self.like), count, sample, self.table, self.tile_map, bad,
            TILE_R=TILE_R, BLOCK=BLOCK, BLOCK_L=max(16, power_of_2(count)), num_warps=4,
        )  # fmt: skip


def _groups(
    weights: list[Tensor], row_scales: list[Tensor], col_scales: list[Tensor], drawn: int, size: int
) -> tuple[list[_Group], int]:
    """Groups, and rows of all matrices. A matrix's share of the sample is its share of the weights."""
    groups: dict[torch.dtype, _Group] = {}
    all_rows, before, end = 0, 0, 0
    for weight, row_scale, col_scale in zip(weights, row_scales, col_scales, strict=True):
        rows, cols = weight.shape
        before += rows * cols
        begin, end = end, before * drawn // size
        group = groups.get(weight.dtype) or groups.setdefault(weight.dtype, _Group(weight))
        group.entries.append((
            group.programs, weight.data_ptr(), row_scale.data_ptr(), col_scale.data_ptr(), rows, cols,
            *weight.stride(), all_rows, group.tiles, begin, end - begin,
        ))  # fmt: skip
        group.programs += cdiv(max(end - begin, rows, cols), BLOCK)
        group.tiles += cdiv(rows, TILE_R)
        all_rows += rows
    return list(groups.values()), all_rows


def first_bracket(sample: Tensor, total: int, size: int) -> Tensor:
    """First state: keys around the sample's own threshold, STANDARD_DEVIATIONS of its rank to either side."""
    drawn = sample.numel()
    place = min(drawn - 1, (size - total) * drawn // size)
    # a rank deviates by sqrt(drawn) / 2 at most
    margin = 0 if drawn == size else int(STANDARD_DEVIATIONS * drawn**0.5 / 2) + 2
    state = torch.empty(5, dtype=torch.int32, device=sample.device)
    launch(_bracket_kernel, (1, 1, 1), sample.sort().values, state, drawn, place, margin, num_warps=1)
    return state


def _narrow(state: Tensor, histogram: Tensor, above: Tensor, inside: Tensor, total: int) -> None:
    sums = torch.empty(3, PARTS, dtype=torch.int64, device=state.device)
    launch(
        _sum_kernel, (PARTS, 1, 1), histogram, above, inside, state, sums, above.numel(),
        WIDTH=BINS // PARTS, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    launch(
        _narrow_kernel, (1, 1, 1), histogram, sums, state, total, PARTS=PARTS, WIDTH=BINS // PARTS, num_warps=4,
    )  # fmt: skip


def select_threshold(
    weights: list[Tensor], row_scales: list[Tensor], col_scales: list[Tensor], total: int, bad: Tensor | None
) -> Tensor:
    if not serves(weights[0]) or not all([w.numel() for w in weights]):
        return NotImplemented
    codes = new_flag(weights[0]) if bad is None else bad
    row_scales, col_scales = [s.contiguous() for s in row_scales], [s.contiguous() for s in col_scales]
    keep = _select(weights, row_scales, col_scales, total, codes)
    if bad is None:
        raise_if_bad("select_threshold", codes)
    return keep


def _select(weights: list[Tensor], row_scales: list[Tensor], col_scales: list[Tensor], total: int, bad: Tensor):
    """Counts per row. The kernels search for total 1 where it is 0, so that they check the values all the same."""
    device, wanted, size = weights[0].device, max(total, 1), sum([w.numel() for w in weights])
    sample = torch.empty(min(SAMPLE, size), dtype=torch.int32, device=device)
    groups, rows = _groups(weights, row_scales, col_scales, sample.numel(), size)
    for group in groups:
        group.draw(sample, bad)
    state = first_bracket(sample, wanted, size)
    del sample
    vectors = all(in_vectors(w) and s.data_ptr() % 16 == 0 for w, s in zip(weights, col_scales, strict=True))
    above, inside, marks = torch.empty(3, rows, dtype=torch.int32, device=device)
    tile = {"VECTORS": vectors, "TILE_R": TILE_R, "BLOCK_C": BLOCK_C, "num_warps": WARPS}
    for histogram in torch.zeros(PASSES, BINS, dtype=torch.int64, device=device):
        for group in groups:
            launch(
                _count_kernel, group.grid, group.like, group.table, group.tile_map, state,
                histogram, above, inside, marks, bad, group.tiles, **tile,
            )  # fmt: skip
        _narrow(state, histogram, above, inside, wanted)
    for group in groups:
        launch(
            _finish_kernel, group.grid, group.like, group.table, group.tile_map, state,
            above, inside, marks, group.tiles, **tile,
        )  # fmt: skip
    keep = keep_last_ties(above.long(), inside.long(), wanted - above.sum())
    return keep if total else torch.zeros_like(keep)
