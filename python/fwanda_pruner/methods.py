"""The pruning methods: from budgets and statistics to zeros, in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn
from tqdm import tqdm

import fwanda_kernels as fk

from .budgets import floored_omega, keep_budgets, keep_total
from .calibrate import BlockStream, Statistics, collect_hessians
from .config import PruneConfig
from .errors import UserError
from .model import Target
from .report import MatrixRow

_DAMPING, _DAMPING_RETRIES = 0.01, 4


@dataclass
class Job:
    """What a method works on.

    Attributes:
        config: resolved.
        model: pruned in place.
        targets: its matrices.
        tokens: [S, L] int64 calibration windows; None for methods and orders that read no text.
        statistics: of the dense model; None where the method needs none.
        progress: show bars.
    """

    config: PruneConfig
    model: nn.Module
    targets: list[Target]
    tokens: Tensor | None
    statistics: Statistics | None
    progress: bool


def prune_targets(job: Job) -> list[MatrixRow]:
    """Prune every target with the configured method.

    Raises:
        UserError: a matrix cannot be pruned (no budget, no factor, not finite), naming it.
    """
    return METHODS[job.config.method](job)


def asked(config: PruneConfig, target: Target) -> int:
    """Weights that a budget fixed per matrix keeps: every allocation but "global"."""
    rows, cols = target.weight.shape
    if config.nm:
        n, m = config.nm
        return rows * (cols // m * n + cols % m)
    if config.allocation == "uniform" and config.method in ("wanda", "fwanda"):
        return rows * keep_total(1, cols, config.removed)
    return keep_total(rows, cols, config.removed)


def _by_score(job: Job) -> list[MatrixRow]:
    """Magnitude, Wanda, F-Wanda: budgets, then the top of each row, a block at a time."""
    config, statistics = job.config, job.statistics
    budgets = None if config.nm else keep_budgets(config, job.targets, statistics)
    stream = BlockStream(job.model, job.tokens) if config.order == "sequential" else None
    rows = []
    for index, targets in tqdm(_by_block(job.targets), desc="prune", unit="block", disable=not job.progress):
        if stream is not None:
            statistics = _measured_inputs(stream, index, targets)
        if targets:
            rows += _select(config, targets, statistics, budgets)
        if stream is not None:
            stream.run(index, advance=True)
    return rows


def _by_block(targets: list[Target]) -> list[tuple[int, list[Target]]]:
    return [(index, [t for t in targets if t.block == index]) for index in range(1 + targets[-1].block)]


def _measured_inputs(stream: BlockStream, index: int, targets: list[Target]) -> Statistics:
    """Statistics of a block's inputs on the outputs of the pruned blocks below; all of it before any is pruned."""
    measured = Statistics()
    with fk.collect_statistics({t.name: t.module for t in targets}) as collected:
        stream.run(index, advance=False)
    for target in targets:
        measured.add(target, collected)
    measured.check(targets, fisher=False)
    return measured


def _select(
    config: PruneConfig, targets: list[Target], statistics: Statistics | None, budgets: dict[str, Tensor] | None
) -> list[MatrixRow]:
    """Prune the matrices of one block by score."""
    weights = [t.weight for t in targets]
    if config.method == "magnitude":
        scales = [torch.ones(w.shape[1], device=w.device) for w in weights]
    else:
        scales = [statistics.norm(t.name) for t in targets]
    if not config.nm:
        keeps = [budgets[t.name] for t in targets]
        fk.foreach_row_topk_prune_(weights, scales, keeps)
        return [_row(t, int(keep.sum())) for t, keep in zip(targets, keeps, strict=True)]
    n, m = config.nm
    for weight, scale in zip(weights, scales, strict=True):
        whole = weight.shape[1] - weight.shape[1] % m
        fk.nm_prune_(weight[:, :whole], scale[:whole], n, m)
    return [_row(t, asked(config, t)) for t in targets]


