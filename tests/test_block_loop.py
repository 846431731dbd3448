"""The loop over the blocks: what it records of each matrix and row, and how it goes on in the middle of them."""

from fractions import Fraction

import oracle
import pytest
import tiny
import torch
from interrupt import interrupted_after

import fwanda_kernels as fk
import fwanda_pruner
from fwanda_pruner import RunState
from fwanda_pruner.model.targets import find_targets
from fwanda_pruner.report.record import ROW_BINS

TOKENS = tiny.tokens(6, 24)
STATISTICS_ONLY = [("wanda", "uniform"), ("fwanda", "uniform"), ("fwanda", "row"), ("fwanda", "global")]
IN_BLOCKS = [  # (method, allocation, order): those whose finished blocks are kept
    ("wanda", "uniform", "sequential"),
    ("wanda", "uniform", "true-sequential"),
    ("fwanda", "row", "sequential"),
    ("sparsegpt", "uniform", "onepass"),
    ("sparsegpt", "uniform", "sequential"),
    ("sparsegpt", "uniform", "true-sequential"),
    ("fsparsegpt", "row", "onepass"),
    ("fsparsegpt", "global", "true-sequential"),
]


def prune(model, **settings):
    return fwanda_pruner.prune(model, **{"calibration": TOKENS, "no_check": True, "progress": False, **settings})


def weights(model) -> dict[str, torch.Tensor]:
    return {name: oracle.weight_of(module) for name, module in oracle.linear_layers(model).items()}


