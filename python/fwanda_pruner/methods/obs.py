"""SparseGPT and F-SparseGPT: Optimal Brain Surgeon, with one Hessian and one factor for each distinct input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

import fwanda_kernels as fk

from ..allocate.budgets import floored_omega, keep_total
from ..allocate.masks import column_scale
from ..engine.device import writing
from ..errors import UserError
from ..measure.sums import HessianSums
from ..measure.token_weights import token_weights
from ..model.targets import Target
from .damping import DAMPING, damped_factor
from .job import GroupJob


def prune_group(job: GroupJob) -> list[str]:
    """Prunes some matrices of a block in place and updates their other weights. Weights that are 0 stay 0.

    Returns:
        Names of the matrices that no token reached.

    Raises:
        UserError: a Hessian has no factor, or an updated weight is not finite, naming the matrix.
    """
    ranks = job.walk.ranks
    hessians, owners = _measure_hessians(job)
    unseen = [target.name for target in job.targets if target.name not in owners]
    own = [target for target in job.targets if owners.get(target.name, 0) == ranks.rank]
    hessians |= {t.name: torch.eye(t.shape[1], device=job.walk.device) for t in own if t.name in unseen}
    _prune_matrices(job, own, hessians)
    for target in job.targets:
        with writing([job.block.weights[target.name]]):
            ranks.broadcast_(job.block.weights[target.name], owners.get(target.name, 0))
    return unseen


def _prune_matrices(job: GroupJob, targets: Sequence[Target], hessians: Mapping[str, Tensor]) -> None:
    """Prunes the matrices that this rank owns."""
    if not targets:
        return
    factors = _factors(hessians)
    for target in targets:
        _prune_matrix(job, target, factors[target.name])
    finite = torch.stack([job.block.weights[t.name].isfinite().all() for t in targets]).tolist()
    for target, good in zip(targets, finite, strict=True):
        if not good:
            raise UserError(f"{target.name}.weight has NaN or inf values after its update; try --dtype float32")


def _measure_hessians(job: GroupJob) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Hessians of the matrices that this rank owns, name -> [C, C] fp32 X^T X; and the owner of every matrix, by name.

    Matrices with the same input have the same tensor. A matrix that no token reached has none.
    """
    sums = HessianSums({target.name: target.module for target in job.targets}, _token_weights(job))
    job.walk.run(job.index, sums, advance=job.advance)
    return sums.by_module(), sums.owner_by_module()


def _token_weights(job: GroupJob) -> dict[str, Tensor]:
    """name -> [T] fp32, the same for all matrices with one input. No entry where one of them lacks its gradients."""
    token_sq_grads = job.inputs.token_sq_grads or {}
    if not any(target.name in token_sq_grads for target in job.targets):
        return {}
    groups = [[target.name for target in job.targets]]
    if job.config.order != "true-sequential":  # there, the targets of a job share one input
        groups = job.walk.input_groups(job.index, {target.name: target.module for target in job.targets})
    weights: dict[str, Tensor] = {}
    for names in groups:
        if all(name in token_sq_grads for name in names):
            weight = token_weights([token_sq_grads[name] for name in names], job.config.power)
            weights |= dict.fromkeys(names, weight)
    return weights


