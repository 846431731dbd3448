"""The threshold over a list of matrices: launches of csrc/threshold.cu, which describes the passes."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from functools import partial
from itertools import starmap

import torch
from torch import Tensor

from ..._checks import new_flag, raise_if_bad
from ..._ties import keep_last_ties
from . import ITEMSIZE, aligned, dense_sizes, multiprocessors, run, variant
from . import about as _about
from .driver import Launch, Zero
from .layout import INT, LONG, POINTER, Layout

about = partial(_about, "threshold")

ENTRY = Layout(
    "Entry",
    "P m.weight, P m.row_scale, P m.col_scale, q m.row_stride, i m.rows, i m.cols, P padded, q first_element, "
    "i first_row, i first_tile",
)
WORKSPACE = Layout("Workspace", "P state, P histogram, P next_tile, P scales, P sample, P list, I capacity")
RANKS = Layout("Ranks", "i of[0], i of[1], i of[2], ? open_hi, ? open_lo")
TABLE_HEAD = struct.Struct("ii")  # count, tiles
BOOL = struct.Struct("?")
MAX_MATRICES = 448
SAMPLE = 1 << 23
LIST_SHARE = 768  # weights for each place on the list; the bracket is expected to hold 0.104 % of them
BINS, STATE_BYTES, STRIP, TILE_ROWS, WARPS = 1 << 18, 24656, 256, 4, 8
BLOCKS_PER_SM = {2: 3, 4: 2}  # bytes of a weight -> blocks_per_sm() of threshold.cu
PASSES = 3  # with the bracket, with the side of the key after a miss, with one bin of it; one more pass counts
DIGITS = 3


def select_threshold(
    weights: list[Tensor], row_scales: list[Tensor], col_scales: list[Tensor], total: int, bad: Tensor | None
) -> Tensor:
    """If total is 0, the kernel searches for 1 weight, so that it still checks all values."""
    sizes = dense_sizes(weights)
    if sizes is None or (rows := sum(size[0] for size in sizes)) > 0x7FFFFFFF:
        return NotImplemented
    first = weights[0]
    flag = new_flag(first) if bad is None else bad
    row_scales, col_scales = [s.contiguous() for s in row_scales], [s.contiguous() for s in col_scales]
    larger, equal = torch.empty(2, rows, dtype=torch.int32, device=first.device)
    search = Search(weights, sizes, row_scales, col_scales, max(total, 1), larger, equal, flag)
    run(first, list(search.plan(multiprocessors(first))))
    if bad is None:
        raise_if_bad("select_threshold", flag)
    if total == 0:
        return torch.zeros(rows, dtype=torch.int64, device=first.device)
    return keep_last_ties(larger.long(), equal.long(), total - larger.sum())


def _up(size: int) -> int:
    return -(-size // 256) * 256


def ranks_of(total: int, size: int, drawn: int) -> tuple[int, int, int, bool, bool]:
    """The wanted rank scaled to the sample, and at least 3 of its standard deviations to either side."""
    below = min(drawn - 1, (size - total) * drawn // size)
    guess, margin = drawn - below, 0
    if drawn < size:
        margin = int(1.5 * math.sqrt(drawn)) + 2
    return max(guess - margin, 1), guess, min(guess + margin, drawn), guess - margin < 1, guess + margin > drawn


class Group:
    """Matrices of one dtype, all in vectors or none, that share a launch."""

    def __init__(self, dtype: torch.dtype, in_vectors: bool):
        self.module, self.itemsize = ("threshold", variant(dtype, in_vectors)), ITEMSIZE[dtype]
        self.entries: list[tuple] = []  # the members of ENTRY
        self.tiles = 0

    def table(self) -> bytes:
        rest = bytes(ENTRY.size * (MAX_MATRICES - len(self.entries)))
        return b"".join([TABLE_HEAD.pack(len(self.entries), self.tiles), *starmap(ENTRY.pack, self.entries), rest])


class Search:
    """The search for the total-th largest score, and the counts above and at it.

    Its workspace has 2 MB for a histogram, 4 B for each column, and the larger of 34 MB and 1 B for each 96 weights.

    Args:
        weights, row_scales, col_scales: as in the op, contiguous but for the rows of weights.
        sizes: dense_sizes() of the weights.
        total: at least 1.
        larger, equal: [R] int32, written.
        bad: [1] int32.
    """

    def __init__(
        self, weights: list[Tensor], sizes: list[tuple[int, int, int]], row_scales: list[Tensor],
        col_scales: list[Tensor], total: int, larger: Tensor, equal: Tensor, bad: Tensor,
    ):  # fmt: skip
        size = sum([rows * cols for rows, cols, _ in sizes])
        self._total, self._size, self._count = total, size, len(sizes)
        self._rows, self._drawn, capacity = larger.numel(), min(size, SAMPLE), size // LIST_SHARE
        # histogram, state, counters of tiles, padded scales, and the sample, whose place the list takes
        state = 8 * BINS
        counters = state + _up(STATE_BYTES)
        self._zeros = counters + _up(4 * self._count * (PASSES + 1))
        sample = self._zeros + 4 * STRIP * sum([-(-cols // STRIP) for _, cols, _ in sizes])
        end = sample + max(4 * self._drawn, 8 * capacity)
        self._workspace = torch.empty(end, dtype=torch.uint8, device=bad.device)
        self._start = start = self._workspace.data_ptr()
        self._counters, scales, sample = start + counters, start + self._zeros, start + sample
        self._groups = _groups(weights, sizes, row_scales, col_scales, scales)
        self._space = WORKSPACE.pack(start + state, start, self._counters, scales, sample, sample, capacity)
        self._outputs = [POINTER.pack(tensor.data_ptr()) for tensor in (larger, equal, bad)]

    def plan(self, processors: int) -> Iterator[Launch | Zero]:
        """All launches, for a card of so many multiprocessors."""
        yield Zero(self._start, self._zeros)
        tables = [group.table() for group in self._groups]
        yield from self._sample(tables, processors)
        for step in range(PASSES + 1):
            for i, (group, table) in enumerate(zip(self._groups, tables, strict=True)):
                yield self._pass(step, i, group, table, processors)
            if step == 0:
                yield self._helper("threshold_list_to_histogram", processors * 4, 256)
            if step < PASSES:
                rest = LONG.pack(self._total), BOOL.pack(step == 0)
                yield self._helper("threshold_narrow", 1, 1024, *rest)
        larger, equal, _ = self._outputs
        rows = LONG.pack(self._rows)
        yield self._helper("threshold_move_guesses", processors * 4, 256, rows, larger, equal)
        yield self._helper("threshold_count_listed", processors * 4, 256, larger, equal)

    def _sample(self, tables: list[bytes], processors: int) -> Iterator[Launch]:
        """Check and pad the scales, draw the sample, and find the bracket in it."""
        drawn = INT.pack(self._drawn)
        for group, table in zip(self._groups, tables, strict=True):
            parameters = (table, self._outputs[2])
            yield Launch(group.module, "threshold_copy_scales", len(group.entries), 256, parameters, blocks_y=4)
            parameters = (table, self._space, LONG.pack(self._size), drawn)
            yield Launch(group.module, "threshold_sample", -(-self._drawn // 256), 256, parameters)
        ranks = RANKS.pack(*ranks_of(self._total, self._size, self._drawn))
        for digit in range(DIGITS):
            blocks = min(processors, -(-self._drawn // 1024))
            yield self._helper("threshold_count_digits", blocks, 1024, drawn, INT.pack(digit))
            yield self._helper("threshold_pick_digits", 1, 1024, ranks, INT.pack(digit))

    def _pass(self, step: int, index: int, group: Group, table: bytes, processors: int) -> Launch:
        kernel = "threshold_first" if step == 0 else "threshold_next" if step < PASSES else "threshold_last"
        next_tile = POINTER.pack(self._counters + 4 * (step * self._count + index))
        blocks = min(processors * BLOCKS_PER_SM[group.itemsize], -(-group.tiles // WARPS))
        parameters = (table, self._space, next_tile, *self._outputs)
        return Launch(group.module, kernel, blocks, 32 * WARPS, parameters)

    def _helper(self, kernel: str, blocks: int, threads: int, *rest: bytes) -> Launch:
        """A kernel that reads no weights: every module has it."""
        return Launch(self._groups[0].module, kernel, blocks, threads, (self._space, *rest))


def _groups(
    weights: list[Tensor], sizes: list[tuple[int, int, int]], row_scales: list[Tensor], col_scales: list[Tensor],
    padded: int,
) -> list[Group]:  # fmt: skip
    """padded: address of the padded scales of the first matrix."""
    groups: list[Group] = []
    filling: dict[tuple[torch.dtype, bool], Group] = {}
    element = row = 0
    for weight, size, row_scale, col_scale in zip(weights, sizes, row_scales, col_scales, strict=True):
        (rows, cols, row_stride), address, dtype = size, weight.data_ptr(), weight.dtype
        kind = dtype, aligned(address, row_stride, cols, ITEMSIZE[dtype])
        group = filling.get(kind)
        if group is None or len(group.entries) == MAX_MATRICES:
            group = filling[kind] = Group(*kind)
            groups.append(group)
        group.entries.append((
            address, row_scale.data_ptr(), col_scale.data_ptr(), row_stride, rows, cols,
            padded, element, row, group.tiles,
        ))  # fmt: skip
        group.tiles += -(-rows // TILE_ROWS)
        element += rows * cols
        row += rows
        padded += -(-cols // STRIP) * 4 * STRIP
    return groups
