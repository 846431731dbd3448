"""Packing the pruned matrices of a model in place, and unpacking them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fwanda_kernels import PackedHeader, pack_weight, packed_size

from ..config import LEAST_PACKED
from ..errors import UserError
from ..setting_checks import expect_flags
from .arguments import expect_model
from .cache import size_text
from .lazy import LazyTensor
from .packed import PackedExperts, PackedLinear, packed_weights, put_experts, take_experts, unpack_layers_
from .packed_quantizer import expect_one_dtype, mark_packed, unmark_packed
from .plain import check_whole
from .targets import Target, find_targets


def pack_(model: nn.Module, *, force: bool = False) -> nn.Module:
    """Replace the pruned matrices of a model by packed ones, in place, one after the other.

    Args:
        model: a pruned causal language model. Removed weights are those that are +0.0.
        force: pack all matrices, even if more than 85 % of their weights are not zero.

    Returns:
        The model. Its config says that it is packed, so save_pretrained() writes a packed folder.

    Raises:
        UserError: no matrix is sparse enough, and not `force`; or the model is packed already, or not plain: it holds
            adapters, compiled parts, or one weight at two places.
    """
    expect_flags(force=force)
    return _pack(model, force, pack_weight)


def pack_lazily_(model: nn.Module, *, force: bool = False) -> nn.Module:
    """As pack_(), but each matrix is packed when it is written to a file: a LazyTensor stands for it until then.

    The model cannot compute afterwards. Its dense weights stay where they are, such as in a mapped file.
    """
    return _pack(
        model, force, lambda weight: LazyTensor(lambda: pack_weight(weight), (packed_size(weight),), torch.uint8)
    )


def _pack(model: nn.Module, force: bool, pack: Callable[[Tensor], Tensor]) -> nn.Module:
    check_whole(model)
    if force:
        chosen = find_targets(model)[0]
    else:
        chosen = sparse_targets(model, advice="prune it first, or pack it anyway with --force (force=True in Python)")
    expect_one_dtype({target.weight.dtype for target in chosen})
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
    layers = {target.name: target.module for target in targets if target.slice_of is None}
    experts = {target.parameter: target.slice_of.experts.module for target in targets if target.slice_of is not None}
    parameters = {path: getattr(module, path.rpartition(".")[2]) for path, module in experts.items()}
    try:
        yield pack_(model)
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)
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


@torch.no_grad()
def _pack_target(model: nn.Module, target: Target, pack: Callable[[Tensor], Tensor]) -> None:
    """Replace the module of a target, or the parameter of fused experts that it is a slice of."""
    if target.slice_of is None:
        layer = target.module
        packed = pack(target.weight)
        header = PackedHeader(tuple(target.shape), target.weight.dtype, "")
        new = PackedLinear(packed, header, layer.bias, conv1d=isinstance(layer, Conv1D))
        model.set_submodule(target.name, new.train(layer.training))
        return
    module, name = target.slice_of.experts.module, target.slice_of.parameter.rpartition(".")[2]
    parameter = getattr(module, name)
    packed = [pack(weight) for weight in parameter]
    header = PackedHeader(tuple(parameter.shape[1:]), parameter.dtype, "")
    put_experts(module, name, packed, [header] * len(packed))
