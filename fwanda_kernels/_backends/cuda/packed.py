"""Packed weights of 16-bit values: launches of csrc/packed.cu. For more than 16 tokens the weight is unpacked first."""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import DTYPES, multiprocessors, run, serves, shared_bytes
from . import about as _about
from .driver import Launch
from .layout import Layout

about = partial(_about, "packed")

PACKED = Layout("PackedLinear", "P packed, P x, P bias, P out, i rows, i columns, i tokens, i tiles, i buffer")
TILE_ROWS, CHUNK_COLUMNS = 16, 256
WARPS, UNPACK_WARPS = 16, 8  # of a block
HEAD_BYTES = 640  # the struct Shared of the .cu file
OVERRUN = 512  # bytes that loads may read past the last buffer
LARGEST_CHUNK = 512 + 2 * TILE_ROWS * CHUNK_COLUMNS
TOKENS = 8  # that share one launch of tensor-core instructions
MAX_TOKENS, MAX_CLUSTER, MAX_TILES = 16, 8, 64
MAX_COLUMNS = 1 << 20  # so that products of counts fit in 32 bits
CLUSTER_COST = 3  # in chunks: what the sums cost when the blocks of a cluster double


class Division(NamedTuple):
    """How a product is divided.

    Attributes:
        tiles: of 16 rows that a cluster owns; each of its blocks has a range of their columns.
        cluster: blocks of a cluster.
        warps: of a block.
        buffer: bytes of shared memory into which a warp copies chunks.
        shared: bytes of dynamic shared memory of a block.
    """

    tiles: int
    cluster: int
    warps: int
    buffer: int
    shared: int


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
    division = divide(rows, columns, len(x), multiprocessors(x), shared_bytes(x))
    run(x, plan_linear(x, packed, None if bias is None else bias.contiguous(), out, division))
    return out


def plan_unpack(packed: Tensor, rows: int, columns: int, out: Tensor) -> list[Launch]:
    """One launch that writes out [R, C]."""
    tiles = -(-rows // TILE_ROWS)
    argument = PACKED.pack(packed.data_ptr(), 0, 0, out.data_ptr(), rows, columns, 0, 1, LARGEST_CHUNK)
    shared = HEAD_BYTES + UNPACK_WARPS * LARGEST_CHUNK + OVERRUN
    return [Launch(_module(out.dtype), "unpack", tiles, 32 * UNPACK_WARPS, (argument,), shared)]


def plan_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, division: Division) -> list[Launch]:
    """One launch that writes out [T, R], T at most 16."""
    (tokens, columns), rows = x.shape, out.shape[1]
    argument = PACKED.pack(
        packed.data_ptr(), x.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
        rows, columns, tokens, division.tiles, division.buffer,
    )  # fmt: skip
    kernel = "packed_linear_8" if tokens <= TOKENS else "packed_linear_16"
    blocks = -(-rows // (TILE_ROWS * division.tiles)) * division.cluster
    threads, shared, size = 32 * division.warps, division.shared, division.cluster
    return [Launch(_module(x.dtype), kernel, blocks, threads, (argument,), shared, early=True, cluster=size)]


@cache
def divide(rows: int, columns: int, tokens: int, processors: int, shared: int) -> Division:
    """The division whose busiest multiprocessor has the fewest chunks.

    Args:
        processors: multiprocessors of the card; each runs one block at a time.
        shared: bytes of shared memory that a block may have.
    """
    tiles, chunks = -(-rows // TILE_ROWS), -(-columns // CHUNK_COLUMNS)
    least, best = None, (1, 1)
    for doublings in range(MAX_CLUSTER.bit_length()):
        size = 1 << doublings
        if size > chunks:
            break
        # the blocks of a large cluster lie in one group of 16 or more multiprocessors
        clusters = max(1, processors // size if size < 4 else processors // 16 * (16 // size))
        own = min(MAX_TILES, -(-tiles // clusters))
        waves = -(-tiles // (own * clusters))
        cost = waves * own * -(-chunks // size) + CLUSTER_COST * doublings
        if least is None or cost < least:
            least, best = cost, (own, size)
    return fit(*best, tokens, shared)


def fit(tiles: int, cluster: int, tokens: int, shared: int, warps: int = WARPS) -> Division:
    """A division with as many warps and as large buffers as shared memory holds."""
    sums = 4 * TILE_ROWS * TOKENS * -(-tokens // TOKENS)  # bytes for a tile, or for a warp
    while warps > 1 and _buffer(tiles, warps, sums, shared) < LARGEST_CHUNK:
        warps -= 1
    while tiles > 1 and _buffer(tiles, warps, sums, shared) < LARGEST_CHUNK:
        tiles -= 1
    return Division(tiles, cluster, warps, _buffer(tiles, warps, sums, shared), shared)


def _buffer(tiles: int, warps: int, sums: int, shared: int) -> int:
    return (shared - HEAD_BYTES - sums * (tiles + warps) - 128 - OVERRUN) // warps // 128 * 128


def _serves(packed: Tensor, columns: int, dtype: torch.dtype) -> bool:
    """Whether the kernels can run: 16-bit values; rows of x and the packed bytes begin at multiples of 16 bytes."""
    fits = columns % 8 == 0 and 0 < columns <= MAX_COLUMNS
    fits = fits and packed.is_contiguous() and packed.data_ptr() % 16 == 0
    return fits and dtype in (torch.bfloat16, torch.float16) and serves(packed)


def _module(dtype: torch.dtype) -> tuple[str, str]:
    return "packed", DTYPES[dtype]
