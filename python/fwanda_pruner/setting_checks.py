"""Checks of single settings, and how errors show their values."""

from __future__ import annotations

import re
import reprlib
from fractions import Fraction

from .errors import UserError, did_you_mean, has_control

_LARGEST_EXPONENT = 4
_LARGEST_GROUP = 1024
_RANGES = {
    "nsamples": (1, 1_000_000),
    "seqlen": (2, 10_000_000),
    "eval_seqlen": (2, 10_000_000),
    "eval_windows": (1, 1_000_000_000),
    "seed": (0, 2**63 - 1),
}


def flag(name: str) -> str:
    """The flag of a setting on the command line."""
    return "--" + name.replace("_", "-")


def show(value) -> str:
    """A short text of any value that a file can hold, even a number of a million digits."""
    try:
        text = reprlib.repr(value) if not isinstance(value, (int, float)) else str(value)
    except ValueError:
        text = f"a number of {value.bit_length()} bits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_value(name: str, value, *, kind: type, choices: tuple | None) -> None:
    """Checks the type and the range of one setting.

    Args:
        name: of the setting.
        value: None: not set.
        kind: str, int, float, bool, or list for a tuple of texts.
        choices: the values that are allowed; None: all of this kind.

    Raises:
        UserError: the value is not allowed.
    """
    if value is None:
        return
    if choices and value not in choices:
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise UserError(f"{flag(name)} must be one of {', '.join(choices)}, got {show(value)}{hint}")
    if kind is str and not isinstance(value, str):
        hint = ' (quote it in YAML: "2:4")' if name == "pattern" else ""
        raise UserError(f"{flag(name)} must be text, got {show(value)}{hint}")
    if kind is list and not (isinstance(value, tuple) and all(isinstance(item, str) for item in value)):
        raise UserError(f"{flag(name)} must be a list of texts, got {show(value)}")
    if any(map(has_control, (value,) if kind is str else value if kind is list else ())):
        raise UserError(f"{flag(name)} holds an unprintable character, got {show(value)}; rename it")
    if kind is bool and not isinstance(value, bool):
        raise UserError(f"{flag(name)} must be true or false, got {show(value)}")
    if kind is int:
        least, most = _RANGES[name]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise UserError(f"{flag(name)} must be an integer in [{least}, {most}], got {show(value)}")
    if kind is float and not (
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _LARGEST_EXPONENT
    ):
        raise UserError(f"{flag(name)} must be a number in [0, {_LARGEST_EXPONENT}], got {show(value)}")


def check_sparsity(sparsity: str | None, pattern: str | None) -> None:
    """Checks the fraction of weights to remove and the n:m pattern, and that they agree.

    Raises:
        UserError: one is not allowed, or they contradict each other.
    """
    if sparsity is not None:
        try:
            # limits the length, so that the exact fraction stays small
            valid = re.fullmatch(r"[-+\d./]{1,40}(e-?\d{1,3})?", sparsity) and 0 <= Fraction(sparsity) < 1
        except (ValueError, ZeroDivisionError):
            valid = False
        if not valid:
            raise UserError(f"--sparsity must be a decimal in [0, 1), got {show(sparsity)}")
    if pattern is None:
        return
    match = re.fullmatch(r"(\d{1,6}):(\d{1,6})", pattern)
    if not match or not 1 <= int(match[1]) <= int(match[2]) <= _LARGEST_GROUP:
        raise UserError(
            f"--pattern must be n:m, keep n of every m, with 1 <= n <= m <= {_LARGEST_GROUP}, e.g. 2:4, "
            f"got {show(pattern)}"
        )
    n, m = int(match[1]), int(match[2])
    if sparsity is not None and Fraction(sparsity) != 1 - Fraction(n, m):
        raise UserError(
            f"--sparsity {sparsity} contradicts --pattern {pattern}, which keeps {n} of {m} and removes "
            f"{float(1 - Fraction(n, m)):g}; give only one of them"
        )
