"""Squared column sums in two deterministic stages: slabs of tokens in fp32 registers, then the slabs in fp64.

Convention: x is [T, C] with any strides; partial [S, C] fp32 holds one row per slab. The split depends on the shape
alone, never on the device or a tuner, so that the same input gives the same bits everywhere.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import on_device, serves

BLOCK_T, BLOCK_C, WARPS = 64, 64, 4
SLAB_TOKENS, MAX_SLABS = 256, 128


@triton.jit
def _sq_sums_kernel(
    x, counted, partial, tokens, cols, stride_t, stride_c, slab,
    MASKED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.program_id(1) * slab
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for start in range(first, first + slab, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        inside = t < tokens
        if MASKED:
            inside &= tl.load(counted + t, mask=inside, other=0) != 0
        address = x + t[:, None].to(tl.int64) * stride_t + c[None, :].to(tl.int64) * stride_c
        v = tl.load(address, mask=inside[:, None] & (c < cols)[None, :], other=0.0).to(tl.float32)
        total = tl.fma(v, v, total)
    row = partial + tl.program_id(1).to(tl.int64) * cols
    tl.store(row + c, tl.sum(total, axis=0), mask=c < cols)


@triton.jit
def _add_slabs_kernel(partial, acc, slabs, cols, stride_acc, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    s = tl.arange(0, BLOCK_S)
    inside = (s < slabs)[:, None] & (c < cols)[None, :]
    v = tl.load(partial + s[:, None].to(tl.int64) * cols + c[None, :], mask=inside, other=0.0)
    total = tl.sum(v.to(tl.float64), axis=0)
    target = acc + c.to(tl.int64) * stride_acc
    before = tl.load(target, mask=c < cols, other=0.0)
    tl.store(target, (before.to(tl.float64) + total).to(tl.float32), mask=c < cols)


def slabs_of(tokens: int) -> tuple[int, int]:
    """(slabs, tokens in a slab) for a number of tokens: at most MAX_SLABS, each a multiple of BLOCK_T."""
    slab = max(SLAB_TOKENS, triton.cdiv(triton.cdiv(tokens, MAX_SLABS), BLOCK_T) * BLOCK_T)
    return triton.cdiv(tokens, slab), slab


def accumulate_sq_sums_(acc: Tensor, x: Tensor, token_mask: Tensor | None) -> None:
    if not serves(x):
        return NotImplemented
    x = x.reshape(-1, x.shape[-1])
    tokens, cols = x.shape
    counted = None if token_mask is None else token_mask.reshape(-1).contiguous().view(torch.uint8)
    slabs, slab = slabs_of(tokens)
    partial = torch.empty(slabs, cols, dtype=torch.float32, device=x.device)
    with on_device(x):
        _sq_sums_kernel[(triton.cdiv(cols, BLOCK_C), slabs)](
            x, counted, partial, tokens, cols, *x.stride(), slab,
            MASKED=counted is not None, BLOCK_T=BLOCK_T, BLOCK_C=BLOCK_C, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        _add_slabs_kernel[(triton.cdiv(cols, 32),)](
            partial, acc, slabs, cols, acc.stride(0),
            BLOCK_S=triton.next_power_of_2(slabs), BLOCK_C=32, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return None
