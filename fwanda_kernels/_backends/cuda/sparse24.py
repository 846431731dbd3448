"""n:4 selection and the 2:4 pack: launches of csrc/sparse24.cu."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..._checks import bad_code, new_flag, raise_if_bad
from . import ITEMSIZE, aligned, dense_rows, run, variant
from . import about as _about
from .driver import Launch
from .layout import INT, POINTER, Layout

about = partial(_about, "sparse24")

WEIGHT = Layout("Weight24", "P weight, P scale, P bad, q row_stride, i rows, i cols")
THREADS, STRIP = 256, 256
WARPS = 8
ROWS = 2  # of a warp of keep_n_of_4
BAND_ROWS = 32  # of a block of compress_24


def nm_mask(weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> Tensor:
    if m != 4 or not dense_rows(weight):
        return NotImplemented
    scale, flag = scale.contiguous(), new_flag(weight) if bad is None else bad
    mask = torch.empty_like(weight, dtype=torch.bool, memory_format=torch.contiguous_format)
    run(weight, plan_keep(weight, scale, n, flag, mask))
    if bad is None:
        raise_if_bad("nm_mask", flag)
    return mask


def nm_prune_(weight: Tensor, scale: Tensor, n: int, m: int, bad: Tensor | None) -> None:
    if m != 4 or not dense_rows(weight):
        return NotImplemented
    if bad is None:
        raise_if_bad("nm_prune_", bad_code(weight, scale))
        bad = new_flag(weight)
    scale = scale.contiguous()
    run(weight, plan_keep(weight, scale, n, bad, None))


def compress_24(weight: Tensor, scale: Tensor, bad: Tensor | None) -> tuple[Tensor, Tensor]:
    if not dense_rows(weight):
        return NotImplemented
    scale, flag = scale.contiguous(), new_flag(weight) if bad is None else bad
    rows, cols = weight.shape
    values = torch.empty(rows, cols // 2, dtype=weight.dtype, device=weight.device)
    meta = torch.empty(rows, cols // 16, dtype=torch.int16, device=weight.device)
    run(weight, plan_compress(weight, scale, flag, values, meta))
    if bad is None:
        raise_if_bad("compress_24", flag)
    return values, meta


def plan_keep(weight: Tensor, scale: Tensor, n: int, bad: Tensor, mask: Tensor | None) -> list[Launch]:
    """One launch that keeps n of 4 in place, or writes mask [R, C] bool. The scale is contiguous."""
    rows, cols = weight.shape
    module, argument = _argument(weight, scale, bad)
    tasks = -(-rows // ROWS) * -(-cols // STRIP)  # one warp each
    parameters = (argument, INT.pack(n))
    kernel = "n_of_4_prune"
    if mask is not None:
        kernel, parameters = "n_of_4_mask", (*parameters, POINTER.pack(mask.data_ptr()))
    return [Launch(module, kernel, -(-tasks // WARPS), THREADS, parameters)]


def plan_compress(weight: Tensor, scale: Tensor, bad: Tensor, values: Tensor, meta: Tensor) -> list[Launch]:
    """One launch that packs a 16-bit weight into values and meta. The scale is contiguous."""
    rows, cols = weight.shape
    module, argument = _argument(weight, scale, bad)
    parameters = (argument, POINTER.pack(values.data_ptr()), POINTER.pack(meta.data_ptr()))
    return [Launch(module, "compress_24", -(-rows // BAND_ROWS) * -(-cols // STRIP), THREADS, parameters)]


def _argument(weight: Tensor, scale: Tensor, bad: Tensor) -> tuple[tuple[str, str], bytes]:
    """The module that fits the weight, and its first parameter."""
    (rows, cols), (row_stride, _) = weight.shape, weight.stride()
    address, scales = weight.data_ptr(), scale.data_ptr()
    in_vectors = aligned(address | scales, row_stride, cols, ITEMSIZE[weight.dtype])
    packed = WEIGHT.pack(address, scales, bad.data_ptr(), row_stride, rows, cols)
    return ("sparse24", variant(weight.dtype, in_vectors)), packed
