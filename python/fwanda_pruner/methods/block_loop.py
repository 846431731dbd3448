"""The one loop over the decoder blocks, for all pruning methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

import fwanda_kernels as fk

from ..allocate.budgets import keep_total
from ..config import PruneConfig
from ..engine.all_weights import count_zeros
from ..engine.engine import Engine
from ..engine.resident import Block
from ..engine.resume import Steps
from ..engine.walk import BlockWalk
from ..measure.statistics import Statistics, warn_unseen
from ..model.targets import Target
from ..progress import progress_bar
from ..report.record import ROW_BINS, MatrixRow
from . import obs, score
from .job import GroupJob, Inputs

_PRUNE_GROUP = {"sparsegpt": obs.prune_group, "fsparsegpt": obs.prune_group}  # the others only rank weights


@dataclass(frozen=True)
class PrunedBlock:
    """One block after pruning.

    Attributes:
        weights: name -> [R, C].
        rows: of the record, one for each matrix.
        row_histogram: [ROW_BINS] int64, as Report.row_histogram.
        refitted: whether the update of its weights was kept; None where all updates are.
        unseen: names of the matrices whose inputs were measured here and that no calibration token reached.
    """

    weights: Mapping[str, Tensor]
    rows: list[MatrixRow]
    row_histogram: Tensor
    refitted: bool | None = None
    unseen: list[str] = field(default_factory=list)


def prune_blocks(
    engine: Engine, config: PruneConfig, inputs: Inputs, steps: Steps[PrunedBlock]
) -> tuple[list[MatrixRow], list[int], dict | None]:
    """Prunes every target by the configured method, one block after the other.

    Args:
        engine: of the dense model, which is pruned in place.
        config: resolved; its allocation is not "auto".
        inputs: what the method reads.
        steps: keeps each block, for an interrupted run. Only used where text runs through the blocks.

    Returns:
        The rows of the record, the histogram of Report.row_histogram, and Report.refit.

    Raises:
        UserError: a matrix cannot be pruned (no factor, not finite), naming it.
    """
    prune_group = _PRUNE_GROUP.get(config.method, score.prune_group)
    rows: list[MatrixRow] = []
    refitted: list[bool] = []
    unseen: list[str] = []
    row_histogram = torch.zeros(ROW_BINS, dtype=torch.int64, device="cpu")
    with engine.walk(inputs.tokens) if config.runs_blocks else nullcontext() as walk:
        for index in _with_progress(engine):
            saved = None if walk is None else steps.load(index)
            with engine.block(index, writes=True) as block:
                if saved is not None:
                    pruned = _restore(config, walk, index, block, saved)
                else:
                    pruned = _prune_block(engine, config, inputs, walk, index, block, prune_group)
                    if walk is not None:
                        steps.save(index, pruned)
            rows += pruned.rows
            row_histogram += pruned.row_histogram
            refitted += [] if pruned.refitted is None else [pruned.refitted]
            unseen += pruned.unseen
    warn_unseen(unseen)
    refit = {"blocks": len(refitted), "kept": sum(refitted)} if refitted else None
    return rows, row_histogram.tolist(), refit


def _with_progress(engine: Engine) -> Iterable[int]:
    """The blocks up to the last one with a target."""
    last = max(target.block for target in engine.targets)
    return progress_bar(range(last + 1), label="prune" if engine.progress else None, unit="blocks")


def _restore(config: PruneConfig, walk: BlockWalk, index: int, block: Block, saved: PrunedBlock) -> PrunedBlock:
    """Puts the weights of a block that an interrupted run pruned in place, and moves the walk past it."""
    if config.order == "onepass":  # the next block then reads what the dense block gives
        walk.advance(index)
    for name, weight in block.weights.items():
        weight.copy_(saved.weights[name])
    if config.order != "onepass":
        walk.advance(index)
    return saved


def _prune_block(
    engine: Engine,
    config: PruneConfig,
    inputs: Inputs,
    walk: BlockWalk | None,
    index: int,
    block: Block,
    prune_group: Callable[[GroupJob], list[str]],
) -> PrunedBlock:
    targets = engine.targets_of(index)
    zeros_before = count_zeros(block.weights.values())
    wanda = _wanda_masks(config, inputs.statistics, block)
    refit = inputs.refit if targets else None
    if refit is not None:
        refit.begin()
        dense = {name: weight.clone() for name, weight in block.weights.items()}
    advanced, unseen = False, []
    for group in _groups(config, walk, index, targets):
        advance = walk is not None and config.order == "onepass"
        unseen += prune_group(GroupJob(config, inputs, block, group, walk, index, advance))
        advanced = advance
    refitted = None if refit is None else refit.settle(block.weights, dense)
    if walk is not None and not advanced:
        walk.advance(index)
    nonzeros = {name: weight.count_nonzero(1) for name, weight in block.weights.items()}  # [R] int64
    rows = _rows(config, targets, block, inputs.budgets, zeros_before, nonzeros, wanda)
    return PrunedBlock(block.weights, rows, _row_histogram(block, nonzeros), refitted, unseen)


def _groups(config: PruneConfig, walk: BlockWalk | None, index: int, targets: list[Target]) -> list[list[Target]]:
    """What is measured and then pruned together."""
    if config.order != "true-sequential":
        return [targets] if targets else []
    named = {target.name: target for target in targets}
    groups = walk.input_groups(index, {name: target.module for name, target in named.items()})
    return [[named[name] for name in names] for names in groups]


def asked(config: PruneConfig, target: Target) -> int:
    """Weights that a matrix keeps, for a budget that is fixed for each matrix."""
    rows, cols = target.shape
    if config.nm:
        n, m = config.nm
        return rows * (cols // m * n + cols % m)
    if config.allocation == "uniform" and not config.traits.updates_weights:
        return rows * keep_total(cols, config.removed)
    return keep_total(rows * cols, config.removed)


def _wanda_masks(config: PruneConfig, statistics: Statistics | None, block: Block) -> dict[str, Tensor]:
    """name -> [R, C] bool: Wanda's mask of the dense weight at the same sparsity, where the statistics allow it."""
    if statistics is None or config.nm:
        return {}
    masks = {}
    for name, weight in block.weights.items():
        keep = keep_total(weight.shape[1], config.removed)
        bad = torch.zeros(1, dtype=torch.int32, device=weight.device)  # the method itself refuses bad values
        masks[name] = fk.row_topk_mask(weight, statistics.layer(name).norm, keep, bad=bad)
    return masks


