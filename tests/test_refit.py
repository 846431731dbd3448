"""The update of the weights under a mask that a search has fixed: kept in a block only if the judged loss falls."""

from dataclasses import replace

import oracle
import pytest
import tiny
import torch
from interrupt import interrupted_after

import fwanda_pruner
from fwanda_pruner import PruneConfig, RunState
from fwanda_pruner.allocate.budgets import ScoreScales, global_scales, keep_budgets
from fwanda_pruner.allocate.judge import Judge
from fwanda_pruner.allocate.masks import masks_of, pack
from fwanda_pruner.allocate.search import Choice, candidates, wanda_config
from fwanda_pruner.engine.resident import ResidentEngine
from fwanda_pruner.engine.resume import NoSteps
from fwanda_pruner.measure.statistics import measure_statistics
from fwanda_pruner.methods.block_loop import prune_blocks
from fwanda_pruner.methods.job import Inputs
from fwanda_pruner.methods.refit import Refit
from fwanda_pruner.model.targets import find_targets
from fwanda_pruner.run.pipeline import run_prune
from fwanda_pruner.text.domains import Domain

TOKENS, HELD_OUT, OTHER = tiny.tokens(16, 24), tiny.tokens(5, 24, seed=9), tiny.tokens(3, 24, seed=8)
CONFIG = PruneConfig(method="fsparsegpt", allocation="response", sparsity="0.6").resolved()
ORDERS = ["onepass", "sequential", "true-sequential"]


class Prepared:
    """A model with masks that a search could have fixed, and the inputs of the block loop.

    Attributes:
        masked: name -> [R, C] dense weight under the masks.
    """

    def __init__(self, model, order: str = "onepass"):
        self.engine = ResidentEngine(model, find_targets(model)[0], progress=False)
        self.config = replace(CONFIG, order=order)
        self.statistics = measure_statistics(self.engine, TOKENS)
        start = global_scales(self.config, self.engine, self.statistics)
        generator = torch.Generator().manual_seed(1)
        columns = {name: 0.5 + torch.rand(len(ones), generator=generator) for name, ones in start.columns.items()}
        self.scales = ScoreScales(start.rows, columns)
        self.masks = pack(self.engine, masks_of(self.config, self.engine, self.statistics, self.scales))
        self.masked = {t.name: t.weight.clone() for t in self.engine.targets}
        self.masks.prune_(self.masked)

    def judge(self) -> Judge:
        domains = [Domain(name, True, False, True, ids[:0], ids) for name, ids in (("one", HELD_OUT), ("two", OTHER))]
        wanda = masks_of(wanda_config(self.config), self.engine, self.statistics)
        return Judge(self.engine, domains, wanda)

    def prune(self, judge) -> dict:
        """Report.refit."""
        budgets = keep_budgets(self.config, self.engine, self.statistics, self.scales)
        refit = Refit(judge, self.masks)
        inputs = Inputs(TOKENS, self.statistics, budgets, self.scales, None, refit)
        return prune_blocks(self.engine, self.config, inputs, NoSteps())[2]

    def kept_blocks(self) -> list[bool]:
        """Whether each block differs from its dense weights under the masks; checks the masks themselves."""
        kept = [False] * self.engine.block_count
        for target in self.engine.targets:
            assert torch.equal(target.weight != 0, self.masked[target.name] != 0), target.name
            kept[target.block] |= not torch.equal(target.weight, self.masked[target.name])
        return kept


class Script:
    """A judge with given losses: of the masks alone, and after the update of each block."""

    def __init__(self, *losses: float):
        self.left = list(losses)

    def losses(self, masks) -> float:
        return self.left.pop(0)

    def rank(self, loss: float) -> tuple[bool, float]:
        return False, loss


# The decision


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", ["mistral", "gpt2", "mixtral"])
def test_the_result_is_never_worse_than_the_masks_alone(family, order):
    found = Prepared(tiny.build(family), order)
    judge = found.judge()
    alone = judge.losses(found.masks)
    refit = found.prune(judge)
    kept = found.kept_blocks()
    final = judge.losses(None)
    assert refit == {"blocks": 2, "kept": sum(kept)}
    assert judge.increase(final) < judge.increase(alone) if any(kept) else final == alone


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("losses", "kept"),
    [
        ([3.0, 2.0, 2.5, 1.0], [True, False, True]),
        ([3.0, 4.0, 3.0, 2.9], [False, False, True]),
        ([3.0, 2.0, 2.0, 2.0], [True, False, False]),
        ([3.0, 3.0, float("nan"), float("inf")], [False, False, False]),
    ],
    ids=str,
)
def test_a_block_keeps_its_update_only_if_the_loss_falls(losses, kept, order):
    """Otherwise it gets its dense weights under the masks, to the bit."""
    found, judge = Prepared(tiny.llama(blocks=3), order), Script(*losses)
    assert found.prune(judge) == {"blocks": 3, "kept": sum(kept)}
    assert found.kept_blocks() == kept and not judge.left


