"""The pruning methods: from budgets and statistics to zeros, in place."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor, nn
from tqdm import tqdm

import fwanda_kernels as fk

from .budgets import floored_omega, keep_total
from .calibrate import Statistics, warn_unseen
from .config import PruneConfig
from .errors import UserError
from .model import Target
from .report import MatrixRow
from .stream import BlockStream

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
        budgets: name -> [R] int64 weights kept in each row; None where the method needs none.
        progress: show bars.
    """

    config: PruneConfig
    model: nn.Module
    targets: list[Target]
    tokens: Tensor | None
    statistics: Statistics | None
    budgets: dict[str, Tensor] | None
    progress: bool


def prune_targets(job: Job) -> list[MatrixRow]:
    """Prune every target with the configured method.

    Raises:
        UserError: a matrix cannot be pruned (no budget, no factor, not finite), naming it.
    """
    return _by_obs(job) if job.config.facts.updates_weights else _by_score(job)


def asked(config: PruneConfig, target: Target) -> int:
    """Weights that a budget fixed per matrix keeps: every allocation but "global"."""
    rows, cols = target.weight.shape
    if config.nm:
        n, m = config.nm
        return rows * (cols // m * n + cols % m)
    if config.allocation == "uniform" and config.facts.scores_inputs:
        return rows * keep_total(1, cols, config.removed)
    return keep_total(rows, cols, config.removed)


def _by_score(job: Job) -> list[MatrixRow]:
    """Magnitude, Wanda, F-Wanda: the top of each row, a block at a time."""
    config, statistics, budgets = job.config, job.statistics, job.budgets
    stream = BlockStream(job.model, job.tokens) if config.order == "sequential" else None
    zeros_before, flags = _zeros(job.targets), []
    for index, targets in tqdm(
        _by_block(job.targets), desc="prune", unit="block", disable=None if job.progress else True
    ):
        if stream is not None and targets:
            statistics = _measured_inputs(stream, index, targets)
        if targets:
            flags.append(_select(config, targets, statistics, budgets))
        if stream is not None:
            stream.run(index, advance=True)
    for target, flag in zip(job.targets, torch.cat(flags).tolist(), strict=True):
        if flag:
            raise UserError(fk.bad_message(target.name, flag))
    rows = _rows(config, job.targets, budgets)
    for row, before in zip(rows, zeros_before, strict=True):
        if row.kept_zero > before:
            raise AssertionError(f"{row.name}: {row.kept_zero} kept weights are zero, of {before} zeros before")
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
) -> Tensor:
    """Prune the matrices of one block by score; returns their [L] flags of bad values, still on the device."""
    weights = [t.weight for t in targets]
    if config.facts.scores_inputs:
        scales = [statistics.layer(t.name).norm for t in targets]
    else:
        scales = [torch.ones(w.shape[1], device=w.device) for w in weights]
    flags = torch.zeros(len(targets), dtype=torch.int32, device=weights[0].device)
    if not config.nm:
        fk.foreach_row_topk_prune_(weights, scales, [budgets[t.name] for t in targets], bad=flags)
        return flags
    n, m = config.nm
    for weight, scale, flag in zip(weights, scales, flags.split(1), strict=True):
        whole = weight.shape[1] - weight.shape[1] % m
        fk.nm_prune_(weight[:, :whole], scale[:whole], n, m, bad=flag)
    return flags


def _by_obs(job: Job) -> list[MatrixRow]:
    """SparseGPT and F-SparseGPT: block by block, one Hessian and one factor for each distinct input."""
    config = job.config
    budgets = job.budgets
    stream = BlockStream(job.model, job.tokens)
    sequential = config.order == "sequential"
    for index, targets in tqdm(
        _by_block(job.targets), desc="prune", unit="block", disable=None if job.progress else True
    ):
        with fk.collect_hessians({t.name: t.module for t in targets}) as hessians:
            stream.run(index, advance=not sequential)
        factors: dict[int, Tensor] = {}
        for target in targets:
            if target.name not in hessians:
                warn_unseen(target)
                hessians[target.name] = torch.eye(target.weight.shape[1], device=target.weight.device)
            hessian = hessians[target.name]
            if id(hessian) not in factors:
                factors[id(hessian)] = _factor(target.name, hessian)
            _prune_by_obs(job, target, factors[id(hessian)], budgets)
        if sequential:
            stream.run(index, advance=True)
    return _rows(config, job.targets, budgets)


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
                warnings.warn(f"the Hessian of {name} needed a damping of {damping:g}, not {_DAMPING:g}", stacklevel=2)
            return factor
    raise UserError(
        f"the Hessian of {name} has no factor, even with a damping of {damping:g}; use more calibration text"
    )


def _prune_by_obs(job: Job, target: Target, factor: Tensor, budgets: dict[str, Tensor] | None) -> None:
    config, weight = job.config, target.weight
    selection: dict = {"sparsity": config.removed}
    if config.nm:
        selection = {"pattern": config.nm}
    elif config.allocation == "row":
        selection = {"keep": budgets[target.name]}
    elif config.allocation == "global":
        size = weight.numel()
        selection = {"sparsity": Fraction(size - int(budgets[target.name].sum()), size)}
    row_weight = None
    if config.needs_fisher:
        row_weight = (floored_omega(job.statistics.layer(target.name)) ** config.power).float()
    fk.obs_prune_(weight, factor=factor, row_weight=row_weight, **selection)
    if not bool(weight.isfinite().all()):
        raise UserError(f"{target.name}.weight has NaN or inf values after its update; try --dtype float32")


def _rows(config: PruneConfig, targets: list[Target], budgets: dict[str, Tensor] | None) -> list[MatrixRow]:
    """The facts of pruned matrices; zeros beyond the removed weights are kept weights that are zero."""
    rows = []
    for target, zeros in zip(targets, _zeros(targets), strict=True):
        kept = asked(config, target) if budgets is None else int(budgets[target.name].sum())
        removed = target.weight.numel() - kept
        if zeros < removed:
            raise AssertionError(f"{target.name}: {zeros} zeros, expected at least {removed}")
        rows.append(MatrixRow(target.name, tuple(target.weight.shape), kept, kept, kept_zero=zeros - removed))
    return rows


def _zeros(targets: list[Target]) -> list[int]:
    """Zeros of each weight; waits for the device once."""
    if not targets:
        return []
    return torch.stack([t.weight.numel() - torch.count_nonzero(t.weight) for t in targets]).tolist()
