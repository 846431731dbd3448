"""Where the parts of a model lie: all on one device, the decoder blocks apart from the rest, or divided over ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .targets import find_blocks


def parameters_of_the_rest(model: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters of the modules outside the decoder blocks, those that a block uses too among them."""
    inside = set(find_blocks(model)[1].modules())
    return (p for module in model.modules() if module not in inside for p in module.parameters(recurse=False))


def blocks_lie_apart(model: nn.Module) -> bool:
    """Whether the parameters of the decoder blocks are on the CPU, and all others on one other device."""
    rest = {id(parameter): parameter.device for parameter in parameters_of_the_rest(model)}
    devices = set(rest.values())
    blocks = {p.device.type for p in find_blocks(model)[1].parameters() if id(p) not in rest}
    return len(devices) == 1 and blocks == {"cpu"} and devices.pop().type != "cpu"


def decoder_of(model: nn.Module) -> nn.Module:
    """The innermost module that runs the decoder blocks; it may be the model itself."""
    path = find_blocks(model)[0].rpartition(".")[0]
    while isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict):
        path = path.rpartition(".")[0]
    return model.get_submodule(path)


def is_sharded(model: nn.Module) -> bool:
    """Whether the weights of the decoder blocks are divided over the ranks, as sharding.shard_() does it."""
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return False
    decoder, blocks = decoder_of(model), find_blocks(model)[1]
    if not all(isinstance(module, FSDPModule) for module in (decoder, *blocks)):
        return False
    return not any(isinstance(parameter, DTensor) for parameter in parameters_of_the_rest(model))


def move_the_rest(model: nn.Module, device: torch.device) -> None:
    """Moves a model to a device, but for the parameters of its decoder blocks. All buffers are moved."""
    for parameter in parameters_of_the_rest(model):
        parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
