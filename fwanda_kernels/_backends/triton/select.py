"""Row selection: one program per row finds the k-th largest score by counting, with the row's keys in registers.

Convention: a row is cut into PARTS of SIZE columns, of which only the last may reach beyond the row. Keys are pairs of
16 bits (pairs.py). First a key is the upper half of a score. Where that leaves columns undecided, the scores of their
bucket are numbered from 1 in cells of 4, then of 1; smaller scores get 0, larger ones the number after the last. The
k-th largest key lies at `low` or above and below `high`: count(>= low) = n_low >= k > n_high = count(>= high).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._checks import new_flag, raise_if_bad
from .common import (
    BAD_KEEP,
    BAD_WEIGHT,
    INFINITE_BITS,
    check_values,
    exact_float,
    flag,
    flag_scale,
    in_vectors,
    magnitude_bits,
    serves,
)
from .launch import cdiv, find, launch, power_of_2, table_of
from .pairs import add_halves, at_least, bound, halves, has_simd, largest_half, moved, pair_high, where_one

# of upper halves: interpolation assumes that few scores lie more than 10 octaves under the largest
SPAN = tl.constexpr(10 << 7)
BISECT_EVERY, BISECT_FROM = tl.constexpr(8), tl.constexpr(16)
MOST_COLUMNS = 1 << 16
MOST_COLUMNS_A_THREAD = {True: 112, False: 48}  # with SIMD, without: the most that need no spills
CELLS = tl.constexpr(1 << 14)
MANY = tl.constexpr(16)  # a bucket with more than 1 / MANY of the row holds ties


@triton.jit
def _load(weight, scale, cols, stride_c, START: tl.constexpr, SIZE: tl.constexpr, FULL: tl.constexpr):
    """Weights of a part in fp32 and their scales, 0 beyond the row."""
    c = START + tl.arange(0, SIZE)
    address = weight + c.to(tl.int64) * stride_c
    if FULL:
        w = tl.load(address, eviction_policy="evict_last")
        s = tl.load(scale + c, eviction_policy="evict_last")
    else:
        w = tl.load(address, mask=c < cols, other=0.0, eviction_policy="evict_last")
        s = tl.load(scale + c, mask=c < cols, other=0.0, eviction_policy="evict_last")
    return exact_float(w), s


@triton.jit
def _bits(w, s, SIMD: tl.constexpr):
    """Bits of the scores of fp32 weights; a scale may be -0.0."""
    if SIMD:  # compilers make |w s| of a product of magnitudes, which takes one instruction more
        return tl.inline_asm_elementwise(
            "{ .reg .f32 x, y; abs.f32 x, $1; abs.f32 y, $2; mul.rn.f32 x, x, y; mov.b32 $0, x; }", "=r,f,f",
            [w, s], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return (tl.abs(w) * tl.abs(s)).to(tl.int32, bitcast=True)


@triton.jit
def _load_keys(weight, scale, cols, stride_c,
               START: tl.constexpr, SIZE: tl.constexpr, FULL: tl.constexpr, SIMD: tl.constexpr):  # fmt: skip
    """Bits of the scores of a part; -1 beyond the row."""
    w, s = _load(weight, scale, cols, stride_c, START, SIZE, FULL)
    keys = _bits(w, s, SIMD)
    return keys if FULL else tl.where(START + tl.arange(0, SIZE) < cols, keys, -1)


@triton.jit
def _count(parts, key, SIMD: tl.constexpr):
    """How many keys are >= key."""
    bounds = bound(key, SIMD)
    n = at_least(parts[0], bounds, SIMD)
    for i in tl.static_range(1, len(parts)):
        n += at_least(parts[i], bounds, SIMD)
    return add_halves(n)


@triton.jit
def _guess(low, high, n_low, n_high, k, span, step, idle):
    """A key strictly between low and high, near the k-th largest: interpolated on the counts, at times bisected."""
    root = tl.rsqrt((n_low - n_high).to(tl.float32))
    anchor = tl.maximum(low, high - span)
    rank = (n_low - k).to(tl.float32) + 0.5
    near = anchor + (rank * root * root * (high - anchor).to(tl.float32)).to(tl.int32)
    bisect = (step % BISECT_EVERY == BISECT_EVERY - 1) | (step >= BISECT_FROM)
    guess = tl.where(bisect, low + ((high - low) >> 1), near)
    guess = tl.where(idle, high - 1, guess)  # no key in the lower part of the bracket: all may be equal
    return tl.minimum(tl.maximum(guess, low + 1), high - 1)


@triton.jit
def _search(parts, low, high, n_low, n_high, k, span, SIMD: tl.constexpr):
    """Narrow the bracket until it holds k keys or one key: (low, n_low, n_high).

    Few keys are expected in the bracket below high - span.
    """
    step = tl.zeros((), tl.int32)
    low, high, n_high = low + step, high + step, n_high + step
    idle = step > 0
    while (high - low > 1) & (n_low != k):
        guess = _guess(low, high, n_low, n_high, k, span, step, idle)
        n = _count(parts, guess, SIMD)
        enough = n >= k
        idle = (n == n_low) & (step == 0)
        low = tl.where(enough, guess, low)
        n_low = tl.where(enough, n, n_low)
        high = tl.where(enough, high, guess)
        n_high = tl.where(enough, n_high, n)
        step += 1
    return low, n_low, n_high


@triton.jit
def _ends(weight, scale, cols, stride_c, bucket,
          PARTS: tl.constexpr, SIZE: tl.constexpr, FULL: tl.constexpr, SIMD: tl.constexpr):  # fmt: skip
    """The smallest and the largest score with the upper half `bucket`."""
    lowest = tl.zeros((SIZE,), tl.int32) + 0x7FFFFFFF
    highest = tl.zeros((SIZE,), tl.int32)
    for i in tl.static_range(PARTS):
        keys = _load_keys(weight, scale, cols, stride_c, i * SIZE, SIZE, FULL or i < PARTS - 1, SIMD)
        inside = keys >> 16 == bucket
        lowest = tl.minimum(lowest, tl.where(inside, keys, 0x7FFFFFFF))
        highest = tl.maximum(highest, tl.where(inside, keys, 0))
    return tl.min(lowest, axis=0), tl.max(highest, axis=0)


@triton.jit
def _cells(weight, scale, cols, stride_c, lowest, last, shift,
           PARTS: tl.constexpr, SIZE: tl.constexpr, FULL: tl.constexpr, SIMD: tl.constexpr):  # fmt: skip
    """Pairs of the cells of 2^shift scores, counted from 1 at `lowest`; 0 below, `last` + 1 above."""
    parts = ()
    first = lowest - (1 << shift)
    end = (last + 1) << shift
    for i in tl.static_range(PARTS):
        keys = _load_keys(weight, scale, cols, stride_c, i * SIZE, SIZE, FULL or i < PARTS - 1, SIMD)
        parts = parts + (pair_high(moved(keys, first, end, 16 - shift, SIMD), SIMD),)
    return parts


@triton.jit
def _without_first_ties(parts, key, n, n_end, k, SIZE: tl.constexpr, SIMD: tl.constexpr):
    """The keys with those equal to `key` lowered by 1 in the first columns, so that k keys are at least `key`.

    n keys are at least `key`, and n_end are larger.
    """
    equal, larger, pairs = bound(key, SIMD), bound(key + 1, SIMD), tl.arange(0, SIZE // 2)
    # with the ties from the pair `first` on, n >= k keys stay; with those from `end` on, n_end < k
    first = tl.zeros((), tl.int32)
    end = first + len(parts) * SIZE // 2
    step = first
    while (n != k) & (end - first > 1):
        share = (n - k).to(tl.float32) / (n - n_end).to(tl.float32)
        middle = first + (share * (end - first).to(tl.float32)).to(tl.int32)
        middle = tl.where(step % 2 == 1, first + ((end - first) >> 1), middle)
        middle = tl.minimum(tl.maximum(middle, first + 1), end - 1)
        kept = tl.zeros((SIZE // 2,), tl.int32)
        for i in tl.static_range(len(parts)):
            later = pairs >= middle - i * SIZE // 2
            kept += at_least(parts[i], tl.where(later, equal, larger), SIMD)
        found = add_halves(kept)
        enough = found >= k
        first = tl.where(enough, middle, first)
        n = tl.where(enough, found, n)
        end = tl.where(enough, end, middle)
        n_end = tl.where(enough, n_end, found)
        step += 1
    lowered = ()
    for i in tl.static_range(len(parts)):
        ties = at_least(parts[i], equal, SIMD) - at_least(parts[i], larger, SIMD)
        place = first - i * SIZE // 2
        in_first = tl.where((pairs == place) & (n != k), 0xFFFF, 0)
        lowered = lowered + (parts[i] - (ties & tl.where(pairs < place, -1, in_first)),)
    return lowered


@triton.jit
def _write(weight, out, ones, cols, stride_c, out_stride_c, START: tl.constexpr, SIZE: tl.constexpr,
           FULL: tl.constexpr, PRUNE: tl.constexpr):  # fmt: skip
    c = START + tl.arange(0, SIZE)
    target = out + c.to(tl.int64) * out_stride_c
    if PRUNE:
        address = weight + c.to(tl.int64) * stride_c
        if FULL:
            tl.store(target, where_one(ones, tl.load(address, eviction_policy="evict_first")))
        else:
            w = tl.load(address, mask=c < cols, other=0.0, eviction_policy="evict_first")
            tl.store(target, where_one(ones, w), mask=c < cols)
    elif FULL:
        tl.store(target, halves(ones))
    else:
        tl.store(target, halves(ones), mask=c < cols)


@triton.jit
def _finite(weight, cols, stride_c, BLOCK: tl.constexpr):
    worst = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, cols, BLOCK):
        c = start + tl.arange(0, BLOCK)
        w = tl.load(weight + c.to(tl.int64) * stride_c, mask=c < cols, other=0.0)
        worst = tl.maximum(worst, magnitude_bits(w))
    return tl.max(worst, axis=0) < INFINITE_BITS


@triton.jit
def _select_row(weight, scale, asked, out, bad, cols, stride_c, out_stride_c,
                PARTS: tl.constexpr, SIZE: tl.constexpr, FULL: tl.constexpr, SIMD: tl.constexpr,
                PRUNE: tl.constexpr):  # fmt: skip
    """Mask or prune the row at `weight`, unless a value does not fit."""
    parts = ()
    for i in tl.static_range(PARTS):
        w, s = _load(weight, scale, cols, stride_c, i * SIZE, SIZE, FULL or i < PARTS - 1)
        parts = parts + (pair_high(_bits(w, s, SIMD), SIMD),)
    largest = largest_half(parts, SIMD)
    code = tl.where((asked < 0) | (asked > cols), BAD_KEEP, 0)
    if largest >= INFINITE_BITS >> 16:
        code |= tl.where(_finite(weight, cols, stride_c, 512), 0, BAD_WEIGHT)
    flag(bad, code)
    if (code == 0) & (largest <= INFINITE_BITS >> 16):
        k = asked.to(tl.int32)
        high = largest + 1
        low = tl.where(k == 0, high, 0)
        low, n_low, n_high = _search(parts, low, high, tl.where(k == 0, 0, cols), 0, k, SPAN, SIMD)
        if n_low != k:
            lowest = low << 16
            highest = lowest | 0xFFFF
            if (n_low - n_high) * MANY > cols:
                lowest, highest = _ends(weight, scale, cols, stride_c, low, PARTS, SIZE, FULL, SIMD)
            shift = tl.where(highest - lowest < CELLS, 0, 2)
            last = ((highest - lowest) >> shift) + 1
            parts = _cells(weight, scale, cols, stride_c, lowest, last, shift, PARTS, SIZE, FULL, SIMD)
            low, n_low, n_high = _search(parts, 1, last + 1, n_low, n_high, k, last, SIMD)
            if (n_low != k) & (shift > 0):
                lowest += (low - 1) << 2
                parts = _cells(weight, scale, cols, stride_c, lowest, 4, 0, PARTS, SIZE, FULL, SIMD)
                low, n_low, n_high = _search(parts, 1, 5, n_low, n_high, k, 4, SIMD)
            if n_low != k:
                parts = _without_first_ties(parts, low, n_low, n_high, k, SIZE, SIMD)
        for i in tl.static_range(PARTS):
            ones = at_least(parts[i], bound(low, SIMD), SIMD)
            _write(weight, out, ones, cols, stride_c, out_stride_c, i * SIZE, SIZE, FULL or i < PARTS - 1, PRUNE)


@triton.jit
def _row_topk_kernel(
    weight, scale, keep, out, bad, cols, stride_r, stride_c, out_stride_r, out_stride_c,
    PARTS: tl.constexpr, SIZE: tl.constexpr, FULL: tl.constexpr, SIMD: tl.constexpr, PRUNE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row == 0:
        for start in range(0, cols, 1024):
            flag_scale(scale, bad, cols, start, 1024)
    _select_row(weight + row * stride_r, scale, tl.load(keep + row), out + row * out_stride_r, bad, cols,
                stride_c, out_stride_c, PARTS, SIZE, FULL, SIMD, PRUNE)  # fmt: skip


@triton.jit
def _foreach_row_topk_kernel(
    like, table, bad, count, cols, PARTS: tl.constexpr, SIZE: tl.constexpr, FULL: tl.constexpr, SIMD: tl.constexpr,
    VECTORS: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    i, row = find(table, count, BLOCK_L)
    entry = table + i
    weight = tl.load(entry + count).to(like.dtype)
    scale = tl.load(entry + 2 * count).to(tl.pointer_type(tl.float32))
    keep = tl.load(entry + 3 * count).to(tl.pointer_type(tl.int64))
    stride_r = tl.load(entry + 4 * count)
    stride_c = tl.load(entry + 5 * count)
    bad += tl.load(entry + 6 * count)
    if VECTORS:
        weight, scale = tl.multiple_of(weight, 16), tl.multiple_of(scale, 16)
        stride_r, stride_c = tl.multiple_of(stride_r, 16), 1
    if row == 0:
        for start in range(0, cols, 1024):
            flag_scale(scale, bad, cols, start, 1024)
    weight += row.to(tl.int64) * stride_r
    _select_row(weight, scale, tl.load(keep + row), weight, bad, cols, stride_c, stride_c,
                PARTS, SIZE, FULL, SIMD, True)  # fmt: skip


@cache
def parts_of(cols: int, simd: bool) -> dict[str, int | bool]:
    """The kernels' constants for rows of so many columns. A thread holds 8 or 16 columns of each part."""
    if cols <= 256:
        size, warps = max(32, power_of_2(cols)), 1
    else:
        warps = min(16, power_of_2(cdiv(cols, 32 * MOST_COLUMNS_A_THREAD[simd])))
        size = 512 * warps
        if 16 * (cdiv(cols, size) * size - cols) > cols:  # smaller parts waste less, but take long to compile
            size //= 2
    parts = cdiv(cols, size)
    return {"PARTS": parts, "SIZE": size, "FULL": cols == parts * size, "SIMD": simd, "num_warps": warps}


