"""What the reference and the backends of obs_prune_() share: the normalised call, and the walk over blocks of columns.

The walk visits the columns of a weight from left to right, in blocks. A backend only prunes one block; walk() does the
rest. Convention of the walk: work [R, C] fp32 holds the weight with all updates so far. To prune a block, a backend
reads its columns from work, writes them, pruned, to the weight, and hands over their errors [columns, R] fp32. From the
errors, matrix products update the columns on the right, in two levels, so that a block does not move all of work.
Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

RULES = ("sparsity", "keep", "mask", "pattern")  # csrc/obs.cuh numbers them in this order
MAX_BLOCK = 128  # columns of a block that the Triton and CUDA kernels can hold
_UPDATE_COLUMNS = 1024  # the errors of so many columns are gathered before the columns on their right are updated
_COUNTED = 32  # blocks whose counters exist at a time


class Block(NamedTuple):
    """Columns [start, end) of a weight.

    Attributes:
        dropped: entries to remove: of the whole block for "sparsity", of each group of a row for "pattern", else 0.
    """

    start: int
    end: int
    dropped: int


@dataclass(frozen=True)
class ObsCall:
    """One call of obs_prune_(), checked and normalised: the one argument of every backend's obs_prune_().

    Attributes:
        weight: [R, C] bf16|fp16|fp32, any strides; pruned in place.
        factor: [C, C] fp32, U of obs_factor().
        row_weight: [R] fp32, or None.
        rule: what chooses the entries to remove, one of RULES.
        chosen: keep [R] int64 for "keep", mask [R, C] bool for "mask", else None.
        group: columns of a group for "pattern", else 0.
        blocks: all columns, in order; the first block is the widest.
    """

    weight: Tensor
    factor: Tensor
    row_weight: Tensor | None
    rule: str
    chosen: Tensor | None
    group: int
    blocks: list[Block]


@contextmanager
def full_fp32() -> Iterator[None]:
    """Keep products of fp32 matrices on CUDA in fp32 inside the block, even where the process allows TF32."""
    matmul = torch.backends.cuda.matmul
    allowed, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = allowed


PruneBlock = Callable[[ObsCall, Tensor, Tensor, Block, Tensor, Tensor], None]


def walk(call: ObsCall, prune_block: PruneBlock, counters: int) -> None:
    """Prune all blocks of a weight by a backend's prune_block(call, work, weighting, block, errors, counts).

    Args:
        call: what to prune. The backend gets it with a contiguous factor, row_weight and keep, and a mask as uint8.
        prune_block: receives work [R, C] fp32, whose rows begin at 16 bytes and are padded to a multiple of 4 columns;
            weighting [C] fp32, 1 / U_cc^2; errors [columns of the block, R] fp32, to be written; and counts [counters]
            int32 scratch, all 0 for the rule "sparsity".
        counters: how many counts the backend needs.
    """
    rows, cols = call.weight.shape
    chosen = call.chosen
    if chosen is not None:
        chosen = chosen.view(torch.uint8) if call.rule == "mask" else chosen.contiguous()
    row_weight = None if call.row_weight is None else call.row_weight.contiguous()
    factor = call.factor.contiguous()
    call = replace(call, factor=factor, row_weight=row_weight, chosen=chosen)
    work = torch.empty(rows, -(-cols // 4) * 4, dtype=torch.float32, device=call.weight.device)[:, :cols].copy_(
        call.weight
    )
    work.masked_fill_(factor.diagonal() < 0, 0)
    weighting = factor.diagonal().square().reciprocal()
    size = call.blocks[0].end
    batch = max(1, _UPDATE_COLUMNS // size) * size
    errors = work.new_empty(batch, rows)
    counts = torch.zeros(_COUNTED, counters, dtype=torch.int32, device=work.device)
    with full_fp32():
        for i, block in enumerate(call.blocks):
            if i and i % _COUNTED == 0 and call.rule == "sparsity":
                counts.zero_()
            first = block.start // batch * batch
            end = min(first + batch, cols)
            of_block = errors[block.start - first : block.end - first]
            prune_block(call, work, weighting, block, of_block, counts[i % _COUNTED])
            if block.end < end:
                work[:, block.end : end].addmm_(of_block.T, factor[block.start : block.end, block.end : end], alpha=-1)
            elif end < cols:
                work[:, end:].addmm_(errors[: end - first].T, factor[first:end, end:], alpha=-1)
