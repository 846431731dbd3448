"""Checks of single settings, and how errors show their values."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Rational, Real

from .errors import UserError, did_you_mean, has_control, show

_LARGEST_EXPONENT = 4
_LARGEST_GROUP = 1024
NUMBER_TEXTS = ("sparsity", "micro_batch", "fisher_samples", "start_token")  # texts that may be given as numbers
_TEXTS = ("calibration", "guard", "eval")
_RANGES = {
    "nsamples": (1, 1_000_000),
    "seqlen": (2, 10_000_000),
    "eval_seqlen": (2, 10_000_000),
    "eval_windows": (1, 1_000_000_000),
    "segment": (1, 1_000_000),
    "seed": (0, 2**63 - 1),
}


def flag(name: str) -> str:
    """The flag of a setting on the command line."""
    return "--" + name.replace("_", "-")


def expect_path(name: str, value) -> None:
    """Refuses what is no path.

    Args:
        name: of the argument.

    Raises:
        UserError: naming the argument.
    """
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise UserError(f"{name} must be a path, got {type(value).__name__}; give the path of a file or a folder")


def expect_flags(**values) -> None:
    """Refuses arguments that are neither True nor False, as arrays, tensors and texts are.

    Args:
        values: by the name of the argument. A bool of numpy will do.

    Raises:
        UserError: naming the first such argument.
    """
    for name, value in values.items():
        if not isinstance(plain(value, bool), bool):
            raise UserError(f"{name} must be True or False, got {show(value)}")


def plain(value, kind: type):
    """A setting as it would come from a file: Path, Fraction, Decimal, numbers of numpy and lists become plain values.

    Args:
        value: any value.
        kind: of the setting, as in check_value().

    Returns:
        str, int, float, bool, or a tuple of texts; a value that is none of these is returned as it is.
    """
    if kind is list:
        if isinstance(value, (list, tuple)):
            return tuple(plain(item, str) for item in value)
        value = plain(value, str)
        return (value,) if isinstance(value, str) else value
    if isinstance(value, os.PathLike):
        path = os.fspath(value)
        return path if isinstance(path, str) else value
    if isinstance(value, (str, bool)):
        return value
    if kind is bool:
        numpy = sys.modules.get("numpy")
        return bool(value) if numpy is not None and isinstance(value, numpy.bool_) else value
    with suppress(OverflowError, ValueError, TypeError):  # too large, or no number at all: check_value() refuses it
        if kind is int:
            return int(value) if isinstance(value, Integral) else value
        if kind is float:
            return float(value) if isinstance(value, (Real, Decimal)) and not isinstance(value, int) else value
    return value


def number_text(value):
    """The exact decimal or fraction of a number, for settings that are texts; other values are returned as they are.

    The float 0.1 becomes "0.1", and so does the number 0.1 of numpy's float32: what Python writes for it.
    """
    if isinstance(value, (bool, str)) or not isinstance(value, (Real, Decimal)):
        return value
    with suppress(TypeError):  # no number at all, as NaT of numpy
        if isinstance(value, Integral):
            return show(int(value))
        if isinstance(value, Rational):
            return f"{show(int(value.numerator))}/{show(int(value.denominator))}"
    return str(value).lower().replace("e+", "e")


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
    if choices and not (isinstance(value, str) and value in choices):  # arrays and tensors compare each number
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        if isinstance(value, bool) and (word := "on" if value else "off") in choices:  # YAML reads on as true
            hint = f' (quote it in YAML: "{word}")'
        raise UserError(f"{flag(name)} must be one of {', '.join(choices)}, got {show(value)}{hint}")
    if kind is str and not isinstance(value, str):
        hint = ' (quote it in YAML: "2:4")' if name == "pattern" else ""
        expected = "a number or text" if name in NUMBER_TEXTS else "text"
        raise UserError(f"{flag(name)} must be {expected}, got {show(value)}{hint}")
    if kind is list and not (isinstance(value, tuple) and all(isinstance(item, str) for item in value)):
        ids = "; token ids are a torch tensor [S, L] of integers" if name in ("calibration", "eval") else ""
        raise UserError(f"{flag(name)} must be a list of texts, got {show(value)}{ids}")
    if any(map(has_control, (value,) if kind is str else value if kind is list else ())):
        raw = ", or write raw text to a .txt file and name that file" if name in _TEXTS else ""
        raise UserError(f"{flag(name)} holds an unprintable character, got {show(value)}; rename it{raw}")
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
            valid = re.fullmatch(r"[-+0-9./]{1,40}(e-?[0-9]{1,3})?", sparsity) and 0 <= Fraction(sparsity) < 1
        except (ValueError, ZeroDivisionError):
            valid = False
        if not valid:
            most = "" if len(sparsity) <= 40 else " and at most 40 characters long"
            raise UserError(f"--sparsity must be in [0, 1), such as 0.5 for 50 %{most}, got {show(sparsity)}")
    if pattern is None:
        return
    match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6})", pattern)
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
