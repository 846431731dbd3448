"""Products with packed weights: inputs, the dense product as baseline, and the check that both agree."""

import torch

import fwanda_kernels as fk

from .case import BF16, Case, buffer_count, random_weight


def product(device: str, tokens: int, rows: int, cols: int, percent: int) -> Case:
    """A linear layer whose weight has lost so many percent of its weights; the naive one multiplies the zeros too."""
    weights = [random_weight(rows, cols, device) for _ in range(buffer_count(rows * cols * 2, device))]
    for weight in weights:
        weight.masked_fill_(torch.rand(rows, cols, device=device) < percent / 100, 0)
    packed = [fk.pack_weight(weight) for weight in weights]
    headers, x = [fk.read_packed_header(p) for p in packed], torch.randn(tokens, cols, device=device).to(BF16)

    def check():
        expected = x.double() @ weights[0].double().T
        found = fk.packed_linear(x, packed[0], header=headers[0]).double()
        assert float((found - expected).norm() / expected.norm()) < 5e-3

    return Case(
        [lambda p=p, h=h: fk.packed_linear(x, p, header=h) for p, h in zip(packed, headers, strict=True)],
        [lambda w=w: torch.nn.functional.linear(x, w) for w in weights],
        check,
        len(packed[0]),
    )
