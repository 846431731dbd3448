"""What is measured: for each op its inputs, its naive torch baseline, and the check that both do the same."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

import fwanda_kernels as fk

BF16 = torch.bfloat16
LLAMA_7B_BLOCK = [(4096, 4096)] * 4 + [(11008, 4096)] * 2 + [(4096, 11008)]
ROTATE_BYTES = {"cuda": 400 << 20, "cpu": 64 << 20}


@dataclass
class Work:
    """One op on rotating buffers.

    Attributes:
        ours, naive: the same work, one call for each buffer.
        check: raises AssertionError unless both agree; runs first.
        size: bytes that must move in one call, None where the work is not bound by memory.
        reset: restores what the calls change.
        naive_scale: what the naive time is multiplied by, where it does a part of the work.
    """

    ours: list[Callable]
    naive: list[Callable]
    check: Callable[[], None]
    size: int | None
    reset: Callable | None = None
    naive_scale: float = 1.0
    keep_alive: list = field(default_factory=list)


def count(size: int, device: str) -> int:
    """Buffers of a size that together exceed the caches."""
    return max(2, ROTATE_BYTES[device] // size + 1)


def random_weight(rows: int, cols: int, device: str, dtype=BF16) -> Tensor:
    return (torch.randn(rows, cols, device=device) * 0.02).to(dtype)


def random_scale(cols: int, device: str) -> Tensor:
    return torch.randn(cols, device=device).exp() + 0.1


def random_keep(rows: int, cols: int, device: str) -> Tensor:
    return torch.randint(cols // 4, 3 * cols // 4, (rows,), device=device)


def same(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual, expected), f"{int((actual != expected).sum())} of {actual.numel()} entries differ"


# stats


def sq_sums(device: str, tokens: int, cols: int) -> Work:
    size = tokens * cols * 2
    xs = [torch.randn(tokens, cols, device=device).to(BF16) for _ in range(count(size, device))]
    acc = torch.zeros(cols, device=device)

    def check():
        found = torch.zeros(cols, device=device)
        fk.accumulate_sq_sums_(found, xs[0])
        torch.testing.assert_close(found.double(), xs[0].double().square().sum(0), rtol=1e-6, atol=0)
        again = torch.zeros(cols, device=device)
        fk.accumulate_sq_sums_(again, xs[0])
        same(again, found)

    return Work(
        [lambda x=x: fk.accumulate_sq_sums_(acc, x) for x in xs],
        [lambda x=x: acc.add_(torch.linalg.vector_norm(x, 2, 0, dtype=torch.float32).square_()) for x in xs],
        check,
        size,
    )


def sq_sums_block(device: str, tokens: int, columns: list[int]) -> Work:
    """All inputs and output gradients of one block."""
    xs = [torch.randn(tokens, cols, device=device).to(BF16) for cols in columns]
    accs = [torch.zeros(cols, device=device) for cols in columns]

    def check():
        found = [torch.zeros_like(a) for a in accs]
        fk.foreach_accumulate_sq_sums_(found, xs)
        for f, x in zip(found, xs, strict=True):
            torch.testing.assert_close(f.double(), x.double().square().sum(0), rtol=1e-6, atol=0)

    def naive():
        for acc, x in zip(accs, xs, strict=True):
            acc += x.float().pow(2).sum(0)

    return Work([lambda: fk.foreach_accumulate_sq_sums_(accs, xs)], [naive], check, tokens * sum(columns) * 2)


# select


def naive_row_topk_(weight: Tensor, scale: Tensor, keep: Tensor) -> None:
    """The usual way: stable argsort of the scores, scatter, multiply."""
    order = torch.argsort(weight.float().abs() * scale, dim=1, stable=True)
    cols = weight.shape[1]
    kept = torch.arange(cols, device=weight.device).expand_as(order) >= cols - keep[:, None]
    weight.mul_(torch.empty_like(weight, dtype=torch.bool).scatter_(1, order, kept))


def row_topk(device: str, rows: int, cols: int, *, equal: bool = False) -> Work:
    size = rows * cols * 2
    fresh = [random_weight(rows, cols, device) for _ in range(count(size, device))]
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
            found = fresh[0][chunk[0] : chunk[-1] + 1].clone()
            fk.row_topk_prune_(found, scale, keep[chunk[0] : chunk[-1] + 1])
            same(found, expected)

    return Work(
        [lambda w=w: fk.row_topk_prune_(w, scale, keep, bad=bad) for w in weights],
        [lambda w=w: naive_row_topk_(w, scale, keep) for w in weights],
        check,
        2 * size,
        reset,
    )


def row_topk_equal(device: str, rows: int, cols: int) -> Work:
    """The worst ties: all weights and scales equal, any count."""
    return row_topk(device, rows, cols, equal=True)


def row_topk_model(device: str, shapes: list[tuple[int, int]]) -> Work:
    """Every matrix of a model, in one call."""
    weights = [random_weight(r, c, device) for r, c in shapes]
    scales = [random_scale(c, device) for _, c in shapes]
    keeps = [random_keep(r, c, device) for r, c in shapes]
    bad = torch.zeros(len(shapes), dtype=torch.int32, device=device)

    def check():
        picked = [shapes.index(shape) for shape in dict.fromkeys(shapes)]
        found = [weights[i].clone() for i in picked]
        fk.foreach_row_topk_prune_(found, [scales[i] for i in picked], [keeps[i] for i in picked])
        for f, i in zip(found, picked, strict=True):
            expected = weights[i].clone()
            naive_row_topk_(expected, scales[i], keeps[i])
            same(f, expected)

    def reset():
        for w in weights:
            w.normal_(0, 0.02)

    def naive():
        for w, s, k in zip(weights, scales, keeps, strict=True):
            naive_row_topk_(w, s, k)

    size = sum(w.numel() * 4 for w in weights)
    return Work([lambda: fk.foreach_row_topk_prune_(weights, scales, keeps, bad=bad)], [naive], check, size, reset)


def threshold(device: str, shapes: list[tuple[int, int]], naive_share: int) -> Work:
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

    size = sum(w.numel() * 2 for w in weights)
    return Work(
        [lambda: fk.select_threshold(weights, rows, cols, total, bad=bad)], [naive], check, size,
        naive_scale=len(shapes) / (part.stop or 1),
    )  # fmt: skip


# sparse24


def naive_24_(weight: Tensor, scale: Tensor) -> None:
    groups = (weight.float().abs() * scale).view(weight.shape[0], -1, 4)
    lowest = groups.topk(2, dim=2, largest=False).indices
    weight.view(weight.shape[0], -1, 4).scatter_(2, lowest, 0)


def nm(device: str, rows: int, cols: int) -> Work:
    size = rows * cols * 2
    fresh = [random_weight(rows, cols, device) for _ in range(count(size, device))]
    weights, scale = [w.clone() for w in fresh], random_scale(cols, device)
    bad = torch.zeros(1, dtype=torch.int32, device=device)

    def reset():
        for w, f in zip(weights, fresh, strict=True):
            w.copy_(f)

    def check():
        found = fresh[0].clone()
        fk.nm_prune_(found, scale, 2, 4)
        order = torch.argsort((fresh[0].float().abs() * scale).view(rows, -1, 4), dim=2, stable=True)[..., :2]
        same(found, fresh[0].clone().view(rows, -1, 4).scatter_(2, order, 0).view(rows, cols))

    return Work(
        [lambda w=w: fk.nm_prune_(w, scale, 2, 4, bad=bad) for w in weights],
        [lambda w=w: naive_24_(w, scale) for w in weights],
        check,
        2 * size,
        reset,
    )


def compress(device: str, rows: int, cols: int) -> Work:
    from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass as from_dense

    size = rows * cols * 2
    weights = [random_weight(rows, cols, device) for _ in range(count(size, device))]
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
        for found, expected in zip(fk.compress_24(weights[0], scale), from_dense(pruned), strict=True):
            same(found, expected)

    return Work(
        [lambda w=w: fk.compress_24(w, scale, bad=bad) for w in weights],
        [lambda w=w: naive(w) for w in weights],
        check,
        rows * cols * 25 // 8,
    )


def compress_cusparselt(device: str, rows: int, cols: int) -> Work:
    work = compress(device, rows, cols)
    weights = [random_weight(rows, cols, device) for _ in range(count(rows * cols * 2, device))]
    scale = random_scale(cols, device)

    def naive(w):
        pruned = w.clone()
        naive_24_(pruned, scale)
        return torch._cslt_compress(pruned)

    def check():
        pruned = weights[0].clone()
        fk.nm_prune_(pruned, scale, 2, 4)
        found, x = fk.compress_24_cusparselt(weights[0], scale), torch.randn(cols, 64, device=device).to(BF16)
        torch.testing.assert_close(torch._cslt_sparse_mm(found, x), pruned @ x, rtol=2e-2, atol=2e-2)

    ours = [lambda w=w: fk.compress_24_cusparselt(w, scale) for w in weights]
    return Work(ours, [lambda w=w: naive(w) for w in weights], check, work.size)


# budgets


def naive_budgets(v: Tensor, total: int, k_max: int, k_min: int = 1) -> Tensor:
    """The paper's loop for one matrix, clamping one bound at a time so that the total holds."""
    keep, free, left = torch.zeros_like(v), torch.ones_like(v, dtype=torch.bool), float(total)
    while True:
        share = left * v / v[free].sum()
        high, low = free & (share > k_max), free & (share < k_min)
        excess = float(((share - k_max) * high).sum() - ((k_min - share) * low).sum())
        fixed, value = (high, k_max) if excess >= 0 and bool(high.any()) else (low, k_min)
        if not bool(fixed.any()):
            break
        keep[fixed], free = value, free & ~fixed
        left -= value * int(fixed.sum())
    base = torch.where(free, share.floor(), keep)
    rest = torch.where(free, share - share.floor(), -1.0)
    base[torch.sort(rest, descending=True, stable=True).indices[: total - int(base.sum())]] += 1
    return base.long()


