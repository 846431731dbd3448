"""The kernels inside other pruning tools: one module for each host, which imports its host only when imported itself.

    nn_prune        torch.nn.utils.prune
    ao_sparsifier   torch.ao.pruning
    wanda_style     forks of the Wanda reference
    llmcompressor   llm-compressor

A mask is True where a weight is KEPT and n:m means KEEP n of m, here as everywhere in this project; a host that says it
the other way round is converted by kept_of(), at its edge.
"""

from __future__ import annotations

import re
import warnings

import torch
from torch import nn
from torch.nn.utils import parametrize

from ..errors import UserError

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def kept_of(prune_n: int, m: int) -> int:
    """Weights KEPT in a group where a host says PRUNE prune_n of m: 1:4 there is 3:4 here.

    Raises:
        UserError: not 0 <= prune_n <= m and m >= 1.
    """
    if not 0 <= prune_n <= m or m < 1:
        raise UserError(f"a pattern that prunes n of m needs 0 <= n <= m and m >= 1, got {prune_n}:{m}")
    return m - prune_n


def check_version(host: str, version: str, oldest: str, newest: str) -> None:
    """Warn, naming both, when a host's version is outside the tested range; compares major.minor."""
    got, low, high = (_major_minor(v) for v in (version, oldest, newest))
    if not low <= got <= high:
        warnings.warn(f"{host} {version} is not among the versions tested, {oldest} to {newest}", stacklevel=3)


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def check_linear(name: str, module: object, *, pruned: bool = False) -> None:
    """Refuse what has no plain floating [R, C] weight of its own.

    Args:
        name: of the module, for the message.
        module: to be checked.
        pruned: accept a weight under torch.nn.utils.prune, which then is `weight_orig`.

    Raises:
        UserError: the module is not linear, or its weight is quantised, parametrised or of another dtype.
    """
    if not isinstance(module, nn.Linear):
        raise UserError(f"{name} must be an nn.Linear, got {type(module).__name__}")
    if parametrize.is_parametrized(module, "weight"):
        raise UserError(f"{name}.weight is already parametrised; remove_parametrizations() first")
    masked = "weight_orig" in module._parameters and "weight_mask" in module._buffers
    if masked and not pruned:
        raise UserError(f"{name}.weight is under torch.nn.utils.prune; prune.remove() it first")
    weight = module.weight_orig if masked else module.weight
    if type(weight) is not nn.Parameter or not weight.is_floating_point():
        kind = f"{type(weight).__name__} of {weight.dtype}"
        raise UserError(
            f"{name}.weight is quantised or parametrised ({kind}); prune the original, or remove the parametrisation "
            f"first"
        )
    if weight.dtype not in _DTYPES:
        raise UserError(f"{name}.weight is {weight.dtype}; use bf16, fp16 or fp32")
