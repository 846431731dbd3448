"""Row selection with a count for each row: launches of csrc/select.cu."""

from __future__ import annotations

from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from ..._checks import bad_code, new_flag, raise_if_bad
from . import ITEMSIZE, aligned, run, serves, variant
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
# a row lies in shared memory
_MAX_COLUMNS = {torch.bfloat16: 65535, torch.float16: 65535, torch.float32: 57344}


def row_topk_mask(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> Tensor:
    if not _serves_rows([weight]):
        return NotImplemented
    if bad is None:
        raise_if_bad("row_topk_mask", bad_code(weight, scale, keep))
        bad = new_flag(weight)
    mask = torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
    scale, keep = scale.contiguous(), keep.contiguous()
    run(weight, plan_mask(weight, scale, keep, bad, mask))
    return mask


def row_topk_prune_(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> None:
    return _prune(["row_topk_prune_"], [weight], [scale], [keep], bad)


def foreach_row_topk_prune_(
    weights: list[Tensor], scales: list[Tensor], keeps: list[Tensor], bad: Tensor | None
) -> None:
    names = [f"foreach_row_topk_prune_ at index {i}" for i in range(len(weights))]
    return _prune(names, weights, scales, keeps, bad)


def _prune(
    names: list[str], weights: list[Tensor], scales: list[Tensor], keeps: list[Tensor], bad: Tensor | None
) -> None:
    """names begin the error for each matrix."""
    if not _serves_rows(weights):
        return NotImplemented
    if bad is None:
        for name, *matrix in zip(names, weights, scales, keeps, strict=True):
            raise_if_bad(name, bad_code(*matrix))
        bad = new_flag(weights[0], len(weights))
    scales, keeps = [s.contiguous() for s in scales], [k.contiguous() for k in keeps]
    run(weights[0], plan_prune(weights, scales, keeps, bad))


def _serves_rows(weights: list[Tensor]) -> bool:
    """Row selection takes weights of one dtype whose rows fit into shared memory."""
    first = weights[0]
    most = _MAX_COLUMNS[first.dtype]
    return serves(first) and all(w.dtype == first.dtype and _serves_layout(w, most) for w in weights)


def _serves_layout(weight: Tensor, most: int) -> bool:
    (rows, cols), (row_stride, col_stride) = weight.shape, weight.stride()
    return 1 <= cols <= most and col_stride == 1 and row_stride >= cols and rows <= MAX_ROWS


def plan_mask(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor, mask: Tensor) -> list[Launch]:
    """One launch that writes the mask [R, C] bool of a matrix. Scale and keep are contiguous."""
    entry = _entry(weight, mask.data_ptr(), scale, keep, bad.data_ptr())
    return _single("row_topk_mask", weight, entry, entry[1] % 4 == 0 and _in_vectors(weight, entry))


def plan_prune(weights: list[Tensor], scales: list[Tensor], keeps: list[Tensor], bad: Tensor) -> list[Launch]:
    """Launches that prune matrices, one for each number of threads that a row takes. All but weights is contiguous."""
    flags = bad.data_ptr()
    if len(weights) == 1:
        entry = _entry(weights[0], 0, scales[0], keeps[0], flags)
        return _single("row_topk_prune", weights[0], entry, _in_vectors(weights[0], entry))
    entries = [
        _entry(weight, 0, scale, keep, flags + 4 * i)
        for i, (weight, scale, keep) in enumerate(zip(weights, scales, keeps, strict=True))
    ]
    module = ("select", variant(weights[0].dtype, all(_in_vectors(weights[0], entry) for entry in entries)))
    launches, itemsize = [], ITEMSIZE[weights[0].dtype]
    entries = sorted((e for e in entries if e[6]), key=_threads, reverse=True)  # rows of most threads first
    for _, group in groupby(entries, key=_threads):
        for part in _parts(list(group)):
            name, room = ("row_topk_prune", 1) if len(part) == 1 else ("row_topk_prune_list", MAX_MATRICES)
            launches.append(_launch(module, name, part, itemsize, room))
    return launches


def _entry(weight: Tensor, mask: int, scale: Tensor, keep: Tensor, bad: int) -> tuple:
    """The members of ENTRY but the last."""
    rows, cols = weight.shape
    return weight.data_ptr(), mask, scale.data_ptr(), keep.data_ptr(), bad, weight.stride(0), rows, cols


def _in_vectors(weight: Tensor, entry: tuple) -> bool:
    """Whether the bulk copies fit, as aligned()."""
    return aligned(entry[0] | entry[2], entry[5], entry[7], ITEMSIZE[weight.dtype])


def _single(kernel: str, weight: Tensor, entry: tuple, in_vectors: bool) -> list[Launch]:
    """The launch of one matrix, if it has rows."""
    module = ("select", variant(weight.dtype, in_vectors))
    return [_launch(module, kernel, [entry], ITEMSIZE[weight.dtype], 1)] if entry[6] else []


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


def list_bytes(threads: int) -> int:
    """Shared memory in front of the row, as list_bytes() of select_row.cuh."""
    return max(2 * threads, 8 * (128 if threads >= 256 else 64))


def _launch(module: tuple[str, str], kernel: str, entries: list[tuple], itemsize: int, room: int) -> Launch:
    """One launch over matrices whose rows take the same number of threads."""
    table, rows, widest = [COUNT.pack(len(entries))], 0, 0
    for entry in entries:
        table.append(ENTRY.pack(*entry, rows))
        rows += entry[6]
        widest = max(widest, entry[7])
    if len(entries) < room:
        table.append(bytes(ENTRY.size * (room - len(entries))))
    threads = _threads(entries[0])
    shared = list_bytes(threads) + (widest * itemsize + 15) // 16 * 16
    return Launch(module, kernel, rows, threads, (b"".join(table),), shared)
