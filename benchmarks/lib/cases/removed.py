"""Packed masks and sums over removed weights: inputs, naive torch baselines and the checks that both agree."""

import torch
from torch import Tensor

import fwanda_kernels as fk

from .case import BF16, Case, buffer_count, random_weight, same


def half_removed(rows: int, cols: int, device: str, count: int) -> list[Tensor]:
    return [torch.rand(rows, cols, device=device) < 0.5 for _ in range(count)]


def pack(device: str, rows: int, cols: int) -> Case:
    """One mask, from a byte to a bit for each weight."""
    masks = half_removed(rows, cols, device, buffer_count(rows * cols, device))
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=device)

    def naive(mask):
        return (mask.view(rows, cols // 8, 8) * powers).sum(2, dtype=torch.uint8)

    return Case(
        [lambda m=m: fk.pack_mask(m) for m in masks],
        [lambda m=m: naive(m) for m in masks],
        lambda: same(fk.pack_mask(masks[0]), naive(masks[0])),
        rows * cols * 9 // 8,
    )


def masked(device: str, rows: int, cols: int) -> Case:
    """A copy of one weight without its removed entries; the naive one reads a mask of bools."""
    masks = half_removed(rows, cols, device, buffer_count(rows * cols * 2, device))
    weights, packed = [random_weight(rows, cols, device) for _ in masks], [fk.pack_mask(m) for m in masks]
    return Case(
        [lambda w=w, p=p: fk.masked_weight(w, p) for w, p in zip(weights, packed, strict=True)],
        [lambda w=w, m=m: w * m for w, m in zip(weights, masks, strict=True)],
        lambda: same(fk.masked_weight(weights[0], packed[0]), weights[0].masked_fill(~masks[0], 0)),
        rows * cols * 33 // 8,
    )


def sums(device: str, tokens: int, rows: int, cols: int) -> Case:
    """The sums over one matrix; the naive way writes the gradient of the weight."""
    (mask,), weight = half_removed(rows, cols, device, 1), random_weight(rows, cols, device)
    gradient, x = (torch.randn(tokens, size, device=device).to(BF16) for size in (rows, cols))
    packed = fk.pack_mask(mask)

    def naive():
        gain = -((gradient.T @ x) * weight).float().masked_fill_(mask, 0)
        return gain.sum(1, dtype=torch.float64), gain.sum(0, dtype=torch.float64)

    def check():
        gain = (-(gradient.double().T @ x.double()) * weight).masked_fill_(mask, 0)
        for found, dim in zip(fk.removed_sums(gradient, x, weight, packed), (1, 0), strict=True):
            # plain torch rounds each product to bf16, tensor cores truncate their sums
            assert float((found - gain.sum(dim)).norm() / gain.sum(dim).norm()) < 5e-3

    ours = [lambda: fk.removed_sums(gradient, x, weight, packed)]
    return Case(ours, [naive], check, None, product=lambda: gradient.T @ x)
