"""Row selection with a count for each row: launches of csrc/select.cu."""

from __future__ import annotations

from functools import cache, partial
from itertools import starmap

import torch
from torch import Tensor

from ..._checks import bad_code, new_flag, raise_if_bad
from . import ITEMSIZE, aligned, run, serves, shared_bytes, variant
from . import about as _about
from .driver import Launch
from .layout import COUNT, Layout

about = partial(_about, "select")

ENTRY = Layout(
    "Entry",
    "P m.weight, P m.mask, P m.scale, P m.keep, P m.bad, q m.row_stride, i m.rows, i m.cols, i first_row",
)
KERNELS = {"prune": "row_topk_prune", "list": "row_topk_prune_list", "mask": "row_topk_mask"}  # each has its module
MAX_MATRICES = 448
COLUMNS_PER_WARP = 2048
WIDE_COLUMNS_PER_WARP = 2560  # of the wide variants
WIDE_COLUMNS = range(4097, 5121)  # they take these rows by two warps instead of three, which was faster on an H200
MAX_ROWS = 0x7FFFFFFF - 0x10000  # of one launch
MAX_COLUMNS = 65535
BESIDE_ROW = 3072  # bytes of shared memory that a block needs at most besides its row


def row_topk_mask(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> Tensor:
    sizes = sizes_of([weight])
    if sizes is None:
        return NotImplemented
    if bad is None:
        raise_if_bad("row_topk_mask", bad_code(weight, scale, keep))
        bad = new_flag(weight)
    mask = torch.empty_like(weight, dtype=torch.bool, memory_format=torch.contiguous_format)
    scale, keep = scale.contiguous(), keep.contiguous()
    run(weight, plan_one(weight, sizes[0], scale, keep, bad, mask))
    return mask


def row_topk_prune_(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> None:
    sizes = sizes_of([weight])
    if sizes is None:
        return NotImplemented
    if bad is None:
        raise_if_bad("row_topk_prune_", bad_code(weight, scale, keep))
        bad = new_flag(weight)
    scale, keep = scale.contiguous(), keep.contiguous()
    run(weight, plan_one(weight, sizes[0], scale, keep, bad, None))


def foreach_row_topk_prune_(
    weights: list[Tensor], scales: list[Tensor], keeps: list[Tensor], bad: Tensor | None
) -> None:
    sizes = sizes_of(weights)
    if sizes is None:
        return NotImplemented
    if bad is None:
        for i, matrix in enumerate(zip(weights, scales, keeps, strict=True)):
            raise_if_bad(f"foreach_row_topk_prune_ at index {i}", bad_code(*matrix))
        bad = new_flag(weights[0], len(weights))
    scales, keeps = [s.contiguous() for s in scales], [k.contiguous() for k in keeps]
    run(weights[0], plan_list(weights, sizes, scales, keeps, bad))


def sizes_of(weights: list[Tensor]) -> list[tuple[int, int, int]] | None:
    """(rows, columns, row stride) of each matrix; None if dtypes differ or a row does not fit into shared memory."""
    first, dtype = weights[0], weights[0].dtype
    if not serves(first):
        return None
    most_cols = min(MAX_COLUMNS, (shared_bytes(first) - BESIDE_ROW) // ITEMSIZE[dtype])
    sizes = []
    for weight in weights:
        (rows, cols), (row_stride, col_stride) = weight.shape, weight.stride()
        if col_stride != 1 or row_stride < cols or not 1 <= cols <= most_cols or rows > MAX_ROWS:
            return None
        if weight.dtype != dtype:
            return None
        sizes.append((rows, cols, row_stride))
    return sizes


def plan_one(
    weight: Tensor, size: tuple[int, int, int], scale: Tensor, keep: Tensor, bad: Tensor, mask: Tensor | None
) -> list[Launch]:
    """One launch that prunes a matrix in place, or writes mask [R, C] bool. Scale and keep are contiguous."""
    (rows, cols, row_stride), address, scales = size, weight.data_ptr(), scale.data_ptr()
    kernel, target = ("prune", 0) if mask is None else ("mask", mask.data_ptr())
    entry = address, target, scales, keep.data_ptr(), bad.data_ptr(), row_stride, rows, cols, 0
    itemsize = ITEMSIZE[weight.dtype]
    in_vectors = aligned(address | scales, row_stride, cols, itemsize) and not target % 4
    return [_launch(kernel, weight.dtype, in_vectors, [entry], rows, 1)] if rows else []


def plan_list(
    weights: list[Tensor], sizes: list[tuple[int, int, int]], scales: list[Tensor], keeps: list[Tensor], bad: Tensor
) -> list[Launch]:
    """Launches that prune matrices, one for each number of threads that a row takes. All but weights is contiguous."""
    flag, dtype, in_vectors = bad.data_ptr(), weights[0].dtype, True
    itemsize = ITEMSIZE[dtype]
    parts: dict[tuple[int, bool], list[_Part]] = {}  # by _kind()
    for weight, (rows, cols, row_stride), scale, keep in zip(weights, sizes, scales, keeps, strict=True):
        address, scale_at = weight.data_ptr(), scale.data_ptr()
        in_vectors = in_vectors and aligned(address | scale_at, row_stride, cols, itemsize)
        if rows:
            part = _part_with_room(parts.setdefault(_kind(cols), []), rows)
            part.entries.append((address, 0, scale_at, keep.data_ptr(), flag, row_stride, rows, cols, part.rows))
            part.rows += rows
        flag += 4
    launches = []
    for kind in sorted(parts, reverse=True):  # rows of most threads first
        for part in parts[kind]:
            kernel, room = ("prune", 1) if len(part.entries) == 1 else ("list", MAX_MATRICES)
            launches.append(_launch(kernel, dtype, in_vectors, part.entries, part.rows, room))
    return launches


class _Part:
    """What one launch holds of a list: the members of ENTRY for each matrix, and all their rows."""

    def __init__(self):
        self.entries: list[tuple] = []
        self.rows = 0


def _part_with_room(parts: list[_Part], rows: int) -> _Part:
    if not parts or len(parts[-1].entries) == MAX_MATRICES or parts[-1].rows + rows > MAX_ROWS:
        parts.append(_Part())
    return parts[-1]


@cache
def _kind(cols: int) -> tuple[int, bool]:
    """The warps that a row takes, and whether a wide variant serves it better. Rows of one kind share a launch."""
    return -(-cols // COLUMNS_PER_WARP), cols in WIDE_COLUMNS


@cache
def _dynamic_bytes(threads: int, row_bytes: int) -> int:
    """Dynamic shared memory of a block."""
    return list_bytes(threads) + (row_bytes + 15) // 16 * 16


def list_bytes(threads: int) -> int:
    """Shared memory in front of the row, as list_bytes() of select_row.cuh."""
    return 8 * (128 if threads >= 256 else 64)


def _launch(
    kernel: str, dtype: torch.dtype, in_vectors: bool, entries: list[tuple], rows: int, room: int
) -> Launch:  # fmt: skip
    """One launch of one of KERNELS over matrices of one _kind(), with so many rows in all."""
    rest = bytes(ENTRY.size * (room - len(entries)))
    table = b"".join([COUNT.pack(len(entries)), *starmap(ENTRY.pack, entries), rest])
    widest, itemsize = max([entry[7] for entry in entries]), ITEMSIZE[dtype]
    warps, wide = _kind(widest)
    if wide := wide and in_vectors and itemsize == 2:
        warps = -(-widest // WIDE_COLUMNS_PER_WARP)
    module, threads = _module(kernel, dtype, in_vectors, wide), 32 * warps
    return Launch(module, KERNELS[kernel], rows, threads, (table,), _dynamic_bytes(threads, widest * itemsize))


@cache
def _module(kernel: str, dtype: torch.dtype, in_vectors: bool, wide: bool) -> tuple[str, str]:
    return "select", f"{variant(dtype, in_vectors)}{'-wide' if wide else ''}-{kernel}"
