"""Budgets: the invariants of the rule, and an exact restatement in fractions."""

from fractions import Fraction
from math import floor, inf

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import fwanda_kernels as fk

CLOSE = 1e-9  # remainders this close at the cut may fall either way
examples = settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))


def budgets(v, total, k_min, k_max) -> list[int]:
    signal = torch.tensor(v, dtype=torch.float64)
    return fk.allocate_row_budgets(signal, total, k_min=k_min, k_max=k_max).tolist()


def water_level(v: list[Fraction], total: int, k_min: int, k_max: int) -> list[Fraction]:
    """x_i = clamp(lambda v_i, k_min, k_max) summing to total, lambda found between the clamps' breakpoints."""

    def fill(level):
        return [min(max(level * x, Fraction(k_min)), Fraction(k_max)) for x in v]

    points = sorted({Fraction(0), *(Fraction(k) / x for x in v for k in (k_min, k_max))})
    upper = next(p for p in points if sum(fill(p)) >= total)
    if sum(fill(upper)) == total:
        return fill(upper)
    lower = points[points.index(upper) - 1]
    below, above = sum(fill(lower)), sum(fill(upper))
    return fill(lower + (upper - lower) * (total - below) / (above - below))


def exact_budgets(v, total, k_min, k_max) -> tuple[list[int], float]:
    """(k, gap): the rule in exact arithmetic; gap separates the remainders of unequal v at the cut."""
    positive = [i for i, x in enumerate(v) if x > 0]
    zero = [i for i, x in enumerate(v) if x == 0]
    share = min(total - k_min * len(zero), k_max * len(positive))
    level = water_level([Fraction(v[i]) for i in positive], share, k_min, k_max) if positive else []
    x, k = [Fraction(0)] * len(v), [0] * len(v)
    for i, value in zip(positive, level, strict=True):
        x[i], k[i] = value, floor(value)
    short = share - sum(k)
    order = sorted((i for i in positive if k[i] < k_max), key=lambda i: (k[i] - x[i], i))
    gap = inf
    for i in order[:short]:
        for j in order[short:]:
            if v[i] != v[j]:
                gap = min(gap, float((x[i] - k[i]) - (x[j] - k[j])))
    for i in order[:short]:
        k[i] += 1
    rest = total - share
    for position, i in enumerate(zero):
        k[i] = rest // len(zero) + (position < rest % len(zero))
    return k, gap


magnitudes = st.one_of(
    st.just(0.0),
    st.integers(1, 9).map(float),
    st.floats(-9, 9).map(lambda e: 10.0**e),
    st.floats(0.5, 2.0),
)


@st.composite
def problems(draw, k_min=None):
    """(v, total, k_min, k_max) with a total within reach."""
    v = draw(st.lists(magnitudes, min_size=1, max_size=12))
    k_max = draw(st.integers(max(k_min or 0, 1), 40))
    k_min = draw(st.integers(0, k_max)) if k_min is None else k_min
    return v, draw(st.integers(len(v) * k_min, len(v) * k_max)), k_min, k_max


@examples
@given(problems())
def test_total_is_exact_and_bounds_hold(problem):
    _, total, k_min, k_max = problem
    k = budgets(*problem)
    assert sum(k) == total and all(k_min <= value <= k_max for value in k)


@examples
@given(problems())
def test_budgets_equal_the_exact_rule(problem):
    expected, gap = exact_budgets(*problem)
    assume(gap > CLOSE)
    assert budgets(*problem) == expected


@examples
@given(problems())
def test_a_larger_signal_gets_no_less_but_one(problem):
    rows = list(zip(problem[0], budgets(*problem), strict=True))
    assert all(k >= other_k - 1 for v, k in rows for other_v, other_k in rows if v >= other_v)


@examples
@given(problems(), st.randoms(use_true_random=False))
def test_permuting_rows_permutes_budgets_up_to_ties(problem, random):
    v, *rest = problem
    assume(exact_budgets(*problem)[1] > CLOSE)
    order = list(range(len(v)))
    random.shuffle(order)
    shuffled = [v[i] for i in order]
    assert sorted(zip(shuffled, budgets(shuffled, *rest), strict=True)) == sorted(
        zip(v, budgets(*problem), strict=True)
    )


@examples
@given(problems(), st.integers(-40, 40))
def test_powers_of_two_change_nothing(problem, exponent):
    v, *rest = problem
    assert budgets([x * 2.0**exponent for x in v], *rest) == budgets(*problem)


