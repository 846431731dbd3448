"""The ops under autograd: torch's own contract for in-place changes, and an error instead of a missing gradient.

An op that changes an argument bumps that tensor's version, so that autograd notices a change of what it saved. No op
has a derivative. In grad mode it is an error to change a tensor that requires grad, and to call backward() through a
result. So is a change of a tensor with a tangent of forward-mode AD, and a floating result from one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._memory import Use, expect_unnegated, resolved, tensors_of, use_of

_AFTER = torch._C._after_ADInplaceOrView_keyset
is_below = partial(torch._C._dispatch_tls_is_dispatch_key_excluded, torch._C.DispatchKey.ADInplaceOrView)


def register(library: torch.library.Library, overload: torch._ops.OpOverload) -> None:
    """Give an op that was just declared its kernels for autograd."""
    schema = overload._schema
    name = _name(schema)
    if _changed_arguments(schema):
        library.impl(name, _changing(overload), "ADInplaceOrView", with_keyset=True)
        library.impl(name, _resolving(overload), "Negative")
    if _changed_arguments(schema) or any(str(result.type) != "Tensor" for result in schema.returns):
        library.impl(name, _unbatched(name), "FuncTorchBatched")
    if schema.returns:
        library.impl(name, _without_derivative(name, overload), "Autograd")


def below(kernel: Callable) -> Callable:
    """The kernel with autograd switched off for the ops that it calls."""

    def switched_off(*args):
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return kernel(*args)

    return switched_off


def _changing(overload: torch._ops.OpOverload) -> Callable:
    count_changes = counting_changes(overload._schema)

    def kernel(keyset, *args):
        count_changes(args)
        return overload.redispatch(keyset & _AFTER, *args)

    return kernel


def _resolving(overload: torch._ops.OpOverload) -> Callable:
    """The kernel for calls with a negated view; torch's own fallback does not serve ops that change an argument."""
    name, changed = _name(overload._schema), _changed_arguments(overload._schema)

    def kernel(*args):
        for i, argument in changed:
            expect_unnegated(name, argument, tensors_of(args[i]))
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return overload(*[resolved(argument) for argument in args])

    return kernel


def counting_changes(schema: torch.FunctionSchema) -> Callable[[tuple], None]:
    """A function of an op's arguments: it bumps the versions of those that the op changes, or refuses the change."""
    name, changed = _name(schema), _changed_arguments(schema)

    def count_changes(args: tuple) -> None:
        tensors = []
        for i, argument in changed:
            given = tensors_of(args[i])
            _refuse_change(name, argument, given)
            tensors += given
        if tensors:
            torch.autograd.graph.increment_version(tensors)

    return count_changes


def _name(schema: torch.FunctionSchema) -> str:
    return schema.name.rpartition("::")[2]


def _changed_arguments(schema: torch.FunctionSchema) -> list[tuple[int, str]]:
    return [(i, argument.name) for i, argument in enumerate(schema.arguments) if use_of(argument) is Use.CHANGED]


def _refuse_change(name: str, argument: str, tensors: list[Tensor]) -> None:
    """Raise RuntimeError where torch's own in-place ops do, and where they would record a derivative."""
    if not torch.is_inference_mode_enabled() and any([tensor.is_inference() for tensor in tensors]):
        raise RuntimeError(
            f"{name}: {argument} was made in inference mode and cannot be changed outside it; pass a clone of it"
        )
    if forward_ad._current_level >= 0:
        _refuse_tangent(name, tensors)
    if torch.is_grad_enabled() and any([t.requires_grad or t._is_view() and t._base.requires_grad for t in tensors]):
        raise RuntimeError(
            f"{name}: {argument} requires grad, or is a view of a tensor that does, and this op has no derivative; "
            f"call it under torch.no_grad() or pass {argument}.detach()"
        )


def _without_derivative(name: str, overload: torch._ops.OpOverload) -> Callable:
    def kernel(*args):
        given = [tensor for argument in args for tensor in tensors_of(argument)]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
            if torch._C._are_functorch_transforms_active():
                raise RuntimeError(f"{name} has no derivative for transforms of torch.func; pass detached tensors")
            return _NoDerivative.apply(name, overload, *args)
        with torch._C._AutoDispatchBelowAutograd():
            result = overload(*args)
        if any(tensor.is_floating_point() for tensor in tensors_of(result)):  # a mask has no derivative to lose
            _refuse_tangent(name, given)
        return result

    return kernel


def _unbatched(name: str) -> Callable:
    """The kernel under torch.func.vmap of an op that torch's own fallback, a loop over the batch, does not serve."""

    def kernel(*_):
        raise RuntimeError(f"{name} does not work under torch.func.vmap; call it for each entry of the batch")

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
