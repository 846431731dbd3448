"""Which allocation: masks are tried in passing, on text that calibration did not read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn
from tqdm import tqdm

from ..config import PruneConfig
from ..errors import UserError
from ..measure.statistics import Statistics
from ..model.targets import Target
from .masks import masked_loss, masks_of

HELD_OUT = 8  # windows
# (b, c) of the global allocation: the measured optimum is flat, and its place differs between models
_EXPONENTS = ((0.75, 0.5), (1.0, 0.5), (1.0, 0.75), (0.75, 0.25), (0.5, 0.5), (0.5, 0.25))


def candidates(config: PruneConfig) -> dict[str, PruneConfig]:
    """What a response can begin with, by a short name, and what "auto" chooses from besides.

    "auto" has uniform rows as Wanda, the published rule and six settings of the global allocation; "response", and
    both under a pattern, where exponents cancel, the global allocation as it is set.
    """
    found, exponents = {}, ((config.row_exponent, config.layer_exponent),)
    if config.allocation == "auto" and not config.nm:
        found = {name: replace(config, allocation=name) for name in ("uniform", "row")}
        exponents = _EXPONENTS
    for b, c in exponents:
        found[f"global b={b:g} c={c:g}"] = replace(config, allocation="global", row_exponent=b, layer_exponent=c)
    return found


def try_masks(
    model: nn.Module,
    tokens: Tensor,
    targets: Sequence[Target],
    statistics: Statistics,
    configs: Mapping[str, PruneConfig],
    *,
    progress: bool = True,
) -> dict[str, float]:
    """Loss of the masks of each config, without an update of the weights, which are as before afterwards.

    Args:
        model: a dense causal language model in eval mode.
        tokens: [S, L] int64 windows, better not those of the calibration.
        targets: its matrices.
        statistics: of the dense model, with g2 where an allocation reads it.
        configs: name -> resolved config.
        progress: show a bar.

    Returns:
        name -> mean next-token loss in nats; inf where it is not finite or the allocation has no budget.
    """
    losses = {}
    for name, config in tqdm(configs.items(), desc="try", unit="mask", disable=None if progress else True):
        try:
            losses[name] = masked_loss(model, tokens, targets, masks_of(config, targets, statistics))
        except UserError:
            losses[name] = math.inf
    return losses


def best(losses: Mapping[str, float]) -> str:
    """The name with the lowest loss, the first of equals.

    Raises:
        UserError: none is finite.
    """
    name = min(losses, key=losses.get)
    if not math.isfinite(losses[name]):
        raise UserError(
            "no allocation gives a finite loss on the held-out text; choose uniform, row or global yourself"
        )
    return name
