"""What the fast backends of obs_prune_() share: all but the pruning of one block of columns.

Convention: work [R, C] fp32 holds the weight with all updates so far. A backend reads a block's columns [a, b) from it,
writes them, pruned, to the weight, and their errors [b - a, R] fp32. The columns on the right are updated from these by
GEMMs in two levels, so that work is not moved once for each block. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .reference import full_fp32, obs_arguments, obs_blocks

MAX_BLOCK = 128
UPDATE_COLUMNS = 1024  # whose errors gather before the columns right of them are updated
CHOICES = ("sparsity", "keep", "mask", "pattern")
_COUNTED = 32  # blocks whose counters exist at a time


@dataclass(frozen=True)
class Sweep:
    """What a backend reads and writes for every block.

    Attributes:
        weight: [R, C] bf16|fp16|fp32, any strides.
        work: [R, C] fp32; rows begin at 16 bytes and are padded to a multiple of 4 columns.
        factor: [C, C] fp32, contiguous.
        weighting: [C] fp32, 1 / U_cc^2.
        row_weight: [R] fp32, contiguous, or None.
        choice: one of CHOICES.
        chosen: [R] int64 for "keep", [R, C] uint8 (0 = remove) for "mask", else None.
        group: columns of a group for "pattern", else 0.
    """

    weight: Tensor
    work: Tensor
    factor: Tensor
    weighting: Tensor
    row_weight: Tensor | None
    choice: str
    chosen: Tensor | None
    group: int


def sweep(
    prune: Callable[[Sweep, int, int, int, Tensor, Tensor], None],
    counters: int,
    weight: Tensor,
    hessian: Tensor | None,
    factor: Tensor | None,
    sparsity: str | None,
    keep: Tensor | None,
    mask: Tensor | None,
    pattern: list[int] | None,
    row_weight: Tensor | None,
    block: int,
    damping: float,
) -> None:
    """obs_prune_() by a backend's prune(sweep, a, b, dropped, errors, counts) of the columns [a, b).

    Args:
        prune: `dropped` entries leave the block ("sparsity") or each group of it ("pattern"); counts is [counters]
            int32 scratch, all 0.
        counters: how much of it prune() needs.
    """
    rows, cols = weight.shape
    factor = obs_arguments(weight, hessian, factor, keep, row_weight, damping).contiguous()
    diagonal = factor.diagonal()
    work = torch.empty(rows, -(-cols // 4) * 4, device=weight.device)[:, :cols].copy_(weight)
    work.masked_fill_(diagonal < 0, 0)
    choice, chosen, group, of_group = "sparsity", None, 0, 0
    if keep is not None:
        choice, chosen = "keep", keep.contiguous()
    elif mask is not None:
        choice, chosen = "mask", mask.view(torch.uint8)
    elif pattern is not None:
        choice, group, of_group = "pattern", pattern[1], pattern[1] - pattern[0]
    row_weight = None if row_weight is None else row_weight.contiguous()
    state = Sweep(weight, work, factor, diagonal.square().reciprocal(), row_weight, choice, chosen, group)
    blocks = obs_blocks(sparsity, pattern, rows, cols, block)
    batch = max(1, UPDATE_COLUMNS // blocks[0][1]) * blocks[0][1]
    errors = work.new_empty(batch, rows)
    counts = torch.zeros(_COUNTED, counters, dtype=torch.int32, device=weight.device)
    with full_fp32():
        for i, (a, b, dropped) in enumerate(blocks):
            if i and i % _COUNTED == 0 and choice == "sparsity":
                counts.zero_()
            first = a // batch * batch
            end = min(first + batch, cols)
            prune(state, a, b, dropped or of_group, errors[a - first : b - first], counts[i % _COUNTED])
            if b < end:
                work[:, b:end].addmm_(errors[a - first : b - first].T, factor[a:b, b:end], alpha=-1)
            elif end < cols:
                work[:, end:].addmm_(errors[: end - first].T, factor[first:end, end:], alpha=-1)