def _by_obs(job: Job) -> list[MatrixRow]:
    """SparseGPT and F-SparseGPT: block by block, one Hessian and one factor for each distinct input."""
    config = job.config
    plan = _obs_plan(job)
    stream, rows = BlockStream(job.model, job.tokens), []
    sequential = config.order == "sequential"
    for index, targets in tqdm(_by_block(job.targets), desc="prune", unit="block", disable=not job.progress):
        with collect_hessians(targets) as hessians:
            stream.run(index, advance=not sequential)
        factors: dict[int, Tensor] = {}
        for target in targets:
            hessian = hessians.get(target.name)
            if hessian is None:
                warnings.warn(
                    f"{target.name} saw no calibration token: its weights are ranked by magnitude", stacklevel=2
                )
                hessian = torch.eye(target.weight.shape[1], device=target.weight.device)
            if id(hessian) not in factors:
                factors[id(hessian)] = _factor(target.name, hessian)
            rows.append(_prune_by_obs(config, target, factors[id(hessian)], *plan(target)))
        if sequential:
            stream.run(index, advance=True)
    return rows


def _obs_plan(job: Job) -> Callable[[Target], tuple[dict, Tensor | None]]:
    """For each target the selection argument of obs_prune_() and the row weight."""
    config, statistics = job.config, job.statistics
    budgets = (
        keep_budgets(config, job.targets, statistics)
        if config.allocation in ("row", "global") and not config.nm
        else {}
    )

    def plan(target: Target) -> tuple[dict, Tensor | None]:
        if config.nm:
            return {"pattern": config.nm}, None
        weight = None
        if config.method == "fsparsegpt":
            weight = (floored_omega(statistics, target.name) ** config.power).float()
        if config.allocation == "row":
            return {"keep": budgets[target.name]}, weight
        if config.allocation == "global":
            size = target.weight.numel()
            return {"sparsity": Fraction(size - int(budgets[target.name].sum()), size)}, weight
        return {"sparsity": config.removed}, weight

    return plan


def _factor(name: str, hessian: Tensor) -> Tensor:
    """obs_factor() at the first damping that gives one; every retry is a warning.

    Raises:
        UserError: none does.
    """
    if not bool(hessian.isfinite().all()):
        raise UserError(f"the Hessian of {name} has NaN or inf values; the model overflows on the calibration text")
    for attempt in range(_DAMPING_RETRIES):
        damping = _DAMPING * 10**attempt
        factor, info = fk.obs_factor(hessian, damping)
        if not int(info):
            if attempt:
                warnings.warn(
                    f"the Hessian of {name} needed a damping of {damping:g} instead of {_DAMPING:g}", stacklevel=2
                )
            return factor
    raise UserError(
        f"the Hessian of {name} cannot be factored, even with a damping of {damping:g}; use more calibration text"
    )


def _prune_by_obs(
    config: PruneConfig, target: Target, factor: Tensor, selection: dict, row_weight: Tensor | None
) -> MatrixRow:
    weight = target.weight
    whole = weight.shape[1] - (weight.shape[1] % config.nm[1] if config.nm else 0)
    head = factor[:whole, :whole].contiguous()
    before = weight.to(torch.float32, copy=True) if whole < weight.shape[1] else None
    fk.obs_prune_(weight[:, :whole], factor=head, row_weight=row_weight, **selection)
    if before is not None:
        # the sweep's errors E satisfy E U_head = W_before - W_after; they move on to the dense tail
        change = before[:, :whole] - weight[:, :whole].float()
        errors = torch.linalg.solve_triangular(head, change, upper=True, left=False)
        weight[:, whole:] = (before[:, whole:] - errors @ factor[:whole, whole:]).to(weight.dtype)
    if not bool(weight.isfinite().all()):
        raise UserError(f"{target.name}.weight has NaN or inf values after its update; try --dtype float32")
    if "keep" in selection:
        kept = int(selection["keep"].sum())
    elif "sparsity" in selection:
        kept = keep_total(*weight.shape, selection["sparsity"])
    else:
        kept = asked(config, target)
    return _row(target, kept)


def _row(target: Target, kept: int) -> MatrixRow:
    """The facts of one pruned matrix; kept weights that are zero are those beyond the removed ones."""
    weight = target.weight
    rows, cols = weight.shape
    zeros = weight.numel() - int(torch.count_nonzero(weight))
    if zeros < weight.numel() - kept:
        raise AssertionError(f"{target.name}: {zeros} zeros, expected at least {weight.numel() - kept}")
    return MatrixRow(target.name, (rows, cols), asked=kept, kept=kept, kept_zero=zeros - (weight.numel() - kept))


METHODS: dict[str, Callable[[Job], list[MatrixRow]]] = {
    "magnitude": _by_score,
    "wanda": _by_score,
    "fwanda": _by_score,
    "sparsegpt": _by_obs,
    "fsparsegpt": _by_obs,
}
