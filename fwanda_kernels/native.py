"""Backend of compiled C++ and CUDA: the libraries that `python -m fwanda_kernels --build` makes from csrc/.

Nothing is compiled here. A library is loaded on the first call that could use it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ._build import find_library
from ._obs import CHOICES, MAX_BLOCK, Sweep, sweep
from .reference import _bad_scale, _bad_weight, _keep_last_ties, bad_message, check_selection, columns_of_block

_CUDA_COLUMNS = {torch.bfloat16: 65535, torch.float16: 65535, torch.float32: 57344}
_OBS_GROUPS, _OBS_COUNTERS = (4, 8, 16, 32), 4100

# what this version calls in each library
_SYMBOLS = {
    "cpu": ("row_topk_mask", "row_topk_prune_", "nm_mask", "nm_prune_"),
    "cuda": (
        "row_topk_mask", "foreach_row_topk_prune_", "foreach_accumulate_sq_sums_", "mask_n_of_4", "prune_n_of_4_",
        "compress_24", "count_at_threshold", "obs_prune_block",
    ),
}  # fmt: skip
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
    if not all(hasattr(torch.ops.fwanda_C, symbol) for symbol in _SYMBOLS[device]):
        raise ImportError(f"{path.name} is of another version; run python -m fwanda_kernels --build {device}")
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


def _cpu_nm_mask(weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> Tensor:
    mask, code = torch.ops.fwanda_C.nm_mask(weight, scale, n, m)
    _report("nm_mask", code, bad)
    return mask


def _cpu_nm_prune_(weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> None:
    _report("nm_prune_", torch.ops.fwanda_C.nm_prune_(weight, scale, n, m), bad)


@cache
def _hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _cuda_serves(weights: list[Tensor]) -> bool:
    """The CUDA kernels need the bulk copies of compute capability 9.0, one dtype and rows of unit column stride."""
    return _hopper(weights[0].device) and len({w.dtype for w in weights}) == 1 and all(_cuda_layout(w) for w in weights)


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


def _cuda_flag(like: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=like.device)


def _dense_rows(matrix: Tensor) -> bool:
    """Whether it is on a card of compute capability 9.0, not empty, and its columns are neighbours in memory."""
    return _hopper(matrix.device) and matrix.numel() > 0 and (matrix.stride(1) == 1 or matrix.shape[1] == 1)


def _cuda_accumulate_sq_sums_(acc: Tensor, x: Tensor, token_mask: Tensor | None) -> None:
    return _cuda_foreach_accumulate_sq_sums_([acc], [x], token_mask)


def _cuda_foreach_accumulate_sq_sums_(accs: list[Tensor], xs: list[Tensor], token_mask: Tensor | None) -> None:
    xs = [x if x.dim() == 2 else x.reshape(-1, x.shape[-1]) for x in xs]
    if not all(_dense_rows(x) for x in xs):
        return NotImplemented
    counted = None if token_mask is None else token_mask.reshape(-1).contiguous()
    torch.ops.fwanda_C.foreach_accumulate_sq_sums_(accs, xs, counted)


def _cuda_nm_mask(weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> Tensor:
    if m != 4 or not _dense_rows(weight):
        return NotImplemented
    found = _cuda_flag(weight) if bad is None else bad
    mask = torch.ops.fwanda_C.mask_n_of_4(weight, scale.contiguous(), n, found)
    if bad is None:
        _report("nm_mask", int(found), None)
    return mask


def _cuda_nm_prune_(weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> None:
    if m != 4 or not _dense_rows(weight):
        return NotImplemented
    if bad is None:
        _report("nm_prune_", int(_bad_weight(weight)) | 2 * int(_bad_scale(scale)), None)
        bad = _cuda_flag(weight)
    torch.ops.fwanda_C.prune_n_of_4_(weight, scale.contiguous(), n, bad)


def _cuda_compress_24(weight: Tensor, scale: Tensor, bad: Tensor | None) -> tuple[Tensor, Tensor]:
    if not _dense_rows(weight):
        return NotImplemented
    found = _cuda_flag(weight) if bad is None else bad
    packed = torch.ops.fwanda_C.compress_24(weight, scale.contiguous(), found)
    if bad is None:
        _report("compress_24", int(found), None)
    return packed


def _cuda_select_threshold(weights, row_scales, col_scales, total: int, bad: Tensor | None) -> Tensor:
    """Total 0 is found as 1 and emptied, so that the values are checked all the same."""
    if not all(_dense_rows(w) for w in weights):
        return NotImplemented
    found = _cuda_flag(weights[0]) if bad is None else bad
    rows, cols = [s.contiguous() for s in row_scales], [s.contiguous() for s in col_scales]
    larger, equal = torch.ops.fwanda_C.count_at_threshold(weights, rows, cols, max(total, 1), found)
    if bad is None:
        _report("select_threshold", int(found), None)
    if total == 0:
        return torch.zeros(len(larger), dtype=torch.int64, device=larger.device)
    return _keep_last_ties(larger.long(), equal.long(), total - larger.sum())


def _cuda_prune_block(state: Sweep, a: int, b: int, dropped: int, errors: Tensor, counts: Tensor) -> None:
    torch.ops.fwanda_C.obs_prune_block(
        state.weight, state.work, state.factor, state.weighting, state.row_weight, state.chosen, errors, counts,
        CHOICES.index(state.choice), a, b, dropped, state.group,
    )  # fmt: skip


def _cuda_obs_prune_(weight, hessian, factor, sparsity, keep, mask, pattern, row_weight, block, damping) -> None:
    """Blocks begin at multiples of 4 columns, as 16-byte loads need it."""
    cols = weight.shape[1]
    if not _hopper(weight.device) or not weight.numel() or (pattern is not None and pattern[1] not in _OBS_GROUPS):
        return NotImplemented
    size = columns_of_block(cols, block, pattern)
    if size > MAX_BLOCK or (size % 4 and size < cols):
        return NotImplemented
    return sweep(
        _cuda_prune_block, _OBS_COUNTERS,
        weight, hessian, factor, sparsity, keep, mask, pattern, row_weight, block, damping,
    )  # fmt: skip


_OPS: dict[str, dict[str, Callable]] = {
    "cpu": {
        "row_topk_mask": _cpu_row_topk_mask,
        "row_topk_prune_": _cpu_row_topk_prune_,
        "foreach_row_topk_prune_": _cpu_foreach_row_topk_prune_,
        "nm_mask": _cpu_nm_mask,
        "nm_prune_": _cpu_nm_prune_,
    },
    "cuda": {
        "row_topk_mask": _cuda_row_topk_mask,
        "row_topk_prune_": _cuda_row_topk_prune_,
        "foreach_row_topk_prune_": _cuda_foreach_row_topk_prune_,
        "accumulate_sq_sums_": _cuda_accumulate_sq_sums_,
        "foreach_accumulate_sq_sums_": _cuda_foreach_accumulate_sq_sums_,
        "nm_mask": _cuda_nm_mask,
        "nm_prune_": _cuda_nm_prune_,
        "compress_24": _cuda_compress_24,
        "select_threshold": _cuda_select_threshold,
        "obs_prune_": _cuda_obs_prune_,
    },
}
