"""Plain-torch oracle of every op: the definition of right, and the fallback that serves everywhere.

Convention: [R, C] weights are read row by row in fp32; a mask is True where a weight is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from itertools import pairwise

import torch
from torch import Tensor

BAD_WEIGHT, BAD_SCALE, BAD_KEEP = 1, 2, 4
_BAD_TEXT = {
    BAD_WEIGHT: "weight has NaN or inf values",
    BAD_SCALE: "scale must be finite and >= 0",
    BAD_KEEP: "keep must be in [0, C]",
}
_SLAB_TOKENS, _CHUNK_TOKENS = 256, 4096
_HIGH_BITS, _LOW_BITS = 15, 16
_LEAF = 128


def bad_message(op: str, code: int) -> str:
    """One line for a `bad` code of a selection op: "<op>: weight has NaN or inf values".

    Args:
        op: what to begin with: the op, or the name of the matrix.
        code: nonzero, as the op ORed it into bad.
    """
    return f"{op}: " + ", ".join(text for bit, text in _BAD_TEXT.items() if code & bit)


def _report(op: str, bad: Tensor | None, *checks: tuple[int, Tensor]) -> None:
    """OR the codes of failed checks (0-d bool tensors, True = failed) into bad, or raise without one."""
    code = sum(failed.to(torch.int32) * bit for bit, failed in checks)
    if bad is not None:
        bad.bitwise_or_(code)
    elif int(code):
        raise ValueError(bad_message(op, int(code)))


def _bad_scale(scale: Tensor) -> Tensor:
    return ~(scale.isfinite() & (scale >= 0)).all()


def _bad_weight(weight: Tensor) -> Tensor:
    return ~weight.isfinite().all()


def check_selection(op: str, weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None = None) -> None:
    """Report values that a row selection cannot take, before anything is written."""
    out_of_range = ((keep < 0) | (keep > weight.shape[1])).any()
    _report(op, bad, (BAD_WEIGHT, _bad_weight(weight)), (BAD_SCALE, _bad_scale(scale)), (BAD_KEEP, out_of_range))


# stats


def accumulate_sq_sums_(acc: Tensor, x: Tensor, token_mask: Tensor | None) -> None:
    slabs = [rows.float().square().sum(0) for rows in _token_chunks(x, token_mask, _SLAB_TOKENS)]
    if slabs:
        acc.add_(torch.stack(slabs).double().sum(0))


def foreach_accumulate_sq_sums_(accs: list[Tensor], xs: list[Tensor], token_mask: Tensor | None) -> None:
    for acc, x in zip(accs, xs, strict=True):
        accumulate_sq_sums_(acc, x, token_mask)


def accumulate_gram_(hessian: Tensor, x: Tensor, token_mask: Tensor | None) -> None:
    with full_fp32():
        for rows in _token_chunks(x, token_mask, _CHUNK_TOKENS):
            rows = rows.float()
            hessian.addmm_(rows.T, rows)


def _token_chunks(x: Tensor, token_mask: Tensor | None, size: int):
    """[t, C] pieces of x with masked tokens zeroed, so that no copy of the whole input is made."""
    rows = x.flatten(0, -2)
    kept = None if token_mask is None else token_mask.reshape(-1, 1)
    for a in range(0, rows.shape[0], size):
        piece = rows[a : a + size]
        yield piece if kept is None else piece.masked_fill(~kept[a : a + size], 0)


# select


def row_topk_mask(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None, op: str = "row_topk_mask") -> Tensor:
    rows, cols = weight.shape
    check_selection(op, weight, scale, keep, bad)
    order = torch.argsort(weight.float().abs() * scale, dim=1, stable=True)
    rank = torch.arange(cols, device=weight.device).expand(rows, cols)
    kept_in_order = rank >= cols - keep.clamp(0, cols)[:, None]
    return torch.empty_like(weight, dtype=torch.bool, memory_format=torch.contiguous_format).scatter_(
        1, order, kept_in_order
    )


def row_topk_prune_(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> None:
    weight.masked_fill_(~row_topk_mask(weight, scale, keep, bad, "row_topk_prune_"), 0)


def foreach_row_topk_prune_(
    weights: list[Tensor], scales: list[Tensor], keeps: list[Tensor], bad: Tensor | None
) -> None:
    for i, (weight, scale, keep) in enumerate(zip(weights, scales, keeps, strict=True)):
        row_topk_prune_(weight, scale, keep, None if bad is None else bad[i : i + 1])


def nm_mask(weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None, op: str = "nm_mask") -> Tensor:
    rows, cols = weight.shape
    _report(op, bad, (BAD_WEIGHT, _bad_weight(weight)), (BAD_SCALE, _bad_scale(scale)))
    groups = (weight.float().abs() * scale).view(rows, cols // m, m)
    order = torch.argsort(groups, dim=2, stable=True)
    kept_in_order = (torch.arange(m, device=weight.device) >= m - n).expand_as(order)
    mask = torch.empty_like(order, dtype=torch.bool, memory_format=torch.contiguous_format)
    return mask.scatter_(2, order, kept_in_order).view(rows, cols)


def nm_prune_(weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> None:
    weight.masked_fill_(~nm_mask(weight, scale, n, m, bad, "nm_prune_"), 0)


def compress_24(weight: Tensor, scale: Tensor, bad: Tensor | None) -> tuple[Tensor, Tensor]:
    rows, cols = weight.shape
    kept = nm_mask(weight, scale, 2, 4, bad, "compress_24").view(rows, cols // 4, 4)
    positions = kept.to(torch.uint8).sort(dim=2, descending=True, stable=True).indices[..., :2]
    values = weight.reshape(rows, cols // 4, 4).gather(2, positions).view(rows, cols // 2)
    nibbles = (positions[..., 0] | positions[..., 1] << 2).view(rows, cols // 16, 4)
    shifts = torch.tensor([0, 4, 8, 12], device=weight.device)
    words = (nibbles << shifts).sum(2).to(torch.int16)
    meta = torch.empty(rows * (cols // 16), dtype=torch.int16, device=weight.device)
    meta[_meta_offsets(rows, cols // 16, weight.device).flatten()] = words.flatten()
    return values, meta.view(rows, cols // 16)


def _meta_offsets(rows: int, words: int, device) -> Tensor:
    """[rows, words] where each 16-bit metadata word goes in the order that the sparse tensor cores read.

    Within 32 rows, the two high bits of the row number become its low bits. Then the off-diagonal words of each 2 x 2
    square swap, and pairs of columns are stored column-major.
    """
    r = torch.arange(rows, device=device)[:, None]
    w = torch.arange(words, device=device)[None, :]
    moved = (r & ~31) | (r & 7) << 2 | (r & 24) >> 3
    shift = (w & 1) - (moved & 1)
    moved, w = moved + shift, w - shift
    return (w >> 1) * 2 * rows + moved * 2 + (w & 1)


def select_threshold(
    weights: list[Tensor], row_scales: list[Tensor], col_scales: list[Tensor], total: int, bad: Tensor | None
) -> Tensor:
    """Two histogram passes over the high and low bits of the scores; one matrix's scores exist at a time."""

    def keys():
        for weight, rows, cols in zip(weights, row_scales, col_scales, strict=True):
            score = (weight.float() * cols * rows[:, None]).abs_()
            score.masked_fill_((rows == 0)[:, None], 0)  # an overflow times 0 would be NaN
            yield score.view(torch.int32)  # non-negative floats order like their bits

    bad_scales = [_bad_scale(s) for s in (*row_scales, *col_scales)]
    _report(
        "select_threshold",
        bad,
        (BAD_WEIGHT, torch.stack([_bad_weight(w) for w in weights]).any()),
        (BAD_SCALE, torch.stack(bad_scales).any()),
    )
    high = sum(torch.bincount((key >> _LOW_BITS).flatten(), minlength=1 << _HIGH_BITS) for key in keys())
    bucket, above = _kth_bucket(high, total)
    low_mask = (1 << _LOW_BITS) - 1
    low = sum(torch.bincount(key[(key >> _LOW_BITS) == bucket] & low_mask, minlength=1 << _LOW_BITS) for key in keys())
    offset, above_low = _kth_bucket(low, total - above)
    threshold = (bucket << _LOW_BITS) | offset
    larger, ties = zip(*(((key > threshold).sum(1), (key == threshold).sum(1)) for key in keys()), strict=True)
    return _keep_last_ties(torch.cat(larger), torch.cat(ties), total - above - above_low)


