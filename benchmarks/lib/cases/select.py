"""Selection by row: inputs, a naive torch baseline and the check that both agree."""

import torch
from torch import Tensor

import fwanda_kernels as fk

from .case import Case, buffer_count, random_keep, random_scale, random_weight, same


def naive_row_topk_(weight: Tensor, scale: Tensor, keep: Tensor) -> None:
    """The usual way: stable argsort of the scores, scatter, multiply."""
    order = torch.argsort(weight.float().abs() * scale, dim=1, stable=True)
    cols = weight.shape[1]
    kept = torch.arange(cols, device=weight.device).expand_as(order) >= cols - keep[:, None]
    weight.mul_(torch.empty_like(weight, dtype=torch.bool).scatter_(1, order, kept))


def row_topk(device: str, rows: int, cols: int, *, equal: bool = False) -> Case:
    """One matrix, with a count for each row; `equal` makes all weights and scales equal."""
    matrix_bytes = rows * cols * 2
    fresh = [random_weight(rows, cols, device) for _ in range(buffer_count(matrix_bytes, device))]
    if equal:
        for w in fresh:
            w.fill_(0.5)
    scale = torch.ones(cols, device=device) if equal else random_scale(cols, device)
    keep = torch.randint(0, cols + 1, (rows,), device=device) if equal else random_keep(rows, cols, device)
    weights = [w.clone() for w in fresh]
    bad = torch.zeros(1, dtype=torch.int32, device=device)

    def reset():
        for w, f in zip(weights, fresh, strict=True):
            w.copy_(f)

    def check():
        for chunk in torch.arange(rows).split(4096):
            expected = fresh[0][chunk[0] : chunk[-1] + 1].clone()
            naive_row_topk_(expected, scale, keep[chunk[0] : chunk[-1] + 1])
            ours = fresh[0][chunk[0] : chunk[-1] + 1].clone()
            fk.row_topk_prune_(ours, scale, keep[chunk[0] : chunk[-1] + 1])
            same(ours, expected)

    return Case(
        [lambda w=w: fk.row_topk_prune_(w, scale, keep, bad=bad) for w in weights],
        [lambda w=w: naive_row_topk_(w, scale, keep) for w in weights],
        check,
        2 * matrix_bytes,
        reset,
    )


def row_topk_equal(device: str, rows: int, cols: int) -> Case:
    """The worst ties: all weights and scales equal, any count."""
    return row_topk(device, rows, cols, equal=True)


def row_topk_model(device: str, shapes: list[tuple[int, int]]) -> Case:
    """Every matrix of a model, in one call."""
    weights = [random_weight(r, c, device) for r, c in shapes]
    scales = [random_scale(c, device) for _, c in shapes]
    keeps = [random_keep(r, c, device) for r, c in shapes]
    bad = torch.zeros(len(shapes), dtype=torch.int32, device=device)

    def check():
        picked = [shapes.index(shape) for shape in dict.fromkeys(shapes)]
        ours = [weights[i].clone() for i in picked]
        fk.foreach_row_topk_prune_(ours, [scales[i] for i in picked], [keeps[i] for i in picked])
        for w, i in zip(ours, picked, strict=True):
            expected = weights[i].clone()
            naive_row_topk_(expected, scales[i], keeps[i])
            same(w, expected)

    def reset():
        for w in weights:
            w.normal_(0, 0.02)

    def naive():
        for w, s, k in zip(weights, scales, keeps, strict=True):
            naive_row_topk_(w, s, k)

    return Case(
        [lambda: fk.foreach_row_topk_prune_(weights, scales, keeps, bad=bad)],
        [naive],
        check,
        sum(w.numel() * 4 for w in weights),
        reset,
    )