def histogram(model) -> list[int]:
    """Rows by the share of weights that they keep: bin i has those in [i / 50, (i + 1) / 50), the last also 1."""
    counts = [0] * ROW_BINS
    for weight in weights(model).values():
        for kept in (weight != 0).sum(1).tolist():
            counts[min(ROW_BINS - 1, Fraction(kept, weight.shape[1]) * ROW_BINS // 1)] += 1
    return counts


# What is recorded


@pytest.mark.parametrize(("method", "allocation"), [*STATISTICS_ONLY, ("magnitude", "layer"), ("sparsegpt", "uniform")])
def test_the_row_histogram_counts_the_shares_that_rows_keep(method, allocation):
    model = tiny.llama(intermediate_size=50)  # each share of 50 columns is the lower end of a bin
    report = prune(model, method=method, allocation=allocation, sparsity="0.7")
    assert report.row_histogram == histogram(model) and len(report.row_histogram) == ROW_BINS
    assert sum(report.row_histogram) == sum(len(weight) for weight in weights(model).values())


def test_rows_that_keep_all_or_nothing_are_in_the_outer_bins():
    model = tiny.llama()
    for module in oracle.linear_layers(model).values():
        module.weight.data[::2] *= 1e-6
    report = prune(model, method="magnitude", sparsity="0.5")
    rows = sum(len(weight) for weight in weights(model).values())
    assert report.row_histogram == [rows // 2, *[0] * (ROW_BINS - 2), rows // 2]


@pytest.mark.parametrize(("method", "allocation"), STATISTICS_ONLY)
@pytest.mark.parametrize("sparsity", ["0.5", "0.7"])
def test_the_disagreement_is_the_share_of_mask_entries_that_wanda_sets_otherwise(method, allocation, sparsity):
    model, wanda = tiny.llama(), tiny.llama()
    report = prune(model, method=method, allocation=allocation, sparsity=sparsity)
    oracle.wanda(wanda, TOKENS, sparsity)
    for row in report.matrices:
        mine, theirs = weights(model)[row.name] != 0, weights(wanda)[row.name] != 0
        expected = float((mine != theirs).double().mean())
        assert row.wanda_disagreement == pytest.approx(expected, abs=1e-6), row.name
    assert any(row.wanda_disagreement for row in report.matrices) == (allocation != "uniform")


def test_the_masks_of_an_obs_walk_are_compared_with_those_of_the_dense_weights():
    model, wanda = tiny.llama(), tiny.llama()
    report = prune(model, method="fsparsegpt", order="sequential", sparsity="0.6")
    oracle.wanda(wanda, TOKENS, "0.6")
    for row in report.matrices:
        differ = (weights(model)[row.name] != 0) != (weights(wanda)[row.name] != 0)
        assert row.wanda_disagreement == pytest.approx(float(differ.double().mean()), abs=1e-6) and differ.any()


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "magnitude"},
        {"method": "sparsegpt"},
        {"method": "wanda", "order": "sequential"},
        {"method": "wanda", "pattern": "2:4"},
        {"method": "fwanda", "allocation": "response", "pattern": "2:4"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_without_statistics_or_under_a_pattern_there_is_no_disagreement(settings):
    assert {row.wanda_disagreement for row in prune(tiny.llama(), **settings).matrices} == {None}


def test_a_matrix_that_was_skipped_has_no_disagreement_and_no_rows():
    model = tiny.llama()
    report = prune(model, method="wanda", exclude=["*.0.*"])
    skipped = [row for row in report.matrices if row.skipped]
    assert len(skipped) == 7 and {row.wanda_disagreement for row in skipped} == {None}
    pruned = [weight for name, weight in weights(model).items() if ".1." in name]
    assert sum(report.row_histogram) == sum(map(len, pruned))


# In the middle of the blocks


def run(output, model, settings, *, resume=False):
    return prune(model, state=RunState(output, resume=resume), sparsity="0.5", **settings)


@pytest.mark.fault("long run dies")
@pytest.mark.parametrize(("method", "allocation", "order"), IN_BLOCKS)
def test_a_restored_block_changes_no_bit_of_the_weights_and_nothing_of_the_record(method, allocation, order, tmp_path):
    settings = {"method": method, "allocation": allocation, "order": order}
    whole, resumed = tiny.llama(blocks=3), tiny.llama(blocks=3)
    expected = run(tmp_path / "whole", whole, settings)
    with pytest.raises(KeyboardInterrupt), interrupted_after("prune-00001"):
        run(tmp_path / "out", tiny.llama(blocks=3), settings)
    report = run(tmp_path / "out", resumed, settings, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert report.matrices == expected.matrices and report.row_histogram == expected.row_histogram
    assert report.row_histogram == histogram(resumed)


@pytest.mark.fault("long run dies")
@pytest.mark.parametrize("order", ["onepass", "sequential", "true-sequential"])
def test_a_restored_block_is_not_pruned_again(order, tmp_path, monkeypatch):
    settings = {"method": "sparsegpt", "order": order}
    with pytest.raises(KeyboardInterrupt), interrupted_after("prune-00001"):
        run(tmp_path / "out", tiny.llama(blocks=3), settings)
    model, plain, pruned = tiny.llama(blocks=3), fk.obs_prune_, []

    def prune_and_note(weight, **arguments):
        pruned.append(weight.data_ptr())
        return plain(weight, **arguments)

    monkeypatch.setattr(fk, "obs_prune_", prune_and_note)
    run(tmp_path / "out", model, settings, resume=True)
    last = [target.weight.data_ptr() for target in find_targets(model)[0] if target.block == 2]
    assert sorted(pruned) == sorted(last)


def test_a_restored_block_without_targets_is_passed_through(tmp_path):
    settings = {"method": "sparsegpt", "exclude": ["*layers.0.*", "*layers.2.*"]}
    whole, resumed = tiny.llama(blocks=4), tiny.llama(blocks=4)
    run(tmp_path / "whole", whole, settings)
    with pytest.raises(KeyboardInterrupt), interrupted_after("prune-00002"):
        run(tmp_path / "out", tiny.llama(blocks=4), settings)
    run(tmp_path / "out", resumed, settings, resume=True)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_methods_that_run_no_text_keep_no_blocks(tmp_path):
    """Their blocks are pruned faster than written."""
    state = RunState(tmp_path / "out")
    prune(tiny.llama(), method="fwanda", allocation="global", state=state)
    names = {path.stem for path in state.folder.glob("*.safetensors")}
    assert {"calibrate", "budgets"} <= names and not any(name.startswith("prune") for name in names)
