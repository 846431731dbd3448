"""Keeps the removed weights of a pruned model at zero while it is fine-tuned."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from fwanda_kernels import masked_weight, pack_mask

from ..errors import UserError
from .arguments import expect_type
from .plain import check_whole
from .targets import Target, find_targets

_GONE = torch.empty(0)  # in place of a weight that its module does not have


class KeptZeros:
    """The masks of a model, applied after each step of every optimizer, until remove() or the end of a `with` block.

    A `with` block may be entered again.

    Attributes:
        packed: name of each matrix -> its mask, [R, ceil(C/8)] uint8 as fwanda_kernels.pack_mask() packs it.
    """

    def __init__(self, model: nn.Module, packed: dict[str, Tensor]):
        self.packed = packed
        self._model = model
        self._targets = {target.name: target for target in find_targets(model)[0] if target.name in packed}
        self._hook: RemovableHandle | None = None
        self._keep()

    @torch.no_grad()
    def apply_(self) -> None:
        """Set the removed weights to +0.0 again, for example after an adapter was merged.

        Weights that are packed or on the meta device stay as they are.

        Raises:
            UserError: a module has been replaced since, or its weight is no plain parameter any more.
        """
        modules = set(self._model.modules())
        for name, target in self._targets.items():
            weight = _current_weight(target, modules)
            if weight is None:
                continue
            if self.packed[name].device != weight.device:
                self.packed[name] = self.packed[name].to(weight.device)
            kept = torch.ones_like(weight, dtype=torch.bfloat16)  # the model may have another dtype by now, as fp64
            weight.masked_fill_(masked_weight(kept, self.packed[name]) == 0, 0)

    def _after_step(self, _optimizer: Optimizer, _args, _kwargs) -> None:
        self.apply_()

    def _keep(self) -> None:
        self.apply_()
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._after_step)

    def remove(self) -> None:
        """Stop keeping the removed weights at zero."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def __enter__(self) -> KeptZeros:
        self._keep()
        return self

    def __exit__(self, *_) -> None:
        self.remove()


def keep_zeros(model: nn.Module, masks: Mapping[str, Tensor] | None = None) -> KeptZeros:
    """Keep the removed weights of a pruned model at zero while it is fine-tuned.

    It works with any optimizer of torch, and so with transformers' Trainer. An optimizer that keeps its own copies of
    the weights (fp32 masters, sharded weights) may write them back later: then call apply_() at the end. With adapters
    of PEFT, call this before they are added, and apply_() after merge_and_unload().

    Args:
        model: a pruned causal language model, on its device.
        masks: name -> [R, ceil(C/8)] uint8, as load_masks() reads them; they are applied at once. None: the weights
            that are zero now stay zero.

    Returns:
        A context manager with apply_() and remove(), which keeps the zeros until its end.

    Raises:
        UserError: a mask fits no matrix of the model; no weight is zero and there are no masks; or the model is packed,
            or not plain: it holds adapters, compiled parts, or one weight at two places.
    """
    check_whole(model)
    expect_type("masks", masks, Mapping, "give what load_masks() returns")
    targets = {target.name: target for target in find_targets(model)[0]}
    if masks is None:
        packed = {name: pack_mask(target.weight != 0) for name, target in targets.items()}
        if not any(bool((target.weight == 0).any()) for target in targets.values()):
            raise UserError("keep_zeros: no weight of the model is zero; prune it first, or give masks")
    elif not masks:
        raise UserError("keep_zeros: masks is empty, so no zero would be kept; give what load_masks() returns, or None")
    else:
        packed = {name: _fitting(name, mask, targets) for name, mask in masks.items()}
    return KeptZeros(model, packed)


def _current_weight(target: Target, modules: Collection[nn.Module]) -> Tensor | None:
    """The weight of a target, wherever it lies by now; None if it is packed, or on the meta device.

    Args:
        modules: of the model.

    Raises:
        UserError: the weight is no plain parameter of the model any more.
    """
    if target.slice_of is None:
        weight = target.module._parameters.get("weight", _GONE)
        if weight is None or weight.is_meta:
            return None
        if weight is _GONE or target.module not in modules or not _is_plain(weight):
            raise UserError(
                f"keep_zeros: {target.name} was replaced, parametrised or converted meanwhile; call remove() before "
                f"such a change, and keep_zeros() after it"
            )
        return target.weight
    # not target.weight, which stays in the memory of before when the model is moved or converted
    experts, name = target.slice_of.experts, target.slice_of.parameter.rpartition(".")[2]
    weights = experts.module._parameters.get(name)
    if weights is None or weights.is_meta:
        return None
    weight = weights.detach()[target.slice_of.index]
    return weight.T if experts.transposed else weight


def _is_plain(weight: Tensor) -> bool:
    return weight.layout == torch.strided and weight.is_floating_point() and weight.dtype.itemsize > 1


def _fitting(name: str, mask: Tensor, targets: Mapping) -> Tensor:
    if name not in targets:
        raise UserError(f"keep_zeros: the model has no matrix {name}; the masks are of another model")
    rows, cols = targets[name].shape
    expect_type(f"the mask of {name}", mask, Tensor, "give what load_masks() returns", needed=True)
    if mask.is_meta or mask.is_nested or mask.layout != torch.strided:
        raise UserError(
            f"keep_zeros: the mask of {name} must be a dense tensor with numbers, got one "
            f"{'on the meta device' if mask.is_meta else 'of another layout'}; give what load_masks() returns"
        )
    if tuple(mask.shape) != (rows, (cols + 7) // 8) or mask.dtype != torch.uint8:
        raise UserError(
            f"keep_zeros: the mask of {name} must be [{rows}, {(cols + 7) // 8}] uint8, got {list(mask.shape)} "
            f"{mask.dtype}; the masks are of another model"
        )
    return mask
