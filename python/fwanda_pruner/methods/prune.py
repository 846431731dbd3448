"""The pruning methods: from budgets and statistics to zeros, in place."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor, nn
from tqdm import tqdm

import fwanda_kernels as fk

from ..allocate.budgets import Factors, floored_omega, keep_total
from ..allocate.masks import column_scale, row_mask
from ..config import PruneConfig
from ..engine.loop import PassSettings
from ..engine.walk import BlockStream
from ..errors import UserError
from ..measure.statistics import Statistics, warn_unseen
from ..measure.token_weights import token_weights
from ..model.targets import Target
from ..report.record import MatrixRow
from ..run.state import RunState

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
        factors: on the scores, of the response allocation; None for others.
        energies: name -> [T] fp32 of token_energies(); None where tokens are not weighed.
        state: keeps each block, where blocks are run one at a time.
    """

    config: PruneConfig
    model: nn.Module
    targets: list[Target]
    tokens: Tensor | None
    statistics: Statistics | None
    budgets: dict[str, Tensor] | None
    progress: bool
    factors: Factors | None = None
    energies: dict[str, Tensor] | None = None
    state: RunState = field(default_factory=RunState)


def prune_targets(job: Job) -> list[MatrixRow]:
    """Prune every target with the configured method.

    Raises:
        UserError: a matrix cannot be pruned (no budget, no factor, not finite), naming it.
    """
    return _by_obs(job) if job.config.facts.updates_weights else _by_score(job)