def budgets(device: str, shapes: list[tuple[int, int]]) -> Work:
    signals = [torch.randn(r, device=device, dtype=torch.float64).mul(1.5).exp() for r, _ in shapes]
    totals, most = [r * c // 2 for r, c in shapes], [c for _, c in shapes]
    bad = torch.zeros(1, dtype=torch.int32, device=device)

    def naive():
        return [naive_budgets(v, total, c) for v, total, c in zip(signals, totals, most, strict=True)]

    def check():
        found = fk.allocate_budgets(signals, totals, k_max=most)
        for k, expected, total in zip(found, naive(), totals, strict=True):
            assert int(k.sum()) == int(expected.sum()) == total
            assert int((k - expected).abs().max()) <= 1

    return Work([lambda: fk.allocate_budgets(signals, totals, k_max=most, bad=bad)], [naive], check, None)


# obs


def gram(device: str, tokens: int, cols: int) -> Work:
    x = torch.randn(tokens, cols, device=device).to(BF16)
    hessian = torch.zeros(cols, cols, device=device)

    def check():
        found = torch.zeros(cols, cols, device=device)
        fk.accumulate_gram_(found, x)
        expected = x.double().T @ x.double()
        assert float((found.double() - expected).norm() / expected.norm()) < 5e-5  # tensor cores cut their sums

    naive = [lambda: hessian.add_(x.float().T @ x.float())]
    return Work([lambda: fk.accumulate_gram_(hessian, x)], naive, check, None)


def hessian_of(cols: int, device: str) -> Tensor:
    x = torch.randn(2 * cols, cols, device=device) * random_scale(cols, device)
    return x.T @ x


def factor(device: str, cols: int) -> Work:
    hessian = hessian_of(cols, device)

    def naive(h):
        damped = h + 0.01 * h.diagonal().mean() * torch.eye(cols, dtype=h.dtype, device=device)
        return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)

    def check():
        found, info = fk.obs_factor(hessian)
        assert int(info) == 0 and float((found - naive(hessian.double())).norm() / found.norm()) < 1e-4

    return Work([lambda: fk.obs_factor(hessian)], [lambda: naive(hessian)], check, None)


