"""Packed weights of 16-bit values: launches of csrc/packed.cu. For more than 16 tokens the weight is unpacked first."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import DTYPES, multiprocessors, run, serves
from . import about as _about
from .driver import Launch
from .layout import Layout

about = partial(_about, "packed")

PACKED = Layout("PackedLinear", "P packed, P x, P bias, P out, i rows, i columns, i tokens, i stages, i stage_bytes")
THREADS = 256
WARPS, TILE_ROWS, TILES, SPLIT, CHUNK_COLUMNS = 8, 16, 4, 2, 256
STAGES = 2
STAGE_BYTES = 512 + 2 * TILE_ROWS * CHUNK_COLUMNS  # the largest chunk
SHARED_BYTES = 30_976 + 4_096  # the struct Shared of the .cu file, and room to align it
OVERRUN = 384  # bytes that loads may read past the last buffer
MAX_TOKENS, MAX_CLUSTER = 16, 8


def unpack_weight(packed: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    if not _serves(packed, columns, dtype) or not rows:
        return NotImplemented
    out = torch.empty(rows, columns, dtype=dtype, device=packed.device)
    run(packed, plan_unpack(packed, rows, columns, out))
    return out


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, rows: int, columns: int) -> Tensor:
    if not _serves(packed, columns, x.dtype) or not rows or not len(x):
        return NotImplemented
    if len(x) > MAX_TOKENS:
        return linear(x, unpack_weight(packed, rows, columns, x.dtype), bias)
    x = x.contiguous()
    if x.data_ptr() % 16:
        x = x.clone()
    out = torch.empty(len(x), rows, dtype=x.dtype, device=x.device)
    run(x, plan_linear(x, packed, None if bias is None else bias.contiguous(), out, multiprocessors(x)))
    return out


def plan_unpack(packed: Tensor, rows: int, columns: int, out: Tensor) -> list[Launch]:
    """One launch that writes out [R, C]."""
    tiles = -(-rows // TILE_ROWS)
    argument = PACKED.pack(packed.data_ptr(), 0, 0, out.data_ptr(), rows, columns, 0, STAGES, STAGE_BYTES)
    return [Launch(_module(out.dtype), "unpack", tiles, THREADS, (argument,), _shared())]


def plan_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, processors: int) -> list[Launch]:
    """One launch that writes out [T, R], T at most 16."""
    (tokens, columns), rows = x.shape, out.shape[1]
    groups = -(-rows // (TILE_ROWS * TILES))
    size = cluster_size(groups, -(-columns // CHUNK_COLUMNS), processors)
    argument = PACKED.pack(
        packed.data_ptr(), x.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
        rows, columns, tokens, STAGES, STAGE_BYTES,
    )  # fmt: skip
    kernel = "packed_linear_8" if tokens <= 8 else "packed_linear_16"
    blocks = groups * size
    return [Launch(_module(x.dtype), kernel, blocks, THREADS, (argument,), _shared(), early=True, cluster=size)]


def cluster_size(groups: int, chunks: int, processors: int) -> int:
    """Blocks of a cluster, which share the chunks of four tiles: enough to fill the card, if each warp gets a chunk."""
    size = 1
    while size < MAX_CLUSTER and groups * size < processors and 2 * size * SPLIT <= chunks:
        size *= 2
    return size


def _serves(packed: Tensor, columns: int, dtype: torch.dtype) -> bool:
    """Whether the kernels can run: 16-bit values; rows of x and the packed bytes begin at multiples of 16 bytes."""
    fits = columns % 8 == 0 and columns > 0 and packed.is_contiguous() and packed.data_ptr() % 16 == 0
    return fits and dtype in (torch.bfloat16, torch.float16) and serves(packed)


def _module(dtype: torch.dtype) -> tuple[str, str]:
    return "packed", DTYPES[dtype]


def _shared() -> int:
    return SHARED_BYTES + WARPS * STAGES * STAGE_BYTES + OVERRUN
