"""Row selection with a count for each row: launches of csrc/select.cu."""

from __future__ import annotations

from functools import cache, partial
from itertools import groupby

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
MAX_MATRICES = 448
COLUMNS_PER_WARP = 2048
MAX_ROWS = 0x7FFFFFFF - 0x10000  # of one launch
MAX_COLUMNS = 65535
BESIDE_ROW = 3072  # bytes of shared memory that a block needs at most besides its row


def row_topk_mask(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> Tensor:
    if not _serves(weight):
        return NotImplemented
    if bad is None:
        raise_if_bad("row_topk_mask", bad_code(weight, scale, keep))
        bad = new_flag(weight)
    mask = torch.empty_like(weight, dtype=torch.bool, memory_format=torch.contiguous_format)
    scale, keep = scale.contiguous(), keep.contiguous()
    run(weight, plan_one(weight, scale, keep, bad, mask))
    return mask


def row_topk_prune_(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> None:
    if not _serves(weight):
        return NotImplemented
    if bad is None:
        raise_if_bad("row_topk_prune_", bad_code(weight, scale, keep))
        bad = new_flag(weight)
    scale, keep = scale.contiguous(), keep.contiguous()
    run(weight, plan_one(weight, scale, keep, bad, None))


def foreach_row_topk_prune_(
    weights: list[Tensor], scales: list[Tensor], keeps: list[Tensor], bad: Tensor | None
) -> None:
    if not all(weight.dtype == weights[0].dtype and _serves(weight) for weight in weights):
        return NotImplemented
    if bad is None:
        for i, matrix in enumerate(zip(weights, scales, keeps, strict=True)):
            raise_if_bad(f"foreach_row_topk_prune_ at index {i}", bad_code(*matrix))
        bad = new_flag(weights[0], len(weights))
    scales, keeps = [s.contiguous() for s in scales], [k.contiguous() for k in keeps]
    run(weights[0], plan_list(weights, scales, keeps, bad))


def _serves(weight: Tensor) -> bool:
    """Whether each row fits into shared memory."""
    (rows, cols), (row_stride, col_stride) = weight.shape, weight.stride()
    if not serves(weight) or col_stride != 1 or row_stride < cols or not 1 <= cols <= MAX_COLUMNS or rows > MAX_ROWS:
        return False
    return cols * ITEMSIZE[weight.dtype] + BESIDE_ROW <= shared_bytes(weight)


def plan_one(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor, mask: Tensor | None) -> list[Launch]:
    """One launch that prunes a matrix in place, or writes mask [R, C] bool. Scale and keep are contiguous."""
    kernel, target = ("row_topk_prune", 0) if mask is None else ("row_topk_mask", mask.data_ptr())
    entry = _entry(weight, target, scale, keep, bad.data_ptr())
    itemsize = ITEMSIZE[weight.dtype]
    module = ("select", variant(weight.dtype, _in_vectors(entry, itemsize) and not target % 4))
    return [_launch(module, kernel, [entry], itemsize, 1)] if entry[6] else []


def plan_list(weights: list[Tensor], scales: list[Tensor], keeps: list[Tensor], bad: Tensor) -> list[Launch]:
    """Launches that prune matrices, one for each number of threads that a row takes. All but weights is contiguous."""
    flags, itemsize = bad.data_ptr(), ITEMSIZE[weights[0].dtype]
    entries = [
        _entry(weight, 0, scale, keep, flags + 4 * i)
        for i, (weight, scale, keep) in enumerate(zip(weights, scales, keeps, strict=True))
    ]
    module = ("select", variant(weights[0].dtype, all(_in_vectors(entry, itemsize) for entry in entries)))
    launches = []
    entries = sorted((e for e in entries if e[6]), key=_threads, reverse=True)  # rows of most threads first
    for _, group in groupby(entries, key=_threads):
        for part in _parts(list(group)):
            name, room = ("row_topk_prune", 1) if len(part) == 1 else ("row_topk_prune_list", MAX_MATRICES)
            launches.append(_launch(module, name, part, itemsize, room))
    return launches


def _entry(weight: Tensor, mask: int, scale: Tensor, keep: Tensor, bad: int) -> tuple:
    """The members of ENTRY but the last."""
    (rows, cols), (row_stride, _) = weight.shape, weight.stride()
    return weight.data_ptr(), mask, scale.data_ptr(), keep.data_ptr(), bad, row_stride, rows, cols


def _in_vectors(entry: tuple, itemsize: int) -> bool:
    """Whether the bulk copies fit, as aligned()."""
    return aligned(entry[0] | entry[2], entry[5], entry[7], itemsize)


def _parts(entries: list[tuple]) -> list[list[tuple]]:
    """Cut a list into what one launch can hold."""
    parts, rows = [[]], 0
    for entry in entries:
        rows += entry[6]
        if rows > MAX_ROWS or len(parts[-1]) == MAX_MATRICES:
            parts.append([])
            rows = entry[6]
        parts[-1].append(entry)
    return parts


def _threads(entry: tuple) -> int:
    """Threads of a row: a warp for 2,048 columns."""
    return -(-entry[7] // COLUMNS_PER_WARP) * 32


@cache
def _dynamic_bytes(threads: int, row_bytes: int) -> int:
    """Dynamic shared memory of a block."""
    return list_bytes(threads) + (row_bytes + 15) // 16 * 16


def list_bytes(threads: int) -> int:
    """Shared memory in front of the row, as list_bytes() of select_row.cuh."""
    return max(2 * threads, 8 * (128 if threads >= 256 else 64))


def _launch(module: tuple[str, str], kernel: str, entries: list[tuple], itemsize: int, room: int) -> Launch:
    """One launch over matrices whose rows take the same number of threads."""
    table, rows = [COUNT.pack(len(entries))], 0
    for entry in entries:
        table.append(ENTRY.pack(*entry, rows))
        rows += entry[6]
    if len(entries) < room:
        table.append(bytes(ENTRY.size * (room - len(entries))))
    threads, widest = _threads(entries[0]), max(entry[7] for entry in entries)
    return Launch(module, kernel, rows, threads, (b"".join(table),), _dynamic_bytes(threads, widest * itemsize))
