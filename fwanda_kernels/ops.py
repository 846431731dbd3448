"""The one place an op is declared: schema, documentation, validation and fake kernel.

Shapes: R output rows, C input columns, T tokens. A mask is True where a weight is kept. Every op is also
`torch.ops.fwanda.<name>`, without the validation. Weights are bf16, fp16 or fp32, with any strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from . import _checks as checks
from ._checks import BOOL, FP32, INT64
from ._dispatch import define

_accumulate_sq_sums_ = define(
    "accumulate_sq_sums_(Tensor(a!) acc, Tensor x, Tensor? token_mask) -> ()",
    family="stats",
    fake=lambda acc, x, token_mask: None,
)


def accumulate_sq_sums_(acc: Tensor, x: Tensor, *, token_mask: Tensor | None = None) -> None:
    """Add the squared sum over tokens of each column: acc_c += sum_t x_tc^2.

    Args:
        acc: [C] fp32, updated in place.
        x: [..., C] bf16|fp16|fp32 activations or output gradients, at least 2-D.
        token_mask: [...] bool, the leading shape of x; False positions (padding) do not count. None counts all.

    Raises:
        ValueError: a shape, dtype or device does not fit.

    Moves the bytes of x once. NaN and inf pass through into acc. Source: the paper, algorithm 1, lines 1 and 2.
    """
    checks.expect_tokens("accumulate_sq_sums_", x, token_mask)
    checks.expect("accumulate_sq_sums_", "acc", acc, x.shape[-1:], FP32, x)
    _accumulate_sq_sums_(acc, x, token_mask)


_foreach_accumulate_sq_sums_ = define(
    "foreach_accumulate_sq_sums_(Tensor(a!)[] accs, Tensor[] xs, Tensor? token_mask) -> ()",
    family="stats",
    fake=lambda accs, xs, token_mask: None,
)


def foreach_accumulate_sq_sums_(
    accs: Sequence[Tensor], xs: Sequence[Tensor], *, token_mask: Tensor | None = None
) -> None:
    """accumulate_sq_sums_() on each pair of a list, in one launch where the backend can.

    Args:
        accs: L vectors [C_l] fp32 without overlap, updated in place.
        xs: L inputs [..., C_l] bf16|fp16|fp32 on one device, e.g. all inputs and output gradients of a block.
        token_mask: [...] bool, the leading shape of every x; None counts all.

    Raises:
        ValueError: a length, shape, dtype or device does not fit.

    Gives the bits of the single calls.
    """
    op = "foreach_accumulate_sq_sums_"
    checks.expect_lists(op, accs=accs, xs=xs)
    for i, (acc, x) in enumerate(zip(accs, xs, strict=True)):
        checks.expect_tokens(op, x, token_mask, f"xs[{i}]")
        checks.expect(op, f"accs[{i}]", acc, x.shape[-1:], FP32, xs[0])
        checks.expect_device(op, f"xs[{i}]", x, xs[0])
    _foreach_accumulate_sq_sums_(list(accs), list(xs), token_mask)


_accumulate_gram_ = define(
    "accumulate_gram_(Tensor(a!) hessian, Tensor x, Tensor? token_mask) -> ()",
    family="obs",
    fake=lambda hessian, x, token_mask: None,
)


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


_row_topk_mask = define(
    "row_topk_mask(Tensor weight, Tensor scale, Tensor keep, Tensor(a!)? bad) -> Tensor",
    family="select",
    fake=lambda weight, scale, keep, bad: weight.new_empty(weight.shape, dtype=torch.bool),
)
_row_topk_prune_ = define(
    "row_topk_prune_(Tensor(a!) weight, Tensor scale, Tensor keep, Tensor(b!)? bad) -> ()",
    family="select",
    fake=lambda weight, scale, keep, bad: None,
)


def row_topk_mask(
    weight: Tensor,
    scale: Tensor,
    keep: int | Tensor,
    *,
    among: Tensor | None = None,
    bad: Tensor | None = None,
) -> Tensor:
    """Mask of the keep[i] weights of each row with the largest score |W_ij| * scale_j.

    Args:
        weight: [R, C] bf16|fp16|fp32, finite.
        scale: [C] fp32, finite and >= 0, e.g. the norm of each input column.
        keep: number kept, 0 <= keep <= C: one int for all rows, or [R] int64.
        among: [R, C] bool, True where a weight may be kept; None: anywhere. A row with fewer than keep[i] of them keeps
            all of those.
        bad: [1] int32 on the same device. With it nothing waits for the device: 1 (weight not finite), 2 (scale not
            finite or negative) or 4 (keep out of range) is ORed into it, and the mask is then meaningless.

    Returns:
        [R, C] bool, contiguous, True = keep; exactly keep[i] True in row i, or as many as `among` has.

    Raises:
        ValueError: a shape, dtype, device or int keep does not fit; without `bad`, a value does not.

    Tie rule: the score is one rounded fp32 product; among equal scores the lowest column is removed first.
    Moves 3 B per bf16 weight, about 27 B with `among`. Source: Sun et al. 2024 (Wanda), equation 1; the paper,
    equation 1.
    """
    keep = _selection_arguments("row_topk_mask", weight, scale, keep, bad)
    if among is None:
        return _row_topk_mask(weight, scale, keep, bad)
    checks.expect("row_topk_mask", "among", among, weight.shape, BOOL, weight)
    kept = _row_topk_mask(weight * among, scale, keep, bad)
    kept &= among
    # a weight outside scores 0: it can take a place only where all above 0 are kept, and the last zeros inside get it
    left = among ^ kept
    unread = torch.zeros(1, dtype=torch.int32, device=weight.device)  # without a flag the op would wait
    missing = keep - kept.sum(1, dtype=torch.int32)
    last = _row_topk_mask(left.to(torch.bfloat16), torch.ones_like(scale), missing, unread)
    return kept.logical_or_(last & left)


def row_topk_prune_(weight: Tensor, scale: Tensor, keep: int | Tensor, *, bad: Tensor | None = None) -> None:
    """Set the weights that row_topk_mask() does not keep to +0.0, in place.

    Arguments, errors and tie rule are those of row_topk_mask(). Moves 4 B per bf16 weight.
    """
    keep = _selection_arguments("row_topk_prune_", weight, scale, keep, bad)
    _row_topk_prune_(weight, scale, keep, bad)


_foreach_row_topk_prune_ = define(
    "foreach_row_topk_prune_(Tensor(a!)[] weights, Tensor[] scales, Tensor[] keeps, Tensor(b!)? bad) -> ()",
    family="select",
    fake=lambda weights, scales, keeps, bad: None,
)


def foreach_row_topk_prune_(
    weights: Sequence[Tensor], scales: Sequence[Tensor], keeps: Sequence[Tensor], *, bad: Tensor | None = None
) -> None:
    """row_topk_prune_() on each matrix of a list, in one launch where the backend can.

    Args:
        weights: L matrices [R_l, C_l] bf16|fp16|fp32 without overlap, on one device.
        scales: L vectors [C_l] fp32.
        keeps: L vectors [R_l] int64.
        bad: [L] int32, the flag of row_topk_mask() for each matrix.

    Raises:
        ValueError: a length, shape, dtype or device does not fit; without `bad`, a value does not.

    Tie rule and result are those of row_topk_prune_().
    """
    op = "foreach_row_topk_prune_"
    checks.expect_lists(op, weights=weights, scales=scales, keeps=keeps)
    for i, (weight, scale, keep) in enumerate(zip(weights, scales, keeps, strict=True)):
        checks.expect_weight(op, weight, f"weights[{i}]")
        checks.expect_device(op, f"weights[{i}]", weight, weights[0])
        checks.expect(op, f"scales[{i}]", scale, weight.shape[1:], FP32, weights[0])
        checks.expect(op, f"keeps[{i}]", keep, weight.shape[:1], INT64, weights[0])
    checks.expect_bad(op, bad, weights[0], len(weights))
    _foreach_row_topk_prune_(list(weights), list(scales), list(keeps), bad)


def _selection_arguments(op: str, weight: Tensor, scale: Tensor, keep: int | Tensor, bad: Tensor | None) -> Tensor:
    checks.expect_weight(op, weight)
    rows, cols = weight.shape
    checks.expect(op, "scale", scale, [cols], FP32, weight)
    checks.expect_bad(op, bad, weight)
    if not isinstance(keep, Tensor):
        if not 0 <= keep <= cols:
            raise ValueError(f"{op}: keep must be in [0, C]=[0, {cols}], got {keep}")
        return torch.full((rows,), keep, dtype=torch.int64, device=weight.device)
    checks.expect(op, "keep", keep, [rows], INT64, weight)
    return keep


_nm_mask = define(
    "nm_mask(Tensor weight, Tensor scale, int n, int m, Tensor(a!)? bad) -> Tensor",
    family="sparse24",
    fake=lambda weight, scale, n, m, bad: weight.new_empty(weight.shape, dtype=torch.bool),
)
_nm_prune_ = define(
    "nm_prune_(Tensor(a!) weight, Tensor scale, int n, int m, Tensor(b!)? bad) -> ()",
    family="sparse24",
    fake=lambda weight, scale, n, m, bad: None,
)


def nm_mask(weight: Tensor, scale: Tensor, n: int, m: int, *, bad: Tensor | None = None) -> Tensor:
    """Mask that keeps n of every m consecutive weights of a row, those with the largest |W_ij| * scale_j.

    Args:
        weight: [R, C] bf16|fp16|fp32, finite; C a multiple of m.
        scale: [C] fp32, finite and >= 0.
        n: number KEPT in a group, 0 <= n <= m.
        m: columns in a group.
        bad: as in row_topk_mask().

    Returns:
        [R, C] bool, contiguous, True = keep.

    Raises:
        ValueError: a shape, dtype, device or the pattern does not fit; without `bad`, a value does not.

    Tie rule: in a group the lowest column is removed first. Moves 3 B per bf16 weight.
    """
    _pattern_arguments("nm_mask", weight, scale, n, m, bad)
    return _nm_mask(weight, scale, n, m, bad)


def nm_prune_(weight: Tensor, scale: Tensor, n: int, m: int, *, bad: Tensor | None = None) -> None:
    """Set the weights that nm_mask() does not keep to +0.0, in place.

    Arguments, errors and tie rule are those of nm_mask(). Moves 4 B per bf16 weight.
    """
    _pattern_arguments("nm_prune_", weight, scale, n, m, bad)
    _nm_prune_(weight, scale, n, m, bad)


def _pattern_arguments(op: str, weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> None:
    checks.expect_weight(op, weight)
    checks.expect(op, "scale", scale, weight.shape[1:], FP32, weight)
    checks.expect_bad(op, bad, weight)
    checks.expect_pattern(op, n, m)
    if weight.shape[1] % m:
        raise ValueError(f"{op}: C={weight.shape[1]} columns are not a multiple of m={m}")


_compress_24 = define(
    "compress_24(Tensor weight, Tensor scale, Tensor(a!)? bad) -> (Tensor, Tensor)",
    family="sparse24",
    fake=lambda weight, scale, bad: (
        weight.new_empty([weight.shape[0], weight.shape[1] // 2]),
        weight.new_empty([weight.shape[0], weight.shape[1] // 16], dtype=torch.int16),
    ),
)


def compress_24(weight: Tensor, scale: Tensor, *, bad: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Select 2:4 as nm_mask() does and pack the result in the layout of torch's CUTLASS sparse kernels.

    Args:
        weight: [R, C] bf16|fp16, finite; R and C multiples of 32.
        scale: [C] fp32, finite and >= 0.
        bad: as in row_topk_mask().

    Returns:
        values: [R, C/2] in the weight's dtype, the two kept weights of each group in column order.
        meta: [R, C/16] int16, two bits for each kept position, four groups an element, reordered for the kernels.

    Raises:
        ValueError: a shape, dtype or device does not fit; without `bad`, a value does not.

    Moves 3.125 B per weight. Source of the layout: the metadata order of CUTLASS for sparse tensor cores of compute
    capability 8.x, as torch's SparseSemiStructuredTensorCUTLASS reads it.
    """
    op = "compress_24"
    _pattern_arguments(op, weight, scale, 2, 4, bad)
    if weight.dtype == torch.float32:
        raise ValueError(f"{op}: weight must be bfloat16 or float16, got float32")
    if weight.shape[0] % 32 or weight.shape[1] % 32:
        raise ValueError(f"{op}: R and C must be multiples of 32, got {list(weight.shape)}")
    return _compress_24(weight, scale, bad)


