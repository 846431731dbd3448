"""The response allocation: factors on the scores that follow how the loss of the pruned model answers.

The global allocation predicts from the dense model what the removal of each weight costs, and damps the prediction by
two exponents. Here the prediction is measured. A pass over the pruned model gives, for each removed weight, the
derivative -g_ij W_ij of the loss towards putting it back. Summed over the removed weights of a matrix, a row or a
column, and divided by the sum of their squared scores, it says by how much the scores there were too low. The factors
of the scores move a part of the way, the masks are selected anew, and so on for a few rounds. Where the factors rest, a
weight at the threshold is worth the same in every matrix: the first-order condition of the best division of the budget.

The derivative of a single weight is noise (its deviation is the score, its mean the square of it), so only sums are
used, and those of rows and columns are drawn towards the ratio of their matrix by as much as their noise asks for
(empirical Bayes). The noise is known from the differences between the passes of a round.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from ..config import PruneConfig
from ..engine.loop import Passes, PassFacts, PassSettings, uncompiled
from ..measure.statistics import Statistics, frozen
from ..model.attributes import replaced
from ..model.targets import Target
from ..run.state import RunState
from .budgets import Factors, global_factors
from .masks import Masks, column_scale, kept_as_bits, masked_loss, masks_of

ROUNDS = 8
_ROUND_TOKENS = 32768
_MATRIX_STEP, _LINE_STEP = 0.3, 0.1  # of the way to a measured ratio, in the logarithm
_CALLS = 8  # backward passes of a round, at least, where there are as many windows
_MATRIX_BOUND, _LINE_BOUND = 5.0, 10.0  # of a ratio in one round


@dataclass
class _Sums:
    """Of the removed weights in each row, or in each column, of a matrix.

    Attributes:
        predicted: fp64, sum of the squared scores.
        found: fp64, sum of -g W over all backward passes; `squares`: sum of the squares of what each of them found.
        passes: how many there were.
    """

    predicted: Tensor
    found: Tensor
    squares: Tensor
    passes: int = 0

    @classmethod
    def of(cls, predicted: Tensor) -> _Sums:
        return cls(predicted, torch.zeros_like(predicted), torch.zeros_like(predicted))

    def clear(self) -> None:
        self.found.zero_()
        self.squares.zero_()
        self.passes = 0

    def add(self, found: Tensor) -> None:
        self.found += found
        self.squares += found.square()
        self.passes += 1

    def ratios(self, ratio: Tensor) -> Tensor:
        """found / predicted relative to that of the matrix, drawn towards 1 by noise; 1 where that is not above 0."""
        expected = ratio * self.predicted
        difference = self.found - expected
        n = self.passes
        noise = (self.squares - self.found.square() / n).clamp(min=0) * n / max(1, n - 1)
        spread = ((difference.square() - noise).sum() / expected.square().sum()).clamp(min=0) if n > 1 else 0
        signal = spread * expected.square()
        known = (signal > 0) & (self.found.sum() > 0)
        own = 1 + torch.where(known, difference / expected * signal / (signal + noise), 0)
        return own.clamp(1 / _LINE_BOUND, _LINE_BOUND)


def respond(
    model: nn.Module,
    tokens: Tensor,
    held_out: Tensor,
    targets: Sequence[Target],
    statistics: Statistics,
    config: PruneConfig,
    loss: float,
    *,
    settings: PassSettings,
    state: RunState | None = None,
    progress: bool = True,
) -> tuple[Factors | None, dict[str, float]]:
    """The factors of the round whose masks do best on held-out text.

    Args:
        model: a dense causal language model in eval mode; its weights are as before afterwards.
        tokens: [S, L] int64 windows; each round takes the next ones, about 32,768 tokens.
        held_out: [S', L] int64 windows, better not those of the calibration.
        targets: its matrices.
        statistics: of the dense model, with g2.
        config: resolved; sparsity, pattern and the exponents of the global allocation count, with which it begins.
        loss: mean next-token loss of the masks it begins with on the held-out text, in nats.
        settings: how the passes run; never compiled.
        state: keeps every round, and those that an interrupted run kept are not run again.
        progress: show a bar.

    Returns:
        The factors, None where no round is below `loss`; and "round 1", "round 2", ... -> such a loss.

    Raises:
        UserError: the Fisher information is 0 everywhere, or the memory does not suffice.
    """
    size = min(len(tokens), math.ceil(_ROUND_TOKENS / tokens.shape[1]))
    # small passes, since the differences between them tell the noise
    micro_batch = min(settings.micro_batch or size, max(1, size // _CALLS))
    settings = replace(uncompiled(settings, "the pruned model is measured"), micro_batch=micro_batch)
    if statistics.passes and statistics.passes["checkpointing"]:
        settings = replace(settings, checkpointing="on")
    state = state or RunState()
    factors, masks = global_factors(config, targets, statistics), None
    best, losses = None, {}
    for index in tqdm(range(ROUNDS), desc="respond", unit="round", disable=None if progress else True):
        if (kept := state.recall(f"round-{index}")) is not None:
            factors, masks = Factors.of_tensors(kept[0], targets[0].weight.device), None
            found, fitting = kept[1]["loss"], kept[1]["passes"]
        else:
            masks = masks or kept_as_bits(masks_of(config, targets, statistics, factors))
            chosen = torch.arange(index * size, (index + 1) * size) % len(tokens)
            sums = _sums_of_removed(targets, statistics, factors, masks)
            facts = _measure(model, tokens[chosen], targets, masks, sums, settings)
            if why := _unusable(sums):
                warnings.warn(f"{why}: the response ends after {index} rounds", stacklevel=2)
                break
            factors = _moved(factors, sums)
            masks = kept_as_bits(masks_of(config, targets, statistics, factors))
            found = masked_loss(model, held_out, targets, masks)
            checkpointing = "on" if facts.checkpointing else settings.checkpointing
            fitting = {"micro_batch": facts.micro_batch, "checkpointing": checkpointing}
            state.keep(f"round-{index}", factors.tensors(), {"loss": found, "passes": fitting})
        settings = replace(settings, **fitting)
        losses[f"round {index + 1}"] = found
        if found < loss:
            best, loss = factors, found
    return best, losses


def _sums_of_removed(targets, statistics, factors: Factors, masks: Masks) -> dict[str, tuple[_Sums, _Sums]]:
    """name -> sums of the rows and of the columns, with what the scores predict."""
    sums = {}
    with torch.inference_mode(False):  # they are added to in place
        for target in targets:
            scale = column_scale(statistics, factors, target.name)
            squares = (target.weight.float().abs() * scale * factors.rows[target.name][:, None]).square()
            squares.masked_fill_(masks[target.name](), 0)
            rows, columns = squares.sum(1, dtype=torch.float64), squares.sum(0, dtype=torch.float64)
            sums[target.name] = _Sums.of(rows), _Sums.of(columns)
    return sums


def _measure(model, tokens, targets, masks: Masks, sums: dict[str, tuple[_Sums, _Sums]], settings) -> PassFacts:
    """Forward and backward passes of the pruned model over the tokens, which add to the sums."""
    passes = Passes(
        model=model,
        modules={},
        tokens=tokens,
        backward=True,
        settings=settings,
        beside=_Pruned(targets, masks, sums),
    )
    with torch.inference_mode(False), torch.enable_grad(), frozen(model, backward=True):
        return passes.run()[1]


def _unusable(sums: Mapping[str, tuple[_Sums, _Sums]]) -> str | None:
    """Why no step follows from the sums, None if one does; waits for the device once."""
    finite = torch.stack([s.squares.isfinite().all() for pair in sums.values() for s in pair]).all()
    missed = torch.stack([rows.found.sum() > 0 for rows, _ in sums.values()]).any()
    finite, missed = torch.stack([finite, missed]).tolist()
    if not finite:
        return "gradients of the pruned model overflow"
    return None if missed else "the loss misses the removed weights of no matrix"


class _Pruned:
    """Context manager: the modules compute with pruned weights, and the backward pass adds to the sums."""

    def __init__(self, targets: Sequence[Target], masks: Masks, sums: dict[str, tuple[_Sums, _Sums]]):
        self._targets, self._masks, self._sums = targets, masks, sums

    def __enter__(self) -> None:
        for rows, columns in self._sums.values():
            rows.clear()
            columns.clear()
        forwards = {t.module: partial(_forward, t, self._masks[t.name], self._sums[t.name]) for t in self._targets}
        self._replaced = replaced("forward", forwards)
        self._replaced.__enter__()

    def __exit__(self, *exception) -> None:
        self._replaced.__exit__(*exception)


def _forward(target: Target, mask: Callable[[], Tensor], sums: tuple[_Sums, _Sums], x: Tensor) -> Tensor:
    y = _PrunedLinear.apply(x, target, mask, sums)
    bias = target.module.bias
    return y if bias is None else y + bias


class _PrunedLinear(torch.autograd.Function):
    """x W'^T with the pruned W'; its backward pass adds up -dL/dW' W over what was removed."""

    @staticmethod
    def forward(ctx, x: Tensor, target: Target, mask: Callable[[], Tensor], sums: tuple[_Sums, _Sums]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.parts = target, mask, sums
        return functional.linear(x, target.weight * mask())

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (x,) = ctx.saved_tensors
        target, mask, (rows, columns) = ctx.parts
        kept = mask()
        slope = gradient.flatten(0, -2).T @ x.flatten(0, -2)
        missed = -(slope * target.weight).float().masked_fill_(kept, 0)
        rows.add(missed.sum(1, dtype=torch.float64))
        columns.add(missed.sum(0, dtype=torch.float64))
        return gradient @ (target.weight * kept), None, None, None


def _moved(factors: Factors, sums: Mapping[str, tuple[_Sums, _Sums]]) -> Factors:
    """The factors a step towards the measured ratios; those of a matrix that saw no token stay."""
    answered = {name: pair for name, pair in sums.items() if pair[0].passes}
    found = torch.stack([rows.found.sum() for rows, _ in answered.values()])
    predicted = torch.stack([rows.predicted.sum() for rows, _ in answered.values()])
    ratios = torch.where(predicted > 0, found / predicted, 0)
    middle = ratios[ratios > 0].median()
    ratios = torch.where(predicted > 0, ratios, middle)  # nothing was removed
    steps = (ratios / middle).clamp(1 / _MATRIX_BOUND, _MATRIX_BOUND) ** (_MATRIX_STEP / 2)
    rows, columns = dict(factors.rows), dict(factors.columns)
    for (name, (of_rows, of_columns)), ratio, step in zip(answered.items(), ratios, steps, strict=True):
        rows[name] = (rows[name] * step * of_rows.ratios(ratio) ** (_LINE_STEP / 2)).float()
        columns[name] = (columns[name] * of_columns.ratios(ratio) ** (_LINE_STEP / 2)).float()
    return Factors(rows, columns)
