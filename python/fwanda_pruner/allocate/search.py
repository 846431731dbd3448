"""Which allocation: the candidates, how they are tried, and what was chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from ..config import PruneConfig
from ..engine.engine import Engine
from ..engine.resume import NoSteps, Steps
from ..errors import UserError
from ..measure.statistics import Statistics
from ..progress import progress_bar
from .budgets import ScoreScales
from .judge import Judge, Losses
from .masks import masks_of
from .response import Round, respond

# (b, c) of the global allocation: perplexity changes little around the best pair, which differs between models
_EXPONENTS = ((0.75, 0.5), (1.0, 0.5), (0.5, 0.25))


@dataclass(frozen=True)
class Choice:
    """What the search of "response" or "auto" found best.

    Attributes:
        name: the best candidate, or "round N" of the response.
        start: the candidate from which the response started.
        losses: "dense", "wanda", name of a candidate or of a round -> source of a domain -> mean next-token loss in
            nats. Losses that are not finite are left out.
        scales: multipliers on the scores, if a round is best; None: a candidate is.
        notes: warnings of the search, for other runs that take this choice.
    """

    name: str
    start: str
    losses: dict[str, dict[str, float]]
    scales: ScoreScales | None
    notes: tuple[str, ...] = ()

    def apply(self, config: PruneConfig) -> PruneConfig:
        """The configuration with the chosen allocation in place of the search."""
        if self.scales is None:
            return candidates(config)[self.name]
        return replace(candidates(config)[self.start], allocation="response")

    def to_dict(self) -> dict:
        """JSON values for the record: all but the scales and the notes."""
        return {"name": self.name, "start": self.start, "losses": self.losses}


def candidates(config: PruneConfig) -> dict[str, PruneConfig]:
    """Starting points for the response allocation, by name. "auto" also tries these on their own.

    "auto" tries uniform rows as Wanda, the published rule, and three settings of the global allocation. "response"
    starts from the global allocation as it is set, and so do both under a pattern, where the exponents cancel.
    """
    configs, exponents = {}, ((config.row_exponent, config.layer_exponent),)
    if config.allocation == "auto" and not config.nm:
        configs = {name: replace(config, allocation=name) for name in ("uniform", "row")}
        exponents = _EXPONENTS
    for b, c in exponents:
        configs[f"global b={b:g} c={c:g}"] = replace(config, allocation="global", row_exponent=b, layer_exponent=c)
    return configs


def choose(
    engine: Engine,
    tokens: Tensor,
    judge: Judge,
    statistics: Statistics,
    config: PruneConfig,
    *,
    rounds: Steps[Round] = NoSteps(),  # noqa: B008  it has no state
) -> Choice:
    """Tries all candidates, runs the rounds of the response from the best global one, and takes the best.

    The best has the smallest mean increase of the loss over the domains (Judge.rank). Masks that are worse than Wanda's
    on a guard are taken only if all masks are.

    Args:
        engine: of a dense model in eval mode; its weights are unchanged afterwards.
        tokens: [S, L] int64 calibration windows.
        judge: compares masks.
        statistics: of the dense model.
        config: resolved, with the allocation "response" or "auto".
        rounds: keeps the rounds, for an interrupted run.

    Raises:
        UserError: no allocation gives a finite loss, or the memory does not suffice.
    """
    configs = candidates(config)
    losses = try_masks(engine, judge, statistics, configs)
    start = min((name for name in losses if configs[name].allocation == "global"), key=lambda n: judge.rank(losses[n]))
    scales = None
    if math.isfinite(judge.increase(losses[start])):
        scales, round_losses = respond(engine, tokens, judge, statistics, configs[start], losses[start], rounds=rounds)
        losses |= round_losses
    name = best_of(judge, losses)
    finite = {
        name: {source: loss for source, loss in values.items() if math.isfinite(loss)}
        for name, values in {"dense": judge.dense, "wanda": judge.wanda, **losses}.items()
    }
    return Choice(name, start, finite, None if name in configs else scales)


def wanda_config(config: PruneConfig) -> PruneConfig:
    """The settings of Wanda's masks at the same sparsity."""
    return replace(config, method="fwanda", allocation="uniform")


def try_masks(
    engine: Engine, judge: Judge, statistics: Statistics, configs: Mapping[str, PruneConfig]
) -> dict[str, Losses]:
    """Losses of the masks of each configuration, without an update of the weights.

    Args:
        engine: of a dense model in eval mode; its weights are unchanged afterwards.
        judge: measures the losses.
        statistics: of the dense model, with g2 where an allocation reads it.
        configs: name -> resolved configuration. "uniform" has the masks of Wanda.

    Returns:
        name -> losses; inf where the allocation has no budget.
    """
    losses: dict[str, Losses] = {}
    label = "try allocations" if engine.progress else None
    for name, config in progress_bar(configs.items(), label=label, unit="masks"):
        try:
            losses[name] = judge.wanda if name == "uniform" else judge.losses(masks_of(config, engine, statistics))
        except UserError:  # the allocation has no budget
            losses[name] = dict.fromkeys(judge.dense, math.inf)
    return losses


def best_of(judge: Judge, losses: Mapping[str, Losses]) -> str:
    """The name with the best losses, the first of equals.

    Raises:
        UserError: no loss is finite.
    """
    name = min(losses, key=lambda name: judge.rank(losses[name]))
    if not math.isfinite(judge.increase(losses[name])):
        raise UserError(
            "no allocation gives a finite loss on the held-out text; choose --allocation uniform, row or global"
        )
    return name
