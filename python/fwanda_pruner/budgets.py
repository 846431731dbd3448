"""How many weights each row keeps: uniform, per layer, by Fisher information per layer, or over the whole model."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

import fwanda_kernels as fk

from .calibrate import Statistics
from .config import PruneConfig
from .errors import UserError
from .model import Target

OMEGA_FLOOR = 1e-8
_CHUNK_ROWS = 1024


def keep_total(rows: int, cols: int, removed: Fraction) -> int:
    """Weights kept of an [R, C] matrix: R C - floor(s R C)."""
    return rows * cols - removed * rows * cols // 1


def floored_omega(statistics: Statistics, name: str) -> Tensor:
    """[R] fp64 omega, not below OMEGA_FLOOR."""
    return statistics.omega(name).clamp(min=OMEGA_FLOOR)


def count_floored_rows(statistics: Statistics, targets: list[Target]) -> int:
    """How many rows met OMEGA_FLOOR over all targets."""
    return sum(int((statistics.omega(t.name) < OMEGA_FLOOR).sum()) for t in targets)


def keep_budgets(config: PruneConfig, targets: list[Target], statistics: Statistics | None) -> dict[str, Tensor]:
    """Weights kept in each row, for an unstructured pattern.

    Args:
        config: resolved; its allocation decides.
        targets: from find_targets().
        statistics: of the dense model; needed by "row" and "global" only.

    Returns:
        name -> [R] int64, on the weight's device.

    Raises:
        UserError: the sparsity leaves less than one weight a row for the "row" allocation.
    """
    return {"layer": _layer, "uniform": _uniform, "row": _row, "global": _global}[config.allocation](
        config, targets, statistics
    )


def _uniform(config: PruneConfig, targets: list[Target], _statistics) -> dict[str, Tensor]:
    budgets = {}
    for target in targets:
        rows, cols = target.weight.shape
        budgets[target.name] = torch.full((rows,), keep_total(1, cols, config.removed), device=target.weight.device)
    return budgets


def _layer(config: PruneConfig, targets: list[Target], _statistics) -> dict[str, Tensor]:
    """Magnitude: one threshold per matrix."""
    budgets = {}
    for target in targets:
        weight = target.weight
        rows, cols = (torch.ones(size, device=weight.device) for size in weight.shape)
        total = keep_total(*weight.shape, config.removed)
        budgets[target.name] = fk.select_threshold([weight], [rows], [cols], total)[0]
    return budgets


def _row(config: PruneConfig, targets: list[Target], statistics: Statistics) -> dict[str, Tensor]:
    """The paper's rule: k_i proportional to omega_i^p inside each matrix, at least 1."""
    shapes = [t.weight.shape for t in targets]
    totals = [keep_total(rows, cols, config.removed) for rows, cols in shapes]
    for target, (rows, cols), total in zip(targets, shapes, totals, strict=True):
        if total < rows:
            raise UserError(
                f"--sparsity {config.sparsity} keeps {total} weights of {target.name} [{rows}, {cols}], but "
                f"--allocation row keeps at least one a row; choose a lower sparsity or --allocation global"
            )
    signals = [floored_omega(statistics, t.name) ** config.power for t in targets]
    budgets = fk.allocate_budgets(signals, totals, k_min=1, k_max=[cols for _, cols in shapes])
    return {t.name: k for t, k in zip(targets, budgets, strict=True)}


def _global(config: PruneConfig, targets: list[Target], statistics: Statistics) -> dict[str, Tensor]:
    """One threshold over all matrices on the damped second-order estimate of the loss.

    A matrix that saw no token has no estimate: it is pruned uniformly, and the others share what is left.
    """
    seen = [t for t in targets if statistics.n_tokens[t.name]]
    budgets = _uniform(config, [t for t in targets if not statistics.n_tokens[t.name]], statistics)
    total = keep_total(1, sum(t.weight.numel() for t in targets), config.removed)
    total -= sum(int(k.sum()) for k in budgets.values())
    norms = [statistics.norm(t.name) for t in seen]
    scales = _row_scales(config, seen, statistics, norms)
    counts = fk.select_threshold([t.weight for t in seen], scales, norms, total)
    return budgets | {t.name: k for t, k in zip(seen, counts, strict=True)}


def _row_scales(
    config: PruneConfig, targets: list[Target], statistics: Statistics, norms: list[Tensor]
) -> list[Tensor]:
    """a_i [R] fp32: omega_i^(b/2) m_i^(b-1) / mean_i(omega_i^(b/2) m_i^b)^(1-c), 0 where omega_i or m_i is 0."""
    b, c = config.row_exponent, config.layer_exponent
    omegas = [statistics.omega(t.name) for t in targets]
    mean = torch.cat(omegas).mean()
    if not bool(mean > 0):
        raise UserError("the Fisher information is 0 everywhere: the loss does not depend on the blocks of this model")
    scales = []
    for target, omega, norm in zip(targets, omegas, norms, strict=True):
        m = _mean_score(target.weight, norm)
        alive = (omega > 0) & (m > 0)
        omega, m = torch.where(alive, omega / mean, 1), torch.where(alive, m, 1)
        row = torch.where(alive, omega ** (b / 2) * m**b, 0)
        layer = row.mean() ** (1 - c)
        scales.append(torch.where(alive, row / m / layer, 0).float())
    return scales


def _mean_score(weight: Tensor, norm: Tensor) -> Tensor:
    """[R] fp64 mean over the columns of |W_ij| * norm_j."""
    norm = norm.double() / weight.shape[1]
    return torch.cat([rows.double().abs() @ norm for rows in weight.split(_CHUNK_ROWS)])