def _factors(hessians: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """name -> factor, one for each distinct Hessian. Waits for the device once if all of them have one.

    Raises:
        UserError: a Hessian has none, naming the matrix.
    """
    owners: dict[int, str] = {}
    for name, hessian in hessians.items():
        owners.setdefault(id(hessian), name)
    factors = {name: fk.obs_factor(hessians[name], DAMPING) for name in owners.values()}
    infos = torch.stack([info.reshape(()) for _, info in factors.values()]).tolist()
    good = {
        name: _stronger_factor(name, hessians[name]) if info else factor
        for (name, (factor, _)), info in zip(factors.items(), infos, strict=True)
    }
    return {name: good[owners[id(hessian)]] for name, hessian in hessians.items()}


def _stronger_factor(name: str, hessian: Tensor) -> Tensor:
    if not bool(hessian.isfinite().all()):
        raise UserError(f"the Hessian of {name} has NaN or inf values; the model overflows on the calibration text")
    return damped_factor(name, partial(_factor_or_none, hessian), failed=True)


def _factor_or_none(hessian: Tensor, damping: float) -> Tensor | None:
    factor, info = fk.obs_factor(hessian, damping)
    return None if int(info) else factor


def _prune_matrix(job: GroupJob, target: Target, factor: Tensor) -> None:
    config, inputs, name = job.config, job.inputs, target.name
    weight = job.block.weights[name]
    if inputs.refit is not None:  # the search has fixed the mask
        scale = column_scale(inputs.statistics, inputs.scales, name)
        mask = fk.row_topk_mask(weight, scale, inputs.budgets[name]) & (weight != 0)
        with writing([weight]):
            fk.obs_prune_(weight, factor=factor, mask=mask)
        return
    row_weight = None
    if config.needs_fisher:
        row_weight = (floored_omega(inputs.statistics.layer(name)) ** config.power).float()
    with writing([weight]):
        _prune_with_zeros(weight, factor, row_weight, _selection(job, name, weight.numel()))


def _prune_with_zeros(weight: Tensor, factor: Tensor, row_weight: Tensor | None, selection: dict) -> None:
    """fk.obs_prune_() under the rule that weights which are 0 before stay 0, and count as removed first.

    If the first walk brings zeros back, or keeps fewer or more weights than asked, a second walk with a fixed mask
    replaces it. The mask removes all zeros first. Then it removes weights that the first walk removed, those with the
    lowest scores first, until as many are removed as the selection asks for.

    Args:
        weight: [R, C], pruned in place.
        factor: [C, C] of its Hessian.
        row_weight: [R] fp32 factors on the scores of rows, or None.
        selection: from _selection().
    """
    zero = weight == 0
    dense = weight.clone() if bool(zero.any()) else None
    fk.obs_prune_(weight, factor=factor, row_weight=row_weight, **selection)
    if dense is None:
        return
    nonzero = weight != 0
    if not bool((zero & nonzero).any()) and int(nonzero.sum()) == _kept(weight, selection):
        return
    score = dense.float().square() / factor.diagonal().square()
    score = (score if row_weight is None else score * row_weight[:, None]).sqrt_()
    removed = ~(nonzero | zero)
    score = torch.where(removed, score, 2 * score.max() + 1).masked_fill_(zero | (factor.diagonal() < 0), 0)
    weight.copy_(dense)
    fk.obs_prune_(weight, factor=factor, mask=_lowest_removed(score, selection) & ~zero)


def _kept(weight: Tensor, selection: dict) -> int:
    """Weights that a selection keeps of a matrix."""
    rows, cols = weight.shape
    if "pattern" in selection:
        n, m = selection["pattern"]
        return rows * (cols // m * n + cols % m)
    if "keep" in selection:
        return int(selection["keep"].sum())
    return keep_total(rows * cols, selection["sparsity"])


def _lowest_removed(score: Tensor, selection: dict) -> Tensor:
    """[R, C] bool: False for the lowest scores [R, C] fp32, as many as a selection removes."""
    cols = score.shape[1]
    ones = torch.ones(cols, dtype=torch.float32, device=score.device)
    if "pattern" in selection:
        n, m = selection["pattern"]
        mask = torch.ones_like(score, dtype=torch.bool)
        whole = cols - cols % m
        mask[:, :whole] = fk.nm_mask(score[:, :whole], ones[:whole], n, m)
        return mask
    keep = selection.get("keep")
    if keep is None:
        (keep,) = fk.select_threshold([score], [torch.ones_like(score[:, 0])], [ones], _kept(score, selection))
    return fk.row_topk_mask(score, ones, keep)


def _selection(job: GroupJob, name: str, size: int) -> dict:
    """How fk.obs_prune_() selects the weights that go."""
    config, budgets = job.config, job.inputs.budgets
    if config.nm:
        return {"pattern": config.nm}
    if budgets is None:
        return {"sparsity": config.removed}
    if config.fixes_matrix_totals:
        return {"keep": budgets[name]}
    return {"sparsity": Fraction(size - int(budgets[name].sum()), size)}
