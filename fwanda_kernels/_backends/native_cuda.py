"""CUDA from compute capability 9.0 on (Hopper), from the .cu files of csrc/; other cards and layouts are declined."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .._checks import bad_code, new_flag, raise_if_bad
from .._obs import MAX_BLOCK, RULES, Block, ObsCall, walk
from .._ties import keep_last_ties
from . import load_library

load_library(
    "cuda",
    (
        "row_topk_mask_flagged", "foreach_row_topk_prune_", "foreach_accumulate_sq_sums_", "mask_n_of_4",
        "prune_n_of_4_", "compress_24", "count_at_threshold", "obs_prune_block",
    ),
)  # fmt: skip
_C = torch.ops.fwanda_C
# row selection holds a row in shared memory
_MAX_COLUMNS = {torch.bfloat16: 65535, torch.float16: 65535, torch.float32: 57344}
_OBS_GROUPS = (4, 8, 16, 32)
_OBS_COUNTERS = 4100  # kObsCounters of csrc/obs.cuh


@cache
def _has_bulk_copies(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _dense_rows(matrix: Tensor) -> bool:
    """Whether the card serves and the matrix is not empty and has neighbouring columns side by side in memory."""
    return _has_bulk_copies(matrix.device) and matrix.numel() > 0 and (matrix.stride(1) == 1 or matrix.shape[1] == 1)


# stats


def accumulate_sq_sums_(acc: Tensor, x: Tensor, token_mask: Tensor | None) -> None:
    return foreach_accumulate_sq_sums_([acc], [x], token_mask)


def foreach_accumulate_sq_sums_(accs: list[Tensor], xs: list[Tensor], token_mask: Tensor | None) -> None:
    xs = [x.flatten(0, -2) for x in xs]
    if not all(_dense_rows(x) for x in xs):
        return NotImplemented
    counted = None if token_mask is None else token_mask.reshape(-1).contiguous()
    _C.foreach_accumulate_sq_sums_(accs, xs, counted)


# select


def _serves_rows(weights: list[Tensor]) -> bool:
    """Row selection takes weights of one dtype whose rows fit into shared memory."""
    one_dtype = len({w.dtype for w in weights}) == 1
    return _has_bulk_copies(weights[0].device) and one_dtype and all(_serves_layout(w) for w in weights)


def _serves_layout(weight: Tensor) -> bool:
    cols = weight.shape[1]
    return 1 <= cols <= _MAX_COLUMNS[weight.dtype] and weight.stride(1) == 1 and weight.stride(0) >= cols


def row_topk_mask(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> Tensor:
    if not _serves_rows([weight]):
        return NotImplemented
    if bad is None:
        raise_if_bad("row_topk_mask", bad_code(weight, scale, keep))
        bad = new_flag(weight)
    return _C.row_topk_mask_flagged(weight, scale.contiguous(), keep.contiguous(), bad)


def row_topk_prune_(weight: Tensor, scale: Tensor, keep: Tensor, bad: Tensor | None) -> None:
    return _row_topk_prune_(["row_topk_prune_"], [weight], [scale], [keep], bad)


def foreach_row_topk_prune_(
    weights: list[Tensor], scales: list[Tensor], keeps: list[Tensor], bad: Tensor | None
) -> None:
    names = [f"foreach_row_topk_prune_ at index {i}" for i in range(len(weights))]
    return _row_topk_prune_(names, weights, scales, keeps, bad)


def _row_topk_prune_(
    names: list[str], weights: list[Tensor], scales: list[Tensor], keeps: list[Tensor], bad: Tensor | None
) -> None:
    """Prune in one launch; names begin the error for each matrix."""
    if not _serves_rows(weights):
        return NotImplemented
    if bad is None:
        for name, *matrix in zip(names, weights, scales, keeps, strict=True):
            raise_if_bad(name, bad_code(*matrix))
        bad = new_flag(weights[0], len(weights))
    scales, keeps = [s.contiguous() for s in scales], [k.contiguous() for k in keeps]
    _C.foreach_row_topk_prune_(weights, scales, keeps, bad)


# threshold


def select_threshold(
    weights: list[Tensor], row_scales: list[Tensor], col_scales: list[Tensor], total: int, bad: Tensor | None
) -> Tensor:
    """The kernel searches for total 1 where it is 0, so that it checks the values all the same."""
    if not all(_dense_rows(w) for w in weights):
        return NotImplemented
    flag = new_flag(weights[0]) if bad is None else bad
    rows, cols = [s.contiguous() for s in row_scales], [s.contiguous() for s in col_scales]
    larger, equal = _C.count_at_threshold(weights, rows, cols, max(total, 1), flag)
    if bad is None:
        raise_if_bad("select_threshold", flag)
    if total == 0:
        return torch.zeros(len(larger), dtype=torch.int64, device=larger.device)
    return keep_last_ties(larger.long(), equal.long(), total - larger.sum())


# sparse24


def nm_mask(weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> Tensor:
    if m != 4 or not _dense_rows(weight):
        return NotImplemented
    flag = new_flag(weight) if bad is None else bad
    mask = _C.mask_n_of_4(weight, scale.contiguous(), n, flag)
    if bad is None:
        raise_if_bad("nm_mask", flag)
    return mask


def nm_prune_(weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> None:
    if m != 4 or not _dense_rows(weight):
        return NotImplemented
    if bad is None:
        raise_if_bad("nm_prune_", bad_code(weight, scale))
        bad = new_flag(weight)
    _C.prune_n_of_4_(weight, scale.contiguous(), n, bad)


def compress_24(weight: Tensor, scale: Tensor, bad: Tensor | None) -> tuple[Tensor, Tensor]:
    if not _dense_rows(weight):
        return NotImplemented
    flag = new_flag(weight) if bad is None else bad
    packed = _C.compress_24(weight, scale.contiguous(), flag)
    if bad is None:
        raise_if_bad("compress_24", flag)
    return packed


# obs


def obs_prune_(call: ObsCall) -> None:
    """Blocks begin at multiples of 4 columns, as 16-byte loads need it."""
    if not _has_bulk_copies(call.weight.device) or not call.weight.numel():
        return NotImplemented
    size = call.blocks[0].end
    if size > MAX_BLOCK or (size % 4 and size < call.weight.shape[1]) or call.group not in (0, *_OBS_GROUPS):
        return NotImplemented
    walk(call, _prune_block, _OBS_COUNTERS)


def _prune_block(call: ObsCall, work: Tensor, weighting: Tensor, block: Block, errors: Tensor, counts: Tensor) -> None:
    _C.obs_prune_block(
        call.weight, work, call.factor, weighting, call.row_weight, call.chosen, errors, counts,
        RULES.index(call.rule), *block, call.group,
    )  # fmt: skip
