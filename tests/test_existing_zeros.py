"""Weights that are 0 before pruning stay 0, for every method; where that makes more zeros than asked, it is said."""

import pytest
import tiny
import torch

import fwanda_pruner
from fwanda_pruner.model.targets import find_targets

ASKED = [{"sparsity": 0.5}, {"sparsity": 0.7}, {"sparsity": 0.2}, {"pattern": "2:4"}, {"pattern": "1:4"}]
SPARSE = {  # what the model holds before
    "half of each matrix": lambda weight: weight.abs() < weight.abs().median(),
    "half of each row": lambda weight: weight.abs() < weight.abs().median(1, keepdim=True).values,
    "2:4": lambda weight: groups_of_4(weight).argsort(-1).argsort(-1).lt(2).view(weight.shape),
    "a few": lambda weight: torch.arange(weight.numel()).view(weight.shape) % 97 == 0,
    "whole columns": lambda weight: (torch.arange(weight.shape[1]) % 3 == 0).expand(weight.shape),
}


def groups_of_4(weight):
    return weight.abs().reshape(len(weight), -1, 4)


def sparse(kind: str):
    """A model with zeros, and the places of its zeros."""
    model = tiny.llama()
    weights = {target.name: target.weight for target in find_targets(model)[0]}
    zeros = {name: SPARSE[kind](weight) for name, weight in weights.items()}
    for name, weight in weights.items():
        weight.masked_fill_(zeros[name], 0)
    return model, zeros


def prune(model, **settings):
    return fwanda_pruner.prune(model, calibration=tiny.tokens(16, 24), progress=False, **settings)


RUNS = [  # (method, allocation, order)
    ("wanda", "uniform", "onepass"),
    ("sparsegpt", "uniform", "sequential"),
    ("fsparsegpt", "row", "sequential"),
]
CASES = [(run, asked, kind) for run in RUNS for asked in ASKED for kind in SPARSE] + [
    (run, asked, "half of each matrix") for run in tiny.EVERY_RUN if run not in RUNS for asked in (ASKED[0], ASKED[3])
]


@pytest.mark.fault("existing zeros")
@pytest.mark.parametrize(("run", "asked", "kind"), CASES, ids=str)
def test_no_zero_becomes_a_weight_again_and_what_is_asked_is_met(run, asked, kind):
    (method, allocation, order), (model, zeros) = run, sparse(kind)
    report = prune(model, method=method, allocation=allocation, order=order, **asked)
    by_name = {row.name: row for row in report.matrices}
    for target in find_targets(model)[0]:
        row, zero = by_name[target.name], zeros[target.name]
        assert not target.weight[zero].any(), target.name
        assert row.zeros_before == int(zero.sum())
        found = int((target.weight == 0).sum())
        assert found == row.zeros >= row.numel - row.asked
        if method == "sparsegpt" and "sparsity" in asked:  # one budget for a matrix: exactly what is asked
            assert found == max(row.numel - row.asked, row.zeros_before)
        if "pattern" in asked:
            n, m = map(int, asked["pattern"].split(":"))
            groups = groups_of_4(target.weight)
            assert ((groups != 0).sum(-1) <= n).all()
            assert not ((zero.view(groups.shape).sum(-1) <= m - n) & ((groups != 0).sum(-1) < n)).any()
    more = report.sparsity["matrices"] - report.asked
    assert any("were 0 before" in line for line in report.warnings) == (more >= 0.0005)


@pytest.mark.fault("existing zeros")
@pytest.mark.parametrize("method", ["sparsegpt", "fsparsegpt"])
def test_a_model_that_is_as_sparse_as_asked_keeps_every_bit(method):
    """Nothing is removed, so there is no error to spread."""
    model, _ = sparse("2:4")
    before = [weight.clone() for weight in model.parameters()]
    report = prune(model, method=method, pattern="2:4")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert report.sparsity["matrices"] == report.sparsity["asked"] == 0.5 and report.warnings == []


@pytest.mark.fault("existing zeros")
@pytest.mark.parametrize("sparsity", [0.5, 0.6])
def test_zeros_that_lie_unevenly_in_blocks_of_columns_are_removed_first(sparsity):
    """The walk has a share for each block of 128 columns; a block with more zeros leaves less to the others."""
    model = tiny.llama(hidden_size=256, intermediate_size=320)
    zeros = {target.name: target.weight.abs() < target.weight.abs().median() for target in find_targets(model)[0]}
    for target in find_targets(model)[0]:
        target.weight.masked_fill_(zeros[target.name], 0)
    report = prune(model, method="sparsegpt", sparsity=sparsity)
    for row, target in zip(report.matrices, find_targets(model)[0], strict=True):
        assert not target.weight[zeros[row.name]].any()
        assert row.kept_zero == 0 and row.zeros == row.numel - row.asked


@pytest.mark.fault("existing zeros")
def test_half_of_a_half_pruned_model_is_explained():
    """Zeros lie unevenly in the rows, and Wanda removes half of each row."""
    model, _ = sparse("half of each matrix")
    report = prune(model, method="wanda", sparsity=0.5)
    found = report.sparsity["matrices"]
    assert found > 0.51
    (said,) = [line for line in report.warnings if "were 0 before" in line]
    assert said.startswith(f"{found:.2%} of the weights of the pruned matrices are 0, and 50.00% were asked for: 49.9")


def test_zeros_that_the_walk_removes_anyway_change_no_bit():
    """A walk without zeros, and one with a zero that it removes first in any case."""
    plain, marked = tiny.llama(), tiny.llama()
    for model, value in ((plain, 1e-12), (marked, 0.0)):
        for target in find_targets(model)[0]:
            target.weight[:, 0] = value
    prune(plain, method="sparsegpt", sparsity=0.5)
    report = prune(marked, method="sparsegpt", sparsity=0.5)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain.parameters(), marked.parameters(), strict=True))
    assert report.warnings == []
