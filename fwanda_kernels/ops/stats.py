"""Squared sums over tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .. import _checks as checks
from .._checks import FP32
from .._dispatch import define

_SLAB_TOKENS = 256  # summed in fp32; the slabs are added in fp64


@define(
    "accumulate_sq_sums_(Tensor(a!) acc, Tensor x, Tensor? token_mask) -> ()",
    fake=lambda acc, x, token_mask: None,
    sample=lambda i: (i.zeros(i.cols), i.x, i.token_mask),
)
def _accumulate_sq_sums_(acc: Tensor, x: Tensor, token_mask: Tensor | None) -> None:
    _add_sq_sums(acc, x, token_mask)


def _add_sq_sums(acc: Tensor, x: Tensor, token_mask: Tensor | None) -> None:
    slabs = [rows.float().square().sum(0) for rows in token_chunks(x, token_mask, _SLAB_TOKENS)]
    if slabs:
        acc.add_(torch.stack(slabs).double().sum(0))


def token_chunks(x: Tensor, token_mask: Tensor | None, size: int) -> Iterator[Tensor]:
    """Pieces [t, C] of x with masked tokens set to 0, so that the whole input is never copied."""
    rows = x.flatten(0, -2)
    counted = None if token_mask is None else token_mask.reshape(-1, 1)
    for a in range(0, rows.shape[0], size):
        piece = rows[a : a + size]
        yield piece if counted is None else piece.masked_fill(~counted[a : a + size], 0)


def accumulate_sq_sums_(acc: Tensor, x: Tensor, *, token_mask: Tensor | None = None) -> None:
    """Add the squared sum over tokens of each column: acc_c += sum_t x_tc^2.

    Args:
        acc: [C] fp32, updated in place.
        x: [..., C] bf16|fp16|fp32 activations or output gradients, at least 2-D.
        token_mask: [...] bool, the leading shape of x; False positions (padding) do not count. None counts all.

    Raises:
        ValueError: a shape, dtype or device does not fit.

    Moves the bytes of x once. NaN and inf pass through into acc. Source: the F-Wanda paper, algorithm 1, lines 1 and 2.
    """
    checks.expect_tokens("accumulate_sq_sums_", x, token_mask)
    checks.expect("accumulate_sq_sums_", "acc", acc, x.shape[-1:], FP32, x)
    _accumulate_sq_sums_(acc, x, token_mask)


@define(
    "foreach_accumulate_sq_sums_(Tensor(a!)[] accs, Tensor[] xs, Tensor? token_mask) -> ()",
    fake=lambda accs, xs, token_mask: None,
    sample=lambda i: ([i.zeros(i.cols), i.zeros(i.cols)], [i.x, -i.x], i.token_mask),
)
def _foreach_accumulate_sq_sums_(accs: list[Tensor], xs: list[Tensor], token_mask: Tensor | None) -> None:
    for acc, x in zip(accs, xs, strict=True):
        _add_sq_sums(acc, x, token_mask)


def foreach_accumulate_sq_sums_(
    accs: Sequence[Tensor], xs: Sequence[Tensor], *, token_mask: Tensor | None = None
) -> None:
    """Call accumulate_sq_sums_() on each pair of a list, in one launch where the backend can.

    Args:
        accs: L vectors [C_l] fp32 without overlap, updated in place.
        xs: L inputs [..., C_l] bf16|fp16|fp32 on one device, e.g. all inputs and output gradients of a block.
        token_mask: [...] bool, the leading shape of every x; None counts all.

    Raises:
        ValueError: a length, shape, dtype or device does not fit.

    Gives the bits of the single calls.
    """
    op = "foreach_accumulate_sq_sums_"
    checks.expect_lists(op, accs=accs, xs=xs)
    for i, x in enumerate(xs):
        checks.expect_tokens(op, x, token_mask, f"xs[{i}]")
        checks.expect_device(op, f"xs[{i}]", x, xs[0])
    checks.expect_each(op, "accs", accs, [x.shape[-1:] for x in xs], FP32, xs[0])
    _foreach_accumulate_sq_sums_(list(accs), list(xs), token_mask)
