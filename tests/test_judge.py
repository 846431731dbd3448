"""Which masks are better: a smaller mean increase of the loss over all domains, and no harm to a guard."""

import math

import oracle
import pytest
import tiny
import torch
from measuring import engine_of

from fwanda_pruner import PruneConfig
from fwanda_pruner.allocate.judge import Judge, domain_losses
from fwanda_pruner.allocate.masks import masks_of
from fwanda_pruner.allocate.search import best_of
from fwanda_pruner.errors import UserError
from fwanda_pruner.measure.statistics import measure_statistics
from fwanda_pruner.text.domains import Domain, choice_windows, split_windows

NAMES = ("calibrated", "guard", "other")


def domains(guards=("guard",), windows=2) -> list[Domain]:
    tokens = [tiny.tokens(windows, 24, seed=i) for i in range(len(NAMES))]
    return [
        Domain(name, name == "calibrated", name in guards, True, torch.empty(0, 24, dtype=torch.int64), ids)
        for name, ids in zip(NAMES, tokens, strict=True)
    ]


class KeepAll:
    """Masks that remove nothing."""

    def prune_(self, _weights):
        pass


class Scripted:
    """An engine whose windows lose what it is told, in the order of the calls: one number for each domain."""

    def __init__(self, *losses):
        self._losses = iter(losses)

    def shared_prefix(self):
        return None

    def window_losses(self, tokens, masks=None, label=None, prefix=None):
        return torch.tensor(next(self._losses), dtype=torch.float64).repeat_interleave(len(tokens) // len(NAMES))


def judge(dense, wanda, guards=("guard",)) -> Judge:
    return Judge(Scripted(dense, wanda), domains(guards), KeepAll())


def losses(*values) -> dict[str, float]:
    return dict(zip(NAMES, values, strict=True))


# Losses


def test_losses_are_the_mean_over_the_windows_of_each_domain():
    """Also under masks, and with different numbers of windows."""
    model = tiny.llama()
    engine = engine_of(model)
    windows = {"a": tiny.tokens(3, 24), "b": tiny.tokens(1, 24, seed=1), "c": tiny.tokens(4, 24, seed=2)}
    statistics = measure_statistics(engine, tiny.tokens(8, 24, seed=3))
    config = PruneConfig(allocation="uniform").resolved()
    found = [domain_losses(engine, windows), domain_losses(engine, windows, masks_of(config, engine, statistics))]
    pruned = tiny.llama()
    oracle.wanda(pruned, tiny.tokens(8, 24, seed=3), "0.5")
    for one, other in zip(found, (model, pruned), strict=True):
        expected = {name: math.log(oracle.perplexity(other, tokens)) for name, tokens in windows.items()}
        assert one == pytest.approx(expected, rel=1e-5) and list(one) == list(windows)


def test_a_loss_that_is_not_finite_is_inf_for_its_domain_alone():
    engine = Scripted((1.0, math.nan, math.inf))
    found = domain_losses(engine, {domain.source: domain.choice for domain in domains()})
    assert found == losses(1.0, math.inf, math.inf)


def test_a_judge_reads_the_windows_of_the_choice_and_not_those_of_the_report():
    reported = tiny.tokens(2, 24, seed=7)
    choice = tiny.tokens(2, 24, seed=8)
    model = tiny.llama()
    found = Judge(engine_of(model), [Domain("a", True, False, True, reported, choice)], KeepAll())
    assert found.dense["a"] == pytest.approx(math.log(oracle.perplexity(model, choice)), rel=1e-5)


# Rank


def test_the_increase_is_the_mean_over_the_domains_of_the_loss_above_dense():
    found = judge((1.0, 2.0, 4.0), (9.0, 9.0, 9.0))
    assert found.increase(losses(1.5, 2.25, 4.0)) == pytest.approx(0.25)
    assert found.increase(losses(0.5, 2.0, 4.0)) == pytest.approx(-0.5 / 3)


def test_a_domain_counts_by_its_increase_and_not_by_its_loss():
    found = judge((1.0, 1.0, 8.0), (9.0, 9.0, 9.0))
    assert best_of(found, {"a": losses(1.1, 1.1, 8.9), "b": losses(1.3, 1.3, 8.1)}) == "b"


@pytest.mark.fault("other text")
def test_masks_that_are_worse_than_wanda_on_a_guard_come_last():
    found = judge((1.0, 1.0, 1.0), (2.0, 2.0, 2.0))
    harmful, harmless = losses(1.1, 2.01, 1.1), losses(2.5, 2.0, 2.5)
    assert found.increase(harmful) < found.increase(harmless)
    assert best_of(found, {"harmful": harmful, "harmless": harmless}) == "harmless"


def test_harm_to_what_is_no_guard_counts_by_the_mean_alone():
    found = judge((1.0, 1.0, 1.0), (2.0, 2.0, 2.0))
    assert best_of(found, {"a": losses(2.2, 1.1, 2.2), "b": losses(2.0, 2.0, 2.0)}) == "a"


@pytest.mark.fault("other text")
def test_masks_that_harm_a_guard_win_only_where_all_do():
    found = judge((1.0, 1.0, 1.0), (2.0, 2.0, 2.0))
    assert best_of(found, {"a": losses(2.0, 2.5, 2.0), "b": losses(1.5, 2.6, 1.5)}) == "b"


def test_every_guard_is_protected():
    found = judge((1.0, 1.0, 1.0), (2.0, 2.0, 2.0), guards=("guard", "other"))
    assert best_of(found, {"a": losses(1.1, 1.1, 2.1), "b": losses(2.0, 2.0, 2.0)}) == "b"


def test_without_guards_the_mean_decides():
    found = judge((1.0, 1.0, 1.0), (2.0, 2.0, 2.0), guards=())
    assert best_of(found, {"a": losses(1.1, 2.5, 1.1), "b": losses(1.9, 1.9, 1.9)}) == "a"


def test_wandas_own_masks_do_no_harm():
    found = judge((1.0, 1.0, 1.0), (2.0, 2.0, 2.0))
    assert found.rank(found.wanda) == (False, 1.0)


def test_of_equals_the_first_wins():
    found = judge((1.0, 1.0, 1.0), (2.0, 2.0, 2.0))
    assert best_of(found, {"b": losses(1.5, 1.5, 1.5), "a": losses(1.5, 1.5, 1.5)}) == "b"


def test_a_domain_whose_dense_loss_is_not_finite_says_nothing():
    found = judge((1.0, math.nan, 1.0), (2.0, math.nan, 2.0))
    assert found.increase(losses(1.3, math.inf, 1.3)) == pytest.approx(0.2)
    assert found.rank(losses(1.3, math.inf, 1.3))[0] is False


def test_masks_whose_loss_is_not_finite_on_a_domain_are_not_chosen():
    found = judge((1.0, 1.0, 1.0), (2.0, 2.0, 2.0))
    assert best_of(found, {"a": losses(1.1, 1.1, math.inf), "b": losses(1.9, 1.9, 1.9)}) == "b"
    message = "^no allocation gives a finite loss on the held-out text; choose --allocation uniform, row or global$"
    with pytest.raises(UserError, match=message):
        best_of(found, {"a": losses(1.1, 1.1, math.inf), "b": losses(math.inf, 1.0, 1.0)})


# Which windows


@pytest.mark.parametrize("domains, windows", [(1, 8), (2, 4), (3, 4), (9, 4)])
def test_a_choice_reads_eight_windows_at_least_and_four_of_each_domain(domains, windows):
    assert choice_windows(domains) == windows


@pytest.mark.parametrize(
    "total, choice, sizes",
    [(16, 8, (8, 8)), (12, 4, (8, 4)), (30, 4, (8, 4)), (5, 4, (3, 2)), (2, 8, (1, 1)), (8, 0, (8, 0))],
)
def test_the_report_and_the_choice_share_no_window(total, choice, sizes):
    windows = torch.arange(total)[:, None]
    reported, chosen = split_windows(windows, choice)
    assert (len(reported), len(chosen)) == sizes
    assert not set(reported.flatten().tolist()) & set(chosen.flatten().tolist())


def test_one_window_alone_serves_both():
    windows = torch.arange(3)[None]
    assert all(torch.equal(part, windows) for part in split_windows(windows, 4))