@pytest.mark.parametrize("exponent", [-800, -300, -140, 140, 300, 800])
def test_extreme_powers_of_two_change_nothing(exponent):
    v = [1.0, 3.0, 7.5, 0.1]
    assert budgets([x * 2.0**exponent for x in v], 19, 1, 20) == budgets(v, 19, 1, 20)


@examples
@given(problems(), st.floats(1e-12, 1e12))
def test_any_factor_changes_nothing(problem, factor):
    v, *rest = problem
    scaled = [x * factor for x in v]
    assume(min(exact_budgets(*problem)[1], exact_budgets(scaled, *rest)[1]) > CLOSE)
    assert budgets(scaled, *rest) == budgets(*problem)


@examples
@given(st.integers(0, 3).flatmap(lambda k_min: st.lists(problems(k_min=k_min), min_size=1, max_size=4)))
def test_many_matrices_at_once_equal_one_by_one(entries):
    k_min = entries[0][2]
    for problem in entries:
        assume(exact_budgets(*problem)[1] > CLOSE)
    vs = [torch.tensor(v, dtype=torch.float64) for v, *_ in entries]
    k_max = [most for *_, most in entries]
    together = fk.allocate_budgets(vs, [total for _, total, *_ in entries], k_min=k_min, k_max=k_max)
    assert [k.tolist() for k in together] == [budgets(*problem) for problem in entries]


def test_many_rows_have_an_exact_total():
    v = torch.randn(20000, dtype=torch.float64).mul(8).exp()
    k = fk.allocate_row_budgets(v, 10_000_001, k_max=4096)
    assert k.dtype == torch.int64 and int(k.sum()) == 10_000_001 and int(k.min()) >= 1 and int(k.max()) <= 4096


def test_among_many_equal_rows_the_lowest_get_the_rest():
    k = fk.allocate_row_budgets(torch.full((5000,), 0.3), 3 * 5000 + 1234, k_max=4096)
    assert torch.equal(k, 3 + (torch.arange(5000) < 1234).long())


@pytest.mark.parametrize(
    "v, total, k_min, k_max, expected",
    [
        ([100.0, 1.0], 6, 1, 4, [4, 2]),
        ([1e18, 1.0], 6, 1, 4, [4, 2]),
        ([1.0, 1e-18, 1e18], 9, 1, 6, [2, 1, 6]),
        ([1.0, 2.0, 3.0], 12, 0, 12, [2, 4, 6]),
        ([1.0, 1.0, 1.0], 10, 1, 12, [4, 3, 3]),
        ([0.0, 0.0, 0.0], 7, 1, 4, [3, 2, 2]),
        ([0.0, 5.0, 0.0], 6, 1, 4, [1, 4, 1]),
        ([0.0, 5.0, 0.0], 7, 1, 4, [2, 4, 1]),
        ([0.0, 5.0, 1.0], 7, 1, 4, [1, 4, 2]),
        ([3.0], 5, 0, 9, [5]),
        ([1.0, 9.0], 0, 0, 9, [0, 0]),
        ([1.0, 9.0], 18, 0, 9, [9, 9]),
        ([1.0, 9.0], 4, 2, 2, [2, 2]),
    ],
)
def test_worked_examples(v, total, k_min, k_max, expected):
    assert budgets(v, total, k_min, k_max) == exact_budgets(v, total, k_min, k_max)[0] == expected


def test_rows_keep_at_least_one_by_default():
    assert fk.allocate_row_budgets(torch.tensor([1.0, 0.0]), 3, k_max=4).tolist() == [2, 1]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_signals_of_any_floating_dtype_are_read_in_float64(dtype, autocast):
    v, other = torch.tensor([1.0, 0.5, 4.0, 0.0]).to(dtype), torch.tensor([1.0, 3.0])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = fk.allocate_budgets([v, other], [9, 4], k_max=[8, 4])
        scales = fk.global_row_scales([torch.ones(4, 2)], [v], [other.to(dtype)])[0]
    expected = fk.allocate_budgets([v.double(), other.double()], [9, 4], k_max=[8, 4])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(scales, fk.global_row_scales([torch.ones(4, 2)], [v.double()], [other.double()])[0])


def test_signal_is_not_modified():
    v = torch.tensor([1.0, 2.0], dtype=torch.float64)
    fk.allocate_row_budgets(v, 4, k_max=4)
    assert v.tolist() == [1, 2]


