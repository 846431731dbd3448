"""How many weights each row keeps: uniform, per layer, by Fisher information per layer, or over the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import fwanda_kernels as fk

from ..config import PruneConfig
from ..errors import UserError

if TYPE_CHECKING:  # they bring transformers, which the adapters of torch do without
    from ..measure.statistics import Statistics
    from ..model.targets import Target

OMEGA_FLOOR = 1e-8


def keep_total(size: int, removed: Fraction) -> int:
    """Weights kept of `size`: size - floor(removed * size)."""
    return size - removed * size // 1


def floored_omega(layer: fk.LayerStatistics) -> Tensor:
    """[R] fp64 omega, not below OMEGA_FLOOR."""
    return layer.omega.clamp(min=OMEGA_FLOOR)


def count_floored_rows(statistics: Statistics, targets: list[Target]) -> int:
    """How many rows met OMEGA_FLOOR over all targets."""
    return sum(int((statistics.layer(t.name).omega < OMEGA_FLOOR).sum()) for t in targets)


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
    rules = {"layer": _layer, "uniform": _uniform, "row": _row, "global": _global}
    if config.allocation not in rules:
        raise UserError(f"allocation {config.allocation} measures the pruned model: only fwanda_pruner.prune() does it")
    return rules[config.allocation](config, targets, statistics)


def _uniform(config: PruneConfig, targets: list[Target], _statistics) -> dict[str, Tensor]:
    return {t.name: _equal_rows(t.weight, config.removed) for t in targets}


def _equal_rows(weight: Tensor, removed: Fraction) -> Tensor:
    rows, cols = weight.shape
    return torch.full((rows,), keep_total(cols, removed), device=weight.device)


def _layer(config: PruneConfig, targets: list[Target], _statistics) -> dict[str, Tensor]:
    """Magnitude: one threshold per matrix."""
    budgets = {}
    for target in targets:
        weight = target.weight
        rows, cols = (torch.ones(size, device=weight.device) for size in weight.shape)
        total = keep_total(weight.numel(), config.removed)
        budgets[target.name] = fk.select_threshold([weight], [rows], [cols], total)[0]
    return budgets


def _row(config: PruneConfig, targets: list[Target], statistics: Statistics) -> dict[str, Tensor]:
    """The paper's rule: k_i proportional to omega_i^p inside each matrix, at least 1."""
    shapes = [t.weight.shape for t in targets]
    totals = [keep_total(rows * cols, config.removed) for rows, cols in shapes]
    for target, (rows, cols), total in zip(targets, shapes, totals, strict=True):
        if total < rows:
            raise UserError(
                f"--sparsity {config.sparsity} keeps {total} weights of {target.name} [{rows}, {cols}], but "
                f"--allocation row keeps at least one a row; choose a lower sparsity or --allocation global"
            )
    signals = [floored_omega(statistics.layer(t.name)) ** config.power for t in targets]
    budgets = fk.allocate_budgets(signals, totals, k_min=1, k_max=[cols for _, cols in shapes])
    return {t.name: k for t, k in zip(targets, budgets, strict=True)}


def _global(config: PruneConfig, targets: list[Target], statistics: Statistics) -> dict[str, Tensor]:
    return threshold_budgets(config, targets, statistics, global_factors(config, targets, statistics))


@dataclass(frozen=True)
class Factors:
    """What makes the scores |W_ij| * norm_j of many matrices comparable: rows_i * columns_j.

    Attributes:
        rows: name -> [R] fp32.
        columns: name -> [C] fp32; they also decide inside a row.
    """

    rows: dict[str, Tensor]
    columns: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """All of them by unique names."""
        return {f"{k}.{name}": t for k in ("rows", "columns") for name, t in getattr(self, k).items()}

    @classmethod
    def of_tensors(cls, tensors: dict[str, Tensor], device: torch.device) -> Factors:
        """The inverse of tensors(), on a device."""
        found: dict[str, dict[str, Tensor]] = {"rows": {}, "columns": {}}
        for key, tensor in tensors.items():
            kind, name = key.split(".", 1)
            found[kind][name] = tensor.to(device)
        return cls(**found)


def global_factors(config: PruneConfig, targets: Sequence[Target], statistics: Statistics) -> Factors:
    """Those of the damped second-order estimate of the loss; 1 for a matrix that saw no token.

    Raises:
        UserError: the Fisher information is 0 everywhere.
    """
    rows = _row_scales(config, [t.weight for t in targets], [statistics.layer(t.name) for t in targets])
    columns = {t.name: torch.ones(t.weight.shape[1], device=t.weight.device) for t in targets}
    return Factors(dict(zip(columns, rows, strict=True)), columns)


def threshold_budgets(
    config: PruneConfig, targets: Sequence[Target], statistics: Statistics, factors: Factors
) -> dict[str, Tensor]:
    """name -> [R] int64 kept in each row: one threshold on the scores of all matrices.

    A matrix that saw no token has no estimate: it is pruned uniformly, and the others share what is left.
    """
    layers = [statistics.layer(t.name) for t in targets]
    columns = [layer.norm * factors.columns[t.name] for t, layer in zip(targets, layers, strict=True)]
    weights, rows = [t.weight for t in targets], [factors.rows[t.name] for t in targets]
    counts = _threshold_counts(config, weights, layers, rows, columns)
    return {t.name: count for t, count in zip(targets, counts, strict=True)}


def global_budgets(config: PruneConfig, weights: list[Tensor], layers: list[fk.LayerStatistics]) -> list[Tensor]:
    """threshold_budgets() of the global allocation, for matrices without names.

    Raises:
        UserError: the Fisher information is 0 everywhere.
    """
    rows = _row_scales(config, weights, layers)
    return _threshold_counts(config, weights, layers, rows, [layer.norm for layer in layers])


def _row_scales(config: PruneConfig, weights: list[Tensor], layers: list[fk.LayerStatistics]) -> list[Tensor]:
    """[R] fp32 scales of the global allocation; 1 for a matrix that saw no token."""
    scales = [torch.ones(len(weight), device=weight.device) for weight in weights]
    seen = [i for i, layer in enumerate(layers) if layer.n_tokens]
    omegas, norms = [layers[i].omega for i in seen], [layers[i].norm for i in seen]
    b, c = config.row_exponent, config.layer_exponent
    try:
        found = fk.global_row_scales([weights[i] for i in seen], omegas, norms, row_exponent=b, layer_exponent=c)
    except ValueError as error:
        raise UserError(
            "the Fisher information is 0 everywhere: the loss does not depend on the blocks of this model"
        ) from error
    for i, scale in zip(seen, found, strict=True):
        scales[i] = scale
    return scales


def _threshold_counts(
    config: PruneConfig,
    weights: list[Tensor],
    layers: list[fk.LayerStatistics],
    rows: list[Tensor],
    columns: list[Tensor],
) -> list[Tensor]:
    counts = [_equal_rows(weight, config.removed) for weight in weights]
    seen = [i for i, layer in enumerate(layers) if layer.n_tokens]
    total = keep_total(sum(weight.numel() for weight in weights), config.removed)
    total -= sum(int(k.sum()) for k, layer in zip(counts, layers, strict=True) if not layer.n_tokens)
    weights, rows, columns = ([items[i] for i in seen] for items in (weights, rows, columns))
    for i, count in zip(seen, fk.select_threshold(weights, rows, columns, total), strict=True):
        counts[i] = count
    return counts
