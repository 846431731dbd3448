"""Packed masks, weights under them, and sums of what the loss would gain from the removed weights.

A packed mask is [R, ceil(C/8)] uint8: bit j % 8 of byte j // 8 is column j, 1 where the weight is kept. Bits beyond
column C are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks as checks
from .._checks import BOOL, UINT8
from .._dispatch import define


@define(
    "pack_mask(Tensor mask) -> Tensor",
    fake=lambda mask: mask.new_empty([mask.shape[0], (mask.shape[1] + 7) // 8], dtype=torch.uint8),
    sample=lambda i: (i.mask,),
)
def _pack_mask(mask: Tensor) -> Tensor:
    rows, cols = mask.shape
    packed = torch.zeros(rows, (cols + 7) // 8, dtype=torch.uint8, device=mask.device)
    for bit in range(8):
        column = mask[:, bit::8]
        packed[:, : column.shape[1]] |= column.to(torch.uint8) << bit
    return packed


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a mask into one bit for each weight.

    Args:
        mask: [R, C] bool, True = kept.

    Returns:
        [R, ceil(C/8)] uint8, contiguous: bit j % 8 of byte j // 8 is column j; bits beyond column C are 0.

    Raises:
        ValueError: mask is not a matrix of bools.

    Moves 1.125 B per weight.
    """
    checks.expect_dense("pack_mask", "mask", mask)
    if mask.dim() != 2:
        expected = checks.describe(("R", "C"), BOOL, "any device")
        raise ValueError(f"pack_mask: mask must be {expected}, got {checks.describe_tensor(mask)}")
    checks.expect("pack_mask", "mask", mask, mask.shape, BOOL, mask)
    return _pack_mask(mask)


@define(
    "masked_weight(Tensor weight, Tensor packed) -> Tensor",
    fake=lambda weight, packed: weight.new_empty(weight.shape),
    sample=lambda i: (i.weight, _pack_mask(i.mask)),
)
def _masked_weight(weight: Tensor, packed: Tensor) -> Tensor:
    bits = _BITS[weight.element_size()]
    return (weight.view(bits) & _spread(packed, weight.shape[1], bits)).view(weight.dtype).contiguous()


_BITS = {2: torch.int16, 4: torch.int32}  # bytes of an element -> dtype of its bits


def _spread(packed: Tensor, cols: int, dtype: torch.dtype) -> Tensor:
    """[R, C] integers with all bits set where the weight is kept, 0 elsewhere. A table gives those of each byte."""
    bytes_, columns = (torch.arange(n, dtype=dtype, device=packed.device) for n in (256, 8))
    table = -(bytes_[:, None] >> columns & 1)
    return table.index_select(0, packed.flatten().int()).view(len(packed), 8 * packed.shape[1])[:, :cols]


def masked_weight(weight: Tensor, packed: Tensor) -> Tensor:
    """Copy a weight with its removed entries set to +0.0.

    Args:
        weight: [R, C] bf16|fp16|fp32; not modified.
        packed: [R, ceil(C/8)] uint8, the mask as pack_mask() packs it.

    Returns:
        [R, C] in the weight's dtype, contiguous; kept weights have their bits.

    Raises:
        ValueError: a shape, dtype or device does not fit.

    Moves 4.125 B per bf16 weight.
    """
    _check_packed("masked_weight", weight, packed)
    return _masked_weight(weight, packed)


@define(
    "removed_sums(Tensor gradient, Tensor x, Tensor weight, Tensor packed) -> (Tensor, Tensor)",
    fake=lambda gradient, x, weight, packed: (
        weight.new_empty([weight.shape[0]], dtype=torch.float64),
        weight.new_empty([weight.shape[1]], dtype=torch.float64),
    ),
    sample=lambda i: (i.gradient, i.x, i.weight, _pack_mask(i.mask)),
)
def _removed_sums(gradient: Tensor, x: Tensor, weight: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    gain = (gradient.T @ x).float().mul_(weight).neg_()
    gain.view(torch.int32).bitwise_and_(_spread(packed, weight.shape[1], torch.int32).bitwise_not())
    return gain.sum(1, dtype=torch.float64), gain.sum(0, dtype=torch.float64)


def removed_sums(gradient: Tensor, x: Tensor, weight: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of -dL/dW_ij * W_ij over the removed weights of each row and of each column.

    To first order, such a sum is by how much the loss falls if these weights come back. dL/dW = gradient^T x is the
    gradient of a linear layer y = x W^T. Triton never writes it to memory.

    Args:
        gradient: [T, R] bf16|fp16|fp32, dL/dy.
        x: [T, C] in the dtype of `gradient`, the inputs of the layer.
        weight: [R, C] bf16|fp16|fp32, with the removed weights.
        packed: [R, ceil(C/8)] uint8, the mask as pack_mask() packs it; 0 = removed.

    Returns:
        rows: [R] fp64.
        columns: [C] fp64.

    Raises:
        ValueError: a shape, dtype or device does not fit.

    2 T R C FLOPs, accumulated in fp32; the sums over tiles or weights are fp64. Deterministic on each backend. Plain
    torch rounds dL/dW to the dtype of `x`; Triton does not, and declines fp32.
    """
    op = "removed_sums"
    checks.expect_tokens(op, x, None)
    _check_packed(op, weight, packed)
    tokens = x.shape[0]
    checks.expect(op, "x", x, (tokens, weight.shape[1]), checks.WEIGHT_DTYPES, weight)
    checks.expect(op, "gradient", gradient, (tokens, weight.shape[0]), (x.dtype,), weight)
    return _removed_sums(gradient, x, weight, packed)


def _check_packed(op: str, weight: Tensor, packed: Tensor) -> None:
    checks.expect_weight(op, weight)
    rows, cols = weight.shape
    checks.expect(op, "packed", packed, (rows, (cols + 7) // 8), UINT8, weight)
