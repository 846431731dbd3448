"""Reading a sharded model from its files, so that each rank reads and holds only its share of the decoder blocks."""

from __future__ import annotations

import os
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .sharding import rank_count, wrap_
from .targets import find_blocks

try:  # newer versions of transformers
    from transformers.distributed import DistributedConfig
except ImportError:
    DistributedConfig = None


def can_read_shares(device: torch.device) -> bool:
    """Whether transformers can read shares, onto this device; it takes the GPU of the local rank."""
    fields = getattr(DistributedConfig, "__dataclass_fields__", {})
    if rank_count() == 1 or not {"fsdp_size", "fsdp_plan"} <= set(fields):
        return False
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or device.type != accelerator.type:
        return accelerator is None
    return int(os.environ.get("LOCAL_RANK", "-1")) == (device.index or 0)


def read_shares(model_class: type, config, name: str, device: torch.device, **options):
    """Reads a model in place of model_class.from_pretrained(), as shard_() would divide it.

    transformers reads shares only into blocks that it has wrapped itself, together with the embeddings and the head.
    So what it has read moves to a second model, whose blocks alone are divided.

    Args:
        model_class: AutoModelForCausalLM or AutoModelForImageTextToText.
        config: of the model.
        name: a folder, or an id of the hub.
        device: of this rank.
        **options: of from_pretrained().

    Returns:
        The model, and what from_pretrained(..., output_loading_info=True) says. The model is on the CPU, and not
        sharded, where transformers cannot read shares of it.

    Raises:
        UserError: as shard_().
    """
    with torch.device("meta"):
        model = model_class.from_config(config, trust_remote_code=options["trust_remote_code"])
    if _some_rank_without_experts(model):
        return model_class.from_pretrained(name, **options)
    blocks = find_blocks(model)[0]
    wrap_(model, device)
    plan = {f"{blocks}.*": "free_full_weight"}
    shares = DistributedConfig(fsdp_size=rank_count(), fsdp_plan=plan)
    source, info = model_class.from_pretrained(name, distributed_config=shares, **options)
    _move(source, model, f"{blocks}.", device)
    return model, info


def _some_rank_without_experts(model: nn.Module) -> bool:
    """Whether the experts of a block are too few for all ranks; transformers fails on a rank that has none."""
    last, fused = rank_count() - 1, (p for p in find_blocks(model)[1].parameters() if p.dim() == 3)
    return any(last * -(-len(parameter) // rank_count()) >= len(parameter) for parameter in fused)


def _move(source: nn.Module, model: nn.Module, blocks: str, device: torch.device) -> None:
    """Gives a sharded model without weights the weights, the buffers and the settings of another."""
    model.config = deepcopy(source.config)
    del model.config.distributed_config
    if hasattr(source, "generation_config"):
        model.generation_config = source.generation_config
    for name, buffer in source.named_buffers():
        module, _, key = name.rpartition(".")
        setattr(model.get_submodule(module), key, buffer.to(device))
    whole: dict[int, Tensor] = {}
    weights = {}
    for name, weight in source.state_dict(keep_vars=True).items():
        if name.startswith(blocks):
            weights[name] = weight
        else:
            if id(weight) not in whole:
                whole[id(weight)] = _whole(weight.detach()).to(device)
            weights[name] = whole[id(weight)]
    model.load_state_dict(weights, assign=True)
    model.requires_grad_(False)
    model.tie_weights()


def _whole(tensor: Tensor) -> Tensor:
    """The tensor, gathered from all ranks if it is divided over them."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
