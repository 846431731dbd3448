"""SparseGPT and F-SparseGPT: the factor, and the sweep against a direct column-by-column restatement in float64."""

import itertools
from fractions import Fraction
from math import floor

import pytest
import torch

import fwanda_kernels as fk
from fwanda_kernels.testing import WEIGHT_DTYPES

ROWS, COLS, TOKENS = 10, 48, 200
BLOCK = 20
DEAD = 5


def make_inputs(tokens=TOKENS, cols=COLS, dead=()) -> torch.Tensor:
    """[tokens, cols] correlated columns of different size; those in `dead` are zero."""
    x = torch.randn(tokens, cols) @ (torch.eye(cols) + 0.3 * torch.randn(cols, cols)) * torch.linspace(0.5, 2, cols)
    x[:, list(dead)] = 0
    return x


def make_problem(dtype=torch.float32, dead=()) -> tuple[torch.Tensor, torch.Tensor]:
    x = make_inputs(dead=dead)
    return torch.randn(ROWS, COLS).to(dtype), x.T @ x


def damped(hessian: torch.Tensor, damping=0.01) -> torch.Tensor:
    """float64 Hessian with 1 on the diagonal of dead columns and damping * mean(diag) added to all."""
    wide = hessian.double().clone()
    diagonal = wide.diagonal()
    diagonal[diagonal == 0] = 1
    diagonal += damping * diagonal.mean().item()
    return wide


# factor


