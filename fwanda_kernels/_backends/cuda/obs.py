"""Blocks of obs_prune_(): launches of csrc/obs.cu."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..._obs import MAX_BLOCK, Block, ObsCall, walk
from . import DTYPE_CODES, MAX_SIZE, run, serves
from . import about as _about
from .driver import Launch
from .layout import Layout

about = partial(_about, "obs")

BLOCK = Layout(
    "ObsBlock",
    "P work, P weight, P factor, P weighting, P row_weight, P chosen, P errors, P counters, q work_stride, "
    "q row_stride, q col_stride, q chosen_row_stride, q chosen_col_stride, i rows, i cols, i start, i end, i dropped, "
    "i group, i dtype",
)
COUNTERS = 4100  # int32: the histograms of three digits, and the keys and ranks found from them
ROWS, THREADS = 32, 256  # of a thread block
COUNT_BLOCKS = 528
SHARED_BYTES = (MAX_BLOCK + 2) * MAX_BLOCK * 4
_GROUPS = (4, 8, 16, 32)


def obs_prune_(call: ObsCall) -> None:
    """Declines blocks that do not begin at multiples of 4 columns, which 16-byte loads need."""
    if not serves(call.weight) or not call.weight.numel() or max(call.weight.shape) > MAX_SIZE:
        return NotImplemented
    size = call.blocks[0].end
    if size > MAX_BLOCK or (size % 4 and size < call.weight.shape[1]) or call.group not in (0, *_GROUPS):
        return NotImplemented
    walk(call, _prune_block, COUNTERS)


def _prune_block(call: ObsCall, work: Tensor, weighting: Tensor, block: Block, errors: Tensor, counts: Tensor) -> None:
    run(call.weight, plan(call, work, weighting, block, errors, counts))


def plan(call: ObsCall, work: Tensor, weighting: Tensor, block: Block, errors: Tensor, counts: Tensor) -> list[Launch]:
    """Launches that prune one block of columns, with the arguments that walk() gives."""
    weight, chosen = call.weight, call.chosen
    rows, cols = weight.shape
    mask_strides = chosen.stride() if call.rule == "mask" else (0, 0)
    optional = [0 if tensor is None else tensor.data_ptr() for tensor in (call.row_weight, chosen)]
    argument = BLOCK.pack(
        work.data_ptr(), weight.data_ptr(), call.factor.data_ptr(), weighting.data_ptr(), *optional,
        errors.data_ptr(), counts.data_ptr(), work.stride(0), *weight.stride(), *mask_strides,
        rows, cols, *block, call.group, DTYPE_CODES[weight.dtype],
    )  # fmt: skip
    module, row_blocks = ("obs", call.rule), -(-rows // ROWS)
    launches = []
    if call.rule == "sparsity" and block.dropped:
        blocks = min(row_blocks, COUNT_BLOCKS)
        launches = [Launch(module, f"obs_count_{digit}", blocks, THREADS, (argument,)) for digit in range(3)]
    return [*launches, Launch(module, "obs_walk", row_blocks, THREADS, (argument,), SHARED_BYTES)]
