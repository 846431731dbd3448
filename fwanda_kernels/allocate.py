"""How many weights each row keeps: in proportion to a signal, or by row scales that compare many matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._checks import (
    as_count,
    expect_bad,
    expect_dense,
    expect_device,
    expect_lists,
    expect_number,
    expect_values,
    expect_weights,
)

_SMALLEST = 2.0**-900  # a smaller share of the largest signal counts as 0
_EXACT_INTEGERS = 2**53
_CHUNK_ROWS = 1024
_PARTS = 16


def allocate_row_budgets(v: Tensor, total: int, *, k_min: int = 1, k_max: int, bad: Tensor | None = None) -> Tensor:
    """Keep counts k_i of one matrix, proportional to v_i within [k_min, k_max], that sum to `total`.

    Args:
        v: [R] floating, finite and >= 0: the share each row deserves, e.g. sqrt(omega).
        total: number kept in the matrix, R * k_min <= total <= R * k_max.
        k_min: fewest kept in a row.
        k_max: most kept in a row: C.
        bad: [1] int32 on the device of v. With it nothing waits for the device: 1 is ORed into it if v is negative or
            not finite; the counts then have no meaning. (bad_message() is for the selection ops, not for this flag.)

    Returns:
        [R] int64.

    Raises:
        ValueError: v is empty, negative or not finite, or total is out of reach.

    Rule: x_i = clamp(lambda * v_i, k_min, k_max), with the lambda for which the x_i sum to total. The x_i are rounded
    down; then the rows with the largest remainders get one more each, among equal remainders the lowest row first. Rows
    with v_i = 0 stay at k_min until all others are at k_max; what is left is spread evenly over them. A v_i below
    2^-900 of the largest counts as 0. Source: the F-Wanda paper, equation 3 and algorithm 2 (which clamps
    both bounds at once and can lose the total).
    """
    op = "allocate_row_budgets"
    total, k_max = as_count(op, "total", total), as_count(op, "k_max", k_max)
    return allocate_budgets([v], [total], k_min=as_count(op, "k_min", k_min), k_max=[k_max], bad=bad)[0]


def allocate_budgets(
    vs: Sequence[Tensor],
    totals: Sequence[int],
    *,
    k_min: int = 1,
    k_max: Sequence[int],
    bad: Tensor | None = None,
) -> list[Tensor]:
    """Allocate the rows of L matrices at once as allocate_row_budgets() does, on the device of the signals.

    Args:
        vs: L vectors [R_l] floating, finite and >= 0, on one device.
        totals: L numbers kept, one for each matrix.
        k_min: fewest kept in a row, in every matrix.
        k_max: L numbers: the most kept in a row of each matrix.
        bad: as in allocate_row_budgets().

    Returns:
        L vectors [R_l] int64.

    Raises:
        ValueError: as allocate_row_budgets(), naming the entry.
    """
    op = "allocate_budgets"
    expect_lists(op, vs=vs, totals=totals, k_max=k_max)
    for i, v in enumerate(vs):
        expect_dense(op, f"vs[{i}]", v)
        expect_values(op, f"vs[{i}]", v)
        expect_device(op, f"vs[{i}]", v, vs[0])
    expect_bad(op, bad, vs[0])
    if bad is not None and bad.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{op}: bad was made in inference mode and cannot be changed outside it; pass a clone of it")
    sizes = [v.numel() for v in vs]
    k_min = as_count(op, "k_min", k_min)
    totals = [as_count(op, f"totals[{i}]", total) for i, total in enumerate(totals)]
    k_max = [as_count(op, f"k_max[{i}]", most) for i, most in enumerate(k_max)]
    for i, (v, total, most) in enumerate(zip(vs, totals, k_max, strict=True)):
        if v.dim() != 1 or not v.is_floating_point() or not sizes[i]:
            raise ValueError(f"allocate_budgets: vs[{i}] must be a floating [R], R >= 1, got {list(v.shape)} {v.dtype}")
        if not 0 <= k_min <= most:
            raise ValueError(f"allocate_budgets: 0 <= k_min <= k_max must hold, got k_min={k_min}, k_max[{i}]={most}")
        if sizes[i] * most > _EXACT_INTEGERS:
            raise ValueError(f"allocate_budgets: R * k_max must be at most 2^53, got {sizes[i]} * {most} in entry {i}")
        if not sizes[i] * k_min <= total <= sizes[i] * most:
            raise ValueError(
                f"allocate_budgets: totals[{i}] must be in [{sizes[i] * k_min}, {sizes[i] * most}] "
                f"({sizes[i]} rows of {k_min} to {most}), got {total}"
            )
    signal, valid, position, limits = _padded(vs, sizes, totals, k_max)
    broken = ~((signal >= 0) & signal.isfinite()).all(1)
    if bad is not None:
        bad.bitwise_or_(broken.any().to(torch.int32))
    elif bool(broken.any()):
        raise ValueError(f"allocate_budgets: vs[{int(broken.int().argmax())}] must be finite and >= 0")
    budgets = _allocate(signal, valid, limits[0], k_min, limits[1])
    return list(budgets.flatten()[position].split(sizes))


def global_row_scales(
    weights: Sequence[Tensor],
    omegas: Sequence[Tensor],
    norms: Sequence[Tensor],
    *,
    row_exponent: float = 0.75,
    layer_exponent: float = 0.5,
    mean_omega: float | None = None,
) -> list[Tensor]:
    """Row scales by which select_threshold() compares rows and matrices: a damped second-order estimate of the loss.

    Args:
        weights: L matrices [R, C] bf16|fp16|fp32 on one device. A row that is not finite gets scale 0;
            select_threshold() then refuses it.
        omegas: L floating vectors [R], finite and >= 0: the Fisher information of each output, LayerStatistics.omega.
        norms: L floating vectors [C], finite and >= 0: the norm of each input column, LayerStatistics.norm.
        row_exponent: b, damping across rows.
        layer_exponent: c, damping across matrices.
        mean_omega: mean of omega over all rows of the model, where the lists hold only a part of it, such as one
            block; None: the mean over the lists.

    Returns:
        L vectors [R] fp32.

    Raises:
        ValueError: the lists, shapes, dtypes or devices do not fit; an omega or a norm is negative or not finite;
            omega is 0 everywhere; or a scale is too large for fp32.

    Formula, in fp64, with omega divided by its mean over all rows and m_i = mean_j(|W_ij| * norm_j):
    a_i = omega_i^(b/2) * m_i^(b-1) / mean_i(omega_i^(b/2) * m_i^b)^(1-c), and 0 where omega_i or m_i is 0. With
    b = c = 1 the score |W_ij| * norm_j * a_i is sqrt(omega_i) * |W_ij| * norm_j. Its square is twice the
    Kronecker-diagonal estimate of how much the summed loss grows if W_ij is removed. Waits for the device once; reads
    each weight once. Source: ours, from the Fisher information of the paper.
    """
    op = "global_row_scales"
    _expect_layers(op, weights, omegas, norms)
    given = {"row_exponent": row_exponent, "layer_exponent": layer_exponent}
    for name, value in (given | ({} if mean_omega is None else {"mean_omega": mean_omega})).items():
        expect_number(op, name, value, "a finite number")
    omegas, norms = [omega.double() for omega in omegas], [norm.double() for norm in norms]
    b, c = row_exponent * 1.0, layer_exponent * 1.0  # torch takes no integer beyond 64 bits
    mean = torch.cat(omegas).mean()
    if mean_omega is not None:
        mean = torch.full_like(mean, mean_omega * 1.0)
    layers = list(zip(weights, omegas, norms, strict=True))
    scales = [_row_scales(weight, omega, norm, mean, b, c) for weight, omega, norm in layers]
    _refuse_values(op, omegas, norms, scales, mean)
    return scales


def _expect_layers(op: str, weights: Sequence[Tensor], omegas: Sequence[Tensor], norms: Sequence[Tensor]) -> None:
    """Raise unless the lists hold weights [R, C], omegas [R] and norms [C] that can be computed with."""
    vectors = {"omegas": omegas, "norms": norms}
    expect_lists(op, weights=weights, **vectors)
    for name, tensors in {"weights": weights, **vectors}.items():
        for i, tensor in enumerate(tensors):
            expect_dense(op, f"{name}[{i}]", tensor)
            expect_values(op, f"{name}[{i}]", tensor)
    for i, (weight, omega, norm) in enumerate(zip(weights, omegas, norms, strict=True)):
        if weight.dim() != 2 or weight.shape != (*omega.shape, *norm.shape):
            raise ValueError(
                f"{op}: entry {i} must be a weight [R, C], an omega [R] and a norm [C], "
                f"got {list(weight.shape)}, {list(omega.shape)} and {list(norm.shape)}"
            )
    expect_weights(op, weights)
    for name, tensors in vectors.items():
        for i, tensor in enumerate(tensors):
            expect_device(op, f"{name}[{i}]", tensor, weights[0])
            if not tensor.is_floating_point():
                raise ValueError(f"{op}: {name}[{i}] must be floating, got {tensor.dtype}")


def _row_scales(weight: Tensor, omega: Tensor, norm: Tensor, mean: Tensor, b: float, c: float) -> Tensor:
    """[R] fp32 by the formula of global_row_scales(); mean: [] fp64."""
    m = _mean_score(weight, norm)
    alive = (omega > 0) & (m > 0) & m.isfinite()
    omega, m = torch.where(alive, omega / mean, 1), torch.where(alive, m, 1)
    row = torch.where(alive, omega ** (b / 2) * m**b, 0)
    layer = row.mean() ** (1 - c)
    return torch.where(alive, row / m / layer, 0).float()


def _refuse_values(
    op: str, omegas: Sequence[Tensor], norms: Sequence[Tensor], scales: list[Tensor], mean: Tensor
) -> None:
    """Raise ValueError for values that have no estimate; waits for the device once."""
    broken = [[~_is_share(omega), ~_is_share(norm)] for omega, norm in zip(omegas, norms, strict=True)]
    flags = [*sum(broken, []), *(~scale.isfinite().all() for scale in scales)]
    *flags, mean = torch.stack([flag.double() for flag in flags] + [mean]).tolist()
    for at, flag in enumerate(flags[: 2 * len(omegas)]):
        if flag:
            raise ValueError(f"{op}: {('omegas', 'norms')[at % 2]}[{at // 2}] must be finite and >= 0")
    if not 0 < mean < float("inf"):
        raise ValueError(f"{op}: the mean of omega must be finite and > 0, got {mean}")
    if 1 in flags:
        at = flags.index(1) - 2 * len(omegas)
        raise ValueError(f"{op}: the scales of entry {at} exceed fp32; take exponents nearer to 1")


def _is_share(v: Tensor) -> Tensor:
    """[] bool: whether all values are finite and >= 0."""
    return (v.isfinite() & (v >= 0)).all()


def _mean_score(weight: Tensor, norm: Tensor) -> Tensor:
    """[R] fp64 mean over the columns of |W_ij| * norm_j."""
    norm = norm / weight.shape[1]
    return torch.cat([rows.double().abs() @ norm for rows in weight.split(_CHUNK_ROWS)])


def _padded(
    vs: Sequence[Tensor], sizes: list[int], totals: Sequence[int], k_max: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put vectors of several lengths into one matrix, in few launches for any L; none waits for the device.

    Returns:
        [L, R] fp64 signals, with zeros after a shorter vector; [L, R] bool, False there; the flat position of each
        row of the vectors in [L, R]; totals and k_max as [2, L, 1] int64.
    """
    flat = torch.cat([v.float() if v.itemsize < 4 else v for v in vs]).double()  # torch joins no fp8 with others
    device, most = flat.device, max(sizes)
    numbers = torch.tensor([sizes, list(totals), list(k_max)], dtype=torch.int64, device="cpu", pin_memory=flat.is_cuda)
    length, *limits = numbers.to(device, non_blocking=True)[:, :, None]
    offset = torch.arange(most, device=device)
    valid = offset < length
    padding = (most - length).cumsum(0) - (most - length)  # before each vector
    before = torch.repeat_interleave(padding.flatten(), length.flatten(), output_size=flat.numel())
    position = torch.arange(flat.numel(), device=device) + before
    signal = flat.new_zeros(len(sizes) * most).index_copy_(0, position, flat)
    return signal.view(len(sizes), most), valid, position, limits


