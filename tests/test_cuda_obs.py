"""The OBS ops on a CUDA device: each backend against the reference there and against float64."""

from fractions import Fraction

import pytest
import torch

import fwanda_kernels as fk
from fwanda_kernels.testing import WEIGHT_DTYPES, make_keep, make_weight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

backends = pytest.mark.parametrize("backend", ["native", "triton", "reference"])


def skip_unless_served(op: str, backend: str) -> None:
    if backend not in fk.backends()[op]["cuda"]:
        pytest.skip(fk.explain(op)["cuda"].get(backend, "not served"))


def make_hessian(cols: int, dead=()) -> torch.Tensor:
    """[cols, cols] of correlated columns of different size; those in `dead` are zero."""
    mix = torch.eye(cols, device="cuda") + 0.3 * torch.randn(cols, cols, device="cuda") / cols**0.5
    x = torch.randn(2 * cols, cols, device="cuda") @ mix * torch.linspace(0.2, 3, cols, device="cuda")
    x[:, list(dead)] = 0
    return x.T @ x


def prune(backend: str, weight: torch.Tensor, factor: torch.Tensor, **choice) -> torch.Tensor:
    pruned = weight.clone()
    with fk.use_backend(backend):
        fk.obs_prune_(pruned, factor=factor, **choice)
    return pruned


# gram


@backends
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_gram_is_near_fp64_symmetric_and_deterministic(dtype, backend):
    skip_unless_served("accumulate_gram_", backend)
    if backend == "triton" and dtype == torch.float32:
        pytest.skip("the tensor cores would round fp32")
    for tokens, cols in ((1, 1), (130, 33), (3000, 1030), (600, 4096)):
        x = make_weight(tokens, cols, dtype, device="cuda")
        mask = torch.arange(tokens, device="cuda") % 3 != 1
        x[~mask] = float("nan")
        found = torch.eye(cols, device="cuda")
        again = found.clone()
        with fk.use_backend(backend):
            for hessian in (found, again):
                fk.accumulate_gram_(hessian, x, token_mask=mask)
                fk.accumulate_gram_(hessian, x[mask])
        wide = x[mask].double()
        expected = 2 * wide.T @ wide + torch.eye(cols, device="cuda")
        assert torch.equal(found, again)
        if backend != "reference":
            assert torch.equal(found, found.T)
        assert (found - expected).norm() < 2e-5 * expected.norm(), (tokens, cols)


def test_gram_beyond_two_to_the_31_elements():
    tokens, cols = (1 << 31) // 4096 + 100, 4096
    x = torch.zeros(tokens, cols, dtype=torch.bfloat16, device="cuda")
    x[-1] = 2.0
    hessian = torch.zeros(cols, cols, device="cuda")
    fk.accumulate_gram_(hessian, x)
    assert (hessian == 4).all()


# factor