def compress_24_cusparselt(weight: Tensor, scale: Tensor, *, bad: Tensor | None = None) -> Tensor:
    """Select 2:4 as nm_mask() does and pack the result for cuSPARSELt, the runtime that Hopper needs.

    Args:
        weight: [R, C] bf16|fp16 on a CUDA device; not modified.
        scale: [C] fp32, finite and >= 0.
        bad: as in row_topk_mask().

    Returns:
        The packed matrix, as `torch._cslt_sparse_mm` takes it.

    Raises:
        ValueError: as compress_24(), or the weight is not on a CUDA device.
        RuntimeError: this build of torch has no cuSPARSELt.
    """
    _pattern_arguments("compress_24_cusparselt", weight, scale, 2, 4, bad)
    if not weight.is_cuda:
        raise ValueError(f"compress_24_cusparselt: weight must be on a CUDA device, got {weight.device}")
    pruned = weight.clone(memory_format=torch.contiguous_format)
    _nm_prune_(pruned, scale, 2, 4, bad)
    return torch._cslt_compress(pruned)


_select_threshold = define(
    "select_threshold(Tensor[] weights, Tensor[] row_scales, Tensor[] col_scales, SymInt total, Tensor(a!)? bad)"
    " -> Tensor",
    family="select",
    fake=lambda weights, row_scales, col_scales, total, bad: weights[0].new_empty(
        [sum(w.shape[0] for w in weights)], dtype=torch.int64
    ),
)


