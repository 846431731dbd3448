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

PACKED = Layout("PackedLinear", "P packed, P x, P bias, P out, i rows, i columns, i tokens, i tiles, i buffer, i units")
TILE_ROWS, CHUNK_COLUMNS = 16, 256
WARPS, UNPACK_WARPS = 16, 8  # of a block
HEAD_BYTES = 592  # the struct Shared of the .cu file
OVERRUN = 512  # bytes that loads may read past the last buffer
LARGEST_CHUNK = 512 + 2 * TILE_ROWS * CHUNK_COLUMNS
TOKENS = 8  # that share one launch of tensor-core instructions
MAX_TOKENS, MAX_CLUSTER, MAX_TILES = 16, 2, 64  # GPUs have too few places for clusters of 4 and 8 large blocks
MAX_COLUMNS = 1 << 18  # so that 64 tiles have fewer than 2^20 chunks
# Fitted to 27 products on an H200: time, in chunks of the busiest multiprocessor, grows by these factors
WARP_COST = 4.8  # 0.7 + 4.8 / warps
CLUSTER_COST, TOKEN_COST = 1.02, 0.01  # if two blocks add up their sums; for each token
DIRECT_COST = 1.3  # if x is not copied


class Division(NamedTuple):
    """How a product is divided.

    Attributes:
        tiles: of 16 rows that a cluster owns at most; each of its blocks has a range of their columns.
        cluster: blocks of a cluster.
        warps: of a block.
        buffer: bytes of shared memory into which a warp copies chunks.
        shared: bytes of dynamic shared memory of a block.
        direct: x is not copied to shared memory.
    """

    tiles: int
    cluster: int
    warps: int
    buffer: int
    shared: int
    direct: bool


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
    argument = PACKED.pack(
        packed.data_ptr(), 0, 0, out.data_ptr(), rows, columns, 0, 1, LARGEST_CHUNK, len(packed) // 16
    )
    shared = HEAD_BYTES + UNPACK_WARPS * LARGEST_CHUNK + OVERRUN
    return [Launch(_module(out.dtype, "unpack"), "unpack", tiles, 32 * UNPACK_WARPS, (argument,), shared)]


def plan_linear(x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor, division: Division) -> list[Launch]:
    """One launch that writes out [T, R], T at most 16."""
    (tokens, columns), rows, size = x.shape, out.shape[1], division.cluster
    argument = PACKED.pack(
        packed.data_ptr(), x.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
        rows, columns, tokens, division.tiles, division.buffer, len(packed) // 16,
    )  # fmt: skip
    name = "direct" if division.direct else str(TOKENS * _groups(tokens))
    blocks, threads = -(-rows // (TILE_ROWS * division.tiles)) * size, 32 * division.warps
    module, kernel = _module(x.dtype, name), f"packed_linear_{name}"
    return [Launch(module, kernel, blocks, threads, (argument,), division.shared, early=True, cluster=size)]


@cache
def divide(rows: int, columns: int, tokens: int, processors: int, shared: int) -> Division:
    """The division whose busiest multiprocessor has the least work.

    Args:
        tokens: at most 16.
        processors: multiprocessors of the card; each runs one block at a time.
        shared: bytes of shared memory that a block may have.
    """
    tiles, chunks = -(-rows // TILE_ROWS), -(-columns // CHUNK_COLUMNS)
    found = []
    for size in range(1, min(MAX_CLUSTER, chunks) + 1):
        clusters = max(1, processors // size)
        own = min(MAX_TILES, -(-tiles // clusters))
        for direct in (False, True):
            division = fit(own, size, columns, tokens, shared, direct=direct)
            if division is None:
                continue
            waves = -(-tiles // (division.tiles * clusters))
            cost = waves * division.tiles * -(-chunks // size) * (1 - WARP_COST / WARPS + WARP_COST / division.warps)
            if size > 1:
                cost *= CLUSTER_COST + TOKEN_COST * tokens
            if direct:
                cost *= DIRECT_COST
            found.append((cost, division))
    return min(found)[1]


def fit(
    tiles: int, cluster: int, columns: int, tokens: int, shared: int, warps: int = WARPS, direct: bool = False
) -> Division | None:
    """A division with as many warps and as large buffers as shared memory holds; None if it holds not even one."""
    x = 0 if direct else tokens * (2 * CHUNK_COLUMNS * -(-columns // (CHUNK_COLUMNS * cluster)) + 64)
    sums = 4 * TILE_ROWS * TOKENS * (2 if direct else _groups(tokens))  # bytes for a tile, or for a warp

    def buffer() -> int:
        taken = HEAD_BYTES + 4 * TILE_ROWS * tiles + x + sums * (tiles + warps)
        return (shared - taken - 128 - OVERRUN) // warps // 128 * 128

    while warps > 1 and buffer() < LARGEST_CHUNK:
        warps -= 1
    while tiles > 1 and buffer() < LARGEST_CHUNK:
        tiles -= 1
    return Division(tiles, cluster, warps, buffer(), shared, direct) if buffer() >= LARGEST_CHUNK else None


def _groups(tokens: int) -> int:
    return 1 if tokens <= TOKENS else 2


def _serves(packed: Tensor, columns: int, dtype: torch.dtype) -> bool:
    """Whether the kernels can run: 16-bit values; rows of x and the packed bytes begin at multiples of 16 bytes."""
    fits = columns % 8 == 0 and 0 < columns <= MAX_COLUMNS
    fits = fits and packed.is_contiguous() and packed.data_ptr() % 16 == 0
    return fits and dtype in (torch.bfloat16, torch.float16) and serves(packed)


@cache
def _module(dtype: torch.dtype, name: str) -> tuple[str, str]:
    return "packed", f"{DTYPES[dtype]}-{name}"
