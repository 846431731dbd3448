"""Decoder blocks whose weights are divided over the ranks, by FSDP2 of torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from ..errors import UserError
from .placement import decoder_of, move_the_rest, parameters_of_the_rest
from .plain import check_plain
from .shares import whole
from .targets import find_blocks


def rank_count() -> int:
    """Processes over which weights can be divided."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def least_of_ranks(value: int, device: torch.device) -> int:
    """The smallest of the values of all ranks."""
    if rank_count() == 1:
        return value
    least = torch.tensor(value, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


def shard_(model: nn.Module, device: torch.device, *, offload: bool = False) -> None:
    """Divides the weights of the decoder blocks over the ranks, and moves all else of the model to the device.

    Each rank keeps a share of the rows of each weight. All ranks must call this, with the same model. One block at a
    time is on the device as a whole. Gradients of parameters are turned off for good.

    Args:
        model: on the CPU, or in the mapped files of a checkpoint.
        device: of this rank.
        offload: keep the shares in pinned RAM instead of on the device.

    Raises:
        UserError: there is one process, or the model's blocks cannot be divided.
    """
    check_plain(model)
    wrap_(model, device, offload=offload)
    move_the_rest(model, device)


def wrap_(model: nn.Module, device: torch.device, *, offload: bool = False) -> None:
    """Divides the decoder blocks as shard_() does; they may be on the meta device. All else stays where it is."""
    if rank_count() == 1:
        raise UserError(
            "--engine sharded divides the weights over several ranks, got one process; start it by torchrun, or use "
            "--engine streamed"
        )
    if offload and device.type == "cpu":
        raise UserError("--offload keeps weights in RAM instead of on GPUs, but the device is the CPU; leave it out")
    _check_blocks(model)
    model.requires_grad_(False)
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    mesh = init_device_mesh(device.type, (rank_count(),))
    options = {"mesh": mesh, "ignored_params": set(parameters_of_the_rest(model))}
    for block in find_blocks(model)[1]:
        fully_shard(block, reshard_after_forward=True, offload_policy=policy, **options)
    fully_shard(decoder_of(model), **options)  # holds no weights; lets a block's weights travel while another computes


def _check_blocks(model: nn.Module) -> None:
    if decoder_of(model) is model:
        raise UserError(f"{type(model).__name__} has no decoder apart from its head, so it cannot be sharded")
    owners: dict[nn.Parameter, int] = {}
    for index, block in enumerate(find_blocks(model)[1]):
        for parameter in block.parameters():
            if owners.setdefault(parameter, index) != index:
                raise UserError(
                    f"blocks {owners[parameter]} and {index} of {type(model).__name__} share a weight, so they cannot "
                    f"be sharded; use --engine streamed"
                )


def gathered_parts(model: nn.Module, most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """The state dict of a sharded model, a few blocks at a time.

    All ranks must go through all parts. The first rank gets the tensors, on the CPU; the others get empty parts.

    Args:
        model: of shard_().
        most_bytes: of a part, if a single block does not have more.

    Yields:
        Name -> tensor.
    """
    path, blocks = find_blocks(model)
    names: dict[str, list[str]] = {f"{path}.{index}.": [] for index in range(len(blocks))}
    outside = []
    for name in model.state_dict():
        prefix = ".".join(name.split(".")[: path.count(".") + 2]) + "."
        names.get(prefix, outside).append(name)
    part = _copies(model, outside)
    for block, inside in zip(blocks, names.values(), strict=True):
        with whole(block):
            copies = _copies(model, inside)
        if part and _bytes(part) + _bytes(copies) > most_bytes:
            yield part
            part = {}
        part |= copies
    yield part


def _copies(model: nn.Module, names: list[str]) -> dict[str, Tensor]:
    """Tensors of the state dict on the CPU of the first rank; empty on others. Tied tensors stay one."""
    if dist.get_rank() != 0:
        return {}
    copies: dict[int, Tensor] = {}
    found = {}
    for name in names:
        module, _, key = name.rpartition(".")
        tensor = getattr(model.get_submodule(module), key)
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().to("cpu", copy=True)  # the memory of a gathered block is freed
        found[name] = copies[id(tensor)]
    return found


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
