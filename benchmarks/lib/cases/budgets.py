"""Row budgets: inputs, the loop of the paper as baseline, and the check that both agree."""

import torch
from torch import Tensor

import fwanda_kernels as fk

from .case import Case


def naive_budgets(v: Tensor, total: int, k_max: int, k_min: int = 1) -> Tensor:
    """The loop of the paper for one matrix. It clamps one bound at a time, so that the total holds."""
    keep, free, left = torch.zeros_like(v), torch.ones_like(v, dtype=torch.bool), float(total)
    while True:
        share = left * v / v[free].sum()
        high, low = free & (share > k_max), free & (share < k_min)
        excess = float(((share - k_max) * high).sum() - ((k_min - share) * low).sum())
        fixed, value = (high, k_max) if excess >= 0 and bool(high.any()) else (low, k_min)
        if not bool(fixed.any()):
            break
        keep[fixed], free = value, free & ~fixed
        left -= value * int(fixed.sum())
    base = torch.where(free, share.floor(), keep)
    rest = torch.where(free, share - share.floor(), -1.0)
    base[torch.sort(rest, descending=True, stable=True).indices[: total - int(base.sum())]] += 1
    return base.long()


def budgets(device: str, shapes: list[tuple[int, int]]) -> Case:
    """A budget for each row of every matrix of a model, in one call."""
    signals = [torch.randn(r, device=device, dtype=torch.float64).mul(1.5).exp() for r, _ in shapes]
    totals, most = [r * c // 2 for r, c in shapes], [c for _, c in shapes]
    bad = torch.zeros(1, dtype=torch.int32, device=device)

    def naive():
        return [naive_budgets(v, total, c) for v, total, c in zip(signals, totals, most, strict=True)]

    def check():
        ours = fk.allocate_budgets(signals, totals, k_max=most)
        for k, expected, total in zip(ours, naive(), totals, strict=True):
            assert int(k.sum()) == int(expected.sum()) == total
            assert int((k - expected).abs().max()) <= 1

    return Case([lambda: fk.allocate_budgets(signals, totals, k_max=most, bad=bad)], [naive], check, None)
