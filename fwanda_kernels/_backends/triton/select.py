"""Row selection: one program per row finds the k-th largest key by counting, with the row's keys in registers.

Convention: columns [0, A) and [A, A + B) of a row are resident keys; with REST the columns after them are read again
for every count, which bounds the registers and leaves C without a limit. Padding has key 0; only keys > 0 are counted.
"""

from __future__ import annotations

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
    flag,
    flag_scale,
    magnitude_bits,
    on_device,
    score_key,
    serves,
)

# up to so many columns: A, B, num_warps, most registers a thread (without spills); columns beyond A + B are re-read
PARTS = (
    (5120, 4096, 1024, 4, 128),
    (8192, 8192, 0, 8, 128),
    (12288, 8192, 2048, 8, 128),
    (16384, 16384, 0, 8, None),
    (float("inf"), 16384, 8192, 16, None),
)
CHUNK = tl.constexpr(2048)
# interpolation assumes that few scores lie more than 10 octaves under the largest, and gives way to bisection
SPAN = tl.constexpr(10 << 23)
BISECT_EVERY, BISECT_FROM = tl.constexpr(8), tl.constexpr(16)


@triton.jit
def _load(weight, scale, cols, stride_c, start, BLOCK: tl.constexpr, EVICT: tl.constexpr):
    """Columns, weights and keys of one part of a row; a key beyond the row is 0."""
    c = start + tl.arange(0, BLOCK)
    w = tl.load(weight + c.to(tl.int64) * stride_c, mask=c < cols, other=0.0, eviction_policy=EVICT)
    return c, w, score_key(w, tl.load(scale + c, mask=c < cols, other=0.0))


@triton.jit
def _at_least(keys, key):
    """How many keys are >= key, for key > 0: those whose difference has no sign bit."""
    below = (keys - key).to(tl.uint32, bitcast=True) >> 31
    return keys.shape[0] - tl.sum(below.to(tl.int32, bitcast=True), axis=0)


@triton.jit
def _at_from(keys, key, c, column, cols):
    """How many keys equal key in a column of [column, cols)."""
    return tl.sum(((keys == key) & (c >= column) & (c < cols)).to(tl.int32), axis=0)


@triton.jit
def _count(key_a, key_b, weight, scale, cols, stride_c, key, column, A: tl.constexpr, B: tl.constexpr,
           REST: tl.constexpr, AT: tl.constexpr):  # fmt: skip
    """_at_least, or with AT _at_from, over all parts of a row."""
    if AT:
        n = _at_from(key_a, key, tl.arange(0, A), column, cols)
    else:
        n = _at_least(key_a, key)
    if B > 0:
        if AT:
            n += _at_from(key_b, key, A + tl.arange(0, B), column, cols)
        else:
            n += _at_least(key_b, key)
    if REST:
        for start in range(A + B, cols, CHUNK):
            c, w, keys = _load(weight, scale, cols, stride_c, start, CHUNK, "evict_last")
            if AT:
                n += _at_from(keys, key, c, column, cols)
            else:
                n += _at_least(keys, key)
    return n


@triton.jit
def _guess(low, high, n_low, n_high, k, step):
    """A key strictly between low and high, near the k-th largest: interpolated on the counts, at times bisected."""
    room = (n_low - n_high).to(tl.float32)
    root = tl.rsqrt(room)
    margin = 0.3 * room * root
    # aim a little past k, from the side that is farther away, so that both ends close in
    rank = k.to(tl.float32) + 0.5 + tl.where(n_low - k > k - n_high, margin, -margin)
    rank = tl.minimum(tl.maximum(rank, n_high.to(tl.float32) + 0.5), n_low.to(tl.float32) - 0.5)
    anchor = tl.maximum(low, high - SPAN)
    near = anchor + ((n_low.to(tl.float32) - rank) * root * root * (high - anchor).to(tl.float32)).to(tl.int32)
    bisect = (step % BISECT_EVERY == BISECT_EVERY - 1) | (step >= BISECT_FROM)
    guess = tl.where(bisect, low + ((high - low) >> 1), near)
    return tl.minimum(tl.maximum(guess, low + 1), high - 1)


@triton.jit
def _write(out, c, cols, stride_c, w, key, low, column, PRUNE: tl.constexpr):
    # key > low, or key == low in a column that stays
    keep = key + (c >= column).to(tl.int32) > low
    target = out + c.to(tl.int64) * stride_c
    if PRUNE:
        tl.store(target, tl.where(keep, w, 0.0), mask=c < cols)
    else:
        tl.store(target, keep.to(tl.uint8), mask=c < cols)