def _kth_bucket(counts: Tensor, k: Tensor | int) -> tuple[Tensor, Tensor]:
    """Highest bucket at which the count from the top reaches k, and how many lie above it."""
    from_top = counts.flip(0).cumsum(0).flip(0)
    bucket = ((from_top >= k).sum() - 1).clamp(min=0)
    return bucket, from_top[bucket] - counts[bucket]


def _keep_last_ties(larger: Tensor, ties: Tensor, kept: Tensor) -> Tensor:
    """Add `kept` ties to the counts, taken from the end: the lowest (matrix, row, column) is removed first."""
    after = ties.flip(0).cumsum(0).flip(0) - ties
    return larger + torch.minimum(ties, (kept - after).clamp(min=0))


# obs


@contextmanager
def full_fp32() -> Iterator[None]:
    """Products of fp32 matrices on CUDA stay fp32 inside the block, whatever the process allows (TF32)."""
    matmul = torch.backends.cuda.matmul
    allowed, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = allowed


def obs_factor(hessian: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    dead = hessian.diagonal().flip(0) == 0
    # with P the flip, H = P L L' P, so P inv(L) P is upper triangular and its gram is inv(H)
    flipped = hessian.flip(0, 1)
    diagonal = flipped.diagonal()
    diagonal.masked_fill_(dead, 1)
    diagonal.add_(damping * diagonal.mean())
    with full_fp32():
        lower, info = torch.linalg.cholesky_ex(flipped)
        factor = _inverse_of_lower(lower).flip(0, 1)
    factor.diagonal().mul_(1 - 2 * dead.flip(0).to(factor.dtype))
    info = torch.where((info == 0) & ~factor.isfinite().all(), torch.full_like(info, -1), info)
    return factor, info


def _inverse_of_lower(lower: Tensor) -> Tensor:
    """Inverse of a lower triangular matrix: of 2^k diagonal blocks at once, then of pairs of neighbours by products."""
    n = lower.shape[0]
    levels = max(0, (n - 1) // _LEAF).bit_length()
    leaf = -(-n // (1 << levels))
    size = leaf << levels
    inverse = lower.new_zeros(size, size)
    inverse[:n, :n] = lower
    inverse.diagonal()[n:].fill_(1)
    blocks = _diagonal_blocks(inverse, leaf)
    blocks.copy_(torch.linalg.solve_triangular(blocks, torch.eye(leaf, device=lower.device), upper=False))
    for level in range(levels):
        half = leaf << level
        pairs = _diagonal_blocks(inverse, 2 * half)
        below = pairs[:, half:, :half]
        below.baddbmm_(pairs[:, half:, half:], below @ pairs[:, :half, :half], beta=0, alpha=-1)
    return inverse[:n, :n]


def _diagonal_blocks(matrix: Tensor, size: int) -> Tensor:
    """[n / size, size, size] view of the blocks on the diagonal of a contiguous matrix [n, n]."""
    n = matrix.shape[0]
    return matrix.as_strided((n // size, size, size), (size * (n + 1), n, 1))


def obs_arguments(
    weight: Tensor,
    hessian: Tensor | None,
    factor: Tensor | None,
    keep: Tensor | None,
    row_weight: Tensor | None,
    damping: float,
) -> Tensor:
    """The factor of obs_prune_(), after the values that can be read without waiting for a GPU are checked."""
    if weight.device.type == "cpu":
        if keep is not None and ((keep < 0) | (keep > weight.shape[1])).any():
            raise ValueError(bad_message("obs_prune_", BAD_KEEP))
        if row_weight is not None and _bad_scale(row_weight):
            raise ValueError("obs_prune_: row_weight must be finite and >= 0")
        if _bad_weight(weight):
            raise ValueError(bad_message("obs_prune_", BAD_WEIGHT))
    if factor is not None:
        return factor
    factor, info = obs_factor(hessian, damping)
    if int(info):
        raise ValueError(
            f"obs_prune_: the damped Hessian has no factor (info {int(info)}); use a larger damping than {damping}"
        )
    return factor


def columns_of_block(cols: int, block: int, pattern: list[int] | None) -> int:
    """Columns of the first block of obs_prune_(): whole groups of a pattern."""
    return min(cols, block if pattern is None else -(-block // pattern[1]) * pattern[1])


def obs_blocks(sparsity: str | None, pattern: list[int] | None, rows: int, cols: int, block: int) -> list[tuple]:
    """(a, b, entries to remove over all rows) of each block of columns [a, b); 0 entries without a sparsity."""
    share = Fraction(sparsity or 0) * rows
    ends = [*range(0, cols, columns_of_block(cols, block, pattern)), cols]
    return [(a, b, int(share * b // 1 - share * a // 1)) for a, b in pairwise(ends)]


def obs_prune_(
    weight: Tensor,
    hessian: Tensor | None,
    factor: Tensor | None,
    sparsity: str | None,
    keep: Tensor | None,
    mask: Tensor | None,
    pattern: list[int] | None,
    row_weight: Tensor | None,
    block: int,
    damping: float,
) -> None:
    factor = obs_arguments(weight, hessian, factor, keep, row_weight, damping)
    rows, cols = weight.shape
    # transposed, so that a column of the weight is contiguous
    columns = weight.float().T.contiguous()
    columns.masked_fill_((factor.diagonal() < 0)[:, None], 0)
    removed = None if mask is None else ~mask.T
    for a, b, count in obs_blocks(sparsity, pattern, rows, cols, block):
        local = columns[a:b]
        upper = factor[a:b, a:b]
        weighting = upper.diagonal().square().reciprocal()[:, None]
        weighting = weighting if row_weight is None else weighting * row_weight
        if removed is not None:
            drop = removed[a:b]
        elif sparsity is not None:
            drop = _lowest((local.square() * weighting).T.flatten(), count).view(rows, b - a).T
        elif keep is not None:
            pruned = cols - keep
            counts = pruned * b // cols - pruned * a // cols
            drop = _lowest_per_row((local.square() * weighting).T, counts).T
        else:
            drop = torch.zeros_like(local, dtype=torch.bool)
        errors = _sweep_block(local, upper, drop, pattern, weighting)
        with full_fp32():
            columns[b:].addmm_(factor[a:b, b:].T, errors, alpha=-1)
    weight.copy_(columns.T)


def _sweep_block(local: Tensor, upper: Tensor, drop: Tensor, pattern: list[int] | None, weighting: Tensor) -> Tensor:
    """Zero the dropped entries column by column and move their error to the columns on the right.

    local, drop: [B, R], a row for each column of the weight. A pattern chooses what to drop when its group begins; the
    columns after the last whole group stay. Returns the errors [B, R].
    """
    errors = torch.empty_like(local)
    n, m = pattern or (0, 0)
    for c in range(local.shape[0]):
        if m and c % m == 0 and c + m <= local.shape[0]:
            group = slice(c, c + m)
            score = (local[group].square() * weighting[group]).T
            drop[group] = _lowest_per_row(score, torch.full_like(score[:, 0], m - n, dtype=torch.int64)).T
        removed = torch.where(drop[c], local[c], 0)
        torch.div(removed, upper[c, c], out=errors[c])
        local[c + 1 :].addr_(upper[c, c + 1 :], errors[c], alpha=-1)
        local[c].masked_fill_(drop[c], 0)
    return errors


def _lowest(score: Tensor, count: int) -> Tensor:
    """Mask of the `count` lowest of a vector, lowest index first among ties."""
    if count == 0:
        return torch.zeros_like(score, dtype=torch.bool)
    kth = score.kthvalue(count).values
    below, equal = score < kth, score == kth
    return below | (equal & (equal.cumsum(0) <= count - below.sum()))


def _lowest_per_row(score: Tensor, counts: Tensor) -> Tensor:
    """Mask of the counts[i] lowest of each row, lowest index first among ties."""
    order = torch.argsort(score, dim=1, stable=True)
    in_order = torch.arange(score.shape[1], device=score.device) < counts[:, None]
    return torch.empty_like(score, dtype=torch.bool).scatter_(1, order, in_order)