def select_threshold(
    weights: Sequence[Tensor],
    row_scales: Sequence[Tensor],
    col_scales: Sequence[Tensor],
    total: int,
    *,
    bad: Tensor | None = None,
) -> list[Tensor]:
    """Keep counts per row when the `total` largest scores over all matrices together are kept.

    The score is fp32(fp32(|W_ij| * col_scale_j) * row_scale_i). A matrix's mask is then row_topk_mask() with the
    same col_scale and these counts.

    Args:
        weights: L matrices [R_l, C_l] bf16|fp16|fp32, finite, on one device.
        row_scales: L vectors [R_l] fp32, finite and >= 0.
        col_scales: L vectors [C_l] fp32, finite and >= 0.
        total: number KEPT over all matrices, 0 <= total <= sum of R_l * C_l.
        bad: as in row_topk_mask().

    Returns:
        L vectors [R_l] int64 that sum to total.

    Raises:
        ValueError: a shape, dtype, device or total does not fit; without `bad`, a value does not.

    Tie rule: among equal scores the lowest (matrix, row, column) is removed first. Reads the weights three times and
    holds no score tensor larger than one matrix.
    """
    op = "select_threshold"
    checks.expect_lists(op, weights=weights, row_scales=row_scales, col_scales=col_scales)
    for i, (weight, rows, cols) in enumerate(zip(weights, row_scales, col_scales, strict=True)):
        checks.expect_weight(op, weight, f"weights[{i}]")
        checks.expect(op, f"row_scales[{i}]", rows, weight.shape[:1], FP32, weights[0])
        checks.expect(op, f"col_scales[{i}]", cols, weight.shape[1:], FP32, weights[0])
        checks.expect_device(op, f"weights[{i}]", weight, weights[0])
    checks.expect_bad(op, bad, weights[0])
    size = sum(w.numel() for w in weights)
    if not 0 <= total <= size:
        raise ValueError(f"{op}: total must be in [0, {size}], got {total}")
    keep = _select_threshold(list(weights), list(row_scales), list(col_scales), total, bad)
    return list(keep.split([w.shape[0] for w in weights]))


