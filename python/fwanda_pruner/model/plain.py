"""Refuses models that cannot be pruned in place and saved as they are, before any work is done.

Pruning writes to plain tensors on one device, or to a model of sharding.shard_(). Wrappers, compiled or parametrised
modules, adapters, weights that are quantised, offloaded or sharded in another way, and weights that share memory are
named in one line that says what to do.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..errors import UserError
from .arguments import expect_model
from .checks import check_quantization
from .packed import expect_dense, packed_weights
from .placement import blocks_lie_apart, is_sharded
from .targets import find_blocks

_WRAPPERS = {"DataParallel", "DistributedDataParallel", "DeepSpeedEngine"}
_SHARDING = {"FullyShardedDataParallel", "FSDPModule", "DTensor"}
_QUANTISERS = {"torchao", "bitsandbytes", "hqq", "optimum", "awq", "gptqmodel", "auto_gptq"}  # packages
_QUANTISE_LATER = "prune the original model, and quantise the result"
_EMPTY = "is on the meta device and holds no numbers; load the model with its weights, onto a real device"
_LORA = re.compile(r"(^|\.)lora_(A|B|a|b|down|up)\b")


def check_plain(model: nn.Module, *, packed: bool = False, several_devices: bool = False) -> None:
    """Refuses what is no causal language model, and one whose weights are not plain tensors on one device.

    Args:
        packed: accept packed weights.
        several_devices: accept weights on several devices.

    Raises:
        UserError: naming the first module or tensor that is in the way, and what to do.
    """
    if isinstance(model, nn.Module) and is_sharded(model):  # shard_() has checked it
        return
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        for fault_of in (_compiled, _wrapped, _quantised, _adapted, _parametrised):
            fault = fault_of(module, name)
            if fault is not None:
                raise UserError(f"{name or 'the model'} {fault}")
    expect_model(model)  # after the loop, which knows wrappers by name
    if getattr(model.config, "rescale_every", None):  # RWKV
        raise UserError(
            f"{type(model).__name__} divides its weights by powers of 2 while it runs; set rescale_every to 0 in its "
            f"config.json, and load it again"
        )
    if not packed:
        expect_dense(model)
    if next(packed_weights(model), None) is None:
        check_quantization(model.config, "the model")
    _check_tensors(model)
    if not several_devices:
        _check_devices(model)
    check_shared(model)


def check_shared(model: nn.Module) -> None:
    """Refuses modules of the blocks that stand at two places, and weights that share memory: no file expresses these.

    Raises:
        UserError: naming both places, and what to do.
    """
    _check_places(model)
    _check_shared_memory(model)


def check_whole(model: nn.Module) -> None:
    """check_plain(), but the weights may lie on several devices, and must not be divided over several ranks."""
    if isinstance(model, nn.Module) and is_sharded(model):
        raise UserError("the model is sharded over several ranks; save it, and load the saved folder in one process")
    check_plain(model, several_devices=True)


def _compiled(module: nn.Module, name: str) -> str | None:
    if hasattr(module, "_orig_mod"):
        return f"is a wrapper of torch.compile; {_unwrap(name, '_orig_mod')}, and compile it after pruning"
    if isinstance(module, torch.jit.ScriptModule):
        return "is compiled by torch.jit; give the model that it was made from"
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    if in_place or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):
        return "is compiled in place by torch.compile; load the model again, prune it, and compile it afterwards"
    return None


def _unwrap(name: str, attribute: str) -> str:
    """How to replace a wrapper by what it wraps."""
    if not name:
        return f"give the model itself, model.{attribute}"
    return f"take it away by model.set_submodule({name!r}, model.get_submodule({name!r}).{attribute})"


def _wrapped(module: nn.Module, name: str) -> str | None:
    classes = {base.__name__ for base in type(module).__mro__}
    if classes & _SHARDING:
        return "is sharded by FSDP in another way; load the model by load_model(name, engine='sharded')"
    if classes & _WRAPPERS:
        return f"is wrapped by {type(module).__name__}; {_unwrap(name, 'module')}"
    hook = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", [hook]):  # a hook, or several in one
        if getattr(part, "offload", False) or "Offload" in type(part).__name__:
            return "is offloaded by accelerate; load the whole model onto one device, without device_map or offloading"
    return None


def _quantised(module: nn.Module, name: str) -> str | None:
    home = type(module).__module__
    if home.split(".")[0] in _QUANTISERS or home.startswith("torch.ao.nn.quantized"):
        return f"is quantised ({home}.{type(module).__name__}); {_QUANTISE_LATER}"
    return None


def _adapted(module: nn.Module, name: str) -> str | None:
    lora = any(_LORA.search(key) for key, _ in module.named_parameters(name, recurse=False))
    loaded = getattr(module, "_hf_peft_config_loaded", False) and not any(map(_is_of_peft, module.modules()))
    if not (_is_of_peft(module) or lora or loaded or _has_more_parameters(module)):
        return None
    whole = hasattr(module, "merge_and_unload")
    merge = "model" if whole else "load the model without them and run peft.PeftModel.from_pretrained(model, ADAPTER)"
    return (
        f"holds adapters ({type(module).__name__}), which are not pruned; merge them into the model first: "
        f"{merge}.merge_and_unload(), or call this before they are added"
    )


def _has_more_parameters(module: nn.Module) -> bool:
    """Whether a linear layer has parameters beside weight and bias that do not stand for one of these two."""
    if not isinstance(module, nn.Linear) or parametrize.is_parametrized(module) or _replaced_tensors(module):
        return False
    return not {key for key, _ in module.named_parameters()} <= {"weight", "bias"}


def _is_of_peft(module: nn.Module) -> bool:
    return any(base.__module__.split(".")[0] in ("peft", "adapters") for base in type(module).__mro__)


def _parametrised(module: nn.Module, name: str) -> str | None:
    if parametrize.is_parametrized(module):
        tensor = next(iter(module.parametrizations))
        return (
            f"is parametrised; remove that first, by torch.nn.utils.parametrize.remove_parametrizations(module, "
            f"{tensor!r})"
        )
    if tensors := _replaced_tensors(module):
        return (
            f"computes its {tensors[0]} from other tensors; make that permanent first, by torch.nn.utils.prune.remove, "
            f"remove_weight_norm or remove_spectral_norm"
        )
    if isinstance(vars(module).get("weight"), Tensor):
        return "has a weight that is no nn.Parameter, so it would not be saved; make it one"
    return None


def _replaced_tensors(module: nn.Module) -> list[str]:
    """Tensors that a hook computes anew in each call, from parameters such as `weight_orig` or `weight_g`."""
    stems = {key.rpartition("_")[0] for key, _ in module.named_parameters(recurse=False)}
    return sorted(stem for stem in stems if isinstance(vars(module).get(stem), Tensor))


def _check_tensors(model: nn.Module) -> None:
    for name, tensor in model.named_parameters():
        if fault := _fault_of_tensor(tensor):
            raise UserError(f"{name} {fault}")
    for name, tensor in model.named_buffers():
        if tensor.is_meta:
            raise UserError(f"{name} {_EMPTY}")


def _fault_of_tensor(tensor: Tensor) -> str | None:
    """Why a parameter is no plain tensor, or None."""
    kind = type(tensor)
    if {base.__name__ for base in kind.__mro__} & _SHARDING:
        return f"is sharded ({kind.__name__}) in another way; load the model by load_model(name, engine='sharded')"
    quantiser = kind.__module__.split(".")[0] in _QUANTISERS
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        return "has no shape yet; run the model once, so that it is initialised"
    if tensor.is_complex():
        return f"is {tensor.dtype}; load the model in bf16, fp16 or fp32"
    if quantiser or not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        what = kind.__name__ if quantiser else tensor.dtype
        return f"is quantised ({what}); {_QUANTISE_LATER}"
    if kind not in (nn.Parameter, Tensor):
        return f"is a {kind.__name__}, expected a plain nn.Parameter; replace it by nn.Parameter with the same values"
    if tensor.is_meta:
        return _EMPTY
    if tensor.layout != torch.strided:
        return f"is stored as {tensor.layout}, expected a dense tensor; replace it by nn.Parameter(tensor.to_dense())"
    if (
        tensor.numel()
        and _addresses(tensor)[1] - tensor.untyped_storage().data_ptr() > tensor.untyped_storage().nbytes()
    ):
        return "has no memory any more (sharded or freed); load the model again"
    if _overlaps_itself(tensor):
        return "has entries that share memory (expanded?); replace it by nn.Parameter(tensor.detach().clone())"
    return None


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two entries may lie at one address."""
    span = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < span:
            return True
        span += (size - 1) * stride
    return False


