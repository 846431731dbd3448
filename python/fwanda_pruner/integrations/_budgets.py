"""Helpers of the adapters: exact fractions, checks for NaN and inf, and the row budgets of F-Wanda."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from math import isfinite

import torch
from torch import Tensor

import fwanda_kernels as fk

from ..allocate.budgets import floored_omega
from ..errors import UserError, show
from ..notes import warn
from . import number_of

_LONG_EXPONENT = re.compile(r"e[-+]?[\d_]{4}", re.IGNORECASE)  # of a decimal, with four digits or more
_NO_GRADIENT = "has no output gradient: run backward() on the SUM of the losses while collecting"


def exact_fraction(name: str, value: float | str | Fraction) -> Fraction:
    """Read a fraction removed exactly as it is written: 0.7 is 7/10, not the nearest binary float.

    Raises:
        UserError: value is not a decimal in [0, 1).
    """
    try:
        text = str(value)  # a Fraction of 1e-6000000 has millions of digits
        fraction = None if _LONG_EXPONENT.search(text) else Fraction(text)
    except (ValueError, ZeroDivisionError):
        fraction = None
    if fraction is None or not 0 <= fraction < 1:
        raise UserError(f"{name} must be the fraction removed, a decimal in [0, 1), got {show(value)}")
    return fraction


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse NaN and inf.

    Raises:
        UserError: the tensor has one; the message names the tensor.
    """
    if not bool(torch.stack(tensor.aminmax()).isfinite().all()):
        raise UserError(f"{name} has NaN or inf values")


def checked_mask(select: Callable[..., Tensor], name: str, weight: Tensor, scale: Tensor, *rest, **settings) -> Tensor:
    """Call a selection op and refuse NaN and inf. The op itself reports them, so the weight is read only once.

    Args:
        select: op that returns a mask and takes `bad=`.
        name: of the layer, for messages.
        weight, scale, rest, settings: arguments of the op.

    Returns:
        [R, C] bool, True = kept.

    Raises:
        UserError: the weight or the scale is not finite; the message says which.
    """
    bad = torch.zeros(1, dtype=torch.int32, device=weight.device)
    mask = select(weight, scale, *rest, bad=bad, **settings)
    refuse_bad(name, int(bad))
    return mask


def refuse_bad(name: str, code: int) -> None:
    """Turn the `bad` code of a selection op into an error.

    Raises:
        UserError: code is not 0. The message says in words what the code means.
    """
    if code:
        hint = "; scale is the norm of each input column" if code & 2 else ""
        raise UserError(fk.bad_message(name, code) + hint)


def measured_norm(name: str, layer: fk.LayerStatistics) -> Tensor:
    """[C] fp32 norm of each input column: ones, with a warning, if the layer saw no token."""
    if not layer.n_tokens:
        warn(f"{name} saw no calibration token: its weights are ranked by magnitude")
    return layer.norm


def gradients_seen(names: Sequence[str], layers: Sequence[fk.LayerStatistics]) -> list[bool]:
    """For each layer, whether g2 has a value other than 0, as it has after a backward pass.

    Raises:
        UserError: a g2 was not measured or is not finite; the message names the module.
    """
    for name, layer in zip(names, layers, strict=True):
        if layer.g2 is None:
            raise UserError(f"{name} {_NO_GRADIENT}")
    ranges = torch.stack([torch.stack(layer.g2.aminmax()) for layer in layers]).tolist()
    for name, ends in zip(names, ranges, strict=True):
        if not all(map(isfinite, ends)):
            raise UserError(f"the output gradient of {name} has NaN or inf values")
    return [any(ends) for ends in ranges]


def check_gradient(name: str, layer: fk.LayerStatistics) -> None:
    """Refuse the statistics of a module that saw tokens but no backward pass.

    Raises:
        UserError: g2 is missing, is 0 everywhere or is not finite; the message says what to run.
    """
    (seen,) = gradients_seen([name], [layer])
    if layer.n_tokens and not seen:
        raise UserError(f"{name} {_NO_GRADIENT}")


def row_budgets(name: str, layer: fk.LayerStatistics, total: int, *, k_max: int, power: float) -> Tensor:
    """Number of weights kept in each row, [R] int64: proportional to omega^power, with the sum `total`.

    Source: the F-Wanda paper, equation 3.

    Raises:
        UserError: power is no finite number or so large that omega^power overflows, no backward pass ran, or the total
            is less than one weight a row.
    """
    power = number_of("power", power)
    check_gradient(name, layer)
    rows = len(layer.g2)
    if total < rows:
        raise UserError(f"{name} would keep {total} weights in {rows} rows, but each row keeps at least 1; remove less")
    signal = floored_omega(layer) ** power
    if not bool(signal.isfinite().all()):
        raise UserError(f"power must be small enough for omega^power to be finite, got {power:g}; the usual one is 0.5")
    return fk.allocate_row_budgets(signal, total, k_max=k_max)
