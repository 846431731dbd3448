"""2:4 selection and packing: inputs, naive torch baselines and the checks that both agree."""

import torch
from torch import Tensor

import fwanda_kernels as fk

from .case import BF16, Case, buffer_count, random_scale, random_weight, recorded, same


def naive_24_(weight: Tensor, scale: Tensor) -> None:
    """The usual way: the two lowest scores of each four by topk, then a scatter of zeros."""
    groups = (weight.float().abs() * scale).view(weight.shape[0], -1, 4)
    lowest = groups.topk(2, dim=2, largest=False).indices
    weight.view(weight.shape[0], -1, 4).scatter_(2, lowest, 0)


def nm(device: str, rows: int, cols: int) -> Case:
    """2:4 selection in place."""
    matrix_bytes = rows * cols * 2
    fresh = [random_weight(rows, cols, device) for _ in range(buffer_count(matrix_bytes, device))]
    weights, scale = [w.clone() for w in fresh], random_scale(cols, device)
    bad = torch.zeros(1, dtype=torch.int32, device=device)

    def reset():
        for w, f in zip(weights, fresh, strict=True):
            w.copy_(f)

    def check():
        ours = fresh[0].clone()
        fk.nm_prune_(ours, scale, 2, 4)
        order = torch.argsort((fresh[0].float().abs() * scale).view(rows, -1, 4), dim=2, stable=True)[..., :2]
        same(ours, fresh[0].clone().view(rows, -1, 4).scatter_(2, order, 0).view(rows, cols))

    return Case(
        [lambda w=w: fk.nm_prune_(w, scale, 2, 4, bad=bad) for w in weights],
        [lambda w=w: naive_24_(w, scale) for w in weights],
        check,
        2 * matrix_bytes,
        reset,
    )


def packed_24_bytes(rows: int, cols: int) -> int:
    """Bytes read and written: a bf16 weight, and half of its values with two bits of metadata for each of them."""
    return rows * cols * 25 // 8


def compress(device: str, rows: int, cols: int) -> Case:
    """2:4 selection and packing for torch's sparse kernels, with CUTLASS."""
    from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass as from_dense

    matrix_bytes = rows * cols * 2
    weights = [random_weight(rows, cols, device) for _ in range(buffer_count(matrix_bytes, device))]
    for w in weights:
        w[w == 0] = 0.01
    scale = random_scale(cols, device)
    bad = torch.zeros(1, dtype=torch.int32, device=device)

    def naive(w):
        pruned = w.clone()
        naive_24_(pruned, scale)
        return from_dense(pruned)

    def check():
        pruned = weights[0].clone()
        fk.nm_prune_(pruned, scale, 2, 4)
        for ours, expected in zip(fk.compress_24(weights[0], scale), from_dense(pruned), strict=True):
            same(ours, expected)

    return Case(
        [lambda w=w: fk.compress_24(w, scale, bad=bad) for w in weights],
        [lambda w=w: naive(w) for w in weights],
        check,
        packed_24_bytes(rows, cols),
    )


def compress_cusparselt(device: str, rows: int, cols: int) -> Case:
    """2:4 selection and packing for torch's sparse kernels, with cuSPARSELt."""
    weights = [random_weight(rows, cols, device) for _ in range(buffer_count(rows * cols * 2, device))]
    scale = random_scale(cols, device)

    def naive(w):
        pruned = w.clone()
        naive_24_(pruned, scale)
        return torch._cslt_compress(pruned)

    def check():
        pruned = weights[0].clone()
        fk.nm_prune_(pruned, scale, 2, 4)
        ours, x = fk.compress_24_cusparselt(weights[0], scale), torch.randn(cols, 64, device=device).to(BF16)
        torch.testing.assert_close(torch._cslt_sparse_mm(ours, x), pruned @ x, rtol=2e-2, atol=2e-2)

    ours = [lambda w=w: fk.compress_24_cusparselt(w, scale) for w in weights]
    return Case(ours, [lambda w=w: naive(w) for w in weights], check, packed_24_bytes(rows, cols))


def linear(device: str, tokens: int, rows: int, cols: int) -> Case:
    """A linear layer with a 2:4 weight in torch's form for cuSPARSELt, against the dense weight in cuBLAS.

    Both run in CUDA graphs: outside of them, the host takes longer for the 2:4 product than the GPU.
    """
    from fwanda_pruner.model.semi_structured import as_cusparselt

    weights, algorithms = [random_weight(rows, cols, device) for _ in range(buffer_count(rows * cols * 2, device))], {}
    for weight in weights:
        fk.nm_prune_(weight, torch.ones(cols, device=device), 2, 4)
    sparse = [as_cusparselt(weight, tokens, algorithms) for weight in weights]
    x = torch.randn(tokens, cols, device=device).to(BF16)
    product = torch.nn.functional.linear

    def check():
        expected = x.double() @ weights[0].double().T
        assert float((product(x, sparse[0]).double() - expected).norm() / expected.norm()) < 5e-3

    ours, naive = (recorded([lambda w=w: product(x, w) for w in of_these]) for of_these in (sparse, weights))
    moved = rows * cols * 9 // 8 + 2 * tokens * (rows + cols)
    return Case([ours], [naive], check, moved, in_a_call=len(weights))