def _launch(weight: Tensor, scale: Tensor, keep: Tensor, out: Tensor, bad: Tensor, prune: bool) -> None:
    rows, cols = weight.shape
    launch(
        _row_topk_kernel, (rows, 1, 1), weight, scale, keep, out, bad, cols, *weight.stride(), *out.stride(),
        **parts_of(cols, has_simd(weight)), PRUNE=prune,
    )  # fmt: skip


def row_topk_mask(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> Tensor:
    if not serves(weight) or weight.shape[1] > MOST_COLUMNS:
        return NotImplemented
    mask = torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
    codes = new_flag(weight) if bad is None else bad
    _launch(weight, scale.contiguous(), keep.contiguous(), mask.view(torch.uint8), codes, prune=False)
    if bad is None:
        raise_if_bad("row_topk_mask", codes)
    return mask


def row_topk_prune_(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> None:
    """With `bad`, a row that holds a bad value stays as it was; without, values are checked before any is written."""
    if not serves(weight) or weight.shape[1] > MOST_COLUMNS:
        return NotImplemented
    scale, keep = scale.contiguous(), keep.contiguous()
    if bad is None:
        check_values("row_topk_prune_", weight, scale, keep)
        bad = new_flag(weight)
    _launch(weight, scale, keep, weight, bad, prune=True)
    return None


def foreach_row_topk_prune_(
    weights: list[Tensor], scales: list[Tensor], keeps: list[Tensor], bad: Tensor | None
) -> None:
    """One launch for each dtype and number of columns; without `bad`, all are checked before any is written."""
    if not all(serves(weight) and weight.shape[1] <= MOST_COLUMNS for weight in weights):
        return NotImplemented
    lists = list(zip(weights, [s.contiguous() for s in scales], [k.contiguous() for k in keeps], strict=True))
    if bad is None:
        for i, matrix in enumerate(lists):
            check_values(f"foreach_row_topk_prune_ at index {i}", *matrix)
        bad = new_flag(weights[0], len(lists))
    groups: dict[tuple, list[tuple[int, Tensor, Tensor, Tensor]]] = {}
    for i, (weight, scale, keep) in enumerate(lists):
        vectors = in_vectors(weight) and scale.data_ptr() % 16 == 0
        groups.setdefault((weight.dtype, weight.shape[1], vectors), []).append((i, weight, scale, keep))
    for (_, cols, vectors), group in groups.items():
        _launch_group(group, bad, cols, vectors)
    return None


def _launch_group(group: list[tuple[int, Tensor, Tensor, Tensor]], bad: Tensor, cols: int, vectors: bool) -> None:
    entries, rows = [], 0
    for i, weight, scale, keep in group:
        entries.append((rows, weight.data_ptr(), scale.data_ptr(), keep.data_ptr(), *weight.stride(), i))
        rows += weight.shape[0]
    like = group[0][1]
    launch(
        _foreach_row_topk_kernel, (rows, 1, 1), like, table_of(entries, like), bad, len(group), cols,
        **parts_of(cols, has_simd(like)), VECTORS=vectors, BLOCK_L=max(16, power_of_2(len(group))),
    )  # fmt: skip
