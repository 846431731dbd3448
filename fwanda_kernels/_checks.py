"""Checks of shapes, dtypes, devices and host values that every op makes before anything is touched.

Each raises ValueError with one line: op, argument, expected, got.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FP32, INT32, INT64, BOOL = (torch.float32,), (torch.int32,), (torch.int64,), (torch.bool,)


def describe(shape: Sequence, dtypes: tuple[torch.dtype, ...], device) -> str:
    names = "|".join(str(d).removeprefix("torch.") for d in dtypes)
    return f"[{', '.join(map(str, shape))}] {names} on {device}"


def expect(op: str, name: str, tensor: Tensor, shape: Sequence[int], dtypes: tuple[torch.dtype, ...], like: Tensor):
    """Raise one line if the tensor has another shape, dtype or device than expected."""
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype not in dtypes or tensor.device != like.device:
        raise ValueError(
            f"{op}: {name} must be {describe(shape, dtypes, like.device)}, "
            f"got {describe(tensor.shape, (tensor.dtype,), tensor.device)}"
        )


def expect_weight(op: str, weight: Tensor, name: str = "weight") -> None:
    if weight.dim() != 2 or weight.dtype not in WEIGHT_DTYPES:
        raise ValueError(
            f"{op}: {name} must be {describe(('R', 'C'), WEIGHT_DTYPES, 'any device')}, "
            f"got {describe(weight.shape, (weight.dtype,), weight.device)}"
        )


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
        raise ValueError(
            f"{op}: {name} must be {describe(('...', 'C'), WEIGHT_DTYPES, 'any device')}, "
            f"got {describe(x.shape, (x.dtype,), x.device)}"
        )
    if token_mask is not None:
        expect(op, "token_mask", token_mask, x.shape[:-1], BOOL, x)


def expect_pattern(op: str, n: int, m: int) -> None:
    if not (m >= 1 and 0 <= n <= m):
        raise ValueError(f"{op}: pattern n:m keeps n of m, 0 <= n <= m and m >= 1, got {n}:{m}")


def expect_hessian(op: str, hessian: Tensor) -> None:
    if hessian.dim() != 2:
        got = describe(hessian.shape, (hessian.dtype,), hessian.device)
        raise ValueError(f"{op}: hessian must be [C, C] float32, got {got}")
    expect(op, "hessian", hessian, (hessian.shape[0], hessian.shape[0]), FP32, hessian)


def expect_sparsity(op: str, sparsity: float | Fraction | str) -> None:
    if torch.compiler.is_compiling():  # the tracer of torch 2.10 cannot follow fractions; the op itself reads it again
        return
    try:
        valid = 0 <= Fraction(str(sparsity)) <= 1
    except (ValueError, ZeroDivisionError):
        valid = False
    if not valid:
        raise ValueError(f"{op}: sparsity must be in [0, 1], got {sparsity}")