@triton.jit
def _row_topk_kernel(
    weight, scale, keep, out, bad, cols, stride_r, stride_c, out_stride_r, out_stride_c,
    A: tl.constexpr, B: tl.constexpr, REST: tl.constexpr, PRUNE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row == 0:
        for start in range(0, cols, 1024):
            flag_scale(scale, bad, cols, start, 1024)
    weight += row * stride_r
    out += row * out_stride_r
    asked = tl.load(keep + row)
    k = tl.minimum(tl.maximum(asked, 0), cols).to(tl.int32)
    c, w, key_a = _load(weight, scale, cols, stride_c, 0, A, "evict_last")
    key_b = key_a
    largest = tl.max(key_a, axis=0)
    heaviest = tl.max(magnitude_bits(w), axis=0)
    if B > 0:
        c, w, key_b = _load(weight, scale, cols, stride_c, A, B, "evict_last")
        largest = tl.maximum(largest, tl.max(key_b, axis=0))
        heaviest = tl.maximum(heaviest, tl.max(magnitude_bits(w), axis=0))
    if REST:
        for start in range(A + B, cols, CHUNK):
            c_rest, w_rest, keys = _load(weight, scale, cols, stride_c, start, CHUNK, "evict_last")
            largest = tl.maximum(largest, tl.max(keys, axis=0))
            heaviest = tl.maximum(heaviest, tl.max(magnitude_bits(w_rest), axis=0))
    code = tl.where(heaviest >= INFINITE_BITS, BAD_WEIGHT, 0) | tl.where((asked < 0) | (asked > cols), BAD_KEEP, 0)
    flag(bad, code)
    if (code == 0) & (largest <= INFINITE_BITS):
        # count(>= low) = n_low >= k > n_high = count(>= high)
        high = largest + 1
        low = tl.where(k == 0, high, 0)
        n_low = tl.where(k == 0, 0, cols)
        n_high = tl.zeros((), tl.int32)
        step = tl.zeros((), tl.int32)
        while (high - low > 1) & (n_low != k):
            guess = _guess(low, high, n_low, n_high, k, step)
            n = _count(key_a, key_b, weight, scale, cols, stride_c, guess, 0, A, B, REST, False)
            enough = n >= k
            low = tl.where(enough, guess, low)
            n_low = tl.where(enough, n, n_low)
            high = tl.where(enough, high, guess)
            n_high = tl.where(enough, n_high, n)
            step += 1
        # of the keys equal to low, those from `column` on stay: `extra` fewer than all
        column = tl.zeros((), tl.int32)
        if n_low != k:
            need = k - n_high
            equal = n_low - n_high
            end = tl.zeros((), tl.int32) + cols
            while equal != need:
                middle = column + ((end - column) >> 1)
                n = _count(key_a, key_b, weight, scale, cols, stride_c, low, middle, A, B, REST, True)
                enough = n >= need
                column = tl.where(enough, middle, column)
                equal = tl.where(enough, n, equal)
                end = tl.where(enough, end, middle)
        c, w, key = _load(weight, scale, cols, stride_c, 0, A, "evict_first")
        _write(out, c, cols, out_stride_c, w, key_a, low, column, PRUNE)
        if B > 0:
            c, w, key = _load(weight, scale, cols, stride_c, A, B, "evict_first")
            _write(out, c, cols, out_stride_c, w, key_b, low, column, PRUNE)
        if REST:
            for start in range(A + B, cols, CHUNK):
                c_rest, w_rest, keys = _load(weight, scale, cols, stride_c, start, CHUNK, "evict_first")
                _write(out, c_rest, cols, out_stride_c, w_rest, keys, low, column, PRUNE)


def parts_of(cols: int) -> tuple[int, int, bool, int, int | None]:
    """(A, B, REST, num_warps, maxnreg) for rows of so many columns."""
    if cols <= 4096:
        a = max(32, triton.next_power_of_2(cols))
        return a, 0, False, max(1, a // 1024), 96
    a, b, warps, registers = next(parts for limit, *parts in PARTS if cols <= limit)
    return a, b, a + b < cols, warps, registers


def _launch(weight: Tensor, scale: Tensor, keep: Tensor, out: Tensor, bad: Tensor, prune: bool) -> None:
    rows, cols = weight.shape
    a, b, rest, warps, registers = parts_of(cols)
    with on_device(weight):
        _row_topk_kernel[(rows,)](
            weight, scale, keep, out, bad, cols, *weight.stride(), *out.stride(),
            A=a, B=b, REST=rest, PRUNE=prune, num_warps=warps, maxnreg=registers, enable_fp_fusion=False,
        )  # fmt: skip


def row_topk_mask(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> Tensor:
    if not serves(weight):
        return NotImplemented
    mask = torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
    codes = new_flag(weight) if bad is None else bad
    _launch(weight, scale.contiguous(), keep.contiguous(), mask.view(torch.uint8), codes, prune=False)
    if bad is None:
        raise_if_bad("row_topk_mask", codes)
    return mask


def row_topk_prune_(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> None:
    """With `bad`, a row that holds a bad value stays as it was; without, values are checked before any is written."""
    if not serves(weight):
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
    """One launch a matrix; without `bad`, all matrices are checked before any is written."""
    if not all(serves(weight) for weight in weights):
        return NotImplemented
    lists = list(zip(weights, [s.contiguous() for s in scales], [k.contiguous() for k in keeps], strict=True))
    if bad is None:
        for i, matrix in enumerate(lists):
            check_values(f"foreach_row_topk_prune_ at index {i}", *matrix)
        bad = new_flag(weights[0], len(lists))
    for i, (weight, scale, keep) in enumerate(lists):
        _launch(weight, scale, keep, weight, bad[i : i + 1], prune=True)
    return None
