"""Models of public shapes whose weights are divided over the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fwanda_pruner.model import placement

from .shapes import build


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
    with device:
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffers have values of their own
    _fill(model, device, seed)
    return model


@torch.no_grad()
def _fill(model: nn.Module, device: torch.device, seed: int) -> None:
    """Values like those of reinitialise(), drawn by each rank for its shards, and by all alike for the rest."""
    alike, own = (torch.Generator(device).manual_seed(number) for number in (seed, seed + 1 + dist.get_rank()))
    for parameter in model.parameters():
        sharded = isinstance(parameter, DTensor)
        values = parameter.to_local() if sharded else parameter
        if parameter.dim() > 1:
            values.normal_(0, 0.02, generator=own if sharded else alike)
        else:
            values.fill_(1)