@pytest.mark.parametrize("order", ORDERS)
def test_later_blocks_read_what_a_rejected_block_gives_and_onepass_what_the_dense_block_gives(order):
    """The update of the last block is that of a model whose first block was masked from the start."""
    found, other = Prepared(tiny.llama(), order), Prepared(tiny.llama(), order)
    found.prune(Script(3.0, 4.0, 1.0))
    if order != "onepass":
        for target in other.engine.targets_of(0):
            target.weight.copy_(other.masked[target.name])
    other.prune(Script(3.0, 4.0, 1.0))
    for mine, theirs in zip(found.engine.targets_of(1), other.engine.targets_of(1), strict=True):
        assert torch.equal(mine.weight, theirs.weight)


def test_the_update_itself_is_that_of_obs_under_the_mask():
    found = Prepared(tiny.llama())
    dense = {t.name: t.weight.clone() for t in found.engine.targets_of(0)}
    inputs = oracle.inputs_of(found.engine.model, TOKENS)
    found.prune(Script(3.0, 2.0, 1.0))
    for target in found.engine.targets_of(0):
        x = inputs[target.name].double()
        expected, _ = oracle.obs_walk(dense[target.name], x.T @ x, mask=found.masked[target.name] != 0)
        difference = (target.weight - expected).norm() / expected.norm()
        assert difference < 1e-3, target.name


# Whole runs


def prune(model, *, choice=None, **settings):
    """The report and the choice of a run."""
    state = settings.pop("state", None)
    config = PruneConfig(**{"method": "fsparsegpt", "allocation": "response", "sparsity": "0.6", **settings})
    return run_prune(model, None, config=config, calibration=TOKENS, choice=choice, state=state, progress=False)


def same_weights(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("allocation", ["response", "auto"])
def test_the_report_counts_the_blocks_whose_update_was_kept(allocation):
    model, masks = tiny.llama(blocks=3), tiny.llama(blocks=3)
    report, choice = prune(model, allocation=allocation)
    prune(masks, method="fwanda", allocation=allocation, choice=choice)
    kept = [False] * 3
    for target, masked in zip(find_targets(model)[0], find_targets(masks)[0], strict=True):
        assert torch.equal(target.weight != 0, masked.weight != 0)
        kept[target.block] |= not torch.equal(target.weight, masked.weight)
    assert report.refit == {"blocks": 3, "kept": sum(kept)} and report.to_dict()["refit"] == report.refit


@pytest.mark.parametrize("settings", [{"method": "fwanda"}, {"allocation": "global"}], ids=str)
def test_without_a_search_or_an_update_nothing_is_counted(settings):
    assert prune(tiny.llama(), **settings)[0].refit is None


def test_blocks_without_a_target_are_not_counted():
    report, _ = prune(tiny.llama(blocks=4), exclude=["*layers.0.*", "*layers.2.*"])
    assert report.refit["blocks"] == 2


@pytest.mark.parametrize("best", ["uniform", "row", "global b=1 c=0.5"])
def test_a_candidate_that_wins_fixes_the_mask_too(best):
    model, masks = tiny.llama(), tiny.llama()
    config = PruneConfig(method="fwanda", allocation="auto", sparsity="0.6").resolved()
    choice = Choice(best, "global b=0.75 c=0.5", {}, None)
    report, same = prune(model, allocation="auto", choice=choice)
    fwanda_pruner.prune(masks, config=candidates(config)[best], calibration=TOKENS, progress=False)
    assert same is choice and report.refit["blocks"] == 2
    for row, target, masked in zip(report.matrices, find_targets(model)[0], find_targets(masks)[0], strict=True):
        assert torch.equal(target.weight != 0, masked.weight != 0)
        assert row.kept == row.asked == int((masked.weight != 0).sum()) and row.kept_zero == 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("allocation", ["response", "auto"])
def test_a_given_choice_gives_the_weights_of_the_run_that_searched(allocation, order):
    models = tiny.llama(), tiny.llama()
    searched, choice = prune(models[0], allocation=allocation, order=order)
    given, same = prune(models[1], allocation=allocation, order=order, choice=choice)
    assert same is choice and same_weights(*models) and given.refit == searched.refit
    assert given.matrices == searched.matrices and given.domains == searched.domains


@pytest.mark.fault("long run dies")
@pytest.mark.parametrize("after", ["choose", "budgets", "prune-00000", "prune-00001", "prune-00002"])
@pytest.mark.parametrize("order", ORDERS)
def test_an_interrupted_run_gives_the_same_bits(order, after, tmp_path):
    whole, resumed = tiny.llama(blocks=3), tiny.llama(blocks=3)
    expected, _ = prune(whole, order=order)
    with pytest.raises(KeyboardInterrupt), interrupted_after(after):
        prune(tiny.llama(blocks=3), order=order, state=RunState(tmp_path / "out"))
    report, _ = prune(resumed, order=order, state=RunState(tmp_path / "out", resume=True))
    assert same_weights(whole, resumed) and report.refit == expected.refit
    assert report.matrices == expected.matrices and report.domains == expected.domains


def test_under_a_pattern_every_update_is_kept():
    report, choice = prune(tiny.llama(), sparsity=None, pattern="2:4")
    assert report.refit is None and choice is None
