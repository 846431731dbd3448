"""Retries the Cholesky factor of a Hessian with stronger damping, and warns."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..errors import UserError
from ..notes import warn

DAMPING = 0.01  # fraction of the mean diagonal
_ATTEMPTS = 4


def damped_factor(
    name: str, factorise: Callable[[float], Tensor | None], damping: float = DAMPING, *, failed: bool = False
) -> Tensor:
    """The factor at the weakest damping that gives one: `damping`, and then each time ten times more.

    Args:
        name: of the matrix, for messages.
        factorise: takes a damping and returns the factor, None if there is none.
        damping: the weakest.
        failed: `damping` itself has already failed: start with the next.

    Raises:
        UserError: no damping gives a factor.
    """
    for attempt in range(int(failed), _ATTEMPTS):
        stronger = damping * 10**attempt
        factor = factorise(stronger)
        if factor is None:
            continue
        if attempt:
            warn(f"the Hessian of {name} needed a damping of {stronger:g}, not {damping:g}")
        return factor
    raise UserError(
        f"the Hessian of {name} has no factor, even with a damping of {stronger:g}; use more calibration text"
    )
