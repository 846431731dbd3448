"""Backend of compiled C++ and CUDA: the libraries that `python -m fwanda_kernels --build` makes from csrc/.

Nothing is compiled here. A library is loaded on the first call that could use it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ._build import find_library
from .reference import bad_message, check_selection

_CUDA_COLUMNS = {torch.bfloat16: 65535, torch.float16: 65535, torch.float32: 57344}

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


def _cuda_serves(weights: list[Tensor]) -> bool:
    """The CUDA kernels need the bulk copies of compute capability 9.0, one dtype and rows of unit column stride."""
    return (
        torch.cuda.get_device_capability(weights[0].device) >= (9, 0)
        and len({w.dtype for w in weights}) == 1
        and all(_cuda_layout(w) for w in weights)
    )


def _cuda_layout(weight: Tensor) -> bool:
    cols = weight.shape[1]
    return 1 <= cols <= _CUDA_COLUMNS[weight.dtype] and weight.stride(1) == 1 and weight.stride(0) >= cols


def _cuda_row_topk_mask(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> Tensor:
    if not _cuda_serves([weight]):
        return NotImplemented
    if bad is None:
        check_selection("row_topk_mask", weight, scale, keep)
        bad = torch.zeros(1, dtype=torch.int32, device=weight.device)
    return torch.ops.fwanda_C.row_topk_mask.flag(weight, scale.contiguous(), keep.contiguous(), bad)


def _cuda_row_topk_prune_(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> None:
    return _cuda_prune_("row_topk_prune_", [weight], [scale], [keep], bad)


def _cuda_foreach_row_topk_prune_(weights, scales, keeps, bad: Tensor | None) -> None:
    return _cuda_prune_("foreach_row_topk_prune_", weights, scales, keeps, bad)


def _cuda_prune_(op: str, weights: list[Tensor], scales: list[Tensor], keeps: list[Tensor], bad: Tensor | None) -> None:
    if not _cuda_serves(weights):
        return NotImplemented
    if bad is None:
        for weight, scale, keep in zip(weights, scales, keeps, strict=True):
            check_selection(op, weight, scale, keep)
        bad = torch.zeros(len(weights), dtype=torch.int32, device=weights[0].device)
    scales, keeps = [s.contiguous() for s in scales], [k.contiguous() for k in keeps]
    torch.ops.fwanda_C.foreach_row_topk_prune_(weights, scales, keeps, bad)


_OPS: dict[str, dict[str, Callable]] = {
    "cpu": {
        "row_topk_mask": _cpu_row_topk_mask,
        "row_topk_prune_": _cpu_row_topk_prune_,
        "foreach_row_topk_prune_": _cpu_foreach_row_topk_prune_,
    },
    "cuda": {
        "row_topk_mask": _cuda_row_topk_mask,
        "row_topk_prune_": _cuda_row_topk_prune_,
        "foreach_row_topk_prune_": _cuda_foreach_row_topk_prune_,
    },
}
