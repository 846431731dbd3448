"""Moving a loaded model to where its engine expects it."""

from __future__ import annotations

import torch
from torch import nn

from ..notes import warn
from .placement import is_sharded, move_the_rest
from .sharding import least_of_ranks, rank_count, shard_

_WEIGHTS_SHARE = 0.8  # of the free memory of a GPU that weights may take; the rest is for activations


def place(model: nn.Module, device: torch.device, engine: str, *, max_bytes: int | None, offload: bool) -> None:
    """Moves a model from the CPU to a device, as the engine of a name expects it.

    Args:
        model: on the CPU, or in the mapped files of a checkpoint.
        device: the CPU or a GPU.
        engine: "resident": all of it; "streamed": all but its decoder blocks; "sharded": a share of the blocks, and all
            else; "auto": the first of these that fits, see fitting_engine().
        max_bytes, offload: as load_model().

    Raises:
        UserError: as shard_().

    Warns:
        UserWarning: "auto" does not choose "resident".
    """
    if engine == "auto":
        engine = "resident" if device.type == "cpu" else _chosen(model, device, max_bytes)
    if is_sharded(model):  # read_shares() has read it
        return
    if engine == "sharded":
        shard_(model, device, offload=offload)
    elif engine == "streamed" and device.type != "cpu":
        move_the_rest(model, device)
    else:
        model.to(device)


def fitting_engine(weights: int, memory: int, ranks: int) -> str:
    """The engine for weights of so many bytes, on ranks with so many bytes of free GPU memory each."""
    memory = int(_WEIGHTS_SHARE * memory)
    if weights <= memory:
        return "resident"
    return "sharded" if weights <= ranks * memory else "streamed"


def _chosen(model: nn.Module, device: torch.device, max_bytes: int | None) -> str:
    free = torch.cuda.mem_get_info(device)[0]
    free = least_of_ranks(min(free, max_bytes or free), device)  # all ranks must choose the same
    weights = sum(parameter.nbytes for parameter in model.parameters())
    engine = fitting_engine(weights, free, rank_count())
    if engine != "resident":
        how = "streamed" if engine == "streamed" else f"sharded over {rank_count()} ranks"
        warn(
            f"the weights take {weights / 2**30:.0f} GiB, and {device} has {free / 2**30:.0f} GiB for them: the "
            f"decoder blocks are {how}, see --engine"
        )
    return engine
