"""Packing the pruned matrices of a model in place, and unpacking them again."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from fwanda_kernels import PackedHeader, pack_weight, packed_size

from ..config import LEAST_PACKED
from ..errors import UserError, one_line
from ..setting_checks import expect_flags
from .arguments import expect_model
from .cache import size_text
from .experts import output_difference
from .in_use import in_use
from .lazy import LazyTensor
from .packed import PackedExperts, PackedLinear, packed_weights, put_experts, take_experts, unpack_layers_
from .packed_quantizer import expect_one_dtype, mark_packed, unmark_packed
from .plain import check_whole
from .targets import Target, find_targets, run_two_tokens

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # torch has no other way
_CHECKED_TOKENS = 16  # for which the output of a layer with its own forward() is compared


def pack_(model: nn.Module, *, force: bool = False) -> nn.Module:
    """Replace the pruned matrices of a model by packed ones, in place, one after the other.

    A layer stays dense if the code of the module around it reads its weight.

    Args:
        model: a pruned causal language model. Removed weights are those that are +0.0.
        force: pack all matrices, even if more than 85 % of their weights are not zero.

    Returns:
        The model. Its config says that it is packed, so save_pretrained() writes a packed folder.

    Raises:
        UserError: no matrix is sparse enough, and not `force`; or the model is packed already, or not plain: it holds
            adapters, compiled parts, or one weight at two places; or a layer has hooks or buffers, or computes
            something else than a linear layer; or the model does not run any more. It is then dense again.
    """
    expect_flags(force=force)
    with in_use(model):
        check_whole(model)
        runs = _fault_of_run(model) is None  # some models need more than text
        _pack(model, force, pack_weight)
        if runs and (fault := _fault_of_run(model)):
            unpack_(model)
            raise UserError(
                f"the model does not run with packed layers ({fault}), because some code reads their weights; save it "
                f"dense"
            )
    return model


def _fault_of_run(model: nn.Module) -> str | None:
    """What the model raises on two tokens, in one line; None if it runs."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        run_two_tokens(model)
    except Exception as error:  # a model raises anything
        return one_line(error, 200)
    finally:
        for module, training in modes.items():
            module.training = training
    return None


def pack_lazily_(model: nn.Module, *, force: bool = False) -> nn.Module:
    """As pack_(), but each matrix is packed when it is written to a file: a LazyTensor stands for it until then.

    The model cannot compute afterwards. Its dense weights stay where they are, such as in a mapped file.
    """
    return _pack(
        model, force, lambda weight: LazyTensor(lambda: pack_weight(weight), (packed_size(weight),), torch.uint8)
    )


def _pack(model: nn.Module, force: bool, pack: Callable[[Tensor], Tensor], *, hooks: bool = False) -> nn.Module:
    with in_use(model):
        return _pack_all(model, force, pack, hooks)


def _pack_all(model: nn.Module, force: bool, pack: Callable[[Tensor], Tensor], hooks: bool) -> nn.Module:
    check_whole(model)
    if force:
        chosen = find_targets(model)[0]
    else:
        chosen = sparse_targets(model, advice="prune it first, or pack it anyway with --force (force=True in Python)")
    chosen = [target for target in chosen if not _weight_is_read(model, target)]
    if not chosen:
        raise UserError("the model reads the weights of all its layers itself, so none can be packed; save it dense")
    expect_one_dtype({target.weight.dtype for target in chosen})
    _check_layers(chosen, hooks)
    waiting = {target.parameter: target for target in reversed(chosen)}
    del chosen  # so that each dense weight is freed once it is packed
    while waiting:
        _pack_target(model, waiting.popitem()[1], pack)
    mark_packed(model)
    return model


def unpack_(model: nn.Module) -> nn.Module:
    """Replace the packed matrices of a model by dense ones, in place, one after the other; returns the model."""
    return _unpack(model, lazily=False)


def unpack_lazily_(model: nn.Module) -> nn.Module:
    """As unpack_(), but each matrix is unpacked when it is written to a file, as in pack_lazily_()."""
    return _unpack(model, lazily=True)


def _unpack(model: nn.Module, *, lazily: bool) -> nn.Module:
    expect_model(model)
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise UserError("the model is offloaded by accelerate; load it again without device_map, and then unpack it")
    with in_use(model):
        unpack_layers_(model, lazily=lazily)
        unmark_packed(model)
    return model


@contextmanager
def packed_meanwhile(model: nn.Module) -> Iterator[None]:
    """Inside the block the sparse matrices of a model are packed; afterwards the dense ones are back, untouched.

    A model that is packed stays as it is.

    Raises:
        UserError: no matrix is sparse enough.
    """
    if next(packed_weights(model), None) is not None:
        yield
        return
    targets = find_targets(model)[0]
    layers = [target for target in targets if target.slice_of is None]
    tensors = [(target.module.weight, target.module.bias) for target in layers]
    experts = {target.parameter: target.slice_of.experts.module for target in targets if target.slice_of is not None}
    parameters = {path: getattr(module, path.rpartition(".")[2]) for path, module in experts.items()}
    try:
        yield _pack(model, False, pack_weight, hooks=True)
    finally:
        for target, (weight, bias) in zip(layers, tensors, strict=True):
            target.module.weight, target.module.bias = weight, bias
            model.set_submodule(target.name, target.module)
        for module in set(experts.values()):
            if isinstance(module, PackedExperts):
                take_experts(module)
        for path, module in experts.items():
            module.register_parameter(path.rpartition(".")[2], parameters[path])
        unmark_packed(model)


