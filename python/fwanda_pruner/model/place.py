"""Moving a loaded model to where its engine expects it."""

from __future__ import annotations

import torch
from torch import nn

from ..config import PruneConfig
from ..errors import UserError, show
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


def warn_of_other_place(config: PruneConfig, model: nn.Module) -> None:
    """Warns of a device or a dtype that a loaded model does not have: only loading follows these settings.

    Raises:
        UserError: the device is no name of one.

    Warns:
        UserWarning: naming the setting and what the model has.
    """
    device, dtype = next(model.parameters()).device, str(model.dtype).removeprefix("torch.")
    if config.device != "auto":
        wanted = named_device(config.device)
        if wanted.type != device.type or wanted.index not in (None, device.index or 0):
            warn(f"--device {config.device} has no effect: the model is on {device}; move it by model.to()")
    if config.dtype not in (None, dtype):
        warn(f"--dtype {config.dtype} has no effect: the weights are {dtype}; convert them by model.to()")


def named_device(name: str) -> torch.device:
    """The CPU or GPU of a name, which this machine may lack.

    Raises:
        UserError: it is no name of one.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError, ValueError, OverflowError):  # the last two: a number that is too large
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"device must be auto, cpu, cuda or cuda:N, got {show(name)}")
    return device


def find_device(device: str | torch.device) -> torch.device:
    """The device that a setting names; auto is the GPU if there is one, else the CPU.

    Raises:
        UserError: there is no such device.
    """
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = named_device(device)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if target.type == "cuda" and (target.index or 0) >= count:
        raise UserError(f"device {str(target)!r}: torch finds {count} CUDA devices here; use cpu or auto")
    return target


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
