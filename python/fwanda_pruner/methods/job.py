"""What the block loop hands to a method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..allocate.budgets import ScoreScales
from ..config import PruneConfig
from ..engine.resident import Block
from ..engine.walk import BlockWalk
from ..measure.statistics import Statistics
from ..model.targets import Target
from .refit import Refit


@dataclass(frozen=True)
class Inputs:
    """What a method reads besides the weights; None where it needs none.

    Attributes:
        tokens: [S, L] int64 calibration windows.
        statistics: of the dense model.
        budgets: name -> [R] int64 weights kept in each row.
        scales: multipliers on the scores, from the search of "response".
        token_sq_grads: name -> [T] fp32 squared gradients of the tokens.
        refit: decides about updates of weights under the masks of a search; they are then fixed.
    """

    tokens: Tensor | None = None
    statistics: Statistics | None = None
    budgets: Mapping[str, Tensor] | None = None
    scales: ScoreScales | None = None
    token_sq_grads: Mapping[str, Tensor] | None = None
    refit: Refit | None = None


@dataclass(frozen=True)
class GroupJob:
    """What a method prunes at once.

    Attributes:
        config: resolved.
        inputs: of the run.
        block: the decoder block, its weights in memory.
        targets: its matrices to prune: all of them, or in true-sequential order those with one input.
        walk, index: the calibration windows at the input of the block, and its index; None for methods and orders that
            read no text.
        advance: whether the method must also move the walk past the dense block.
    """

    config: PruneConfig
    inputs: Inputs
    block: Block
    targets: list[Target]
    walk: BlockWalk | None
    index: int
    advance: bool