ONE = torch.ones(2)
WRONG = [
    ([], [], 1, [], "must be non-empty lists of one length, got 0 vs, 0 totals, 0 k_max"),
    ([ONE], [2, 2], 1, [4], "must be non-empty lists of one length, got 1 vs, 2 totals, 1 k_max"),
    ([ONE, ONE], [2, 1], 1, [4, 4], "totals[1] must be in [2, 8] (2 rows of 1 to 4), got 1"),
    ([ONE], [9], 0, [4], "totals[0] must be in [0, 8] (2 rows of 0 to 4), got 9"),
    ([ONE], [2], 5, [4], "0 <= k_min <= k_max must hold, got k_min=5, k_max[0]=4"),
    ([ONE], [2], -1, [4], "0 <= k_min <= k_max must hold, got k_min=-1, k_max[0]=4"),
    ([ONE, ONE[None]], [2, 2], 1, [4, 4], "vs[1] must be a floating [R], R >= 1, got [1, 2] torch.float32"),
    ([ONE.int()], [2], 1, [4], "vs[0] must be a floating [R], R >= 1, got [2] torch.int32"),
    ([ONE[:0]], [0], 1, [4], "vs[0] must be a floating [R], R >= 1, got [0] torch.float32"),
    ([ONE, -ONE], [2, 2], 1, [4, 4], "vs[1] must be finite and >= 0"),
    ([ONE * float("nan")], [2], 1, [4], "vs[0] must be finite and >= 0"),
    ([ONE, ONE, ONE / 0], [2] * 3, 1, [4] * 3, "vs[2] must be finite and >= 0"),
]


@pytest.mark.parametrize("vs, totals, k_min, k_max, message", WRONG, ids=range(len(WRONG)))
def test_wrong_argument_is_one_line(vs, totals, k_min, k_max, message):
    with pytest.raises(ValueError) as error:
        fk.allocate_budgets(vs, totals, k_min=k_min, k_max=k_max)
    assert str(error.value).startswith("allocate_budgets: ") and message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value, code", [(1.0, 0), (-1.0, 1), (float("nan"), 1), (float("inf"), 1)])
def test_bad_collects_the_code_instead_of_raising(value, code):
    bad = torch.tensor([4], dtype=torch.int32)
    fk.allocate_row_budgets(torch.tensor([1.0, value]), 4, k_max=4, bad=bad)
    assert bad.tolist() == [4 | code]


@pytest.mark.parametrize("bad", [5, torch.zeros(1), torch.zeros(2, dtype=torch.int32)], ids=str)
def test_a_wrong_bad_is_one_line(bad):
    with pytest.raises(ValueError, match=r"^allocate_budgets: bad must be .*$"):
        fk.allocate_row_budgets(ONE, 4, k_max=4, bad=bad)


def test_a_bad_of_inference_mode_is_one_line():
    with torch.inference_mode():
        bad = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^allocate_budgets: bad was made in inference mode and cannot be changed"):
        fk.allocate_row_budgets(ONE, 4, k_max=4, bad=bad)


# row scales of the global allocation


def layers_of(*shapes) -> tuple[list, list, list]:
    torch.manual_seed(0)
    weights = [torch.randn(shape) for shape in shapes]
    omegas = [torch.randn(rows, dtype=torch.float64).exp() for rows, _ in shapes]
    return weights, omegas, [torch.rand(cols) + 0.1 for _, cols in shapes]


@pytest.mark.parametrize("b, c", [(0.75, 0.5), (1.0, 1.0), (0.0, 0.0), (0.5, 1.0)])
def test_global_row_scales_follow_the_formula(b, c):
    weights, omegas, norms = layers_of((5, 8), (1100, 3))
    found = fk.global_row_scales(weights, omegas, norms, row_exponent=b, layer_exponent=c)
    mean = torch.cat(omegas).mean()
    for a, weight, omega, norm in zip(found, weights, omegas, norms, strict=True):
        m, omega = (weight.double().abs() * norm).mean(1), omega / mean
        expected = omega ** (b / 2) * m ** (b - 1) / (omega ** (b / 2) * m**b).mean() ** (1 - c)
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, expected.float())


def test_without_damping_the_row_scale_is_the_root_of_omega():
    weights, omegas, norms = layers_of((4, 6), (3, 5))
    total = torch.cat(omegas).mean()
    scales = fk.global_row_scales(weights, omegas, norms, row_exponent=1.0, layer_exponent=1.0)
    for a, omega in zip(scales, omegas, strict=True):
        torch.testing.assert_close(a, (omega / total).sqrt().float())