@pytest.mark.parametrize("cols", [1, 128, 129, 300, 700])
def test_factor_of_several_leaves_is_the_factor(cols):
    x = make_inputs(2 * cols, cols)
    hessian = x.T @ x
    factor, info = fk.obs_factor(hessian)
    expected = torch.linalg.cholesky(torch.linalg.inv(damped(hessian)), upper=True)
    assert int(info) == 0 and torch.equal(factor, factor.triu()) and factor.is_contiguous()
    assert (factor - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("damping", [0.01, 0.1])
@pytest.mark.parametrize("tokens, dead", [(TOKENS, ()), (TOKENS, (0, DEAD, COLS - 1)), (7, ())], ids=str)
def test_factor_is_the_upper_cholesky_factor_of_the_damped_inverse(tokens, dead, damping):
    x = make_inputs(tokens, dead=dead)
    hessian = x.T @ x
    factor, info = fk.obs_factor(hessian, damping)
    inverse = torch.linalg.inv(damped(hessian, damping))
    assert int(info) == 0 and torch.equal(factor, factor.triu())
    wide = factor.double()
    torch.testing.assert_close(wide.T @ wide, inverse, rtol=1e-3, atol=1e-4 * inverse.abs().max().item())


def test_dead_columns_count_as_one_in_the_mean_that_damps():
    diagonal = torch.tensor([0.0, 0.5, 0.0, 0.25])
    factor, _ = fk.obs_factor(diagonal.diag(), 0.1)
    expected = torch.tensor([1, 0.5, 1, 0.25]) + 0.1 * 2.75 / 4
    torch.testing.assert_close(factor.diagonal(), expected.rsqrt() * torch.tensor([-1, 1, -1, 1]))


def test_dead_columns_have_a_negative_diagonal_and_touch_no_other_column():
    _, hessian = make_problem(dead=(0, DEAD))
    factor, _ = fk.obs_factor(hessian)
    assert (factor.diagonal() < 0).nonzero().flatten().tolist() == [0, DEAD]
    others = factor - factor.diagonal().diag()
    assert not others[[0, DEAD]].any() and not others[:, [0, DEAD]].any()


BROKEN = {
    "indefinite": torch.tensor([[1.0, 2.0], [2.0, 1.0]]),
    "negative": -torch.eye(3),
    "nan_diagonal": torch.eye(3).fill_diagonal_(float("nan")),
    "nan_off_diagonal": torch.tensor([[1.0, float("nan")], [float("nan"), 1.0]]),
    "inf": torch.eye(3) * float("inf"),
}


@pytest.mark.fault("Cholesky")
@pytest.mark.parametrize("kind", BROKEN)
def test_factor_of_a_broken_hessian_has_info(kind):
    info = fk.obs_factor(BROKEN[kind])[1]
    assert info.shape == () and info.dtype == torch.int32 and int(info) != 0


@pytest.mark.fault("not finite")
@pytest.mark.parametrize("kind", BROKEN)
def test_prune_with_a_broken_hessian_raises_and_keeps_the_weight(kind):
    hessian = BROKEN[kind]
    weight = torch.randn(4, len(hessian))
    before = weight.clone()
    with pytest.raises(ValueError, match="^obs_prune_: .*larger damping"):
        fk.obs_prune_(weight, hessian, sparsity=0.5)
    assert torch.equal(weight, before)


# the sweep


def lowest(scores: torch.Tensor, count: int) -> list[int]:
    return torch.argsort(scores, stable=True)[:count].tolist()


def direct_obs(weight, hessian, *, sparsity=None, keep=None, mask=None, pattern=None, row_weight=None, block=128):
    """Prune a column at a time with the inverse Hessian of the columns from it on, all in float64."""
    w = weight.double().clone()
    rows, cols = w.shape
    h = damped(hessian)
    w[:, hessian.diagonal() == 0] = 0
    inverses = [torch.linalg.inv(h[c:, c:]) for c in range(cols)]
    weights_of_rows = torch.ones(rows, dtype=torch.float64) if row_weight is None else row_weight.double()
    gone = torch.zeros(rows, cols, dtype=torch.bool) if mask is None else ~mask
    step = block if pattern is None else pattern[1]

    def scores(a, b):
        diagonal = torch.stack([inverses[c][0, 0] for c in range(a, b)])
        return w[:, a:b].square() / diagonal * weights_of_rows[:, None]

    for c in range(cols):
        a, b = c, min(c + step, cols)
        if c % step == 0 and sparsity is not None:
            count = floor(Fraction(sparsity) * rows * b) - floor(Fraction(sparsity) * rows * a)
            for flat in lowest(scores(a, b).flatten(), count):
                gone[flat // (b - a), a + flat % (b - a)] = True
        elif c % step == 0 and mask is None:
            for i, row in enumerate(scores(a, b)):
                pruned = 0 if keep is None else cols - int(keep[i])
                count = pattern[1] - pattern[0] if pattern else pruned * b // cols - pruned * a // cols
                gone[i, [a + j for j in lowest(row, count)]] = True
        error = torch.where(gone[:, c], w[:, c], 0) / inverses[c][0, 0]
        w[:, c:] -= error[:, None] * inverses[c][0]
        w[gone[:, c], c] = 0
    return w, gone


KEEP = torch.tensor([0, 1, COLS - 1, COLS, 24, 30, 10, 7, 33, 20])
SELECTIONS = {
    "sparsity": {"sparsity": "0.7"},
    "row_weight": {"sparsity": "0.5", "row_weight": torch.linspace(0.1, 4, ROWS)},
    "keep": {"keep": KEEP},
    "keep_row_weight": {"keep": KEEP, "row_weight": torch.linspace(0.1, 4, ROWS)},
    "mask": {"mask": torch.rand(ROWS, COLS, generator=torch.Generator().manual_seed(1)) > 0.5},
    "2:4": {"pattern": (2, 4)},
    "4:8": {"pattern": (4, 8)},
    "3:4": {"pattern": (3, 4)},
    "0:3": {"pattern": (0, 3)},
}
selections = pytest.mark.parametrize("selection", SELECTIONS)


@selections
@pytest.mark.parametrize("dead", [(), (DEAD, 21)], ids=["alive", "dead"])
def test_sweep_equals_the_direct_restatement(selection, dead):
    weight, hessian = make_problem(dead=dead)
    arguments = SELECTIONS[selection]
    expected, gone = direct_obs(weight, hessian, block=BLOCK, **arguments)
    fk.obs_prune_(weight, hessian, block=BLOCK, **arguments)
    gone[:, list(dead)] = True
    assert torch.equal(weight == 0, gone)
    torch.testing.assert_close(weight.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("removed", [0, 1, 7, COLS - 1, COLS])
def test_sweep_is_the_exact_solution_when_the_first_columns_go(removed):
    _, hessian = make_problem()
    weight = torch.randn(1, COLS)
    original, h = weight[0].double(), damped(hessian)
    solution = torch.linalg.solve(h[removed:, removed:], h[removed:, :removed] @ original[:removed])
    expected = torch.cat([torch.zeros(removed), original[removed:] + solution])
    fk.obs_prune_(weight, hessian, mask=torch.arange(COLS)[None] >= removed, block=BLOCK)
    torch.testing.assert_close(weight[0].double(), expected.double(), rtol=1e-3, atol=1e-4)


# counts


def zeros_per_block(weight: torch.Tensor, block=BLOCK) -> list[torch.Tensor]:
    return [(weight[:, a : a + block] == 0).sum(1) for a in range(0, COLS, block)]


@pytest.mark.parametrize("sparsity", [0.7, "0.7", 0.1, 0.3, 0.5, "0.123", Fraction(1, 3), 0, 0.0, 1, 1e-5])
def test_each_block_loses_its_exact_share(sparsity):
    weight, hessian = make_problem()
    fk.obs_prune_(weight, hessian, sparsity=sparsity, block=BLOCK)
    share = Fraction(str(sparsity)) * ROWS
    ends = [*range(0, COLS, BLOCK), COLS]
    expected = [floor(share * b) - floor(share * a) for a, b in itertools.pairwise(ends)]
    assert [int(count.sum()) for count in zeros_per_block(weight)] == expected


def test_each_row_of_each_block_loses_its_exact_share():
    weight, hessian = make_problem()
    fk.obs_prune_(weight, hessian, keep=KEEP, block=BLOCK)
    ends, pruned = [*range(0, COLS, BLOCK), COLS], COLS - KEEP
    for counts, (a, b) in zip(zeros_per_block(weight), itertools.pairwise(ends), strict=True):
        assert torch.equal(counts, pruned * b // COLS - pruned * a // COLS)
    assert torch.equal((weight != 0).sum(1), KEEP)


@pytest.mark.parametrize("block", [1, 20, 128])
@pytest.mark.parametrize("n, m", [(2, 4), (4, 8), (1, 4), (0, 4), (4, 4), (2, 3)])
def test_every_group_has_its_pattern(n, m, block):
    weight, hessian = make_problem()
    fk.obs_prune_(weight, hessian, pattern=(n, m), block=block)
    assert ((weight != 0).view(ROWS, -1, m).sum(2) == n).all()


def test_scores_that_tie_go_by_row_then_column():
    weight = torch.ones(3, 4)
    fk.obs_prune_(weight, torch.eye(4), sparsity=0.5)
    assert weight.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]]


# a fixed mask


def test_fixed_mask_leaves_positive_zeros_and_lowers_the_output_error():
    x = make_inputs()
    dense, mask = torch.randn(ROWS, COLS), torch.rand(ROWS, COLS) > 0.5
    weight = dense.clone()
    fk.obs_prune_(weight, x.T @ x, mask=mask, block=BLOCK)
    assert torch.equal(weight != 0, mask) and not weight[~mask].view(torch.int32).any()
    assert ((weight - dense) @ x.T).norm() < ((dense * mask - dense) @ x.T).norm()


@pytest.mark.parametrize("selection", ["mask", "2:4", "4:8"])
def test_block_size_does_not_matter_for_a_mask_or_a_pattern(selection):
    weight, hessian = make_problem()
    results = []
    for block in (8, 16, 128) if ":" in selection else (1, 7, 16, 128):
        results.append(weight.clone())
        fk.obs_prune_(results[-1], hessian, block=block, **SELECTIONS[selection])
    for result in results[:-1]:
        assert torch.equal(result == 0, results[-1] == 0)
        torch.testing.assert_close(result, results[-1], rtol=1e-3, atol=1e-4)


# the call


@selections
def test_factor_gives_what_the_hessian_gives_and_neither_is_modified(selection):
    weight, hessian = make_problem(dead=(DEAD,))
    factor, _ = fk.obs_factor(hessian)
    kept = [t.clone() for t in (hessian, factor)]
    by_hessian, by_factor = weight.clone(), weight.clone()
    fk.obs_prune_(by_hessian, hessian, block=BLOCK, **SELECTIONS[selection])
    fk.obs_prune_(by_factor, factor=factor, block=BLOCK, **SELECTIONS[selection])
    assert torch.equal(by_hessian, by_factor)
    assert torch.equal(hessian, kept[0]) and torch.equal(factor, kept[1])


@selections
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=str)
def test_result_is_deterministic_and_the_fp32_sweep_rounded_once(selection, dtype):
    weight, hessian = make_problem(dtype)
    first, second, wide = weight.clone(), weight.T.contiguous().T, weight.float()
    for w in (first, second, wide):
        fk.obs_prune_(w, hessian, block=BLOCK, **SELECTIONS[selection])
    assert torch.equal(first, second) and torch.equal(first, wide.to(dtype))


def test_a_constant_row_weight_changes_nothing():
    weight, hessian = make_problem()
    plain = weight.clone()
    fk.obs_prune_(plain, hessian, sparsity=0.5, block=BLOCK)
    fk.obs_prune_(weight, hessian, sparsity=0.5, block=BLOCK, row_weight=torch.full((ROWS,), 4.0))
    assert torch.equal(weight, plain)


def test_the_precision_that_the_process_allows_is_left_as_it_was():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    weight, hessian = make_problem()
    try:
        for allowed in ("tf32", "ieee"):
            matmul.fp32_precision = allowed
            fk.accumulate_gram_(hessian, make_inputs())
            fk.obs_prune_(weight, hessian, sparsity=0.5)
            with pytest.raises(ValueError):
                fk.obs_prune_(weight, -hessian, sparsity=0.5)
            assert matmul.fp32_precision == allowed
    finally:
        matmul.fp32_precision = before


W, H = torch.randn(6, 8), torch.eye(8)
WRONG = [
    ({"hessian": None}, "exactly one of hessian and factor must be given, got none"),
    ({"factor": H}, "exactly one of hessian and factor must be given, got ['hessian', 'factor']"),
    ({"hessian": H[1:]}, "hessian must be [8, 8] float32 on cpu, got [7, 8] float32 on cpu"),
    ({"hessian": H.double()}, "hessian must be [8, 8] float32 on cpu, got [8, 8] float64 on cpu"),
    ({"hessian": None, "factor": H.to("meta")}, "factor must be [8, 8] float32 on cpu, got [8, 8] float32 on meta"),
    ({"weight": W.double()}, "weight must be [R, C] bfloat16|float16|float32 on any device, got [6, 8] float64 on cpu"),
    ({"weight": W[0]}, "weight must be [R, C] bfloat16|float16|float32 on any device, got [8] float32 on cpu"),
    ({"weight": W / torch.zeros(8)}, "weight has NaN or inf values"),
    ({"sparsity": None}, "exactly one of sparsity, keep, mask and pattern must be given, got none"),
    ({"pattern": (2, 4)}, "exactly one of sparsity, keep, mask and pattern must be given, got ['sparsity', 'pattern']"),
    ({"sparsity": 1.5}, "sparsity must be in [0, 1], got 1.5"),
    ({"sparsity": -0.1}, "sparsity must be in [0, 1], got -0.1"),
    ({"sparsity": float("nan")}, "sparsity must be in [0, 1], got nan"),
    ({"sparsity": "half"}, "sparsity must be in [0, 1], got half"),
    ({"sparsity": None, "keep": torch.full((5,), 4)}, "keep must be [6] int64 on cpu, got [5] int64 on cpu"),
    ({"sparsity": None, "keep": torch.full((6,), 4.0)}, "keep must be [6] int64 on cpu, got [6] float32 on cpu"),
    ({"sparsity": None, "keep": torch.full((6,), 9)}, "keep must be in [0, C]"),
    ({"sparsity": None, "keep": torch.full((6,), -1)}, "keep must be in [0, C]"),
    ({"sparsity": None, "mask": W[:5] > 0}, "mask must be [6, 8] bool on cpu, got [5, 8] bool on cpu"),
    ({"sparsity": None, "mask": W}, "mask must be [6, 8] bool on cpu, got [6, 8] float32 on cpu"),
    ({"sparsity": None, "pattern": (5, 4)}, "got 5:4"),
    ({"row_weight": torch.ones(8)}, "row_weight must be [6] float32 on cpu, got [8] float32 on cpu"),
    ({"row_weight": torch.full((6,), -1.0)}, "row_weight must be finite and >= 0"),
    ({"row_weight": torch.full((6,), float("nan"))}, "row_weight must be finite and >= 0"),
    ({"block": 0}, "got block=0 and damping=0.01"),
    ({"damping": 0.0}, "got block=128 and damping=0.0"),
]


@pytest.mark.parametrize("change, message", WRONG, ids=[f"{'-'.join(c)}-{i}" for i, (c, _) in enumerate(WRONG)])
def test_wrong_argument_is_one_line_and_the_weight_is_kept(change, message):
    arguments = {"weight": W.clone(), "hessian": H, "sparsity": 0.5, **change}
    before = arguments["weight"].clone()
    with pytest.raises(ValueError) as error:
        fk.obs_prune_(arguments.pop("weight"), arguments.pop("hessian"), **arguments)
    text = str(error.value)
    assert text.startswith("obs_prune_: ") and message in text and "\n" not in text
    current = change.get("weight", None)
    assert current is None or torch.equal(current.nan_to_num(), before.nan_to_num())


def test_zero_weights_are_kept_positive_or_negative_only_where_the_mask_says():
    weight = torch.tensor([[-0.0, -0.0, 1.0, 2.0]])
    fk.obs_prune_(weight, torch.eye(4), mask=torch.tensor([[False, True, False, True]]))
    assert torch.signbit(weight).tolist()[0][0::2] == [False, False] and weight.tolist() == [[0, 0, 0, 2]]


@pytest.mark.parametrize(
    "hessian, damping, message",
    [
        (torch.zeros(3, 4), 0.01, "hessian must be [3, 3] float32 on cpu, got [3, 4] float32 on cpu"),
        (torch.zeros(3), 0.01, "hessian must be [C, C] float32, got [3] float32 on cpu"),
        (torch.eye(3).double(), 0.01, "hessian must be [3, 3] float32 on cpu, got [3, 3] float64 on cpu"),
        (torch.eye(3), 0.0, "damping must be > 0, got 0.0"),
        (torch.eye(3), float("nan"), "damping must be > 0, got nan"),
    ],
)
def test_wrong_factor_argument_is_one_line(hessian, damping, message):
    with pytest.raises(ValueError) as error:
        fk.obs_factor(hessian, damping)
    assert str(error.value) == f"obs_factor: {message}"


def test_columns_after_the_last_group_of_a_pattern_stay_dense_and_take_up_error():
    """With the head fixed the tail minimises the damped output error: the gradient there vanishes."""
    before = torch.randn(6, 10)
    x = torch.randn(64, 10)
    hessian = x.T @ x
    weight = before.clone()
    fk.obs_prune_(weight, hessian, pattern=(2, 4))
    assert ((weight[:, :8] == 0).view(6, 2, 4).sum(2) == 2).all() and (weight[:, 8:] != 0).all()
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(10)
    gradient = ((weight - before) @ damped)[:, 8:]
    assert gradient.abs().max() < 1e-4 * (before @ damped).abs().max()
    assert not torch.equal(weight[:, 8:], before[:, 8:])