def _rows(
    config: PruneConfig,
    targets: list[Target],
    block: Block,
    budgets: Mapping[str, Tensor] | None,
    zeros_before: list[int],
    nonzeros: Mapping[str, Tensor],
    wanda: Mapping[str, Tensor],
) -> list[MatrixRow]:
    """The rows of the record. Zeros beyond the removed weights are kept weights that are zero."""
    nonzero = _integers(count.sum() for count in nonzeros.values())
    if budgets is None:
        kept = [asked(config, target) for target in targets]
    else:
        kept = _integers(budgets[target.name].sum() for target in targets)
    unlike: list[int | None] = [None] * len(targets)
    if wanda:
        unlike = _integers((wanda[name] ^ (weight != 0)).count_nonzero() for name, weight in block.weights.items())
    return [_row(config, *facts) for facts in zip(targets, zeros_before, nonzero, kept, unlike, strict=True)]


def _row(
    config: PruneConfig, target: Target, zeros_before: int, nonzero: int, kept: int, unlike_wanda: int | None
) -> MatrixRow:
    rows, cols = target.shape
    kept_zero = kept - nonzero
    if kept_zero < 0 or (kept_zero > zeros_before and not config.traits.updates_weights):
        raise AssertionError(f"{target.name}: {nonzero} nonzero weights, {kept} should be kept")
    place = (None, None) if target.slice_of is None else (target.slice_of.parameter, target.slice_of.index)
    disagreement = None if unlike_wanda is None else unlike_wanda / (rows * cols)
    return MatrixRow(target.name, (rows, cols), kept, kept, kept_zero, None, *place, disagreement, zeros_before)


def _integers(scalars: Iterable[Tensor]) -> list[int]:
    """The values of scalar tensors; waits for the device once."""
    scalars = list(scalars)
    return torch.stack(scalars).tolist() if scalars else []


def _row_histogram(block: Block, nonzeros: Mapping[str, Tensor]) -> Tensor:
    """[ROW_BINS] int64: how many rows keep a share of their weights in each of the equal bins of [0, 1]."""
    if not nonzeros:
        return torch.zeros(ROW_BINS, dtype=torch.int64, device="cpu")
    bins = [count * ROW_BINS // block.weights[name].shape[1] for name, count in nonzeros.items()]
    return torch.bincount(torch.cat(bins).clamp(max=ROW_BINS - 1).cpu(), minlength=ROW_BINS)
