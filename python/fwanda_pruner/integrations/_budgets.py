"""What the adapters share: exact fractions, the norm of each input column, and the row budgets of F-Wanda."""

from __future__ import annotations

import warnings
from fractions import Fraction

import torch
from torch import Tensor

import fwanda_kernels as fk

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


def norms(name: str, x2: Tensor, n_tokens: int) -> Tensor:
    """[C] fp32 norm of each input column; ones and a warning where no token came by, so that the magnitude decides."""
    if not n_tokens:
        warnings.warn(f"{name} saw no calibration token: its weights are ranked by magnitude", stacklevel=3)
        return torch.ones_like(x2)
    check_finite(f"the input of {name}", x2)
    return x2.sqrt()


def check_gradient(name: str, g2: Tensor, n_tokens: int) -> None:
    """Refuse g2 of a module that saw tokens but no backward pass.

    Raises:
        UserError: saying what to run.
    """
    check_finite(f"the output gradient of {name}", g2)
    if n_tokens and not bool(g2.any()):
        raise UserError(f"{name} has no output gradient: run backward() on the SUM of the losses while collecting")


def row_budgets(name: str, g2: Tensor, n_tokens: int, total: int, *, k_max: int, power: float) -> Tensor:
    """[R] int64 weights kept in each row: proportional to omega^power, summing to total (the paper, equation 3).

    Raises:
        UserError: no backward pass ran, or the total is out of reach.
    """
    from ..budgets import OMEGA_FLOOR

    check_gradient(name, g2, n_tokens)
    if total < len(g2):
        raise UserError(f"{name} would keep {total} weights in {len(g2)} rows; a row budget keeps at least 1 in each")
    omega = g2.double() / max(n_tokens, 1)
    return fk.allocate_row_budgets(omega.clamp(min=OMEGA_FLOOR) ** power, total, k_max=k_max)
