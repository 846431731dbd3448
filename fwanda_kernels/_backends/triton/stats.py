"""Squared column sums in two deterministic stages: slabs of tokens in fp32 registers, then the slabs in fp64.

Convention: x is [T, C] with any strides; partial [S, C] fp32 holds one row per slab. The split and the order of every
addition depend on the shape alone, never on the device, a layout or a tuner: the same input gives the same bits in a
single and in a grouped launch. A grouped launch finds its tensors in a table [FIELDS, L] int64, see _entries().
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import in_vectors, serves
from .launch import cdiv, find, launch, power_of_2, table_of

BLOCK_T, BLOCK_C, WARPS = 128, 64, 4
# rows that a tile is folded to at once, in registers: with 16 bytes a load, each thread holds these rows of its columns
ROWS = tl.constexpr(16)
SLAB_TOKENS, MAX_SLABS = 256, 128
FINISH_C = 32


@triton.jit
def _fold(v, N: tl.constexpr):
    """Sum rows of v [M, C], M <= 2048, by halves until N are left: an order that no layout changes."""
    for _ in tl.static_range(11):
        if v.shape[0] > N:
            v = tl.sum(tl.reshape(v, (2, v.shape[0] // 2, v.shape[1])), axis=0)
    return v


@triton.jit
def _fold_pairs(v):
    """Sum of the rows of v [M, C], M <= 128, by neighbours: lanes before warps, so that little goes between warps."""
    for _ in tl.static_range(7):
        if v.shape[0] > 1:
            v = tl.sum(tl.reshape(v, (v.shape[0] // 2, 2, v.shape[1])), axis=1)
    return tl.reshape(v, (v.shape[1],))


@triton.jit
def _slab_sums(x, counted, target, first, end, cols, stride_t, stride_c, c,
               MASKED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """Write the sums of columns c over tokens [first, end) to target."""
    total = tl.zeros((ROWS, BLOCK_C), tl.float32)
    for start in range(first, end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        inside = t < end
        if MASKED:
            inside &= tl.load(counted + t, mask=inside, other=0) != 0
        address = x + t[:, None].to(tl.int64) * stride_t + c[None, :].to(tl.int64) * stride_c
        v = tl.load(address, mask=inside[:, None] & (c < cols)[None, :], other=0.0).to(tl.float32)
        total += _fold(v * v, ROWS)
    tl.store(target + c, _fold_pairs(total), mask=c < cols)


@triton.jit
def _add_slabs(partial, acc, slabs, cols, stride_acc, c, BLOCK_S: tl.constexpr):
    """Add columns c of partial [slabs, cols] to acc."""
    s = tl.arange(0, BLOCK_S)
    inside = (s < slabs)[:, None] & (c < cols)[None, :]
    v = tl.load(partial + s[:, None].to(tl.int64) * cols + c[None, :], mask=inside, other=0.0)
    total = tl.reshape(_fold(v.to(tl.float64), 1), (v.shape[1],))
    target = acc + c.to(tl.int64) * stride_acc
    before = tl.load(target, mask=c < cols, other=0.0)
    tl.store(target, (before.to(tl.float64) + total).to(tl.float32), mask=c < cols)


@triton.jit
def _sq_sums_kernel(
    x, counted, partial, tokens, cols, stride_t, stride_c, slab,
    MASKED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    target = partial + tl.program_id(1).to(tl.int64) * cols
    first = tl.program_id(1) * slab
    end = tl.minimum(first + slab, tokens)
    _slab_sums(x, counted, target, first, end, cols, stride_t, stride_c, c, MASKED, BLOCK_T, BLOCK_C)


@triton.jit
def _add_slabs_kernel(partial, acc, slabs, cols, stride_acc, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    _add_slabs(partial, acc, slabs, cols, stride_acc, c, BLOCK_S)


@triton.jit
def _foreach_sq_sums_kernel(
    like, counted, partial, table, count,
    MASKED: tl.constexpr, VECTORS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    i, program = find(table, count, BLOCK_L)
    entry = table + i
    partial += tl.load(entry + 2 * count)
    cols = tl.load(entry + 3 * count).to(tl.int32)
    x = tl.load(entry + 6 * count).to(like.dtype)
    tokens = tl.load(entry + 7 * count).to(tl.int32)
    slab = tl.load(entry + 8 * count).to(tl.int32)
    stride_t = tl.load(entry + 9 * count)
    stride_c = tl.load(entry + 10 * count)
    if VECTORS:
        x, cols, stride_t, stride_c = tl.multiple_of(x, 16), tl.multiple_of(cols, 16), tl.multiple_of(stride_t, 16), 1
    strips = (cols + BLOCK_C - 1) // BLOCK_C
    c = program % strips * BLOCK_C + tl.arange(0, BLOCK_C)
    s = program // strips
    target = partial + s.to(tl.int64) * cols
    end = tl.minimum((s + 1) * slab, tokens)
    _slab_sums(x, counted, target, s * slab, end, cols, stride_t, stride_c, c, MASKED, BLOCK_T, BLOCK_C)


@triton.jit
def _foreach_add_slabs_kernel(
    partial, table, count, BLOCK_L: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr
):
    i, program = find(table + count, count, BLOCK_L)
    entry = table + i
    partial += tl.load(entry + 2 * count)
    cols = tl.load(entry + 3 * count).to(tl.int32)
    acc = tl.load(entry + 4 * count).to(tl.pointer_type(tl.float32))
    stride_acc = tl.load(entry + 5 * count)
    slabs = tl.load(entry + 11 * count).to(tl.int32)
    c = program * BLOCK_C + tl.arange(0, BLOCK_C)
    _add_slabs(partial, acc, slabs, cols, stride_acc, c, BLOCK_S)


def slabs_of(tokens: int) -> tuple[int, int]:
    """(slabs, tokens in a slab) for a number of tokens: at most MAX_SLABS, each a multiple of BLOCK_T."""
    slab = max(SLAB_TOKENS, cdiv(cdiv(tokens, MAX_SLABS), BLOCK_T) * BLOCK_T)
    return cdiv(tokens, slab), slab


def accumulate_sq_sums_(acc: Tensor, x: Tensor, token_mask: Tensor | None) -> None:
    if not serves(x):
        return NotImplemented
    x, counted = x.flatten(0, -2), _counted(token_mask)
    tokens, cols = x.shape
    slabs, slab = slabs_of(tokens)
    partial = torch.empty(slabs, cols, dtype=torch.float32, device=x.device)
    launch(
        _sq_sums_kernel, (cdiv(cols, BLOCK_C), slabs, 1),
        x, counted, partial, tokens, cols, *x.stride(), slab,
        MASKED=counted is not None, BLOCK_T=BLOCK_T, BLOCK_C=BLOCK_C, num_warps=WARPS,
    )  # fmt: skip
    launch(
        _add_slabs_kernel, (cdiv(cols, FINISH_C), 1, 1), partial, acc, slabs, cols, acc.stride(0),
        BLOCK_S=power_of_2(slabs), BLOCK_C=FINISH_C, num_warps=4,
    )  # fmt: skip
    return None


def _counted(token_mask: Tensor | None) -> Tensor | None:
    return None if token_mask is None else token_mask.reshape(-1).contiguous().view(torch.uint8)


def foreach_accumulate_sq_sums_(accs: list[Tensor], xs: list[Tensor], token_mask: Tensor | None) -> None:
    """Two launches for each dtype (and one more pair where some inputs do not allow vector loads)."""
    pairs = [(acc, x.reshape(-1, x.shape[-1])) for acc, x in zip(accs, xs, strict=True) if x.numel()]
    if not all(serves(x) for _, x in pairs):
        return NotImplemented
    groups: dict[tuple, list[tuple[Tensor, Tensor]]] = {}
    for acc, x in pairs:
        groups.setdefault((x.dtype, in_vectors(x)), []).append((acc, x))
    for (_, vectors), group in groups.items():
        _accumulate_group(group, _counted(token_mask), vectors)
    return None


def _accumulate_group(group: list[tuple[Tensor, Tensor]], counted: Tensor | None, vectors: bool) -> None:
    like, count = group[0][1], len(group)
    entries, (programs, finish_programs, size) = _entries(group)
    table = table_of(entries, like)
    partial = torch.empty(size, dtype=torch.float32, device=like.device)
    block_l = max(16, power_of_2(count))
    launch(
        _foreach_sq_sums_kernel, (programs, 1, 1), like, counted, partial, table, count,
        MASKED=counted is not None, VECTORS=vectors, BLOCK_L=block_l, BLOCK_T=BLOCK_T, BLOCK_C=BLOCK_C, num_warps=WARPS,
    )  # fmt: skip
    block_s = power_of_2(max(slabs_of(x.shape[0])[0] for _, x in group))
    launch(
        _foreach_add_slabs_kernel, (finish_programs, 1, 1), partial, table, count,
        BLOCK_L=block_l, BLOCK_S=block_s, BLOCK_C=FINISH_C, num_warps=4,
    )  # fmt: skip


def _entries(group: list[tuple[Tensor, Tensor]]) -> tuple[list[tuple[int, ...]], tuple[int, int, int]]:
    """The table's column for each tensor; and the programs of both launches and the size of partial, in all.

    A column: first program of the sums and of the finish, offset in partial, C, acc, its stride, x, T, tokens in a
    slab, both strides of x, slabs.
    """
    entries, programs, finish_programs, size = [], 0, 0, 0
    for acc, x in group:
        tokens, cols = x.shape
        slabs, slab = slabs_of(tokens)
        entries.append((
            programs, finish_programs, size, cols, acc.data_ptr(), acc.stride(0),
            x.data_ptr(), tokens, slab, *x.stride(), slabs,
        ))  # fmt: skip
        programs += cdiv(cols, BLOCK_C) * slabs
        finish_programs += cdiv(cols, FINISH_C)
        size += slabs * cols
    return entries, (programs, finish_programs, size)
