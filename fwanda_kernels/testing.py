"""Inputs and assertions for tests of the ops, here and in other projects."""

from __future__ import annotations

import torch
from torch import Tensor

from .ops import WEIGHT_DTYPES


def make_weight(
    rows: int, cols: int, dtype: torch.dtype = torch.float32, *, kind: str = "normal", seed: int = 0, device="cpu"
) -> Tensor:
    """[rows, cols] weight of a named kind.

    Args:
        kind: one of KINDS; all but "normal" are hard for a selection (ties, zeros, denormals, extremes, order).
    """
    generator = torch.Generator().manual_seed(seed)
    weight = KINDS[kind](torch.randn(rows, cols, generator=generator))
    return weight.to(dtype).to(device)


def _one_huge(w: Tensor) -> Tensor:
    w = w.clone()
    w[:, w.shape[1] // 2 :][:, :1] = 6e4
    return w


KINDS = {
    "normal": lambda w: w,
    "all_equal": lambda w: torch.full_like(w, 0.5),
    "zeros": torch.zeros_like,
    "two_values": lambda w: torch.where(w > 0, 1.0, -0.5),
    "heavy_ties": lambda w: (w * 2).round() / 2,
    "denormal": lambda w: w * 1e-40,
    "one_huge": _one_huge,
    "ascending": lambda w: w.sort(dim=1).values,
    "descending": lambda w: w.sort(dim=1, descending=True).values,
}


def make_scale(cols: int, *, seed: int = 0, device="cpu") -> Tensor:
    """[cols] fp32 >= 0 with a wide spread and one zero, like the norms of input columns."""
    generator = torch.Generator().manual_seed(seed + 1)
    scale = torch.randn(cols, generator=generator).exp()
    if cols > 2:
        scale[cols // 3] = 0
    return scale.to(device)


def make_keep(rows: int, cols: int, *, seed: int = 0, device="cpu") -> Tensor:
    """[rows] int64 in [0, cols], with 0, 1, cols - 1 and cols among the first rows."""
    generator = torch.Generator().manual_seed(seed + 2)
    keep = torch.randint(0, cols + 1, (rows,), generator=generator)
    edges = torch.tensor([0, min(1, cols), max(cols - 1, 0), cols])[:rows]
    keep[: len(edges)] = edges
    return keep.to(device)


def sample_arguments(device="cpu", dtype: torch.dtype = torch.float32) -> dict[str, tuple]:
    """Small valid arguments for each op `torch.ops.fwanda.<name>`, for opcheck and tracing: {name: arguments}."""
    rows, cols, tokens = 6, 16, 24
    weight, scale = make_weight(rows, cols, dtype, device=device), make_scale(cols, device=device)
    keep = make_keep(rows, cols, device=device)
    x = make_weight(tokens, cols, dtype, seed=3, device=device)
    mask = torch.arange(tokens, device=device) % 5 != 0
    hessian = x.float().T @ x.float()
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    row_scale = torch.ones(rows, device=device)
    return {
        "accumulate_sq_sums_": (torch.zeros(cols, device=device), x, mask),
        "accumulate_gram_": (torch.zeros(cols, cols, device=device), x, mask),
        "row_topk_mask": (weight, scale, keep, flag),
        "row_topk_prune_": (weight, scale, keep, flag),
        "nm_mask": (weight, scale, 2, 4, flag),
        "nm_prune_": (weight, scale, 2, 4, flag),
        "select_threshold": ([weight, weight * 2], [row_scale, row_scale], [scale, scale], rows * cols, flag),
        "obs_factor": (hessian, 0.01),
        "obs_prune_": (weight, hessian, None, "0.5", None, None, None, row_scale, 8, 0.01),
    }


def assert_masks_equal(actual: Tensor, expected: Tensor) -> None:
    """Raise AssertionError naming the first differing position and how many differ."""
    assert actual.dtype == expected.dtype == torch.bool, f"masks must be bool, got {actual.dtype} and {expected.dtype}"
    assert actual.shape == expected.shape, f"shapes differ: {list(actual.shape)} and {list(expected.shape)}"
    different = (actual.cpu() != expected.cpu()).nonzero()
    assert not len(different), (
        f"{len(different)} of {actual.numel()} entries differ, first at {different[0].tolist()}: "
        f"got {bool(actual[tuple(different[0])])}"
    )


__all__ = [
    "KINDS",
    "WEIGHT_DTYPES",
    "assert_masks_equal",
    "make_keep",
    "make_scale",
    "make_weight",
    "sample_arguments",
]