def sparse_targets(model: nn.Module, *, advice: str = "prune it first") -> list[Target]:
    """The matrices that pack_() packs. Of fused experts, these are all of a parameter, if they are sparse on average.

    Raises:
        UserError: there are none. `advice` ends the message.
    """
    targets = find_targets(model)[0]
    kept: dict[str, list[int]] = {}  # parameter -> weights that are not zero, and all
    for target in targets:
        counts = kept.setdefault(target.parameter, [0, 0])
        counts[0] += int((target.weight != 0).sum())
        counts[1] += target.weight.numel()
    chosen = [
        target for target in targets if kept[target.parameter][0] <= (1 - LEAST_PACKED) * kept[target.parameter][1]
    ]
    if not chosen:
        weights = sum(target.weight.numel() for target in targets)
        size = targets[0].weight.element_size()
        raise UserError(
            f"the model is dense: no matrix has {float(LEAST_PACKED):.0%} zeros. Its {len(targets)} matrices take "
            f"{size_text(weights * size)}, and would take {size_text(weights * size + weights // 8)} packed; {advice}"
        )
    return chosen


def _weight_is_read(model: nn.Module, target: Target) -> bool:
    """Whether a module around a layer reads its weight itself, which it could not do if the layer was packed."""
    if target.slice_of is not None:
        return False
    path, _, name = target.name.rpartition(".")
    around = [model, *(model.get_submodule(path[:end]) for end in _ends(path))]
    sources = {_source_of(kind) for module in around for kind in type(module).__mro__}
    return any(_reads_weight(source, name) for source in sources)


def _ends(path: str) -> list[int]:
    """Where the paths of the modules that lead to a path end in it."""
    return [match.start() for match in re.finditer(r"\.", path)] + [len(path)] if path else []


@cache
def _reads_weight(source: str, name: str) -> bool:
    """Whether code reads the weight of an attribute or entry, or of a variable that it sets to the attribute."""
    if name.isdecimal():
        return f"[{name}].weight" in source
    aliases = re.findall(rf"\b(\w+) = [\w.]*\.{name}$", source, re.MULTILINE)
    return any(re.search(rf"\b{word}\.weight\b", source) for word in (name, *aliases))


@cache
def _source_of(kind: type) -> str:
    """The source code of the methods of a class that run with its weights; empty if it has none."""
    sources = []
    for name, function in vars(kind).items():
        if inspect.isfunction(function) and name not in ("__init__", "_init_weights", "_reset_parameters"):
            with suppress(OSError, TypeError):
                sources.append(inspect.getsource(function))
    return "\n".join(sources)


def _check_layers(targets: list[Target], hooks: bool) -> None:
    for target in targets:
        fault = _fault_of_layer(target, hooks) if target.slice_of is None else None
        if fault is not None:
            raise UserError(f"{target.name} {fault}")


def _fault_of_layer(target: Target, hooks: bool) -> str | None:
    """Why a packed layer cannot stand for a layer, or None. With `hooks`, the layer may have hooks."""
    layer, kind = target.module, type(target.module).__name__
    if not hooks and any(getattr(layer, key) for key in _HOOKS):
        return "has hooks, which a packed layer would not run; remove them, and register them again afterwards"
    if next(layer.buffers(), None) is not None:
        return f"({kind}) has buffers, which a packed layer cannot hold; replace it by a plain linear layer"
    if type(layer).forward in (nn.Linear.forward, Conv1D.forward) and "forward" not in vars(layer):
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(_CHECKED_TOKENS, target.shape[1], generator=generator, dtype=torch.float32, device="cpu")
    try:
        difference = output_difference(
            layer.forward, lambda x: linear(x, target.weight, layer.bias), (x.to(target.weight),)
        )
    except Exception as error:  # a layer raises anything on input that it does not expect
        difference = one_line(error, 120)
    if difference is None:
        return None
    return (
        f"({kind}) computes something else than a linear layer ({difference}), so it cannot be packed; replace it by "
        f"one, or save the model dense"
    )


@torch.no_grad()
def _pack_target(model: nn.Module, target: Target, pack: Callable[[Tensor], Tensor]) -> None:
    """Replace the module of a target, or the parameter of fused experts that it is a slice of."""
    if target.slice_of is None:
        layer = target.module
        packed = pack(target.weight)
        header = PackedHeader(tuple(target.shape), target.weight.dtype, "")
        new = PackedLinear(packed, header, layer.bias, layer)
        model.set_submodule(target.name, new.train(layer.training))
        return
    module, name = target.slice_of.experts.module, target.slice_of.parameter.rpartition(".")[2]
    parameter = getattr(module, name)
    packed = [pack(weight) for weight in parameter]
    header = PackedHeader(tuple(parameter.shape[1:]), parameter.dtype, "")
    put_experts(module, name, packed, [header] * len(packed))
