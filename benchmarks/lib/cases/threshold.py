"""One threshold over a whole model: inputs, a naive torch baseline and the check that both agree."""

import torch

import fwanda_kernels as fk

from .case import Case, random_scale, random_weight, same


def threshold(device: str, shapes: list[tuple[int, int]], naive_share: int) -> Case:
    """The model-wide threshold; the naive sort gets the first 1/naive_share of the list, all it has memory for."""
    weights = [random_weight(r, c, device) for r, c in shapes]
    rows = [torch.rand(r, device=device) + 0.5 for r, _ in shapes]
    cols = [random_scale(c, device) for _, c in shapes]
    bad = torch.zeros(1, dtype=torch.int32, device=device)
    total = sum(w.numel() for w in weights) // 2
    part = slice(0, len(shapes) // naive_share)
    part_total = sum(w.numel() for w in weights[part]) // 2

    def naive():
        scores = [
            (w.float().abs() * c * r[:, None]).flatten()
            for w, r, c in zip(weights[part], rows[part], cols[part], strict=True)
        ]
        flat = torch.cat(scores)
        kept = torch.zeros_like(flat, dtype=torch.bool)
        kept[torch.sort(flat, stable=True).indices[-part_total:]] = True
        sizes = [w.numel() for w in weights[part]]
        return torch.cat([k.view(w.shape).sum(1) for k, w in zip(kept.split(sizes), weights[part], strict=True)])

    def check():
        same(torch.cat(fk.select_threshold(weights[part], rows[part], cols[part], part_total)), naive())
        assert sum(int(k.sum()) for k in fk.select_threshold(weights, rows, cols, total)) == total

    return Case(
        [lambda: fk.select_threshold(weights, rows, cols, total, bad=bad)], [naive], check,
        sum(w.numel() * 2 for w in weights), naive_scale=len(shapes) / (part.stop or 1),
    )  # fmt: skip
