"""How a round of `--allocation response` moves the scales of the scores, from the sums of its rows and columns."""

import math

import pytest
import torch

from fwanda_pruner.allocate.budgets import ScoreScales
from fwanda_pruner.allocate.response import LineSums, move_scales


def lines(predicted, *passes) -> LineSums:
    """The sums of lines with these predicted squares, of which each pass measured so much."""
    measured = torch.tensor(passes, dtype=torch.float64).view(len(passes), len(predicted))
    predicted = torch.tensor(predicted, dtype=torch.float64)
    return LineSums(predicted, measured.sum(0), measured.square().sum(0), len(passes))


def test_ratios_without_noise_are_those_measured():
    sums = lines([1.0, 2.0, 4.0, 0.0], [1.0, 4.0, 2.0, 0.0], [1.0, 4.0, 2.0, 0.0])
    assert sums.ratios(torch.tensor(2.0)).tolist() == pytest.approx([1.0, 2.0, 0.5, 1.0])


def test_ratios_of_noise_alone_are_1():
    sums = lines([1.0, 1.0, 1.0], [9.0, -8.0, 9.0], [-8.0, 9.0, -7.0], [2.0, 1.5, 1.0])
    assert sums.ratios(torch.tensor(3.0)).tolist() == [1.0, 1.0, 1.0]


def test_ratios_are_drawn_by_their_noise():
    """By hand: noise .16 and 0, spread 1.84 / 18, so a signal of .92 each."""
    sums = lines([1.0, 1.0], [2.2, 1.0], [1.8, 1.0])
    assert sums.ratios(torch.tensor(3.0)).tolist() == pytest.approx([1 + 0.92 / 1.08 / 3, 2 / 3])


def test_a_single_pass_tells_no_noise_and_moves_no_line():
    assert lines([1.0, 1.0], [0.0, 2.0]).ratios(torch.tensor(1.0)).tolist() == [1.0, 1.0]


def test_ratios_are_bounded():
    sums = lines([1.0] * 40, [0.0] * 39 + [400.0], [0.0] * 39 + [400.0])
    assert sums.ratios(torch.tensor(2.0)).min() == pytest.approx(0.1)
    assert sums.ratios(torch.tensor(2.0)).max() == pytest.approx(10.0)


def test_scales_follow_the_ratio_of_their_matrix():
    ratios = {"low": 8.0, "right": 2.0, "high": 0.5, "negative": -1.0}
    sums = {name: (lines([1.0, 3.0], *[[ratio, 3 * ratio]] * 2),) * 2 for name, ratio in ratios.items()}
    sums["nothing removed"] = (lines([0.0, 0.0], [0.0, 0.0], [0.0, 0.0]),) * 2
    names = [*sums, "unseen"]
    start = ScoreScales({name: torch.ones(2) for name in names}, {name: torch.ones(2) for name in names})
    moved = move_scales(start, sums)
    steps = {name: float(moved.rows[name].log().mean()) / 0.15 for name in names}  # the middle ratio is 4
    assert steps["right"] == pytest.approx(0) and steps["low"] == pytest.approx(math.log(4), rel=1e-5)
    assert steps["high"] == pytest.approx(math.log(1 / 4), rel=1e-5)
    assert steps["negative"] == pytest.approx(math.log(1 / 5), rel=1e-5)
    assert steps["unseen"] == steps["nothing removed"] == 0
    assert all(torch.allclose(column, torch.ones(2)) for column in moved.columns.values())


def test_rows_and_columns_move_apart_by_their_ratios():
    sums = {"matrix": (lines([1.0, 1.0], [1.0, 3.0], [1.0, 3.0]), lines([1.0, 1.0], [3.0, 1.0], [3.0, 1.0]))}
    ones = {"matrix": torch.ones(2)}
    moved = move_scales(ScoreScales(ones, ones), sums)
    apart = [0.5**0.05, 1.5**0.05]
    assert moved.rows["matrix"].tolist() == pytest.approx(apart)
    assert moved.columns["matrix"].tolist() == pytest.approx(apart[::-1])
