"""What the arguments of a call may share of memory.

An expanded weight, or one that overlaps itself or another of its list, has no exact counts. What a call changes must
overlap nothing else that the call reads or changes. Negated views, such as z.conj().imag, hold the negatives of their
values: they are not changed, and read as their values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor

from ._checks import describe_tensor


class Use(Enum):
    """What a call does with an argument: it changes it, keeps an exact number of its entries, or only reads it."""

    CHANGED, WEIGHT, READ = range(3)


def use_of(argument: torch.Argument) -> Use:
    if argument.alias_info is not None and argument.alias_info.is_write:
        return Use.CHANGED
    return Use.WEIGHT if argument.name in ("weight", "weights") else Use.READ


def tensors_of(argument) -> list[Tensor]:
    """The tensors of an argument: a tensor, a list, or anything else."""
    if isinstance(argument, Tensor):
        return [argument]
    return [t for t in argument if isinstance(t, Tensor)] if isinstance(argument, (list, tuple)) else []


def checking_memory(schema: torch.FunctionSchema) -> Callable[[tuple], tuple]:
    """A function of an op's arguments: it raises ValueError, or returns them as kernels may take them."""
    op = schema.name.rpartition("::")[2]
    arguments = [(i, a.name, use_of(a)) for i, a in enumerate(schema.arguments) if "Tensor" in str(a.type)]
    apart = [i for i, _, use in arguments if use is not Use.READ]
    read = [i for i, _, use in arguments if use is Use.READ]

    def check(args: tuple) -> tuple:
        try:
            if _surely_apart(args, apart, read):
                return args
        except NotImplementedError as error:  # tensors that transforms wrap have no memory of their own
            raise RuntimeError(f"{op} does not work under transforms of torch.func; call it outside them") from error
        _expect_apart(op, [(name, tensors_of(args[i]), use) for i, name, use in arguments])
        return tuple(resolved(arg) for arg in args)

    return check


def _surely_apart(args: tuple, apart: list[int], read: list[int]) -> bool:
    """Whether a quick look tells that nothing is to be refused or resolved. Kernels copy what is not contiguous."""
    places = []
    for i in apart:
        arg = args[i]
        if type(arg) is list:
            for tensor in arg:
                if not tensor.is_contiguous() or tensor.is_neg():
                    return False
            places += [tensor.untyped_storage().data_ptr() for tensor in arg]
        elif arg is not None:
            if not arg.is_contiguous() or arg.is_neg():
                return False
            places.append(arg.untyped_storage().data_ptr())
    distinct = set(places)
    if len(distinct) != len(places):
        return False
    for i in read:
        arg = args[i]
        if type(arg) is list:
            if any(tensor.is_neg() or tensor.untyped_storage().data_ptr() in distinct for tensor in arg):
                return False
        elif arg is not None and (arg.is_neg() or arg.untyped_storage().data_ptr() in distinct):
            return False
    return True


def resolved(argument):
    """An argument with copies in the place of negated views."""
    if isinstance(argument, (list, tuple)):
        return [resolved(entry) for entry in argument]
    return argument.resolve_neg() if isinstance(argument, Tensor) else argument


def expect_unnegated(op: str, name: str, tensors: Sequence[Tensor]) -> None:
    """Raise if a tensor that the op changes is a negated view."""
    if any(tensor.is_neg() for tensor in tensors):
        raise ValueError(
            f"{op}: {name} must not be a negated view, such as z.conj().imag, as the call changes it; pass "
            f"tensor.resolve_neg()"
        )


def _expect_apart(op: str, arguments: Sequence[tuple[str, list[Tensor], Use]]) -> None:
    """Raise for what the top of this file says; `arguments` are name, tensors and use of each."""
    for name, tensors, use in arguments:
        if use is Use.CHANGED:
            expect_unnegated(op, name, tensors)
        if use is not Use.READ:
            _expect_own_entries(op, name, tensors)
    seen: dict[int, list[tuple[str, Tensor, Use]]] = {}  # by storage
    for name, tensors, use in arguments:
        for tensor in tensors:
            same = seen.setdefault(tensor.untyped_storage().data_ptr(), [])
            for other, second, other_use in same:
                matters = Use.CHANGED in (use, other_use) or (use is Use.WEIGHT and name == other)
                if matters and _overlap(tensor, second):
                    _refuse_overlap(op, *((other, name) if other_use is Use.CHANGED else (name, other)), tensor)
            same.append((name, tensor, use))


def _expect_own_entries(op: str, name: str, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if _overlaps_itself(tensor):
            raise ValueError(
                f"{op}: the entries of {name} must not overlap in memory, got {describe_tensor(tensor)} with strides "
                f"{list(tensor.stride())}; pass a contiguous copy"
            )


def _refuse_overlap(op: str, changed: str, other: str, tensor: Tensor) -> None:
    if changed == other:
        raise ValueError(
            f"{op}: {changed} must not overlap each other in memory, got one {describe_tensor(tensor)} twice"
        )
    raise ValueError(f"{op}: {changed} is changed and must not overlap {other} in memory; pass a copy of {other}")


def _overlaps_itself(tensor: Tensor) -> bool:
    spans = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    if not tensor.numel() or not spans:
        return False
    if len(spans) == 1 or 0 in (spans[0][1], spans[1][1]):
        return 0 in [stride for _, stride in spans]
    (rows, stride_r), (cols, stride_c) = spans
    common = math.gcd(stride_r, stride_c)  # the nearest two entries that meet are so many rows and columns apart
    return stride_c // common < rows and stride_r // common < cols


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage share a byte."""
    if not a.numel() or not b.numel():
        return False
    first, second = sorted((a, b), key=Tensor.data_ptr)
    gap = second.data_ptr() - first.data_ptr()
    if gap >= _span(first):
        return False
    taken = torch.zeros(max(_span(first), gap + _span(second)), dtype=torch.bool, device="cpu")
    _bytes_of(first, taken).fill_(True)
    return bool(_bytes_of(second, taken[gap:]).any())


def _span(tensor: Tensor) -> int:
    """Bytes from the first entry to the end of the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _bytes_of(tensor: Tensor, memory: Tensor) -> Tensor:
    """View of `memory` [span] at the bytes of a tensor; the first entry stands for the first byte of the tensor."""
    size = tensor.element_size()
    return memory.as_strided((*tensor.shape, size), (*[stride * size for stride in tensor.stride()], 1))