def test_rows_without_fisher_information_or_score_have_scale_zero():
    weights, omegas, norms = layers_of((4, 6), (3, 5))
    omegas[0][1], weights[0][2], norms[1] = 0, 0, torch.zeros(5)
    first, second = fk.global_row_scales(weights, omegas, norms)
    assert (first > 0).tolist() == [True, False, False, True] and second.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda w, o, n: (w, [0 * x for x in o], n), "the mean of omega must be finite and > 0, got 0.0"),
        (lambda w, o, n: (w, [x / 0 for x in o], n), "omegas[0] must be finite and >= 0"),
        (lambda w, o, n: (w, [x[:0] for x in o], n), "entry 0 must be a weight [R, C]"),
        (lambda w, o, n: ([w[0], w[1].int()], o, n), "weights[1] must be [R, C] bfloat16|float16|float32"),
        (lambda w, o, n: ([w[0] * 1j, w[1]], o, n), "weights[0] must be [R, C] bfloat16|float16|float32"),
        (lambda w, o, n: (w, [o[0], o[1].long()], n), "omegas[1] must be floating, got torch.int64"),
        (lambda w, o, n: (w, o, [n[0], n[1] * 1j]), "norms[1] must be floating, got torch.complex64"),
        (lambda w, o, n: ([w[0], w[1].to("meta")], o, n), "weights[1] is on the meta device and holds no numbers"),
        (lambda w, o, n: (w, [o[0], o[1].to("meta")], n), "omegas[1] is on the meta device and holds no numbers"),
        (lambda w, o, n: (w, o, [n[0].to("meta"), n[1]]), "norms[0] is on the meta device and holds no numbers"),
        (lambda w, o, n: ([], [], []), "non-empty lists of one length, got 0 weights, 0 omegas, 0 norms"),
        (lambda w, o, n: (w, o[:1], n), "non-empty lists of one length, got 2 weights, 1 omegas, 2 norms"),
        (
            lambda w, o, n: (w, o, n[::-1]),
            "entry 0 must be a weight [R, C], an omega [R] and a norm [C], got [4, 6], [4]",
        ),
    ],
)
def test_global_row_scales_refuse_what_has_no_estimate_in_one_line(change, message):
    with pytest.raises(ValueError) as error:
        fk.global_row_scales(*change(*layers_of((4, 6), (3, 5))))
    assert str(error.value).startswith("global_row_scales: ") and message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.fault("not finite")
@pytest.mark.parametrize("mean", [None, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -1.0])
@pytest.mark.parametrize("place", ["omegas", "norms"])
def test_global_row_scales_refuse_values_that_are_no_shares(place, value, mean):
    weights, omegas, norms = layers_of((4, 6), (3, 5))
    {"omegas": omegas, "norms": norms}[place][1][2] = value
    with pytest.raises(ValueError, match=rf"^global_row_scales: {place}\[1\] must be finite and >= 0$"):
        fk.global_row_scales(weights, omegas, norms, mean_omega=mean)


@pytest.mark.fault("not finite")
@pytest.mark.parametrize("exponents", [{"row_exponent": 1e3}, {"row_exponent": -1e3}, {"layer_exponent": 1e3}])
def test_exponents_with_which_a_scale_overflows_are_refused(exponents):
    weights, omegas, norms = layers_of((4, 6), (3, 5))
    with pytest.raises(ValueError, match=r"^global_row_scales: the scales of entry [01] exceed fp32; take expon"):
        fk.global_row_scales(weights, omegas, [norms[0], norms[1] * 1e4], **exponents)


@pytest.mark.fault("not finite")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_of_weights_that_is_not_finite_has_scale_zero_and_leaves_the_others(value):
    weights, omegas, norms = layers_of((4, 6), (3, 5))
    weights[0][1, 2] = value
    scale = fk.global_row_scales(weights, omegas, norms)[0]
    assert (scale > 0).tolist() == [True, False, True, True] and scale.isfinite().all()


def test_budgets_of_signals_without_numbers_are_refused_in_one_line():
    signals = [torch.ones(4), torch.ones(4, device="meta")]
    with pytest.raises(ValueError, match=r"^allocate_budgets: vs\[1\] is on the meta device and holds no numbers; "):
        fk.allocate_budgets(signals, [10, 10], k_max=[16, 16])