def asked(config: PruneConfig, target: Target) -> int:
    """Weights that a budget fixed per matrix keeps: every allocation within a matrix."""
    rows, cols = target.weight.shape
    if config.nm:
        n, m = config.nm
        return rows * (cols // m * n + cols % m)
    if config.allocation == "uniform" and config.facts.scores_inputs:
        return rows * keep_total(cols, config.removed)
    return keep_total(rows * cols, config.removed)


def _by_score(job: Job) -> list[MatrixRow]:
    """Magnitude, Wanda, F-Wanda: the top of each row, a block at a time."""
    config = job.config
    stream = _stream(job) if config.runs_blocks else None
    zeros_before = _zeros(job.targets)
    flags: dict[str, Tensor] = {}
    for index, targets in _blocks(job):
        if _recalled(job, stream, index, targets):
            continue
        for group in _groups(job, stream, index, targets):
            statistics = job.statistics if stream is None else _measured_inputs(stream, index, group)
            flags |= _select(config, group, statistics, job.budgets, job.factors)
        if stream is not None:
            _check_flags(flags)
            flags = {}
            _keep(job, index, targets)
            stream.run(index, advance=True)
    _check_flags(flags)
    rows = _rows(config, job.targets, job.budgets)
    for row, before in zip(rows, zeros_before, strict=True):
        if row.kept_zero > before:
            raise AssertionError(f"{row.name}: {row.kept_zero} kept weights are zero, of {before} zeros before")
    return rows


def _check_flags(flags: dict[str, Tensor]) -> None:
    """Refuse what a selection found bad; waits for the device once.

    Raises:
        UserError: naming the matrix.
    """
    codes = torch.cat(list(flags.values())).tolist() if flags else []
    for name, code in zip(flags, codes, strict=True):
        if code:
            raise UserError(fk.bad_message(name, code))


def _recalled(job: Job, stream: BlockStream | None, index: int, targets: list[Target]) -> bool:
    """Whether an interrupted run finished the block; its weights are then in place and the stream is behind it."""
    kept = None if stream is None else job.state.recall(_stage(index))
    if kept is None:
        return False
    if job.config.order == "onepass":
        stream.run(index, advance=True)
    for target in targets:
        target.weight.copy_(kept[0][target.name])
    if job.config.order != "onepass":
        stream.run(index, advance=True)
    return True


def _keep(job: Job, index: int, targets: list[Target]) -> None:
    job.state.keep(_stage(index), {target.name: target.weight for target in targets})


def _stage(index: int) -> str:
    return f"block-{index:05d}"


def _stream(job: Job) -> BlockStream:
    return BlockStream(job.model, job.tokens, micro_batch=PassSettings.of(job.config).micro_batch)


def _blocks(job: Job) -> Iterable[tuple[int, list[Target]]]:
    """The blocks in order, each with its targets, below a progress bar."""
    blocks = [(i, [t for t in job.targets if t.block == i]) for i in range(1 + job.targets[-1].block)]
    return tqdm(blocks, desc="prune", unit="block", disable=None if job.progress else True)


def _groups(job: Job, stream: BlockStream | None, index: int, targets: list[Target]) -> list[list[Target]]:
    """What is measured and then pruned together: a block's matrices, or in true-sequential those with one input."""
    if job.config.order != "true-sequential":
        return [targets] if targets else []
    named = {t.name: t for t in targets}
    groups = stream.input_groups(index, {t.name: t.module for t in targets})
    return [[named[name] for name in names] for names in groups]


def _measured_inputs(stream: BlockStream, index: int, targets: list[Target]) -> Statistics:
    """Statistics of a block's inputs on the outputs of what was pruned before; all of it before any is pruned."""
    measured = Statistics()
    with fk.collect_statistics({t.name: t.module for t in targets}) as collected:
        stream.run(index, advance=False)
    for target in targets:
        measured.add(target, collected)
    measured.check(targets, fisher=False)
    return measured


def _select(
    config: PruneConfig,
    targets: list[Target],
    statistics: Statistics | None,
    budgets: dict[str, Tensor] | None,
    factors: Factors | None,
) -> dict[str, Tensor]:
    """Prune matrices by score; name -> [1] flag of bad values, still on the device."""
    weights = [t.weight for t in targets]
    if config.facts.scores_inputs:
        scales = [column_scale(statistics, factors, t.name) for t in targets]
    else:
        scales = [torch.ones(w.shape[1], device=w.device) for w in weights]
    flags = torch.zeros(len(targets), dtype=torch.int32, device=weights[0].device)
    named = {t.name: flag for t, flag in zip(targets, flags.split(1), strict=True)}
    if not config.nm:
        fk.foreach_row_topk_prune_(weights, scales, [budgets[t.name] for t in targets], bad=flags)
        return named
    n, m = config.nm
    for weight, scale, flag in zip(weights, scales, flags.split(1), strict=True):
        whole = weight.shape[1] - weight.shape[1] % m
        fk.nm_prune_(weight[:, :whole], scale[:whole], n, m, bad=flag)
    return named


def _by_obs(job: Job) -> list[MatrixRow]:
    """SparseGPT and F-SparseGPT: block by block, one Hessian and one factor for each distinct input."""
    stream, onepass = _stream(job), job.config.order == "onepass"
    for index, targets in _blocks(job):
        if _recalled(job, stream, index, targets):
            continue
        for group in _groups(job, stream, index, targets):
            weights = _token_weights(job, stream, index, group)
            factors = _factors(_measured_hessians(stream, index, group, weights, advance=onepass))
            for target in group:
                _prune_by_obs(job, target, factors[target.name])
        _check_updated(targets)
        _keep(job, index, targets)
        if not onepass or not targets:
            stream.run(index, advance=True)
    return _rows(job.config, job.targets, job.budgets)


def _token_weights(job: Job, stream: BlockStream, index: int, targets: list[Target]) -> dict[str, Tensor]:
    """name -> [T] fp32, the same for all matrices with one input; without an entry where the energies lack one."""
    energies, weights = job.energies or {}, {}
    if not any(t.name in energies for t in targets):
        return weights
    groups = [[t.name for t in targets]]  # in true-sequential order those with one input
    if job.config.order != "true-sequential":
        groups = stream.input_groups(index, {t.name: t.module for t in targets})
    for names in groups:
        if all(name in energies for name in names):
            weight = token_weights([energies[name] for name in names], job.config.power)
            weights |= dict.fromkeys(names, weight)
    return weights


def _measured_hessians(
    stream: BlockStream, index: int, targets: list[Target], weights: dict[str, Tensor], *, advance: bool
) -> dict[str, Tensor]:
    """name -> [C, C] fp32 X^T X of the inputs; matrices with the same input have the same tensor."""
    with fk.collect_hessians({t.name: t.module for t in targets}, weights) as hessians:
        stream.run(index, advance=advance)
    for target in targets:
        if target.name not in hessians:
            warn_unseen(target)
            hessians[target.name] = torch.eye(target.weight.shape[1], device=target.weight.device)
    return hessians


def _factors(hessians: dict[str, Tensor]) -> dict[str, Tensor]:
    """name -> factor, one for each distinct Hessian; waits for the device once if all have one.

    Raises:
        UserError: a Hessian has none, naming the matrix.
    """
    names: dict[int, str] = {}
    for name, hessian in hessians.items():
        names.setdefault(id(hessian), name)
    found = {name: fk.obs_factor(hessians[name], _DAMPING) for name in names.values()}
    infos = torch.stack([info.reshape(()) for _, info in found.values()]).tolist()
    factors = {
        name: _retried_factor(name, hessians[name]) if info else factor
        for (name, (factor, _)), info in zip(found.items(), infos, strict=True)
    }
    return {name: factors[names[id(hessian)]] for name, hessian in hessians.items()}


def _retried_factor(name: str, hessian: Tensor) -> Tensor:
    """The factor at the first stronger damping that gives one, with a warning.

    Raises:
        UserError: none does.
    """
    if not bool(hessian.isfinite().all()):
        raise UserError(f"the Hessian of {name} has NaN or inf values; the model overflows on the calibration text")
    for attempt in range(1, _DAMPING_RETRIES):
        damping = _DAMPING * 10**attempt
        factor, info = fk.obs_factor(hessian, damping)
        if not int(info):
            warnings.warn(f"the Hessian of {name} needed a damping of {damping:g}, not {_DAMPING:g}", stacklevel=2)
            return factor
    raise UserError(
        f"the Hessian of {name} has no factor, even with a damping of {damping:g}; use more calibration text"
    )


def _prune_by_obs(job: Job, target: Target, factor: Tensor) -> None:
    config, weight, budgets = job.config, target.weight, job.budgets
    if job.factors is not None:  # measured in every row and column, so nothing is left to select
        mask = row_mask(target, column_scale(job.statistics, job.factors, target.name), budgets[target.name])
        fk.obs_prune_(weight, factor=factor, mask=mask)
        return
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


def _check_updated(targets: list[Target]) -> None:
    """Refuse weights that an update made NaN or inf; waits for the device once.

    Raises:
        UserError: naming the matrix.
    """
    finite = torch.stack([t.weight.isfinite().all() for t in targets]).tolist() if targets else []
    for target, good in zip(targets, finite, strict=True):
        if not good:
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
