"""Squared sums: inputs, a naive torch baseline and the check that both agree."""

import torch

import fwanda_kernels as fk

from .case import BF16, Case, buffer_count, same


def sq_sums(device: str, tokens: int, cols: int) -> Case:
    """The squares of one input, summed by column."""
    input_bytes = tokens * cols * 2
    xs = [torch.randn(tokens, cols, device=device).to(BF16) for _ in range(buffer_count(input_bytes, device))]
    acc = torch.zeros(cols, device=device)

    def check():
        ours = torch.zeros(cols, device=device)
        fk.accumulate_sq_sums_(ours, xs[0])
        torch.testing.assert_close(ours.double(), xs[0].double().square().sum(0), rtol=1e-6, atol=0)
        again = torch.zeros(cols, device=device)
        fk.accumulate_sq_sums_(again, xs[0])
        same(again, ours)

    return Case(
        [lambda x=x: fk.accumulate_sq_sums_(acc, x) for x in xs],
        [lambda x=x: acc.add_(torch.linalg.vector_norm(x, 2, 0, dtype=torch.float32).square_()) for x in xs],
        check,
        input_bytes,
    )


def sq_sums_block(device: str, tokens: int, columns: list[int]) -> Case:
    """All inputs and output gradients of one block."""
    xs = [torch.randn(tokens, cols, device=device).to(BF16) for cols in columns]
    accs = [torch.zeros(cols, device=device) for cols in columns]

    def check():
        ours = [torch.zeros_like(a) for a in accs]
        fk.foreach_accumulate_sq_sums_(ours, xs)
        for a, x in zip(ours, xs, strict=True):
            torch.testing.assert_close(a.double(), x.double().square().sum(0), rtol=1e-6, atol=0)

    def naive():
        for acc, x in zip(accs, xs, strict=True):
            acc += x.float().pow(2).sum(0)

    return Case([lambda: fk.foreach_accumulate_sq_sums_(accs, xs)], [naive], check, tokens * sum(columns) * 2)
