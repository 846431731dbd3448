"""Adapters that bring the kernels to other pruning tools, here called hosts. Each host has one module:

    nn_prune        torch.nn.utils.prune
    ao_sparsifier   torch.ao.pruning
    wanda_style     forks of the Wanda reference
    llmcompressor   llm-compressor

A module imports its host; importing this package imports none. In this project a mask is True where a weight is KEPT,
and n:m means KEEP n of m. Some hosts say PRUNE n of m: their adapter converts at once with kept_of().
"""

from __future__ import annotations

import contextlib
import re
import warnings
from math import isfinite
from numbers import Integral, Real

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..errors import UserError, show

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def count_of(name: str, value: int) -> int:
    """Read an integer of Python or numpy.

    Raises:
        UserError: value is no integer; a bool, a float such as 4.0 and a tensor are none.
    """
    with contextlib.suppress(TypeError):  # no number at all, as NaT of numpy
        if isinstance(value, Integral) and not isinstance(value, bool):
            return int(value)
    raise UserError(f"{name} must be an integer, got {show(value)} ({type(value).__name__})")


def number_of(name: str, value: float) -> float:
    """Read a finite number of Python or numpy.

    Raises:
        UserError: value is none; a bool, a string, a tensor, NaN and inf are none.
    """
    with contextlib.suppress(TypeError, OverflowError):  # no number at all, as NaT of numpy; too large
        if isinstance(value, Real) and not isinstance(value, bool) and isfinite(value):
            return float(value)
    raise UserError(f"{name} must be a finite number, got {show(value)} ({type(value).__name__})")


def kept_of(prune_n: int, m: int) -> int:
    """Convert PRUNE prune_n of m into the number of weights KEPT in a group: 1:4 in the host is 3:4 here.

    Raises:
        UserError: unless 0 <= prune_n <= m and m >= 1.
    """
    prune_n, m = count_of("n of a pattern", prune_n), count_of("m of a pattern", m)
    if not 0 <= prune_n <= m or m < 1:
        raise UserError(f"a pattern that prunes n of m needs 0 <= n <= m and m >= 1, got {prune_n}:{m}")
    return m - prune_n


def check_version(host: str, version: str, oldest: str, newest: str) -> None:
    """Warn if a host's version, by its major and minor numbers, is outside the tested range oldest to newest."""
    got, low, high = (_major_minor(v) for v in (version, oldest, newest))
    if not low <= got <= high:
        warnings.warn(f"{host} {version} is not among the versions tested, {oldest} to {newest}", stacklevel=3)


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def check_linear(name: str, module: object, *, pruned: bool = False) -> None:
    """Refuse a module unless it is linear and owns a plain weight [R, C] in bf16, fp16 or fp32.

    Args:
        name: of the module, for messages.
        module: the module.
        pruned: accept a module that torch.nn.utils.prune has pruned; its weight is `weight_orig`.

    Raises:
        UserError: the module is not linear, or its weight is quantised, parametrised or of another dtype.
    """
    if not isinstance(module, nn.Linear):
        raise UserError(f"{name} must be an nn.Linear, got {type(module).__name__}")
    if parametrize.is_parametrized(module, "weight"):
        raise UserError(f"{name}.weight is already parametrised; call remove_parametrizations() first")
    masked = "weight_orig" in module._parameters and "weight_mask" in module._buffers
    if masked and not pruned:
        raise UserError(f"{name}.weight is under torch.nn.utils.prune; call prune.remove() first")
    weight = module.weight_orig if masked else module.weight
    if not isinstance(weight, torch.Tensor):
        raise UserError(f"{name}.weight must be a tensor, got {type(weight).__name__}")
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        kind = f"{type(weight).__name__} of {weight.dtype}"
        raise UserError(
            f"{name}.weight is quantised or parametrised ({kind}); prune the original, or remove the parametrisation "
            f"first"
        )
    if weight.dtype not in _DTYPES:
        raise UserError(f"{name}.weight is {weight.dtype}; use bf16, fp16 or fp32")