def obs(device: str, rows: int, cols: int) -> Work:
    hessian = hessian_of(cols, device)
    upper, _ = fk.obs_factor(hessian)
    fresh = random_weight(rows, cols, device, torch.float32)
    weight = fresh.clone()

    def naive_prune_(w):
        for a in range(0, cols, 128):
            b = min(a + 128, cols)
            local, errors, u = w[:, a:b].clone(), torch.zeros(rows, b - a, device=device), upper[a:b, a:b]
            score = local.square() / u.diagonal().square()
            removed = rows * b // 2 - rows * a // 2
            drop = score <= score.flatten().sort().values[removed - 1]
            for j in range(b - a):
                q = local[:, j].masked_fill(drop[:, j], 0)
                errors[:, j] = (local[:, j] - q) / u[j, j]
                local[:, j:] -= errors[:, j : j + 1] @ u[j : j + 1, j:]
                local[:, j] = q
            w[:, a:b] = local
            w[:, b:] -= errors @ upper[a:b, b:]

    def reset():
        weight.copy_(fresh)

    def check():
        found, expected = fresh.clone(), fresh.clone()
        fk.obs_prune_(found, factor=upper, sparsity=Fraction(1, 2))
        naive_prune_(expected)
        assert int((found == 0).sum()) == rows * cols // 2
        assert float(((found == 0) != (expected == 0)).float().mean()) < 1e-3

    return Work(
        [lambda: fk.obs_prune_(weight, factor=upper, sparsity=Fraction(1, 2))], [lambda: naive_prune_(weight)],
        check, None, reset,
    )  # fmt: skip