def _allocate(signal: Tensor, valid: Tensor, total: Tensor, k_min: int, k_max: Tensor) -> Tensor:
    """The rule of allocate_row_budgets() on padded rows: signal, valid [L, R]; total, k_max [L, 1] int64."""
    exponent = torch.frexp(signal.amax(1, keepdim=True)).exponent
    signal = torch.ldexp(
        signal, -exponent
    )  # scaling by a power of two is exact, so the result does not depend on the size of the signal
    positive = valid & (signal > _SMALLEST)
    zero = valid & ~positive
    zeros = zero.sum(1, keepdim=True)
    positive_total = torch.minimum(total - k_min * zeros, k_max * positive.sum(1, keepdim=True))

    real = torch.where(positive, _water_fill(signal, positive, positive_total, k_min, k_max), 0)
    base = real.floor().to(torch.int64)
    short = positive_total - base.sum(1, keepdim=True)
    remainder = torch.where(positive & (base < k_max), real - base, -1.0)
    base += _rank(remainder) < short

    spread = total - positive_total
    even = spread // zeros.clamp(min=1) + (zero.cumsum(1) <= spread % zeros.clamp(min=1))
    return torch.where(positive, base, even)


def _water_fill(signal: Tensor, positive: Tensor, total: Tensor, k_min: int, k_max: Tensor) -> Tensor:
    """x_i = clamp(lambda v_i, k_min, k_max), with the lambda for which the positive rows sum to total.

    The sum is piecewise linear in lambda. It bends where a row leaves k_min (lambda = k_min / v_i) or reaches k_max.
    Two searches over the sorted rows, run side by side, find the bends around total; between them lambda has a closed
    form. Each round cuts a bracket into 16 parts, so the number of rounds is small and does not depend on the values.
    """
    count, rows = signal.shape
    ascending = torch.where(positive, signal, 0).sort(dim=1).values
    first = rows - positive.sum(1, keepdim=True)  # of the positive rows
    prefix = torch.nn.functional.pad(ascending.cumsum(1), (1, 0))

    # the last row that reaches total at lambda = k_min / v_j, and the last one at k_max / v_j
    bound = torch.cat([torch.full_like(k_max, k_min), k_max], 1).repeat_interleave(_PARTS - 1, 1)
    reaching = (first - 1).expand(-1, 2)
    width = rows - reaching
    part = torch.arange(1, _PARTS, device=signal.device)
    for _ in range(-(-rows.bit_length() // (_PARTS - 1).bit_length())):
        step = width[:, :, None] * part // _PARTS  # [L, 2, 15] ascending
        j = (reaching[:, :, None] + step).flatten(1)
        lam = bound / ascending.gather(1, j.clamp(0, rows - 1))
        low = torch.searchsorted(ascending, k_min / lam, right=True).maximum(first)
        high = torch.searchsorted(ascending, k_max / lam).maximum(low)
        middle = prefix.gather(1, high) - prefix.gather(1, low)
        at_lam = k_min * (low - first) + lam * middle + k_max * (rows - high)
        reaches = (step == 0) | (at_lam >= total).view(count, 2, -1)
        reaches = reaches.long().cumprod(2).bool()  # only those before the first that does not reach it
        gained = torch.where(reaches, step, 0).amax(2)
        width = torch.where(reaches, width[:, :, None], step).amin(2) - gained
        reaching = reaching + gained

    low, high = (reaching + 1).split(1, dim=1)  # rows [low, high) are between the bounds
    middle = prefix.gather(1, high) - prefix.gather(1, low)
    inside = (total - k_min * (low - first) - k_max * (rows - high)) / middle
    at_bound = torch.where(
        high < rows,
        k_max / ascending.gather(1, high.clamp(max=rows - 1)),
        k_min / ascending.gather(1, (low - 1).clamp(min=0)),
    )
    lam = torch.where(high > low, inside, at_bound)
    return (lam * signal).clamp(min=k_min).minimum(k_max)


def _rank(values: Tensor) -> Tensor:
    """Position of each value in the descending order of its row, ties in index order."""
    order = torch.sort(values, dim=1, descending=True, stable=True).indices
    positions = torch.arange(values.shape[1], device=values.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, positions)
