"""Optimal Brain Surgeon: Gram matrix, factor of the inverse Hessian, and pruning with updates of the kept weights."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import torch
from torch import Tensor

from .. import _checks as checks
from .._checks import BOOL, FP32, INT64
from .._dispatch import define
from .._obs import Block, ObsCall, full_fp32
from .._ties import lowest, lowest_of_rows
from .stats import token_chunks

_CHUNK_TOKENS = 4096
_LEAF = 128  # most columns of a diagonal block that is inverted directly


# Gram matrix


@define(
    "accumulate_gram_(Tensor(a!) hessian, Tensor x, Tensor? token_mask) -> ()",
    fake=lambda hessian, x, token_mask: None,
    sample=lambda i: (i.zeros(i.cols, i.cols), i.x, i.token_mask),
)
def _accumulate_gram_(hessian: Tensor, x: Tensor, token_mask: Tensor | None) -> None:
    with full_fp32():
        for rows in token_chunks(x, token_mask, _CHUNK_TOKENS):
            rows = rows.float()
            hessian.addmm_(rows.T, rows)


def accumulate_gram_(hessian: Tensor, x: Tensor, *, token_mask: Tensor | None = None) -> None:
    """Add the Gram matrix of the tokens: hessian += X^T X, accumulated in fp32.

    Args:
        hessian: [C, C] fp32, symmetric, updated in place.
        x: [..., C] bf16|fp16|fp32 activations, at least 2-D.
        token_mask: [...] bool, the leading shape of x; False positions (padding) do not count. None counts all.

    Raises:
        ValueError: a shape, dtype or device does not fit.

    2 T C^2 FLOPs. Source: Frantar and Alistarh 2023 (SparseGPT), the layer-wise Hessian without its factor 2.
    """
    checks.expect_tokens("accumulate_gram_", x, token_mask)
    checks.expect("accumulate_gram_", "hessian", hessian, (x.shape[-1], x.shape[-1]), FP32, x)
    _accumulate_gram_(hessian, x, token_mask)


# factor


@define(
    "obs_factor(Tensor hessian, float damping) -> (Tensor, Tensor)",
    fake=lambda hessian, damping: (hessian.new_empty(hessian.shape), hessian.new_empty([], dtype=torch.int32)),
    sample=lambda i: (i.hessian, 0.01),
)
def _obs_factor(hessian: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    return _factor(hessian, damping)


def _factor(hessian: Tensor, damping: float) -> tuple[Tensor, Tensor]:
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
    if n == 0:
        return lower.clone()
    levels = max(0, (n - 1) // _LEAF).bit_length()
    leaf = -(-n // (1 << levels))
    size = leaf << levels
    inverse = lower.new_zeros(size, size)
    inverse[:n, :n] = lower
    inverse.diagonal()[n:].fill_(1)
    blocks = _diagonal_blocks(inverse, leaf)
    blocks.copy_(
        torch.linalg.solve_triangular(blocks, torch.eye(leaf, dtype=lower.dtype, device=lower.device), upper=False)
    )
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


def obs_factor(hessian: Tensor, damping: float = 0.01) -> tuple[Tensor, Tensor]:
    """Upper Cholesky factor U of the inverse of the damped Hessian: inv(H + damping * mean(diag H) * I) = U^T U.

    A dead column (H_jj = 0: its input was always zero) counts as H_jj = 1. It gets a NEGATIVE diagonal in U, by which
    obs_prune_() knows it. One factor serves all matrices with the same input.

    Args:
        hessian: [C, C] fp32, symmetric, not modified.
        damping: fraction of the mean diagonal that is added to the diagonal, > 0.

    Returns:
        U: [C, C] fp32, upper triangular.
        info: [] int32 on the same device: 0, or the order of the leading minor that is not positive definite, or -1
            when U is not finite. Nothing waits for the device: read it once per factor.

    Raises:
        ValueError: a shape, dtype, device or damping does not fit.

    C^3 FLOPs. Source: Frantar and Alistarh 2023 (SparseGPT), section 3.3.
    """
    checks.expect_hessian("obs_factor", hessian)
    checks.expect_number("obs_factor", "damping", damping, "> 0")
    if not damping > 0:
        raise ValueError(f"obs_factor: damping must be > 0, got {damping}")
    return _obs_factor(hessian, damping * 1.0)  # torch takes no integer beyond 64 bits


# pruning


def _normalise(
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
) -> ObsCall:
    """What backends receive, after a check of the values that can be read without waiting for a GPU."""
    rule = checks.expect_one("obs_prune_", sparsity=sparsity, keep=keep, mask=mask, pattern=pattern)
    if weight.device.type == "cpu":
        _check_values(weight, keep, row_weight)
    if factor is None:
        factor, info = _factor(hessian, damping)
        if int(info):
            raise ValueError(
                f"obs_prune_: the damped Hessian has no factor (info {int(info)}); use a larger damping than {damping}"
            )
    n, m = pattern or (0, 0)
    blocks = _blocks(*weight.shape, block, Fraction(sparsity or 0), n, m)
    return ObsCall(weight, factor, row_weight, rule, keep if rule == "keep" else mask, m, blocks)


def _check_values(weight: Tensor, keep: Tensor | None, row_weight: Tensor | None) -> None:
    if keep is not None and checks.bad_keep(keep, weight.shape[1]):
        checks.raise_if_bad("obs_prune_", checks.BAD_KEEP)
    if row_weight is not None and checks.bad_scale(row_weight):
        raise ValueError("obs_prune_: row_weight must be finite and >= 0")
    if checks.bad_weight(weight):
        checks.raise_if_bad("obs_prune_", checks.BAD_WEIGHT)


def _blocks(rows: int, cols: int, block: int, sparsity: Fraction, n: int, m: int) -> list[Block]:
    """All columns in blocks of whole groups of m (0 without a pattern), with the number of entries to remove."""
    size = min(cols, max(m, block // m * m) if m else block)
    share = sparsity * rows
    ends = [*range(0, cols, max(size, 1)), cols]
    return [Block(a, b, m - n if m else int(share * b // 1 - share * a // 1)) for a, b in pairwise(ends)]


@define(
    "obs_prune_(Tensor(a!) weight, Tensor? hessian, Tensor? factor, str? sparsity, Tensor? keep, Tensor? mask,"
    " int[]? pattern, Tensor? row_weight, int block, float damping) -> ()",
    fake=lambda *_: None,
    sample=lambda i: (i.weight, None, i.factor, "0.5", None, None, None, i.row_scale, 8, 0.01),
    prepare=_normalise,
)
def _obs_prune_(call: ObsCall) -> None:
    rows, cols = call.weight.shape
    # transposed, so that a column of the weight is contiguous
    columns = call.weight.float().T.contiguous()
    columns.masked_fill_((call.factor.diagonal() < 0)[:, None], 0)
    for block in call.blocks:
        a, b = block.start, block.end
        local, upper = columns[a:b], call.factor[a:b, a:b]
        weighting = upper.diagonal().square().reciprocal()[:, None]
        weighting = weighting if call.row_weight is None else weighting * call.row_weight
        drop = _choose(call, block, local, weighting)
        errors = _walk_block(local, upper, drop, weighting, call.group, block.dropped)
        with full_fp32():
            columns[b:].addmm_(call.factor[a:b, b:].T, errors, alpha=-1)
    call.weight.copy_(columns.T)


def _choose(call: ObsCall, block: Block, local: Tensor, weighting: Tensor) -> Tensor:
    """[B, R] mask of the entries of a block that go; all False for a pattern, which the walk chooses group by group."""
    (rows, cols), (a, b, dropped) = call.weight.shape, block
    if call.rule == "mask":
        return ~call.chosen.T[a:b]
    if call.rule == "sparsity":
        return lowest((local.square() * weighting).T.flatten(), dropped).view(rows, b - a).T
    if call.rule == "keep":
        pruned = cols - call.chosen
        return lowest_of_rows((local.square() * weighting).T, pruned * b // cols - pruned * a // cols).T
    return torch.zeros_like(local, dtype=torch.bool)


def _walk_block(local: Tensor, upper: Tensor, drop: Tensor, weighting: Tensor, group: int, dropped: int) -> Tensor:
    """Set the dropped entries to 0 column by column and move their error to the columns on the right.

    Args:
        local: [B, R], a row for each column of the weight; updated in place.
        upper: [B, B], the factor of these columns.
        drop: [B, R] bool, updated in place: a pattern chooses `dropped` of each group when the walk reaches the group.
        weighting: [B, 1] or [B, R], what multiplies the squared weights.
        group: columns of a group, or 0. The columns after the last whole group stay.

    Returns:
        [B, R] errors.
    """
    errors = torch.empty_like(local)
    for c in range(local.shape[0]):
        if group and c % group == 0 and c + group <= local.shape[0]:
            columns = slice(c, c + group)
            score = (local[columns].square() * weighting[columns]).T
            drop[columns] = lowest_of_rows(score, dropped).T
        removed = torch.where(drop[c], local[c], 0)
        torch.div(removed, upper[c, c], out=errors[c])
        local[c + 1 :].addr_(upper[c, c + 1 :], errors[c], alpha=-1)
        local[c].masked_fill_(drop[c], 0)
    return errors


def obs_prune_(
    weight: Tensor,
    hessian: Tensor | None = None,
    *,
    factor: Tensor | None = None,
    sparsity: float | Fraction | str | None = None,
    keep: Tensor | None = None,
    mask: Tensor | None = None,
    pattern: tuple[int, int] | None = None,
    row_weight: Tensor | None = None,
    block: int = 128,
    damping: float = 0.01,
) -> None:
    """Prune by Optimal Brain Surgeon, column by column: each removed weight's error moves to the columns on its right.

    Give `hessian` or `factor`, and one of `sparsity`, `keep`, `mask` and `pattern`.

    Args:
        weight: [R, C] bf16|fp16|fp32, pruned and updated in place; the walk over its columns runs in fp32.
        hessian: [C, C] fp32, X^T X of the inputs; not modified.
        factor: [C, C] fp32, U of obs_factor(), which serves several matrices; not modified.
        sparsity: fraction removed of each block of columns [a, b), over all rows: an exact decimal or a Fraction s.
            A block loses floor(s R b) - floor(s R a) entries, so the matrix loses floor(s R C).
        keep: [R] int64, kept in each row; row i loses floor(p b / C) - floor(p a / C) entries of a block,
            p = C - keep[i].
        mask: [R, C] bool, True = keep, fixed beforehand; only the update is computed.
        pattern: (n, m), keep n of every m columns; block is rounded down to a multiple of m, or up to m. The last C % m
            columns stay dense and take up error, so check C yourself where the pattern must cover it.
        row_weight: [R] fp32, finite and >= 0, multiplies the score of each row (F-SparseGPT: omega^p).
        block: columns in a block of the lazy update and of the selection.
        damping: as in obs_factor(), used with `hessian` only.

    Raises:
        ValueError: not exactly one of hessian and factor, or of sparsity, keep, mask and pattern; a shape, dtype,
            device or value does not fit; the Hessian cannot be factored at this damping (with `hessian`, which waits
            for the device; with `factor` the caller reads info).

    Dead columns are set to zero first. The score is w^2 / U_cc^2 on the updated weights; among equal scores the lowest
    (row, column) is removed first. Values of weight, keep and row_weight are checked on the CPU only: nothing waits for
    a CUDA device. Source: Frantar and Alistarh 2023 (SparseGPT), algorithm 1.
    """
    op = "obs_prune_"
    checks.expect_weight(op, weight)
    rows, cols = weight.shape
    given = checks.expect_one(op, hessian=hessian, factor=factor)
    checks.expect(op, given, factor if hessian is None else hessian, (cols, cols), FP32, weight)
    checks.expect_one(op, sparsity=sparsity, keep=keep, mask=mask, pattern=pattern)
    if sparsity is not None:
        checks.expect_sparsity(op, sparsity)
        sparsity = str(sparsity)
    if keep is not None:
        checks.expect(op, "keep", keep, (rows,), INT64, weight)
    if mask is not None:
        checks.expect(op, "mask", mask, (rows, cols), BOOL, weight)
    if pattern is not None:
        if not isinstance(pattern, (tuple, list)) or len(pattern) != 2:
            raise ValueError(f"{op}: pattern must be two integers (n, m), keep n of m, got {checks.quoted(pattern)}")
        pattern = list(checks.expect_pattern(op, *pattern))
    if row_weight is not None:
        checks.expect(op, "row_weight", row_weight, (rows,), FP32, weight)
    block = checks.as_count(op, "block", block)
    checks.expect_number(op, "damping", damping, "> 0")
    if block < 1 or not damping > 0:
        raise ValueError(f"{op}: block must be >= 1 and damping > 0, got block={block} and damping={damping}")
    block = min(block, max(cols, 1))
    _obs_prune_(weight, hessian, factor, sparsity, keep, mask, pattern, row_weight, block, damping * 1.0)
