"""Masks packed into bits, to compare two models of which only one fits on the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

BITS = 8


def packed_masks(weights: Iterable[Tensor], device: torch.device | str | None = None) -> list[Tensor]:
    """The zeros of each weight [R, C], eight in a byte, on the CPU: [ceil(R C / 8)] uint8 each.

    Args:
        weights: of a model.
        device: that packs them; None: where each lies.
    """
    return [_packed(weight.to(device or weight.device)).cpu() for weight in weights]


def agreement(masks: list[Tensor], others: list[Tensor]) -> float:
    """Share of the weights that are zero in both models or in neither; both from packed_masks().

    The bits that fill the last byte of a matrix count as weights.
    """
    differ = sum(_differing(a, b) for a, b in zip(masks, others, strict=True))
    return 1 - differ / (BITS * sum(mask.numel() for mask in masks))


def _differing(a: Tensor, b: Tensor) -> int:
    ones = torch.tensor([byte.bit_count() for byte in range(256)], device=a.device)
    return int(ones[(a ^ b).int()].sum())


def _packed(weight: Tensor) -> Tensor:
    zeros = nn.functional.pad((weight == 0).flatten(), (0, -weight.numel() % BITS)).view(-1, BITS)
    places = (2 ** torch.arange(BITS, device=weight.device)).to(torch.uint8)
    return (zeros * places).sum(1, dtype=torch.uint8)
