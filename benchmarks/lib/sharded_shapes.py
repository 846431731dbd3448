"""Models of public shapes whose weights are divided over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fwanda_pruner.model import placement

from .shapes import build, fill_, renew_rotary


def build_sharded(shape: str, dtype: torch.dtype, device: torch.device, seed: int) -> nn.Module:
    """A model for the sharded engine, whose random weights are made on the shards: no rank ever holds all of them.

    Args:
        shape, dtype: as build().
        device: of this rank.
        seed: of the weights; what each rank holds as a whole is the same on all of them.
    """
    from fwanda_pruner.model.sharding import wrap_

    model = build(shape, dtype, "meta", seed)
    wrap_(model, device, offload=False)
    model.to_empty(device=device)
    placement.move_the_rest(model, device)
    renew_rotary(model, device)
    _fill(model, device, seed)
    return model


@torch.no_grad()
def _fill(model: nn.Module, device: torch.device, seed: int) -> None:
    """Values like those of reinitialise(), drawn by each rank for its shards, and by all alike for the rest."""
    alike, own = (torch.Generator(device).manual_seed(number) for number in (seed, seed + 1 + dist.get_rank()))
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            fill_(name, parameter.to_local(), own)
        else:
            fill_(name, parameter, alike)
