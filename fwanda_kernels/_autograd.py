"""The ops under autograd: torch's own contract for in-place changes, and an error instead of a missing gradient.

An op that changes an argument bumps that tensor's version, so that autograd notices a change of what it saved. No op
has a derivative. In grad mode it is an error to change a tensor that requires grad, and to call backward() through a
result. So is a change of a tensor with a tangent of forward-mode AD, and a floating result from one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

_AFTER = torch._C._after_ADInplaceOrView_keyset
below_autograd = torch._C._AutoDispatchBelowADInplaceOrView


def register(library: torch.library.Library, overload: torch._ops.OpOverload) -> None:
    """Give an op that was just declared its kernels for autograd."""
    schema = overload._schema
    name = schema.name.rpartition("::")[2]
    changed = [
        (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    ]
    if changed:
        library.impl(name, _changing(name, overload, changed), "ADInplaceOrView", with_keyset=True)
    if schema.returns:
        library.impl(name, _without_derivative(name, overload), "Autograd")


def _changing(name: str, overload: torch._ops.OpOverload, changed: list[tuple[int, str]]) -> Callable:
    def kernel(keyset, *args):
        for i, argument in changed:
            tensors = _tensors(args[i])
            for tensor in tensors:
                _refuse_change(name, argument, tensor)
            if tensors:
                torch.autograd.graph.increment_version(tensors)
        with below_autograd():
            return overload.redispatch(keyset & _AFTER, *args)

    return kernel


def _refuse_change(name: str, argument: str, tensor: Tensor) -> None:
    """Raise RuntimeError where torch's own in-place ops do, and where they would record a derivative."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{name}: {argument} was made in inference mode and cannot be changed outside it; pass a clone of it"
        )
    if forward_ad._current_level >= 0:
        _refuse_tangent(name, [tensor])
    if not torch.is_grad_enabled():
        return
    if tensor.requires_grad or tensor._is_view() and tensor._base.requires_grad:
        raise RuntimeError(
            f"{name}: {argument} requires grad, or is a view of a tensor that does, and this op has no derivative; "
            f"call it under torch.no_grad() or pass {argument}.detach()"
        )


def _without_derivative(name: str, overload: torch._ops.OpOverload) -> Callable:
    def kernel(*args):
        given = [tensor for argument in args for tensor in _tensors(argument)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
            return _NoDerivative.apply(name, overload, *args)
        with torch._C._AutoDispatchBelowAutograd():
            result = overload(*args)
        if any(tensor.is_floating_point() for tensor in _tensors(result)):  # a mask has no derivative to lose
            _refuse_tangent(name, given)
        return result

    return kernel


def _refuse_tangent(name: str, tensors: list[Tensor]) -> None:
    """Raise RuntimeError where forward-mode AD would lose a derivative in silence."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(f"{name} has no derivative, in forward mode neither; call it on the primal tensors")


class _NoDerivative(torch.autograd.Function):
    """Calls an op. backward() through a result raises RuntimeError; results of integers and bools have none."""

    @staticmethod
    def forward(ctx, name: str, overload: torch._ops.OpOverload, *args):
        ctx.name = name
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(f"{ctx.name} has no derivative; call it under torch.no_grad() or pass detached tensors")


def _tensors(argument) -> list[Tensor]:
    if isinstance(argument, Tensor):
        return [argument]
    return [t for t in argument if isinstance(t, Tensor)] if isinstance(argument, (list, tuple)) else []
