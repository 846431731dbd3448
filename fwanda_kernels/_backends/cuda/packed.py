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
LEAST_WARPS = 3  # rather several launches of fewer tokens
HEAD_BYTES = 528  # the struct Shared of the .cu file
OVERRUN = 512  # bytes that loads may read past the last buffer
LARGEST_CHUNK = 512 + 2 * TILE_ROWS * CHUNK_COLUMNS
TOKENS = 8  # that share one launch of tensor-core instructions
MAX_TOKENS, MAX_CLUSTER, MAX_TILES = 16, 8, 64
MAX_COLUMNS = 1 << 18  # so that one token of a cluster fits in shared memory
CLUSTER_COST = 3  # in chunks: what the sums cost when the blocks of a cluster double


class Division(NamedTuple):
    """How a product is divided.

    Attributes:
        tokens: of one launch.
        tiles: of 16 rows that a cluster owns; each of its blocks has a range of their columns.
        cluster: blocks of a cluster.
        warps: of a block.
        buffer: bytes of shared memory into which a warp copies chunks.
        shared: bytes of dynamic shared memory of a block.
    """

    tokens: int
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
    """Launches that write out [T, R], T at most 16; there is one if shared memory has room for all tokens."""
    columns, rows = x.shape[1], out.shape[1]
    blocks = -(-rows // (TILE_ROWS * division.tiles)) * division.cluster
    launches = []
    for part, result in zip(x.split(division.tokens), out.split(division.tokens), strict=True):
        argument = PACKED.pack(
            packed.data_ptr(), part.data_ptr(), 0 if bias is None else bias.data_ptr(), result.data_ptr(),
            rows, columns, len(part), division.tiles, division.buffer,
        )  # fmt: skip
        kernel = "packed_linear_8" if len(part) <= TOKENS else "packed_linear_16"
        threads, shared, size = 32 * division.warps, division.shared, division.cluster
        launches.append(
            Launch(_module(x.dtype), kernel, blocks, threads, (argument,), shared, early=True, cluster=size)
        )
    return launches


@cache
def divide(rows: int, columns: int, tokens: int, processors: int, shared: int) -> Division:
    """The division whose busiest multiprocessor has the least work.

    Args:
        tokens: at most 16.
        processors: multiprocessors of the card; each runs one block at a time.
        shared: bytes of shared memory that a block may have.
    """
    tiles, chunks = -(-rows // TILE_ROWS), -(-columns // CHUNK_COLUMNS)
    least, best = None, None
    for doublings in range(MAX_CLUSTER.bit_length()):
        size = 1 << doublings
        if size > chunks:
            break
        # the blocks of a large cluster lie in one group of 16 or more multiprocessors
        clusters = max(1, processors // size if size < 4 else processors // 16 * (16 // size))
        own = min(MAX_TILES, -(-tiles // clusters))
        waves = -(-tiles // (own * clusters))
        # the more of shared memory x takes, the fewer bytes of the weight are on their way
        work = waves * own * -(-chunks // size) * (1 + _x_bytes(columns, size, tokens) / shared)
        cost = work + CLUSTER_COST * doublings
        division = fit(own, size, columns, tokens, shared)
        if division and (division.warps >= LEAST_WARPS or tokens == 1) and (least is None or cost < least):
            least, best = cost, division
    return best or divide(rows, columns, -(-tokens // 2), processors, shared)


def fit(tiles: int, cluster: int, columns: int, tokens: int, shared: int, warps: int = WARPS) -> Division | None:
    """A division with as many warps and as large buffers as shared memory holds; None if it holds not even one."""

    def buffer() -> int:
        sums = 4 * TILE_ROWS * TOKENS * -(-tokens // TOKENS)  # bytes for a tile, or for a warp
        taken = HEAD_BYTES + 4 * TILE_ROWS * tiles + _x_bytes(columns, cluster, tokens) + sums * (tiles + warps)
        return (shared - taken - 128 - OVERRUN) // warps // 128 * 128

    while warps > 1 and buffer() < LARGEST_CHUNK:
        warps -= 1
    while tiles > 1 and buffer() < LARGEST_CHUNK:
        tiles -= 1
    return Division(tokens, tiles, cluster, warps, buffer(), shared) if buffer() >= LARGEST_CHUNK else None


def _x_bytes(columns: int, cluster: int, tokens: int) -> int:
    """What the columns of a block take in shared memory; tokens begin at other banks in turn."""
    return tokens * (2 * CHUNK_COLUMNS * -(-columns // (CHUNK_COLUMNS * cluster)) + 64)


def _serves(packed: Tensor, columns: int, dtype: torch.dtype) -> bool:
    """Whether the kernels can run: 16-bit values; rows of x and the packed bytes begin at multiples of 16 bytes."""
    fits = columns % 8 == 0 and 0 < columns <= MAX_COLUMNS
    fits = fits and packed.is_contiguous() and packed.data_ptr() % 16 == 0
    return fits and dtype in (torch.bfloat16, torch.float16) and serves(packed)


def _module(dtype: torch.dtype) -> tuple[str, str]:
    return "packed", DTYPES[dtype]
