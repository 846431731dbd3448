"""Checks of the Triton kernels for packed masks and removed weights, for test_triton.py: interpreted, or on a GPU."""

from __future__ import annotations

import torch
from helpers_triton_obs import BF16, DEVICE, FP16, ours, reference

from fwanda_kernels.testing import make_weight


def check_removed(dtype) -> None:
    """Masks and weights to the bit, sums near fp64, on partial tiles, any strides, and twice the same."""
    for tokens, rows, cols in ((70, 33, 45), (1, 1, 1), (40, 130, 300)):
        shapes = ((tokens, rows), (tokens, cols), (rows, cols))
        given = [make_weight(*shape, dtype, seed=i, device=DEVICE) for i, shape in enumerate(shapes)]
        given[2][:, -1] = -0.0
        mask = make_weight(rows, cols, seed=5, device=DEVICE) > 0
        wide_gradient, wide_x, wide = (t.double() for t in given)
        gain = (-(wide_gradient.T @ wide_x) * wide).masked_fill(mask, 0)
        for gradient, x, weight, kept in (
            (*given, mask),
            [t.t().contiguous().t() for t in (*given, mask)],
            [torch.cat((t, t), dim=1)[:, t.shape[1] :] for t in (*given, mask)],
        ):
            packed = ours.pack_mask(kept)
            assert torch.equal(packed, reference.pack_mask(mask))
            found, expected = ours.masked_weight(weight, packed), reference.masked_weight(weight, packed)
            assert torch.equal(found.view(torch.int16), expected.view(torch.int16))
            sums = ours.removed_sums(gradient, x, weight, packed)
            for found, again, dim in zip(sums, ours.removed_sums(gradient, x, weight, packed), (1, 0), strict=True):
                bound = 1e-5 * (gain.abs().sum(dim) + tokens)
                assert ((found - gain.sum(dim)).abs() <= bound).all() and torch.equal(found, again)


def check_nan() -> None:
    """A NaN in the product counts where a weight is removed, and nowhere else."""
    gradient, x = torch.ones(2, 3, dtype=BF16, device=DEVICE), torch.ones(2, 9, dtype=BF16, device=DEVICE)
    gradient[0, 1], mask = float("nan"), torch.ones(3, 9, dtype=torch.bool, device=DEVICE)
    mask[1, 8] = mask[2, 0] = False
    sums = ours.removed_sums(gradient, x, torch.ones(3, 9, dtype=BF16, device=DEVICE), ours.pack_mask(mask))
    nan = float("nan")
    for found, expected in zip(sums, ([0, nan, -2], [-2, *[0] * 7, nan]), strict=True):
        torch.testing.assert_close(found.cpu(), torch.tensor(expected).double(), rtol=0, atol=0, equal_nan=True)


CASES = {f"removed-{str(dtype)[6:]}": (check_removed, dtype) for dtype in (BF16, FP16)}
CASES |= {"removed-nan": (check_nan,)}
