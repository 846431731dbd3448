"""What the adapters share: exact fractions, the norm of each input column, and the row budgets of F-Wanda."""

from __future__ import annotations

import warnings
from fractions import Fraction

import torch
from torch import Tensor

import fwanda_kernels as fk

from ..budgets import floored_omega
from ..errors import UserError


def exact_fraction(name: str, value: float | str | Fraction) -> Fraction:
    """The decimal that was written: 0.7 is 7/10.

    Raises:
        UserError: not a fraction in [0, 1).
    """
    try:
        fraction = Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        fraction = None
    if fraction is None or not 0 <= fraction < 1:
        raise UserError(f"{name} must be the fraction removed, a decimal in [0, 1), got {value!r}")
    return fraction


def kept(count: int, removed: Fraction) -> int:
    """What is left of `count` weights: count - floor(removed * count)."""
    return count - removed * count // 1


def check_finite(name: str, tensor: Tensor) -> None:
    """Refuse NaN and inf.

    Raises:
        UserError: naming the tensor.
    """
    if not bool(torch.stack(tensor.aminmax()).isfinite().all()):
        raise UserError(f"{name} has NaN or inf values")


def checked_norm(name: str, layer: fk.LayerStatistics) -> Tensor:
    """[C] fp32 norm of each input column, with a warning where no token came by.

    Raises:
        UserError: it is not finite.
    """
    if not layer.n_tokens:
        warnings.warn(f"{name} saw no calibration token: its weights are ranked by magnitude", stacklevel=3)
    check_finite(f"the input of {name}", layer.x2)
    return layer.norm


def check_gradient(name: str, layer: fk.LayerStatistics) -> None:
    """Refuse g2 of a module that saw tokens but no backward pass.

    Raises:
        UserError: saying what to run.
    """
    check_finite(f"the output gradient of {name}", layer.g2)
    if layer.n_tokens and not bool(layer.g2.any()):
        raise UserError(f"{name} has no output gradient: run backward() on the SUM of the losses while collecting")


def row_budgets(name: str, layer: fk.LayerStatistics, total: int, *, k_max: int, power: float) -> Tensor:
    """[R] int64 weights kept in each row: proportional to omega^power, summing to total (the paper, equation 3).

    Raises:
        UserError: no backward pass ran, or the total is out of reach.
    """
    check_gradient(name, layer)
    rows = len(layer.g2)
    if total < rows:
        raise UserError(f"{name} would keep {total} weights in {rows} rows; a row budget keeps at least 1 in each")
    return fk.allocate_row_budgets(floored_omega(layer) ** power, total, k_max=k_max)
