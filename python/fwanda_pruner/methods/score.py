"""Magnitude, Wanda and F-Wanda: the weights with the largest scores of each row or group stay."""

from __future__ import annotations

import torch
from torch import Tensor

import fwanda_kernels as fk

from ..allocate.masks import column_scale
from ..engine.device import writing
from ..errors import UserError
from ..measure.statistics import Statistics
from ..measure.sums import StatisticsSums
from .job import GroupJob


def prune_group(job: GroupJob) -> list[str]:
    """Prunes some matrices of a block in place. A weight that is 0 has the score 0, so it goes first and stays 0.

    Returns:
        Names of the matrices that no token reached, if this call measured their inputs.

    Raises:
        UserError: a weight or an input is not finite, naming the matrix.
    """
    statistics = job.inputs.statistics if job.walk is None else measure_inputs(job)
    names = [target.name for target in job.targets]
    weights = [job.block.weights[name] for name in names]
    if job.config.traits.scores_inputs:
        scales = [column_scale(statistics, job.inputs.scales, name) for name in names]
    else:
        scales = [torch.ones(weight.shape[1], dtype=torch.float32, device=weight.device) for weight in weights]
    bad = torch.zeros(len(weights), dtype=torch.int32, device=weights[0].device)
    with writing(weights):
        if job.config.nm:
            _prune_pattern(weights, scales, *job.config.nm, bad)
        else:
            fk.foreach_row_topk_prune_(weights, scales, [job.inputs.budgets[name] for name in names], bad=bad)
    for name, code in zip(names, bad.tolist(), strict=True):
        if code:
            raise UserError(fk.bad_message(name, code))
    return [] if job.walk is None else [name for name in names if not statistics.n_tokens[name]]


def measure_inputs(job: GroupJob) -> Statistics:
    """Statistics of the inputs that the matrices see after the blocks before them were pruned."""
    sums = StatisticsSums({target.name: target.module for target in job.targets})
    job.walk.run(job.index, sums, advance=job.advance)
    statistics = Statistics.of_sums(sums.tensors(), job.targets, None, job.walk.device)
    statistics.check(job.targets, fisher=False)
    return statistics


def _prune_pattern(weights: list[Tensor], scales: list[Tensor], n: int, m: int, bad: Tensor) -> None:
    """n:m in each matrix; columns left over at the end stay dense."""
    for weight, scale, flag in zip(weights, scales, bad.split(1), strict=True):
        whole = weight.shape[1] - weight.shape[1] % m
        fk.nm_prune_(weight[:, :whole], scale[:whole], n, m, bad=flag)
