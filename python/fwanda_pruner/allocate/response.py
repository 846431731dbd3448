"""The response allocation: it measures on the pruned model where removed weights are missed, and corrects the scores.

The global allocation predicts from the dense model what the removal of each weight costs, and damps the prediction by
two exponents. The response measures it instead. A backward pass through the pruned model gives, for each removed
weight, the derivative -g_ij W_ij of the loss towards putting it back. Summed over the removed weights of a matrix, row
or column, and divided by the sum of their squared scores, it says by how much those scores were too low. The scales of
the scores move a part of the way, the masks are selected again, and so on for a few rounds. The steps become smaller,
because with steps of one size the masks swing around the best. Where the scales come to rest, a weight at the
threshold is worth the same in every matrix: the condition for the best division of a budget.

The derivative of a single weight is nearly all noise, so only sums are used. Those of rows and columns are shrunk
towards the ratio of their matrix, more so the noisier they are (empirical Bayes). The differences between the passes of
a round tell the noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import Tensor

import fwanda_kernels as fk

from ..config import PruneConfig
from ..engine.engine import Engine
from ..engine.resume import Steps
from ..measure.removed import RemovedWeightSums
from ..measure.statistics import Statistics
from ..notes import warn
from ..progress import progress_bar
from .budgets import ScoreScales, global_scales
from .judge import Judge, Losses
from .masks import PackedMasks, column_scale, masks_of, pack

_FEW_ROUNDS, _MANY_ROUNDS = 8, 16  # for up to half of the weights; for more of them, and under a pattern
_JUDGED = (2, 0)  # places of the judged rounds, counted from the last; docs/allocation.md says why these
_ROUND_TOKENS = 16384
_MATRIX_STEP, _LINE_STEP = 0.3, 0.1  # share of the way to a measured ratio, in the logarithm, in the first round
_LAST_STEP = 0.3  # of these steps, in the last round
_PASSES = 8  # backward passes of a round, at least, where there are as many windows
_MATRIX_BOUND, _LINE_BOUND = 5.0, 10.0  # of a ratio in one round


@dataclass(frozen=True)
class Round:
    """The state of the search after one round.

    Attributes:
        scales: of the scores.
        losses: of their masks, for each domain; None: not measured.
        micro_batch, checkpointing: with which the passes fitted the memory; fields of PassSettings.
        masks: of the scales; None: select them again.
    """

    scales: ScoreScales
    losses: Losses | None
    micro_batch: int
    checkpointing: str
    masks: PackedMasks | None = field(default=None, compare=False)


@dataclass(frozen=True)
class LineSums:
    """Sums over the removed weights of each row, or of each column, of a matrix: all [N] fp64, or [K, N] of K matrices.

    Attributes:
        predicted: squared scores.
        measured: -dL/dW * W over all passes; `squares`: sum of the squares of what each pass measured.
        passes: how many there were.
    """

    predicted: Tensor
    measured: Tensor
    squares: Tensor
    passes: int

    def ratios(self, matrix_ratios: Tensor) -> Tensor:
        """measured / predicted relative to that of the matrix, shrunk towards 1 by its noise.

        1 where the noise explains the difference, and for all lines where the loss misses nothing in the matrix.

        Args:
            matrix_ratios: [] or [K] fp64.
        """
        expected = matrix_ratios[..., None] * self.predicted
        difference = self.measured - expected
        n = self.passes
        noise = (self.squares - self.measured.square() / n).clamp(min=0) * n / max(1, n - 1)
        spread = _sum(difference.square() - noise) / _sum(expected.square())
        signal = spread.clamp(min=0) * expected.square() if n > 1 else torch.zeros_like(expected)
        known = (signal > 0) & (_sum(self.measured) > 0)
        own = 1 + torch.where(known, difference / expected * signal / (signal + noise), 0)
        return own.clamp(1 / _LINE_BOUND, _LINE_BOUND)


def _sum(lines: Tensor) -> Tensor:
    return lines.sum(-1, keepdim=True)


def ratios_of(lines: Sequence[LineSums], matrix_ratios: Tensor) -> list[Tensor]:
    """LineSums.ratios() of many matrices; those of equal size are computed together.

    Args:
        lines: of each matrix.
        matrix_ratios: [L] fp64.
    """
    places: dict[tuple[int, int], list[int]] = {}
    for i, sums in enumerate(lines):
        places.setdefault((len(sums.predicted), sums.passes), []).append(i)
    found: dict[int, Tensor] = {}
    for (_, passes), group in places.items():
        parts = [torch.stack([getattr(lines[i], name) for i in group]) for name in ("predicted", "measured", "squares")]
        ratios = LineSums(*parts, passes).ratios(matrix_ratios[torch.tensor(group, device=matrix_ratios.device)])
        found |= zip(group, ratios, strict=True)
    return [found[i] for i in range(len(lines))]


def respond(
    engine: Engine,
    tokens: Tensor,
    judge: Judge,
    statistics: Statistics,
    config: PruneConfig,
    start_losses: Losses,
    *,
    rounds: Steps[Round],
) -> tuple[ScoreScales | None, dict[str, Losses]]:
    """Runs the rounds and returns the scales whose masks are the best.

    Args:
        engine: of a dense model in eval mode; its weights are unchanged afterwards.
        tokens: [S, L] int64 windows; each round takes the next ones, about 16,384 tokens.
        judge: compares masks.
        statistics: of the dense model, with g2.
        config: resolved; its global allocation is where the rounds start.
        start_losses: of the masks of that allocation.
        rounds: keeps the rounds, for an interrupted run.

    Returns:
        The scales, None where no round is better than the start; and the losses of the judged rounds, of 8 rounds
            "round 6" and "round 8" -> losses.

    Raises:
        UserError: the Fisher information is 0 everywhere, or the memory does not suffice.
    """
    state = _start(engine, tokens, statistics, config)
    judged: dict[int, Round] = {}
    label = "measure the pruned model" if engine.progress else None
    for index in progress_bar(range(round_count(config)), label=label, unit="rounds"):
        saved = rounds.load(index)
        following = saved or _next_round(engine, tokens, judge, statistics, config, state, index)
        if following is None:
            if index and state.losses is None:
                masks = _masks(engine, statistics, config, state)
                judged[index] = replace(state, losses=judge.losses(masks), masks=None)
            break
        if saved is None:
            rounds.save(index, following)
        state = following
        if state.losses is not None:
            judged[index + 1] = replace(state, masks=None)
    best = min(judged.values(), key=lambda state: judge.rank(state.losses), default=None)
    better = best is not None and judge.rank(best.losses) < judge.rank(start_losses)
    return best.scales if better else None, {f"round {number}": found.losses for number, found in judged.items()}


def round_count(config: PruneConfig) -> int:
    """Rounds of the response: the more is removed, the longer the loss goes on falling."""
    return _FEW_ROUNDS if config.nm is None and config.removed <= Fraction(1, 2) else _MANY_ROUNDS


def _start(engine: Engine, tokens: Tensor, statistics: Statistics, config: PruneConfig) -> Round:
    """The state before the first round. Its passes are small, since the differences between them tell the noise."""
    size = _round_windows(tokens)
    checkpointing = engine.settings.checkpointing
    if statistics.passes and statistics.passes["checkpointing"]:
        checkpointing = "on"
    micro_batch = min(engine.settings.micro_batch or size, max(1, size // _PASSES))
    return Round(global_scales(config, engine, statistics), None, micro_batch, checkpointing)


def _round_windows(tokens: Tensor) -> int:
    return min(len(tokens), math.ceil(_ROUND_TOKENS / tokens.shape[1]))


def _next_round(
    engine: Engine,
    tokens: Tensor,
    judge: Judge,
    statistics: Statistics,
    config: PruneConfig,
    state: Round,
    index: int,
) -> Round | None:
    """Measures the masks of a state on the next windows and moves its scales; None if no step follows."""
    masks = _masks(engine, statistics, config, state)
    size = _round_windows(tokens)
    windows = tokens[torch.arange(index * size, (index + 1) * size, device=tokens.device) % len(tokens)]
    sums = RemovedWeightSums(engine.targets, masks.packed)
    settings = replace(engine.settings, micro_batch=state.micro_batch, checkpointing=state.checkpointing)
    passes = engine.measure(windows, sums, backward=True, settings=settings)
    lines = _line_sums(_predicted(engine, statistics, state.scales, masks), sums.tensors())
    if reason := _unusable(lines):
        warn(f"{reason}: the response ends after {index} rounds")
        return None
    count = round_count(config)
    scales = move_scales(state.scales, lines, 1 - (1 - _LAST_STEP) * index / max(1, count - 1))
    masks = pack(engine, masks_of(config, engine, statistics, scales))
    checkpointing = "on" if passes.checkpointing else state.checkpointing
    losses = judge.losses(masks) if count - 1 - index in _JUDGED else None
    return Round(scales, losses, passes.micro_batch, checkpointing, masks)


def _masks(engine: Engine, statistics: Statistics, config: PruneConfig, state: Round) -> PackedMasks:
    return state.masks or pack(engine, masks_of(config, engine, statistics, state.scales))


def _predicted(
    engine: Engine, statistics: Statistics, scales: ScoreScales, masks: PackedMasks
) -> dict[str, tuple[Tensor, Tensor]]:
    """name -> sums of the squared scores over the removed weights of each row and each column, fp64."""
    predicted = {}
    for index in range(engine.block_count):
        with engine.block(index) as block:
            for name, weight in block.weights.items():
                removed = weight - fk.masked_weight(weight, masks.packed[name])  # exact: one of the two is 0
                squares = removed.float().square_()
                of_rows, of_columns = scales.rows[name].square(), column_scale(statistics, scales, name).square()
                predicted[name] = of_rows.double() * (squares @ of_columns), of_columns.double() * (of_rows @ squares)
    return predicted


def _line_sums(
    predicted: Mapping[str, tuple[Tensor, Tensor]], sums: Mapping[str, Tensor]
) -> dict[str, tuple[LineSums, LineSums]]:
    """name -> sums of the rows and of the columns. A matrix that saw no token has no entry."""
    lines = {}
    for name, (rows, columns) in predicted.items():
        if f"{name}.passes" in sums:
            passes = int(sums[f"{name}.passes"])
            lines[name] = (
                LineSums(rows, sums[f"{name}.rows"], sums[f"{name}.row_squares"], passes),
                LineSums(columns, sums[f"{name}.columns"], sums[f"{name}.column_squares"], passes),
            )
    return lines


def _unusable(lines: Mapping[str, tuple[LineSums, LineSums]]) -> str | None:
    """Why no step follows from the sums, None if one does. Waits for the device once."""
    no_step = "putting removed weights back would lower the loss in no matrix"
    if not lines:
        return no_step
    finite = torch.stack([s.squares.isfinite().all() for pair in lines.values() for s in pair]).all()
    missed = torch.stack([rows.measured.sum() > 0 for rows, _ in lines.values()]).any()
    finite, missed = torch.stack([finite, missed]).tolist()
    if not finite:
        return "gradients of the pruned model overflow"
    return None if missed else no_step


def move_scales(scales: ScoreScales, lines: Mapping[str, tuple[LineSums, LineSums]], step: float = 1.0) -> ScoreScales:
    """Moves the scales a step towards the measured ratios; those of a matrix without sums stay.

    Args:
        scales: of the scores.
        lines: name -> sums of the rows and of the columns.
        step: of the steps of the first round.
    """
    row_sums, column_sums = zip(*lines.values(), strict=True)
    measured = torch.stack([sums.measured.sum() for sums in row_sums])
    predicted = torch.stack([sums.predicted.sum() for sums in row_sums])
    ratios = torch.where(predicted > 0, measured / predicted, 0)
    middle = ratios[ratios > 0].median()
    ratios = torch.where(predicted > 0, ratios, middle)  # nothing was removed from such a matrix
    steps = (ratios / middle).clamp(1 / _MATRIX_BOUND, _MATRIX_BOUND) ** (step * _MATRIX_STEP / 2)
    line_step = step * _LINE_STEP / 2
    rows, columns = dict(scales.rows), dict(scales.columns)
    of_rows, of_columns = ratios_of(row_sums, ratios), ratios_of(column_sums, ratios)
    for name, own, of_row, of_column in zip(lines, steps, of_rows, of_columns, strict=True):
        rows[name] = (rows[name] * own * of_row**line_step).float()
        columns[name] = (columns[name] * of_column**line_step).float()
    return ScoreScales(rows, columns)
