"""Checks of arguments, and the `bad` flag: the one home of its codes and of what is done with them.

Shapes, dtypes, devices and host values are checked before anything is touched; each check raises ValueError with one
line: op, argument, expected, got. Values on the device are another matter, as reading them waits for the device. With
`bad`, a selection ORs the codes below into it and goes on. Without `bad`, it raises before it writes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP32, INT32, INT64 = (torch.float32,), (torch.int32,), (torch.int64,)
BOOL, UINT8 = (torch.bool,), (torch.uint8,)

BAD_WEIGHT, BAD_SCALE, BAD_KEEP = 1, 2, 4  # csrc/bad.h has them for C++ and CUDA
_BAD_TEXT = {
    BAD_WEIGHT: "weight has NaN or inf values",
    BAD_SCALE: "scale must be finite and >= 0",
    BAD_KEEP: "keep must be in [0, C]",
}


# shapes, dtypes, devices and host values


def describe(shape: Sequence, dtypes: tuple[torch.dtype, ...], device) -> str:
    names = "|".join(str(d).removeprefix("torch.") for d in dtypes)
    return f"[{', '.join(map(str, shape))}] {names} on {device}"


def describe_tensor(tensor: Tensor) -> str:
    return describe(tensor.shape, (tensor.dtype,), tensor.device)


def expect(op: str, name: str, tensor: Tensor, shape: Sequence[int], dtypes: tuple[torch.dtype, ...], like: Tensor):
    """Raise unless the tensor has this shape, one of these dtypes and the device of `like`."""
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype not in dtypes or tensor.device != like.device:
        expected = describe(shape, dtypes, like.device)
        raise ValueError(f"{op}: {name} must be {expected}, got {describe_tensor(tensor)}")


def expect_weight(op: str, weight: Tensor, name: str = "weight") -> None:
    if weight.dim() != 2 or weight.dtype not in WEIGHT_DTYPES:
        expected = describe(("R", "C"), WEIGHT_DTYPES, "any device")
        raise ValueError(f"{op}: {name} must be {expected}, got {describe_tensor(weight)}")


def expect_bad(op: str, bad: Tensor | None, like: Tensor, size: int = 1) -> None:
    if bad is not None:
        expect(op, "bad", bad, [size], INT32, like)


def expect_lists(op: str, **lists: Sequence) -> None:
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) != 1 or not min(lengths.values()):
        got = ", ".join(f"{length} {name}" for name, length in lengths.items())
        raise ValueError(f"{op}: {', '.join(lists)} must be non-empty lists of one length, got {got}")


def expect_device(op: str, name: str, tensor: Tensor, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{op}: {name} must be on {like.device} like the first, got {tensor.device}")


def expect_tokens(op: str, x: Tensor, token_mask: Tensor | None, name: str = "x") -> None:
    if x.dim() < 2 or x.dtype not in WEIGHT_DTYPES:
        expected = describe(("...", "C"), WEIGHT_DTYPES, "any device")
        raise ValueError(f"{op}: {name} must be {expected}, got {describe_tensor(x)}")
    if token_mask is not None:
        expect(op, "token_mask", token_mask, x.shape[:-1], BOOL, x)


def expect_pattern(op: str, n: int, m: int) -> None:
    if not (m >= 1 and 0 <= n <= m):
        raise ValueError(f"{op}: pattern n:m keeps n of m, 0 <= n <= m and m >= 1, got {n}:{m}")


def expect_hessian(op: str, hessian: Tensor) -> None:
    if hessian.dim() != 2:
        raise ValueError(f"{op}: hessian must be [C, C] float32, got {describe_tensor(hessian)}")
    expect(op, "hessian", hessian, (hessian.shape[0], hessian.shape[0]), FP32, hessian)


def expect_one(op: str, **arguments) -> str:
    """Raise unless exactly one of the arguments is given (not None); returns its name."""
    given = [name for name, value in arguments.items() if value is not None]
    if len(given) != 1:
        *others, last = arguments
        names = f"{', '.join(others)} and {last}"
        raise ValueError(f"{op}: exactly one of {names} must be given, got {given or 'none'}")
    return given[0]


def expect_sparsity(op: str, sparsity: float | Fraction | str) -> None:
    if torch.compiler.is_compiling():  # torch 2.10 cannot trace fractions; the op itself reads the sparsity again
        return
    try:
        valid = 0 <= Fraction(str(sparsity)) <= 1
    except (ValueError, ZeroDivisionError):
        valid = False
    if not valid:
        raise ValueError(f"{op}: sparsity must be in [0, 1], got {sparsity}")


# values on the device


def bad_message(op: str, code: int) -> str:
    """Put a `bad` code into words: "<op>: weight has NaN or inf values".

    Args:
        op: how the line begins: the op, or the name of the matrix.
        code: nonzero, as the op ORed it into `bad`.
    """
    return f"{op}: " + ", ".join(text for bit, text in _BAD_TEXT.items() if code & bit)


def new_flag(like: Tensor, size: int = 1) -> Tensor:
    """[size] int32 zeros on the device of `like`, to be used as `bad`."""
    return torch.zeros(size, dtype=torch.int32, device=like.device)


def raise_if_bad(op: str, code: int | Tensor) -> None:
    """Raise ValueError if a code is not 0; for a tensor this waits for the device."""
    if code := int(code):
        raise ValueError(bad_message(op, code))


def report_bad(op: str, code: int | Tensor, bad: Tensor | None) -> None:
    """OR a code into `bad`, or raise without one."""
    if bad is None:
        raise_if_bad(op, code)
    else:
        bad.bitwise_or_(code)


def bad_weight(weight: Tensor) -> Tensor:
    """[] bool, True if a value is NaN or inf."""
    return ~weight.isfinite().all()


def bad_scale(scale: Tensor) -> Tensor:
    """[] bool, True if a value is NaN, inf or negative."""
    return ~(scale.isfinite() & (scale >= 0)).all()


def bad_keep(keep: Tensor, cols: int) -> Tensor:
    """[] bool, True if a count is not in [0, C]."""
    return ((keep < 0) | (keep > cols)).any()


def bad_code(weight: Tensor, scale: Tensor, keep: Tensor | None = None) -> Tensor:
    """[] int32 code of the values of a selection."""
    code = bad_weight(weight).to(torch.int32) * BAD_WEIGHT + bad_scale(scale).to(torch.int32) * BAD_SCALE
    return code if keep is None else code + bad_keep(keep, weight.shape[1]).to(torch.int32) * BAD_KEEP
