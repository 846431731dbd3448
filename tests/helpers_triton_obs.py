"""Ops on one backend, and checks of the Triton OBS kernels for test_triton.py: interpreted, or on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

import fwanda_kernels as fk
from fwanda_kernels.testing import assert_masks_equal, make_keep, make_weight

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"


class OnBackend:
    """The ops of torch.ops.fwanda, all on one backend: it serves or raises BackendError."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, op: str):
        def call(*arguments):
            with fk.use_backend(self._name):
                return getattr(torch.ops.fwanda, op)(*arguments)

        return call


ours, reference = OnBackend("triton"), OnBackend("reference")


def check_gram(dtype: torch.dtype) -> None:
    """Near fp64 on partial tiles, and symmetric to the bit; masked tokens do not count, whatever they hold."""
    for tokens, cols in ((70, 33), (64, 260), (3, 1), (150, 384)):
        x = make_weight(2 * tokens, cols, dtype, device=DEVICE).view(2, tokens, cols)
        mask = torch.arange(2 * tokens, device=DEVICE).view(2, tokens) % 3 != 0
        x[~mask] = float("nan")
        hessian = torch.eye(cols, device=DEVICE)
        for _ in range(2):
            ours.accumulate_gram_(hessian, x, mask)
        wide = x[mask].double()
        expected = 2 * wide.T @ wide + torch.eye(cols, device=DEVICE)
        assert torch.equal(hessian, hessian.T)
        torch.testing.assert_close(hessian.double(), expected, rtol=1e-5, atol=1e-4)


def obs_problem(rows: int, cols: int, dtype: torch.dtype, kind: str = "normal") -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and the factor of inputs whose third column is dead."""
    x = make_weight(2 * cols, cols, FP32, seed=5, device=DEVICE)
    x[:, 2:3] = 0
    return make_weight(rows, cols, dtype, kind=kind, device=DEVICE), reference.obs_factor(x.T @ x, 0.01)[0]


OBS_CHOICES = {
    "sparsity": lambda rows, cols: {"sparsity": "0.37"},
    "row_weight": lambda rows, cols: {"sparsity": "0.5", "row_weight": torch.linspace(0.1, 4, rows, device=DEVICE)},
    "all": lambda rows, cols: {"sparsity": "1"},
    "none": lambda rows, cols: {"sparsity": "0"},
    "keep": lambda rows, cols: {"keep": make_keep(rows, cols, device=DEVICE)},
    "mask": lambda rows, cols: {"mask": make_weight(rows, cols, seed=6, device=DEVICE) > 0},
    "2:4": lambda rows, cols: {"pattern": [2, 4]},
    "0:3": lambda rows, cols: {"pattern": [0, 3]},
}


def obs_pair(weight: torch.Tensor, factor: torch.Tensor, block: int, **choice) -> list[torch.Tensor]:
    """What Triton and the reference make of a copy of the weight."""
    names = ("sparsity", "keep", "mask", "pattern", "row_weight")
    arguments = [choice.get(name) for name in names]
    results = []
    for ops in (ours, reference):
        results.append(weight.clone())
        ops.obs_prune_(results[-1], None, factor, *arguments, block, 0.01)
    return results


def assert_obs_alike(weight: torch.Tensor, factor: torch.Tensor, block: int, **choice) -> None:
    found, expected = obs_pair(weight, factor, block, **choice)
    assert_masks_equal(found == 0, expected == 0)
    torch.testing.assert_close(found, expected, rtol=1e-2 if weight.dtype == BF16 else 2e-3, atol=1e-5)


def check_obs(choice: str) -> None:
    """The reference's masks, and its weights but for rounding; partial blocks and tiles."""
    for rows, cols, block, dtype in ((19, 70, 20, FP32), (5, 37, 128, BF16), (33, 32, 16, FP16), (3, 7, 1, FP32)):
        weight, factor = obs_problem(rows, cols, dtype)
        for given in (weight, weight.T.contiguous().T):
            assert_obs_alike(given, factor, block, **OBS_CHOICES[choice](rows, cols))


def check_obs_of_patterns_in_the_default_block() -> None:
    """A group of any width up to 128 divides the columns of a block, so that Triton serves it."""
    weight, factor = obs_problem(3, 300, FP32)
    for pattern in ([0, 3], [2, 3], [60, 100]):
        assert_obs_alike(weight, factor, 128, pattern=pattern)


def check_obs_of_wide_weights() -> None:
    """Errors of more than 1024 columns reach the columns on their right in two levels."""
    weight, factor = obs_problem(3, 1100, FP32)
    assert_obs_alike(weight, factor, 100, **OBS_CHOICES["mask"](3, 1100))


def check_obs_ties(kind: str) -> None:
    """Equal scores go by (row, column) over all tiles."""
    weight, eye = make_weight(70, 24, FP32, kind=kind, device=DEVICE), torch.eye(24, device=DEVICE)
    weight = torch.where(weight == 0, 0.25, weight)
    for sparsity in ("0.5", "0.31", "0.999"):
        found, expected = obs_pair(weight, eye, 16, sparsity=sparsity)
        assert torch.equal(found, expected)
    found, expected = obs_pair(weight, eye, 16, keep=torch.full((70,), 11, device=DEVICE))
    assert torch.equal(found, expected)


def check_obs_declines() -> None:
    """Blocks and groups that are too wide, and a Gram matrix of fp32; a forced backend that declines says so."""
    weight, factor = obs_problem(2, 300, FP32)
    for choice in ({"sparsity": "0.5", "block": 256}, {"pattern": (75, 150)}):
        with fk.use_backend("triton"), pytest.raises(fk.BackendError, match="obs_prune_: .*triton: declines these arg"):
            fk.obs_prune_(weight, factor=factor, **choice)
    with pytest.raises(fk.BackendError, match="accumulate_gram_: .*triton: declines these arguments"):
        ours.accumulate_gram_(factor, weight, None)


CASES = {f"gram-{dtype}": (check_gram, dtype) for dtype in (BF16, FP16)}
CASES |= {f"obs-{choice}": (check_obs, choice) for choice in OBS_CHOICES}
CASES |= {f"obs_ties-{kind}": (check_obs_ties, kind) for kind in ("all_equal", "two_values", "heavy_ties")}
CASES |= {"obs_patterns_in_the_default_block": (check_obs_of_patterns_in_the_default_block,)}
CASES |= {"obs_of_wide_weights": (check_obs_of_wide_weights,), "obs_declines": (check_obs_declines,)}
