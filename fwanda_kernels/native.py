"""Backend of compiled C++ and CUDA: the libraries that `python -m fwanda_kernels --build` makes from csrc/.

Nothing is compiled here. A library is loaded on the first call that could use it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._build import find_library
from .reference import bad_message

_loaded: set[str] = set()


def load(device: str) -> dict[str, Callable]:
    """The ops that the library for a device ("cpu" or "cuda") serves: {name: function}.

    Raises:
        ImportError: the library was not built or cannot be loaded; the message says why.
    """
    path = find_library(device)
    if path is None:
        raise ImportError(f"not built; run python -m fwanda_kernels --build {device}")
    if device not in _loaded:
        try:
            torch.ops.load_library(path)
        except OSError as error:
            raise ImportError(f"{path.name} cannot be loaded: {error}") from error
        _loaded.add(device)
    return _OPS[device]


def _report(op: str, code: int, bad: Tensor | None) -> None:
    if bad is not None:
        bad.bitwise_or_(code)
    elif code:
        raise ValueError(bad_message(op, code))


def _cpu_row_topk_mask(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> Tensor:
    mask, code = torch.ops.fwanda_C.row_topk_mask(weight, scale, keep)
    _report("row_topk_mask", code, bad)
    return mask


def _cpu_row_topk_prune_(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> None:
    _report("row_topk_prune_", torch.ops.fwanda_C.row_topk_prune_(weight, scale, keep), bad)


def _cpu_foreach_row_topk_prune_(weights, scales, keeps, bad: Tensor | None) -> None:
    for i, (weight, scale, keep) in enumerate(zip(weights, scales, keeps, strict=True)):
        _cpu_row_topk_prune_(weight, scale, keep, None if bad is None else bad[i : i + 1])


_OPS: dict[str, dict[str, Callable]] = {
    "cpu": {
        "row_topk_mask": _cpu_row_topk_mask,
        "row_topk_prune_": _cpu_row_topk_prune_,
        "foreach_row_topk_prune_": _cpu_foreach_row_topk_prune_,
    },
    "cuda": {},
}