def _addresses(tensor: Tensor) -> tuple[int, int]:
    """Address of the first byte of a tensor, and of the one after its last."""
    start = tensor.data_ptr()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (reach + 1) * tensor.element_size()


def _check_devices(model: nn.Module) -> None:
    """Refuses weights on several devices, unless the blocks lie on the CPU and all else on a GPU, to be streamed."""
    where: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        where.setdefault(parameter.device, name)
    if len(where) > 1 and not blocks_lie_apart(model):
        places = ", ".join(f"{name} on {device}" for device, name in where.items())
        raise UserError(f"the model lies on {len(where)} devices ({places}); load it onto one, without device_map")


def _check_places(model: nn.Module) -> None:
    """Refuses a module of the blocks that stands at two places."""
    path, blocks = find_blocks(model)
    seen: dict[nn.Module, str] = {}
    for name, module in blocks.named_modules(prefix=path, remove_duplicate=False):
        if next(module.parameters(), None) is None:
            continue
        if module in seen:
            raise UserError(
                f"{name} and {seen[module]} are one module at two places; give each its own, by copy.deepcopy(module)"
            )
        seen[module] = name


def _check_shared_memory(model: nn.Module) -> None:
    """Refuses tensors that share memory, unless transformers ties them again when it loads the model."""
    inside = find_blocks(model)[0] + "."
    for names in _overlapping(model):
        ties = [name for name in names if any(re.search(pattern, name) for pattern in _tie_patterns(model))]
        first, second = names[0], names[1]
        if len(ties) < len(names) - 1 or any(name.startswith(inside) for name in names if name not in ties):
            raise UserError(
                f"{first} and {second} share memory, which a saved model cannot express; give one of them "
                f"nn.Parameter(tensor.detach().clone())"
            )
        configs = (model.config, model.config.get_text_config())
        if not any(getattr(config, "tie_word_embeddings", True) for config in configs) and _are_embeddings(model):
            raise UserError(
                f"{first} and {second} are one tensor, but model.config.tie_word_embeddings is False, so the saved "
                f"model would not load; set it to True"
            )


def _overlapping(model: nn.Module) -> Iterator[list[str]]:
    """Names of tensors of the state dict whose ranges of memory overlap, in groups."""
    by_storage = defaultdict(list)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and tensor.numel() and not tensor.is_meta:
            by_storage[tensor.device, tensor.untyped_storage().data_ptr()].append((*_addresses(tensor), name))
    for tensors in by_storage.values():
        group, reached = [], 0
        for start, end, name in sorted(tensors):
            if start >= reached:
                if len(group) > 1:
                    yield group
                group = []
            group.append(name)
            reached = max(reached, end)
        if len(group) > 1:
            yield group


def _tie_patterns(model: nn.Module) -> list[str]:
    """Regular expressions of the names that the model's classes declare as tied to others."""
    return [key for module in model.modules() for key in getattr(module, "_tied_weights_keys", None) or ()]


def _are_embeddings(model: nn.Module) -> bool:
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight
