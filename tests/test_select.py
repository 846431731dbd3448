"""Selections, each against a naive restatement: sort by (score, index), drop the head."""

from fractions import Fraction
from math import floor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fwanda_kernels as fk
from fwanda_kernels.testing import KINDS, WEIGHT_DTYPES, assert_masks_equal, make_keep, make_scale, make_weight

dtypes = pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=lambda d: str(d).removeprefix("torch."))
kinds = pytest.mark.parametrize("kind", KINDS)
SHAPES = [(1, 1), (3, 7), (5, 33), (4, 130), (0, 4), (3, 0)]
PATTERNS = [(1, 4), (2, 4), (4, 8), (3, 4), (0, 4), (4, 4), (2, 3), (1, 1), (3, 5), (8, 16), (11, 32)]

# row_topk


def naive_mask(weight, scale, keep) -> torch.Tensor:
    """Sort each row by (score, column) and drop the head."""
    rows, cols = weight.shape
    mask = torch.ones(rows, cols, dtype=torch.bool)
    scores = (weight.float().abs() * scale).tolist()
    for i, (row, k) in enumerate(zip(scores, keep, strict=True)):
        order = sorted(range(cols), key=lambda j: (row[j], j))
        mask[i, order[: cols - int(k)]] = False
    return mask


@pytest.mark.fault("ties")
@pytest.mark.usefixtures("backend")
@dtypes
@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_row_topk_keeps_the_largest_scores(kind, dtype, shape):
    rows, cols = shape
    weight, scale = make_weight(rows, cols, dtype, kind=kind), make_scale(cols)
    for keep in {0, min(1, cols), max(cols - 1, 0), cols}:
        assert_masks_equal(fk.row_topk_mask(weight, scale, keep), naive_mask(weight, scale, [keep] * rows))
    keep = make_keep(rows, cols)
    assert_masks_equal(fk.row_topk_mask(weight, scale, keep), naive_mask(weight, scale, keep))


LAYOUTS = {
    "transposed": lambda w: w.T.contiguous().T,
    "every_second_column": lambda w: w.repeat_interleave(2, 1)[:, ::2],
    "column_slice": lambda w: torch.cat([w, w + 1], 1)[:, : w.shape[1]],
    "every_second_row": lambda w: w.repeat_interleave(2, 0)[::2],
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.mark.usefixtures("backend")
@dtypes
@layouts
def test_selection_does_not_depend_on_strides(layout, dtype):
    weight, scale, keep = make_weight(6, 24, dtype, kind="heavy_ties"), make_scale(24), make_keep(6, 24)
    strided = LAYOUTS[layout](weight)
    assert not strided.is_contiguous()
    for mask, expected in (
        (fk.row_topk_mask(strided, scale, keep), naive_mask(weight, scale, keep)),
        (fk.nm_mask(strided, scale, 2, 4), fk.nm_mask(weight, scale, 2, 4)),
    ):
        assert_masks_equal(mask, expected)
    counts = fk.select_threshold([strided], [torch.ones(6)], [scale], 70)
    assert torch.equal(counts[0], fk.select_threshold([weight], [torch.ones(6)], [scale], 70)[0])


@pytest.mark.usefixtures("backend")
@layouts
def test_masks_are_contiguous(layout):
    weight, scale = LAYOUTS[layout](make_weight(6, 24)), make_scale(24)
    assert fk.row_topk_mask(weight, scale, 12).is_contiguous()
    assert fk.nm_mask(weight, scale, 2, 4).is_contiguous()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("prune", ["row_topk_prune_", "nm_prune_"])
@dtypes
@layouts
def test_prune_zeroes_what_the_mask_drops_and_nothing_else(layout, dtype, prune):
    arguments = (12,) if prune == "row_topk_prune_" else (2, 4)
    weight, scale = LAYOUTS[layout](make_weight(6, 24, dtype)), make_scale(24)
    mask = getattr(fk, prune.replace("prune_", "mask"))(weight, scale, *arguments)
    storage = weight._base.clone() if weight._base is not None else None
    expected = torch.where(mask, weight, torch.zeros((), dtype=dtype))
    getattr(fk, prune)(weight, scale, *arguments)
    assert torch.equal(weight, expected) and torch.equal(weight.signbit(), expected.signbit())
    if storage is not None:
        outside = torch.ones_like(storage, dtype=torch.bool)
        outside.as_strided(weight.shape, weight.stride(), weight.storage_offset()).fill_(False)
        assert torch.equal(weight._base[outside], storage[outside])


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("prune", [lambda w, s: fk.row_topk_prune_(w, s, 2), lambda w, s: fk.nm_prune_(w, s, 2, 4)])
def test_negative_zeros_tie_with_zeros_and_are_removed_as_positive_zero(prune):
    weight = torch.tensor([[0.0, -0.0, 0.0, -0.0], [-0.0, 1.0, -0.0, -2.0]])
    prune(weight, torch.tensor([1.0, -0.0, 1.0, 1.0]))
    # row 1: the zero scale makes column 1 tie with the zeros, and the two lowest of the ties go
    assert torch.signbit(weight).tolist() == [[False, False, False, True], [False, False, True, True]]
    assert weight.abs().tolist() == [[0, 0, 0, 0], [0, 0, 0, 2]]


@pytest.mark.usefixtures("backend")
def test_products_that_overflow_or_underflow_tie():
    weight = torch.tensor([[1e30, 3e38, -2e30, 1.0], [1e-30, 2e-30, -3e-30, 1e-38]])
    scale = torch.tensor([1e30, 1e30, 1e30, 1e-20])
    assert fk.row_topk_mask(weight, scale, 2).tolist()[0] == [False, True, True, False]
    tiny = torch.full((4,), 1e-30)
    assert fk.row_topk_mask(weight[1:], tiny, 2).tolist() == [[False, False, True, True]]


@pytest.mark.usefixtures("backend")
@dtypes
@kinds
@pytest.mark.parametrize("sparsity", ["0.5", "0.3", "0.7", "0"])
def test_uniform_selection_is_wandas(kind, dtype, sparsity):
    weight, x2 = make_weight(9, 70, dtype, kind=kind), make_scale(70)
    metric = weight.abs() * x2.sqrt().reshape(1, -1)
    assert metric.dtype == torch.float32
    removed = metric.sort(dim=-1, stable=True)[1][:, : floor(70 * Fraction(sparsity))]
    expected = torch.ones_like(weight, dtype=torch.bool).scatter_(1, removed, False)
    assert_masks_equal(fk.row_topk_mask(weight, x2.sqrt(), 70 - floor(70 * Fraction(sparsity))), expected)


def naive_among(weight, scale, keep, among) -> torch.Tensor:
    """Sort the allowed weights of each row by (score, column) and keep the tail."""
    mask = torch.zeros(weight.shape, dtype=torch.bool)
    scores = (weight.float().abs() * scale).tolist()
    for i, (row, k) in enumerate(zip(scores, keep, strict=True)):
        allowed = [j for j in range(len(row)) if among[i, j]]
        order = sorted(allowed, key=lambda j: (row[j], j))
        mask[i, order[max(len(order) - int(k), 0) :]] = True
    return mask


WEIGHTS = [0.0, -0.0, 1.0, -1.0, 2.0, 6e-8, -1e-30, 1e-45, 3e38, -65504.0]
SCALES = [0.0, -0.0, 1.0, 0.5, 1e-38, 1e38]  # 3e38 * 1e38 overflows, 1e-30 * 1e-38 is 0


@st.composite
def selections(draw):
    """weight, scale, keep, among: few different values, so that ties, zeros and overflow are the rule."""
    rows, cols = draw(st.integers(1, 3)), draw(st.integers(1, 9))

    def matrix(values, shape=(rows, cols)):
        size = shape[0] * shape[1]
        return torch.tensor(draw(st.lists(values, min_size=size, max_size=size))).view(shape)

    dtype = draw(st.sampled_from(WEIGHT_DTYPES))
    most = torch.finfo(dtype).max
    weight = matrix(st.sampled_from(draw(st.sampled_from([WEIGHTS, [0.0], [0.0, 1.0]])))).clamp(-most, most).to(dtype)
    scale = matrix(st.sampled_from(draw(st.sampled_from([SCALES, [0.0], [1.0]]))), (1, cols)).view(cols)
    keep = matrix(st.integers(0, cols), (1, rows)).view(rows)
    among = matrix(draw(st.sampled_from([st.booleans(), st.just(False), st.just(True)])))
    return weight, scale, keep, among


@pytest.mark.usefixtures("backend")
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(selections())
def test_row_topk_among_keeps_the_largest_of_the_allowed_ones_exactly(selection):
    weight, scale, keep, among = selection
    bad = torch.zeros(1, dtype=torch.int32)
    expected = naive_among(weight, scale, keep, among)
    assert_masks_equal(fk.row_topk_mask(weight, scale, keep, among=among), expected)
    assert_masks_equal(fk.row_topk_mask(weight, scale, keep, among=among, bad=bad), expected)
    assert not bad


@pytest.mark.usefixtures("backend")
@dtypes
@kinds
def test_row_topk_among_everything_is_row_topk(kind, dtype):
    weight, scale, keep = make_weight(5, 130, dtype, kind=kind), make_scale(130), make_keep(5, 130)
    everything = torch.ones(5, 130, dtype=torch.bool)
    assert_masks_equal(fk.row_topk_mask(weight, scale, keep, among=everything), fk.row_topk_mask(weight, scale, keep))
    assert not fk.row_topk_mask(weight, scale, keep, among=~everything).any()


@pytest.mark.usefixtures("backend")
@layouts
def test_row_topk_among_takes_any_strides(layout):
    weight, scale, keep = make_weight(6, 24, kind="heavy_ties"), make_scale(24), make_keep(6, 24)
    among = LAYOUTS[layout](make_weight(6, 24, seed=1)) > 0
    mask = fk.row_topk_mask(LAYOUTS[layout](weight), scale, keep, among=among.T.contiguous().T)
    assert mask.is_contiguous()
    assert_masks_equal(mask, naive_among(weight, scale, keep, among))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_outside_must_be_finite_too(value):
    weight, among = torch.ones(2, 4), torch.ones(2, 4, dtype=torch.bool)
    weight[1, 2], among[1, 2] = value, False
    bad = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="row_topk_mask: weight has NaN or inf"):
        fk.row_topk_mask(weight, torch.ones(4), 2, among=among)
    fk.row_topk_mask(weight, torch.ones(4), 2, among=among, bad=bad)
    assert int(bad) == 1


@pytest.mark.parametrize(
    "change, got",
    [
        (lambda a: a[:, 1:], "got [2, 3] bool on cpu"),
        (lambda a: a.float(), "got [2, 4] float32 on cpu"),
        (lambda a: a.to("meta"), "got [2, 4] bool on meta"),
    ],
)
def test_an_among_that_does_not_fit_is_refused(change, got):
    with pytest.raises(ValueError) as error:
        fk.row_topk_mask(torch.ones(2, 4), torch.ones(4), 2, among=change(torch.ones(2, 4, dtype=torch.bool)))
    assert str(error.value) == f"row_topk_mask: among must be [2, 4] bool on cpu, {got}"


def test_row_topk_among_compiles_without_graph_breaks():
    weight, scale, keep = make_weight(6, 24), make_scale(24), make_keep(6, 24)
    among, bad = weight > 0, torch.zeros(1, dtype=torch.int32)
    torch._dynamo.reset()
    traced = torch.compile(fk.row_topk_mask, fullgraph=True, backend="aot_eager")
    assert_masks_equal(traced(weight, scale, keep, among=among, bad=bad), naive_among(weight, scale, keep, among))


# nm


@pytest.mark.usefixtures("backend")
@dtypes
@kinds
@pytest.mark.parametrize("n, m", PATTERNS)
def test_nm_keeps_the_largest_of_each_group(n, m, kind, dtype):
    weight, scale = make_weight(5, 6 * m, dtype, kind=kind), make_scale(6 * m)
    groups = [naive_mask(weight[:, a : a + m], scale[a : a + m], [n] * 5) for a in range(0, 6 * m, m)]
    assert_masks_equal(fk.nm_mask(weight, scale, n, m), torch.cat(groups, 1))


# select_threshold


def naive_counts(weights, row_scales, col_scales, total) -> list[list[int]]:
    """Sort all scores by (score, matrix, row, column) and keep the tail; a zero row scale gives 0, even times inf."""
    entries = []
    for index, (weight, rows, cols) in enumerate(zip(weights, row_scales, col_scales, strict=True)):
        scores = (weight.float().abs() * cols) * rows[:, None]
        scores[rows == 0] = 0
        entries += [(s, index, i, j) for i, row in enumerate(scores.tolist()) for j, s in enumerate(row)]
    counts = [[0] * len(weight) for weight in weights]
    for _, index, i, _ in sorted(entries)[len(entries) - total :]:
        counts[index][i] += 1
    return counts


THRESHOLD_SHAPES = [(3, 7), (1, 5), (4, 33), (2, 1)]
THRESHOLD_TOTAL = sum(rows * cols for rows, cols in THRESHOLD_SHAPES)


@dtypes
@kinds
def test_select_threshold_keeps_the_largest_scores_of_all(kind, dtype):
    weights = [make_weight(*shape, dtype, kind=kind, seed=i) for i, shape in enumerate(THRESHOLD_SHAPES)]
    row_scales = [make_scale(len(w), seed=7 + i) for i, w in enumerate(weights)]
    col_scales = [make_scale(w.shape[1], seed=i) for i, w in enumerate(weights)]
    for total in (0, 1, 50, THRESHOLD_TOTAL // 2, THRESHOLD_TOTAL - 1, THRESHOLD_TOTAL):
        counts = fk.select_threshold(weights, row_scales, col_scales, total)
        assert [c.dtype for c in counts] == [torch.int64] * 4
        assert [c.tolist() for c in counts] == naive_counts(weights, row_scales, col_scales, total)


@pytest.mark.parametrize("total", range(0, 25, 4))
def test_select_threshold_with_overflow_and_zero_rows(total):
    weights = [make_weight(3, 4) * 1e30, make_weight(3, 4, seed=1)]
    row_scales = [torch.tensor([0.0, 1.0, 1e-30]), torch.tensor([1e30, 0.0, 1.0])]
    col_scales = [torch.tensor([1e30, 1e30, 0.0, 1.0]), torch.full((4,), 1e30)]
    counts = fk.select_threshold(weights, row_scales, col_scales, total)
    assert [c.tolist() for c in counts] == naive_counts(weights, row_scales, col_scales, total)


def test_select_threshold_removes_the_lowest_matrix_row_and_column_first():
    ones = [torch.ones(2, 3), torch.ones(2, 3)]
    counts = fk.select_threshold(ones, [torch.ones(2)] * 2, [torch.ones(3)] * 2, 8)
    assert [c.tolist() for c in counts] == [[0, 2], [3, 3]]
