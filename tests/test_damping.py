"""Which damping gives the factor of a Hessian, and what is said of it."""

import warnings

import pytest
import torch

from fwanda_pruner import UserError
from fwanda_pruner.methods.damping import DAMPING, damped_factor

FACTOR = torch.eye(3)


class Factorise:
    """Gives a factor from a damping on; remembers the dampings that it was asked for."""

    def __init__(self, least: float):
        self.least, self.asked = least, []

    def __call__(self, damping: float):
        self.asked.append(damping)
        return FACTOR if damping >= self.least else None


def test_the_first_damping_is_taken_without_a_word():
    factorise = Factorise(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert damped_factor("matrix", factorise) is FACTOR
    assert factorise.asked == [DAMPING]


@pytest.mark.parametrize(("least", "taken"), [(0.05, 0.1), (0.5, 1), (5, 10)])
def test_the_weakest_damping_that_gives_a_factor_is_taken_and_named(least, taken):
    factorise = Factorise(least)
    with pytest.warns(UserWarning, match=f"^the Hessian of q_proj needed a damping of {taken:g}, not 0.01$"):
        assert damped_factor("q_proj", factorise) is FACTOR
    assert factorise.asked == pytest.approx([d for d in (0.01, 0.1, 1, 10) if d <= taken])


def test_a_damping_that_is_known_to_fail_is_not_tried_again():
    factorise = Factorise(0)
    with pytest.warns(UserWarning, match="needed a damping of 0.1, not 0.01"):
        damped_factor("matrix", factorise, failed=True)
    assert factorise.asked == pytest.approx([0.1])


def test_the_damping_that_a_caller_asks_for_is_the_weakest():
    factorise = Factorise(0.03)
    with pytest.warns(UserWarning, match="needed a damping of 0.05, not 0.005"):
        damped_factor("matrix", factorise, 0.005)
    assert factorise.asked == pytest.approx([0.005, 0.05])


@pytest.mark.parametrize(("failed", "tried"), [(False, [0.01, 0.1, 1, 10]), (True, [0.1, 1, 10])])
def test_without_a_factor_at_1000_times_the_damping_the_matrix_is_refused_by_name(failed, tried):
    factorise = Factorise(1e9)
    message = "^the Hessian of k_proj has no factor, even with a damping of 10; use more calibration text$"
    with pytest.raises(UserError, match=message):
        damped_factor("k_proj", factorise, failed=failed)
    assert factorise.asked == pytest.approx(tried)