_obs_factor = define(
    "obs_factor(Tensor hessian, float damping) -> (Tensor, Tensor)",
    family="obs",
    fake=lambda hessian, damping: (hessian.new_empty(hessian.shape), hessian.new_empty([], dtype=torch.int32)),
)


def obs_factor(hessian: Tensor, damping: float = 0.01) -> tuple[Tensor, Tensor]:
    """Upper Cholesky factor U of the inverse of the damped Hessian: inv(H + damping * mean(diag H) * I) = U^T U.

    A dead column (H_jj = 0: its input was always zero) counts as H_jj = 1 and has a NEGATIVE diagonal in U, which is
    how obs_prune_() knows it. One factor serves all matrices with the same input.

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
    if not damping > 0:
        raise ValueError(f"obs_factor: damping must be > 0, got {damping}")
    return _obs_factor(hessian, damping)


_obs_prune_ = define(
    "obs_prune_(Tensor(a!) weight, Tensor? hessian, Tensor? factor, str? sparsity, Tensor? keep, Tensor? mask,"
    " int[]? pattern, Tensor? row_weight, int block, float damping) -> ()",
    family="obs",
    fake=lambda weight, hessian, factor, sparsity, keep, mask, pattern, row_weight, block, damping: None,
)


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

    Args:
        weight: [R, C] bf16|fp16|fp32, pruned and updated in place; the sweep runs in fp32.
        hessian: [C, C] fp32, X^T X of the inputs; or
        factor: [C, C] fp32, U of obs_factor(), which serves several matrices. Neither is modified.
        sparsity: fraction removed of each block of columns [a, b), over all rows: an exact decimal or a Fraction s;
            floor(s R b) - floor(s R a) entries go, so the matrix loses floor(s R C).
        keep: [R] int64, kept per row; row i loses floor(p b / C) - floor(p a / C) entries of a block, p = C - keep[i].
        mask: [R, C] bool, True = keep, fixed beforehand; only the update is computed.
        pattern: (n, m), keep n of every m columns; block is rounded up to a multiple of m. The last C % m columns stay
            dense and take up error, so check C yourself where the pattern must cover it.
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
    given = [name for name, value in (("hessian", hessian), ("factor", factor)) if value is not None]
    if len(given) != 1:
        raise ValueError(f"{op}: exactly one of hessian and factor must be given, got {given or 'none'}")
    checks.expect(op, given[0], factor if hessian is None else hessian, (cols, cols), FP32, weight)
    choices = (("sparsity", sparsity), ("keep", keep), ("mask", mask), ("pattern", pattern))
    chosen = [name for name, value in choices if value is not None]
    if len(chosen) != 1:
        raise ValueError(f"{op}: exactly one of sparsity, keep, mask and pattern must be given, got {chosen or 'none'}")
    if sparsity is not None:
        checks.expect_sparsity(op, sparsity)
    if keep is not None:
        checks.expect(op, "keep", keep, [rows], INT64, weight)
    if mask is not None:
        checks.expect(op, "mask", mask, (rows, cols), BOOL, weight)
    if pattern is not None:
        checks.expect_pattern(op, *pattern)
    if row_weight is not None:
        checks.expect(op, "row_weight", row_weight, [rows], FP32, weight)
    if block < 1 or not damping > 0:
        raise ValueError(f"{op}: block must be >= 1 and damping > 0, got block={block} and damping={damping}")
    _obs_prune_(
        weight,
        hessian,
        factor,
        None if sparsity is None else str(sparsity),
        keep,
        mask,
        None if pattern is None else list(pattern),
        row_weight,
        block,
        damping,
    )
