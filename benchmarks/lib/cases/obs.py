"""Gram matrix, SparseGPT factor and walk: inputs, naive torch baselines and the checks that both agree."""

from fractions import Fraction

import torch
from torch import Tensor

import fwanda_kernels as fk

from .case import BF16, Case, random_scale, random_weight


def gram(device: str, tokens: int, cols: int) -> Case:
    """X^T X of one input, added to a Hessian."""
    x = torch.randn(tokens, cols, device=device).to(BF16)
    hessian = torch.zeros(cols, cols, device=device)

    def check():
        ours = torch.zeros(cols, cols, device=device)
        fk.accumulate_gram_(ours, x)
        expected = x.double().T @ x.double()
        assert float((ours.double() - expected).norm() / expected.norm()) < 5e-5  # tensor cores truncate their sums

    naive = [lambda: hessian.add_(x.float().T @ x.float())]
    return Case([lambda: fk.accumulate_gram_(hessian, x)], naive, check, None)


def random_hessian(cols: int, device: str) -> Tensor:
    x = torch.randn(2 * cols, cols, device=device) * random_scale(cols, device)
    return x.T @ x


def factor(device: str, cols: int) -> Case:
    """The upper Cholesky factor of the damped inverse Hessian."""
    hessian = random_hessian(cols, device)

    def naive(h):
        damped = h + 0.01 * h.diagonal().mean() * torch.eye(cols, dtype=h.dtype, device=device)
        return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)

    def check():
        ours, info = fk.obs_factor(hessian)
        assert int(info) == 0 and float((ours - naive(hessian.double())).norm() / ours.norm()) < 1e-4

    return Case([lambda: fk.obs_factor(hessian)], [lambda: naive(hessian)], check, None)


def naive_obs_prune_(weight: Tensor, upper: Tensor) -> None:
    """The walk of SparseGPT over blocks of 128 columns, with a sort of each block; half is removed."""
    rows, cols = weight.shape
    for a in range(0, cols, 128):
        b = min(a + 128, cols)
        local, u = weight[:, a:b].clone(), upper[a:b, a:b]
        errors = torch.zeros(rows, b - a, device=weight.device)
        score = local.square() / u.diagonal().square()
        removed = rows * b // 2 - rows * a // 2
        drop = score <= score.flatten().sort().values[removed - 1]
        for j in range(b - a):
            q = local[:, j].masked_fill(drop[:, j], 0)
            errors[:, j] = (local[:, j] - q) / u[j, j]
            local[:, j:] -= errors[:, j : j + 1] @ u[j : j + 1, j:]
            local[:, j] = q
        weight[:, a:b] = local
        weight[:, b:] -= errors @ upper[a:b, b:]


def obs(device: str, rows: int, cols: int) -> Case:
    """The walk over one matrix, fp32, half removed."""
    hessian = random_hessian(cols, device)
    with fk.use_backend("reference"):  # whichever backend is measured
        upper, _ = fk.obs_factor(hessian)
    fresh = random_weight(rows, cols, device, torch.float32)
    weight = fresh.clone()

    def reset():
        weight.copy_(fresh)

    def check():
        ours, expected = fresh.clone(), fresh.clone()
        fk.obs_prune_(ours, factor=upper, sparsity=Fraction(1, 2))
        naive_obs_prune_(expected, upper)
        assert int((ours == 0).sum()) == rows * cols // 2
        assert float(((ours == 0) != (expected == 0)).float().mean()) < 1e-3

    ours = [lambda: fk.obs_prune_(weight, factor=upper, sparsity=Fraction(1, 2))]
    return Case(ours, [lambda: naive_obs_prune_(weight, upper)], check, None, reset)
