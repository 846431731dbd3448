"""How many weights each row keeps: uniform, per matrix, by Fisher information per matrix, or over the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import fwanda_kernels as fk

from ..config import PruneConfig
from ..errors import UserError

if TYPE_CHECKING:  # they import transformers, which the adapters for plain torch do without
    from ..engine.engine import Engine
    from ..measure.statistics import Statistics

OMEGA_FLOOR = 1e-8


@dataclass(frozen=True)
class ScoreScales:
    """Multipliers that make the scores |W_ij| * norm_j of all matrices comparable: rows_i * columns_j.

    Attributes:
        rows: name -> [R] fp32. They change only how many weights a row keeps.
        columns: name -> [C] fp32. They also change which weights it keeps.
    """

    rows: dict[str, Tensor]
    columns: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """All of them by unique names."""
        return {f"{kind}.{name}": t for kind in ("rows", "columns") for name, t in getattr(self, kind).items()}

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor], device: torch.device) -> ScoreScales:
        """The inverse of tensors(), on a device."""
        parts: dict[str, dict[str, Tensor]] = {"rows": {}, "columns": {}}
        for key, tensor in tensors.items():
            kind, name = key.split(".", 1)
            parts[kind][name] = tensor.to(device)
        return cls(**parts)


def keep_total(size: int, removed: Fraction) -> int:
    """Weights kept of `size`: size - floor(removed * size)."""
    return size - removed * size // 1


def floored_omega(layer: fk.LayerStatistics) -> Tensor:
    """[R] fp64 omega, raised to OMEGA_FLOOR where it is lower."""
    return layer.omega.clamp(min=OMEGA_FLOOR)


def is_measured(layer: fk.LayerStatistics) -> bool:
    """Whether a token reached the matrix, and a gradient other than 0 its output: then its loss can be estimated."""
    return bool(layer.n_tokens) and bool(layer.omega.any())


def count_floored_rows(statistics: Statistics, names: Iterable[str]) -> int:
    """Rows of the named matrices whose omega is below OMEGA_FLOOR."""
    return sum(int((statistics.layer(name).omega < OMEGA_FLOOR).sum()) for name in names)


def keep_budgets(
    config: PruneConfig, engine: Engine, statistics: Statistics | None, scales: ScoreScales | None = None
) -> dict[str, Tensor]:
    """Weights kept in each row, for an unstructured pattern.

    Args:
        config: resolved; its allocation decides.
        engine: of the dense model.
        statistics: of the dense model; needed by "row" and "global" only.
        scales: multipliers from the search of "response". If given, config.allocation is ignored.

    Returns:
        name -> [R] int64, on the engine's device.

    Raises:
        UserError: the "row" allocation would keep less than one weight a row, or the Fisher information is 0
            everywhere.
    """
    if scales is not None:
        return threshold_budgets(config, engine, statistics, scales)
    if config.allocation not in BUDGETS:
        raise UserError(f"allocation {config.allocation} measures the pruned model: only fwanda_pruner.prune() does it")
    return BUDGETS[config.allocation](config, engine, statistics)


def _uniform(config: PruneConfig, engine: Engine, _statistics) -> dict[str, Tensor]:
    """Every row keeps the same share."""
    return {t.name: _equal_rows(t.shape, config.removed, engine.device) for t in engine.targets}


def _equal_rows(shape: Sequence[int], removed: Fraction, device: torch.device) -> Tensor:
    rows, cols = shape
    return torch.full((rows,), keep_total(cols, removed), dtype=torch.int64, device=device)


def _layer(config: PruneConfig, engine: Engine, _statistics) -> dict[str, Tensor]:
    """Magnitude: one threshold per matrix."""
    budgets = {}
    for index in range(engine.block_count):
        with engine.block(index) as block:
            for name, weight in block.weights.items():
                rows, cols = (torch.ones(size, dtype=torch.float32, device=weight.device) for size in weight.shape)
                total = keep_total(weight.numel(), config.removed)
                budgets[name] = fk.select_threshold([weight], [rows], [cols], total)[0]
    return budgets


def _row(config: PruneConfig, engine: Engine, statistics: Statistics) -> dict[str, Tensor]:
    """The published rule: k_i proportional to omega_i^p inside each matrix, at least 1 (the paper, equation 3)."""
    targets = engine.targets
    totals = [keep_total(rows * cols, config.removed) for rows, cols in (t.shape for t in targets)]
    for target, total in zip(targets, totals, strict=True):
        rows, cols = target.shape
        if total < rows:
            raise UserError(
                f"--sparsity {config.sparsity} keeps {total} weights of {target.name} [{rows}, {cols}], but "
                f"--allocation row keeps at least one a row; choose a lower sparsity or --allocation global"
            )
    signals = [floored_omega(statistics.layer(t.name)) ** config.power for t in targets]
    budgets = fk.allocate_budgets(signals, totals, k_min=1, k_max=[t.shape[1] for t in targets])
    return {t.name: k for t, k in zip(targets, budgets, strict=True)}


def _global(config: PruneConfig, engine: Engine, statistics: Statistics) -> dict[str, Tensor]:
    """One threshold over the model, on scores scaled by the damped estimate of the loss."""
    return threshold_budgets(config, engine, statistics, global_scales(config, engine, statistics))


BUDGETS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "layer": _layer,
    "uniform": _uniform,
    "row": _row,
    "global": _global,
}


def global_scales(config: PruneConfig, engine: Engine, statistics: Statistics) -> ScoreScales:
    """Row scales of the global allocation; 1 for columns, and for a matrix that is not measured.

    Raises:
        UserError: the Fisher information is 0 everywhere.
    """
    layers = {t.name: statistics.layer(t.name) for t in engine.targets}
    mean_omega = _mean_omega(layers.values())
    rows: dict[str, Tensor] = {}
    for index in range(engine.block_count):
        with engine.block(index) as block:
            names = list(block.weights)
            scales = _row_scales(config, list(block.weights.values()), [layers[n] for n in names], mean_omega)
            rows |= dict(zip(names, scales, strict=True))
    columns = {t.name: torch.ones(t.shape[1], dtype=torch.float32, device=engine.device) for t in engine.targets}
    return ScoreScales({t.name: rows[t.name] for t in engine.targets}, columns)


def threshold_budgets(
    config: PruneConfig, engine: Engine, statistics: Statistics, scales: ScoreScales
) -> dict[str, Tensor]:
    """name -> [R] int64 kept in each row, by one threshold on the scaled scores of all matrices.

    A matrix that is not measured has no estimate: it is pruned uniformly, and the others share what is left.
    """
    layers = {t.name: statistics.layer(t.name) for t in engine.targets}
    unseen = {
        t.name: _equal_rows(t.shape, config.removed, engine.device)
        for t in engine.targets
        if not is_measured(layers[t.name])
    }
    seen = [t.name for t in engine.targets if t.name not in unseen]
    total = _total_of_seen(config, [t.shape for t in engine.targets], unseen.values())
    columns = {name: layers[name].norm * scales.columns[name] for name in seen}
    counts = unseen | engine.select_threshold({name: scales.rows[name] for name in seen}, columns, total)
    return {t.name: counts[t.name] for t in engine.targets}


def global_budgets(config: PruneConfig, weights: list[Tensor], layers: list[fk.LayerStatistics]) -> list[Tensor]:
    """The global allocation for plain weights, without an engine: [R] int64 kept in each row of each matrix.

    Raises:
        UserError: the Fisher information is 0 everywhere.
    """
    rows = _row_scales(config, weights, layers, _mean_omega(layers))
    counts = [_equal_rows(weight.shape, config.removed, weight.device) for weight in weights]
    unseen = [count for count, layer in zip(counts, layers, strict=True) if not is_measured(layer)]
    total = _total_of_seen(config, [weight.shape for weight in weights], unseen)
    seen = [i for i, layer in enumerate(layers) if is_measured(layer)]
    parts = [weights[i] for i in seen], [rows[i] for i in seen], [layers[i].norm for i in seen]
    for i, count in zip(seen, fk.select_threshold(*parts, total), strict=True):
        counts[i] = count
    return counts


def _mean_omega(layers) -> float:
    """Mean of omega over the rows of all matrices that are measured.

    Raises:
        UserError: it is 0.
    """
    omegas = [layer.omega for layer in layers if is_measured(layer)]
    mean = float(torch.cat(omegas).mean()) if omegas else 0.0
    if not 0 < mean < float("inf"):
        raise UserError("the Fisher information is 0 everywhere: the loss does not depend on the blocks of this model")
    return mean


def _row_scales(
    config: PruneConfig, weights: list[Tensor], layers: list[fk.LayerStatistics], mean_omega: float
) -> list[Tensor]:
    """[R] fp32 scales of the global allocation for each matrix; 1 for one that is not measured."""
    scales = [torch.ones(len(weight), dtype=torch.float32, device=weight.device) for weight in weights]
    seen = [i for i, layer in enumerate(layers) if is_measured(layer)]
    if not seen:
        return scales
    try:
        seen_scales = fk.global_row_scales(
            [weights[i] for i in seen],
            [layers[i].omega for i in seen],
            [layers[i].norm for i in seen],
            row_exponent=config.row_exponent,
            layer_exponent=config.layer_exponent,
            mean_omega=mean_omega,
        )
    except ValueError as error:  # exponents with which a scale overflows
        raise UserError(str(error)) from error
    for i, scale in zip(seen, seen_scales, strict=True):
        scales[i] = scale
    return scales


def _total_of_seen(config: PruneConfig, shapes: Sequence[Sequence[int]], unseen_counts) -> int:
    """Weights that the matrices which are measured may keep together."""
    total = keep_total(sum(rows * cols for rows, cols in shapes), config.removed)
    return total - sum(int(count.sum()) for count in unseen_counts)
