"""Packed masks, and sums over removed weights in the backward pass: the ops against a naive restatement."""

import pytest
import torch
from torch import nn

import fwanda_kernels as fk
from fwanda_kernels.testing import WEIGHT_DTYPES, make_weight

dtypes = pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
shapes = pytest.mark.parametrize("shape", [(5, 19), (3, 8), (2, 1), (4, 0), (0, 9)])


def random_mask(rows: int, cols: int) -> torch.Tensor:
    return make_weight(rows, cols, seed=5) > 0


@shapes
def test_bit_j_of_a_byte_is_its_column_j_and_padding_is_0(shape):
    mask = random_mask(*shape)
    for given in (mask, mask.T.contiguous().T):
        packed = fk.pack_mask(given)
        assert packed.dtype == torch.uint8 and packed.is_contiguous()
        assert packed.tolist() == [
            [sum(bit << i for i, bit in enumerate(row[first : first + 8])) for first in range(0, len(row), 8)]
            for row in mask.tolist()
        ]


@dtypes
@shapes
def test_a_removed_weight_is_positive_zero_and_a_kept_one_has_its_bits(shape, dtype):
    weight, mask = make_weight(*shape, dtype), random_mask(*shape)
    weight[:, -1:] = -0.0
    before, packed = weight.clone(), fk.pack_mask(mask)
    for given in (weight, weight.T.contiguous().T):
        found = fk.masked_weight(given, packed)
        assert found.dtype == dtype and found.is_contiguous() and torch.equal(found == 0, ~mask | (weight == 0))
        assert torch.equal(found[mask].signbit(), weight[mask].signbit()) and torch.equal(found[mask], weight[mask])
        assert not found[~mask].signbit().any()
    assert torch.equal(weight, before)


def test_a_removed_nan_is_zero():
    weight = torch.full((2, 3), float("nan"))
    assert torch.equal(fk.masked_weight(weight, torch.zeros(2, 1, dtype=torch.uint8)), torch.zeros(2, 3))


@dtypes
@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_sums_are_those_of_autograd(tokens, dtype):
    """Against the weight gradient of a linear layer in fp64, whatever the strides."""
    mask = random_mask(7, 19)
    x, out, weight = make_weight(tokens, 19, dtype), make_weight(tokens, 7, dtype, seed=1), make_weight(7, 19, dtype)
    dense = weight.double().requires_grad_()
    nn.functional.linear(x.double(), dense).backward(out.double())
    gain = (-dense.grad * weight.double()).masked_fill(mask, 0)
    for gradient, inputs, matrix in ((out, x, weight), [t.T.contiguous().T for t in (out, x, weight)]):
        sums = fk.removed_sums(gradient, inputs, matrix, fk.pack_mask(mask))
        for found, dim in zip(sums, (1, 0), strict=True):
            bound = torch.finfo(dtype).eps * (dense.grad * weight.double()).abs().sum(dim) + 1e-5
            assert found.dtype == torch.float64 and ((found - gain.sum(dim)).abs() <= bound).all()


def test_rows_and_columns_have_one_total_and_it_is_the_change_of_a_linear_loss():
    mask = random_mask(6, 16)
    x, out, weight = make_weight(24, 16), make_weight(24, 6, seed=1), make_weight(6, 16, seed=2)
    packed = fk.pack_mask(mask)
    rows, columns = fk.removed_sums(out, x, weight, packed)
    loss = lambda w: (nn.functional.linear(x.double(), w.double()) * out.double()).sum()  # noqa: E731
    change = loss(fk.masked_weight(weight, packed)) - loss(weight)
    torch.testing.assert_close(rows.sum(), change, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(columns.sum(), change, rtol=1e-5, atol=1e-4)


def test_kept_weights_count_nothing_even_if_the_gradient_is_nan():
    out = torch.full((3, 2), float("nan"))
    rows, columns = fk.removed_sums(out, torch.ones(3, 9), torch.ones(2, 9), fk.pack_mask(torch.ones(2, 9).bool()))
    assert not rows.any() and not columns.any()