@pytest.mark.parametrize("cols", [1, 100, 129, 1000, 4096])
def test_factor_is_the_float64_factor(cols):
    hessian = make_hessian(cols, dead=(cols // 2,) if cols > 1 else ())
    before = hessian.clone()
    factor, info = fk.obs_factor(hessian)
    wide = hessian.double()
    diagonal = wide.diagonal()
    dead = diagonal == 0
    diagonal.masked_fill_(dead, 1)
    diagonal += 0.01 * diagonal.mean().item()
    expected = torch.linalg.cholesky(torch.linalg.inv(wide), upper=True)
    expected.diagonal().mul_(1 - 2 * dead.double())
    assert int(info) == 0 and torch.equal(factor, factor.triu()) and torch.equal(hessian, before)
    assert (factor - expected).norm() < 1e-4 * expected.norm()
    assert torch.equal(factor, fk.obs_factor(hessian)[0])


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_factor_of_a_broken_hessian_has_info(value):
    hessian = make_hessian(300)
    hessian[200, 200] = value
    assert int(fk.obs_factor(hessian)[1]) != 0


# prune

CHOICES = {
    "sparsity": lambda r, c: {"sparsity": "0.37"},
    "row_weight": lambda r, c: {"sparsity": "0.5", "row_weight": torch.linspace(0.1, 4, r, device="cuda")},
    "all": lambda r, c: {"sparsity": 1},
    "none": lambda r, c: {"sparsity": 0},
    "keep": lambda r, c: {"keep": make_keep(r, c, device="cuda")},
    "mask": lambda r, c: {"mask": (make_weight(c, r, seed=6, device="cuda") > 0).T},
    "2:4": lambda r, c: {"pattern": (2, 4)},
    "5:8": lambda r, c: {"pattern": (5, 8)},
    "16:32": lambda r, c: {"pattern": (16, 32)},
    "0:3": lambda r, c: {"pattern": (0, 3)},
}


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("choice", CHOICES)
def test_prune_has_the_reference_s_masks_and_weights(choice, backend):
    """Rounding differs, and may turn a close choice here and there; the counts are exact all the same."""
    skip_unless_served("obs_prune_", backend)
    if (backend, choice) == ("native", "0:3"):
        pytest.skip("groups of 4, 8, 16 or 32 only")
    for rows, cols, block, dtype in ((300, 1200, 128, torch.bfloat16), (33, 202, 20, torch.float32)):
        weight = make_weight(rows, cols, dtype, device="cuda")
        factor, _ = fk.obs_factor(make_hessian(cols, dead=(5,)))
        arguments = {"block": block, **CHOICES[choice](rows, cols)}
        found, expected = (prune(name, weight, factor, **arguments) for name in (backend, "reference"))
        strided = prune(backend, weight.T.contiguous().T, factor, **arguments)
        assert torch.equal(found, strided) and torch.equal(found, prune(backend, weight, factor, **arguments))
        different = int(((found == 0) != (expected == 0)).sum())
        assert different <= weight.numel() * 1e-4
        live = torch.arange(cols, device="cuda") != 5
        assert int((found[:, live] == 0).sum()) == int((expected[:, live] == 0).sum())
        assert (found - expected).float().norm() <= (1e-2 if different else 4e-3) * expected.float().norm()


@pytest.mark.parametrize("backend", ["native", "triton"])
@pytest.mark.parametrize("kind", ["all_equal", "two_values", "heavy_ties", "zeros"])
def test_equal_scores_go_by_row_then_column(kind, backend):
    skip_unless_served("obs_prune_", backend)
    weight, eye = make_weight(500, 200, torch.float16, kind=kind, device="cuda"), torch.eye(200, device="cuda")
    for arguments in ({"sparsity": "0.5"}, {"sparsity": "0.011"}, {"sparsity": "0.999"}, {"pattern": (3, 4)}):
        assert torch.equal(prune(backend, weight, eye, **arguments), prune("reference", weight, eye, **arguments))
    keep = make_keep(500, 200, device="cuda")
    assert torch.equal(prune(backend, weight, eye, keep=keep), prune("reference", weight, eye, keep=keep))


def sweep_in_float64(weight: torch.Tensor, hessian: torch.Tensor, share: Fraction) -> torch.Tensor:
    w, h = weight.double(), hessian.double()
    h.diagonal().add_(0.01 * h.diagonal().mean())
    upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    rows, cols = w.shape
    for a in range(0, cols, 128):
        b = min(a + 128, cols)
        score = (w[:, a:b] / upper.diagonal()[a:b]).square().flatten()
        count = int(share * rows * b) - int(share * rows * a)
        drop = torch.zeros_like(score, dtype=torch.bool)
        drop[score.sort(stable=True).indices[:count]] = True
        drop = drop.view(rows, b - a)
        for c in range(a, b):
            error = torch.where(drop[:, c - a], w[:, c], 0) / upper[c, c]
            w[:, c:] -= error[:, None] * upper[c, c:]
            w[:, c].masked_fill_(drop[:, c - a], 0)
    return w


@backends
def test_output_error_is_that_of_a_float64_sweep_whatever_the_process_allows(backend):
    """Within 1e-3; and TF32, where allowed for products, changes no bit."""
    skip_unless_served("obs_prune_", backend)
    rows, cols = 512, 1536
    weight, hessian = make_weight(rows, cols, device="cuda"), make_hessian(cols)

    def output_error(pruned):
        change = pruned.double() - weight.double()
        return float(((change @ hessian.double()) * change).sum().sqrt())

    expected = output_error(sweep_in_float64(weight, hessian, Fraction(1, 2)))
    results = []
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        try:
            factor, _ = fk.obs_factor(hessian)
            results.append(prune(backend, weight, factor, sparsity=0.5))
        finally:
            torch.set_float32_matmul_precision("highest")
    assert abs(output_error(results[0]) - expected) < 1e-3 * expected
    assert torch.equal(*results)
