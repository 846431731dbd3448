"""Which masks are better: those with the smaller increase of the loss over all domains that harm no guard."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..engine.engine import Engine
from ..engine.masks_in_passing import Masks
from ..engine.prefix import SharedPrefix
from ..text.domains import Domain

Losses = Mapping[str, float]
"""Source of a domain -> mean next-token loss in nats; inf where it is not finite."""


def domain_losses(
    engine: Engine, windows: Mapping[str, Tensor], masks: Masks | None = None, *, prefix: SharedPrefix | None = None
) -> Losses:
    """Losses of the windows [S, L] of each domain, under masks; None: with the weights as they are.

    Args:
        prefix: as Engine.window_losses().
    """
    sizes = [len(tokens) for tokens in windows.values()]
    losses = engine.window_losses(torch.cat(list(windows.values())), masks, label="losses", prefix=prefix)
    means = [float(part.mean()) for part in losses.split(sizes)]
    return {name: mean if math.isfinite(mean) else math.inf for name, mean in zip(windows, means, strict=True)}


class Judge:
    """Compares masks by their losses on Domain.choice of each domain.

    Args:
        engine: of a dense model in eval mode.
        domains: at least one.
        wanda: Wanda's masks at the same sparsity.

    Attributes:
        dense, wanda: losses of the dense model, and of Wanda's masks.
    """

    def __init__(self, engine: Engine, domains: Sequence[Domain], wanda: Masks):
        self._engine, self._prefix = engine, engine.shared_prefix()
        self._windows = {domain.source: domain.choice for domain in domains}
        self._guards = [domain.source for domain in domains if domain.guard]
        self.dense = self.losses(None)
        self.wanda = self.losses(wanda)

    def losses(self, masks: Masks | None) -> Losses:
        """Loss of each domain under masks; None: with the weights as they are."""
        return domain_losses(self._engine, self._windows, masks, prefix=self._prefix)

    def increase(self, losses: Losses) -> float:
        """The mean over the domains of how much the loss exceeds that of the dense model, in nats.

        inf if a loss is not finite. A domain on which the dense model has no finite loss adds nothing.
        """
        total = sum(losses[name] - dense for name, dense in self.dense.items() if math.isfinite(dense))
        return total / len(self.dense) if math.isfinite(total) else math.inf

    def rank(self, losses: Losses) -> tuple[bool, float]:
        """Orders masks by their losses: smaller is better. Masks that are worse than Wanda's on a guard come last."""
        harms = any(losses[name] > self.wanda[name] for name in self._guards)
        return harms, self.increase(losses)
