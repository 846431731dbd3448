"""Squared sums over tokens: launches of csrc/stats.cu."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from . import DTYPE_CODES, ITEMSIZE, aligned, dense_rows, run
from . import about as _about
from .driver import Launch
from .layout import COUNT, POINTER, Layout

about = partial(_about, "stats")

ENTRY = Layout(
    "Entry",
    "P in.x, P in.acc, q in.token_stride, q in.acc_stride, i in.tokens, i in.cols, i in.dtype, P partial, "
    "i first_block, i first_finish, i slabs, ? aligned",
)
MAX_ENTRIES = 64
THREADS, STRIP, FINISH_COLUMNS = 256, 256, 32


def slab_tokens(tokens: int) -> int:
    """Tokens that a block sums, as slab_tokens() of stats.cu."""
    return 128 if tokens <= 4096 else 256


def accumulate_sq_sums_(acc: Tensor, x: Tensor, token_mask: Tensor | None) -> None:
    return foreach_accumulate_sq_sums_([acc], [x], token_mask)


def foreach_accumulate_sq_sums_(accs: list[Tensor], xs: list[Tensor], token_mask: Tensor | None) -> None:
    xs = [x if x.dim() == 2 else x.flatten(0, -2) for x in xs]
    if not all(dense_rows(x) for x in xs):
        return NotImplemented
    counted = None if token_mask is None else token_mask.reshape(-1).contiguous()
    partial_sums = accs[0].new_empty(sum(_slabs(x) * x.shape[1] for x in xs))
    run(xs[0], plan(accs, xs, counted, partial_sums))


def _slabs(x: Tensor) -> int:
    return -(-x.shape[0] // slab_tokens(x.shape[0]))


def plan(accs: list[Tensor], xs: list[Tensor], counted: Tensor | None, partial_sums: Tensor) -> list[Launch]:
    """Two launches for each 64 inputs: sums of slabs of tokens into partial_sums, and those added to accs.

    Args:
        accs, xs: as in the op; xs [T, C] with neighbouring columns side by side.
        counted: [T] bool, contiguous, or None for all tokens.
        partial_sums: fp32 scratch, an entry for each slab and column of all xs.
    """
    place, launches = partial_sums.data_ptr(), []
    module = "stats", f"{'one' if len(xs) == 1 else 'list'}{'' if counted is None else '-masked'}"
    for i in range(0, len(xs), MAX_ENTRIES):
        table, blocks, finish, place = _table(accs[i : i + MAX_ENTRIES], xs[i : i + MAX_ENTRIES], place, len(xs) == 1)
        mask = POINTER.pack(0 if counted is None else counted.data_ptr())
        launches.append(Launch(module, "sq_sums", blocks, THREADS, (table, mask)))
        launches.append(Launch(module, "add_slabs", finish, THREADS, (table,), early=True))
    return launches


def _table(accs: list[Tensor], xs: list[Tensor], place: int, single: bool) -> tuple[bytes, int, int, int]:
    """The table of a launch, the blocks of both kernels, and where its partial sums end."""
    parts, blocks, finish = [COUNT.pack(len(xs))], 0, 0
    for acc, x in zip(accs, xs, strict=True):
        (tokens, cols), (stride, _), slabs, address = x.shape, x.stride(), _slabs(x), x.data_ptr()
        code, in_vectors = DTYPE_CODES[x.dtype], aligned(address, stride, cols, ITEMSIZE[x.dtype])
        parts.append(
            ENTRY.pack(
                address, acc.data_ptr(), stride, acc.stride()[0], tokens, cols, code,
                place, blocks, finish, slabs, in_vectors,
            )
        )  # fmt: skip
        blocks += slabs * -(-cols // STRIP)
        finish += -(-cols // FINISH_COLUMNS)
        place += 4 * slabs * cols
    if not single:
        parts.append(bytes(ENTRY.size * (MAX_ENTRIES - len(xs))))
    return b"".join(parts), blocks, finish, place
