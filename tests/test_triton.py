"""The Triton backend: interpreted against the reference, compiled without a GPU, and on a GPU where there is one.

Interpreted cases run in one subprocess of one test, as TRITON_INTERPRET must be set before Triton is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from helpers_triton_obs import CASES as OBS_CASES
from helpers_triton_obs import ours, reference
from helpers_triton_packed import CASES as PACKED_CASES
from helpers_triton_removed import CASES as REMOVED_CASES

import fwanda_kernels as fk
from fwanda_kernels.testing import KINDS, assert_masks_equal, make_keep, make_scale, make_weight

ROOT = Path(__file__).parents[1]
ARCHITECTURES = (80, 89, 90, 100, 120, "gfx942", "gfx950")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPE_OF = dict(zip(KINDS, (BF16, FP16, FP32) * 3, strict=True)) | {"denormal": BF16, "one_huge": FP16}
DEVICE = "cuda" if torch.cuda.is_available() and __name__ != "__main__" else "cpu"


def flag() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=DEVICE)


def prunes_alike(op: str, weight, *arguments) -> None:
    found, expected = weight.clone(), weight.clone()
    getattr(ours, op)(found, *arguments, flag())
    getattr(reference, op)(expected, *arguments, flag())
    bits = torch.int32 if weight.dtype == FP32 else torch.int16
    assert torch.equal(found.view(bits), expected.view(bits))  # +0.0 and not -0.0


def check_row_topk(kind: str, rows: int = 5, cols: int = 100, dtype: torch.dtype | None = None) -> None:
    weight = make_weight(rows, cols, dtype or DTYPE_OF[kind], kind=kind, device=DEVICE)
    scale, keep = make_scale(cols, device=DEVICE), make_keep(rows, cols, device=DEVICE)
    expected = reference.row_topk_mask(weight, scale, keep, None)
    assert_masks_equal(ours.row_topk_mask(weight, scale, keep, None), expected)
    assert_masks_equal(ours.row_topk_mask(weight.t().contiguous().t(), scale, keep, flag()), expected)
    prunes_alike("row_topk_prune_", weight, scale, keep)


def check_nm(kind: str) -> None:
    for n, m, cols in ((2, 4, 64), (1, 4, 36), (3, 8, 40), (2, 5, 35)):
        weight, scale = make_weight(3, cols, DTYPE_OF[kind], kind=kind, device=DEVICE), make_scale(cols, device=DEVICE)
        expected = reference.nm_mask(weight, scale, n, m, None)
        assert_masks_equal(ours.nm_mask(weight, scale, n, m, None), expected)
        prunes_alike("nm_prune_", weight, scale, n, m)


def check_nm_of_infinite_scores() -> None:
    """Finite weights whose scores overflow, so that infinities are ties."""
    weight = torch.tensor([[1e30, 2e30, 1, 3e30, 3e38, 1, 1e-30, 2e38]] * 2, device=DEVICE)
    scale = torch.full((8,), 1e30, device=DEVICE)
    assert_masks_equal(ours.nm_mask(weight, scale, 2, 4, None), reference.nm_mask(weight, scale, 2, 4, None))
    prunes_alike("nm_prune_", weight, scale, 2, 4)


def threshold_lists(kind: str) -> tuple[list, list, list, int]:
    shapes = ((6, 33, BF16), (3, 64, FP32), (2, 40, BF16))
    weights = [make_weight(r, c, dtype, kind=kind, seed=c, device=DEVICE) for r, c, dtype in shapes]
    row_scales = [make_scale(w.shape[0], seed=3, device=DEVICE) for w in weights]
    col_scales = [make_scale(w.shape[1], seed=4, device=DEVICE) for w in weights]
    return weights, row_scales, col_scales, sum(w.numel() for w in weights)


def check_threshold(kind: str) -> None:
    *lists, size = threshold_lists(kind)
    for total in (0, size // 3, size):
        found = ours.select_threshold(*lists, total, None)
        assert torch.equal(found, reference.select_threshold(*lists, total, None))
        assert found.sum() == total


def check_thresholds(weights: list, totals: tuple, sample: int) -> None:
    """Counts of a sample that is smaller than the weights; its real size is too much for the interpreter."""
    from fwanda_kernels._backends.triton import threshold

    row_scales = [make_scale(w.shape[0], seed=3, device=DEVICE) for w in weights]
    col_scales = [make_scale(w.shape[1], seed=4, device=DEVICE) for w in weights]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threshold, "SAMPLE", sample)
        if DEVICE == "cpu":
            patch.setattr(threshold, "PARTS", 16)  # programs that the interpreter runs one after another
        for total in totals:
            found = ours.select_threshold(weights, row_scales, col_scales, total, None)
            assert torch.equal(found, reference.select_threshold(weights, row_scales, col_scales, total, None)), total


def check_misleading_sample() -> None:
    """One weight of each stretch of 8 is sampled; here those are all larger, or all smaller, than the rest."""
    place = torch.arange(4096, device=DEVICE)
    sampled = place % 8 == (place // 8 * 0x9E3779B1 & 0xFFFFFF) * 8 >> 24
    for larger in (sampled, ~sampled):
        weight = make_weight(1, 4096, seed=1, device=DEVICE).sigmoid() + 2 * larger
        check_thresholds([weight.view(16, 256)], (5, 2048, 4000), sample=512)


def check_hard_lists() -> None:
    """Skewed scores, few different ones, equal ones, a matrix that dominates, and matrices of one weight."""
    skewed = make_weight(9, 300, device=DEVICE).mul(9).exp()
    few = make_weight(9, 300, BF16, device=DEVICE).sign() * 3
    tiny = [make_weight(1, 1, dtype, seed=i, device=DEVICE) for i, dtype in enumerate((BF16, FP16, FP32))]
    equal = make_weight(33, 64, FP16, kind="all_equal", device=DEVICE)
    dominating = make_weight(64, 512, BF16, device=DEVICE) * 1e6
    for weights in ([skewed], [few], [equal], [*tiny, dominating, few], [*tiny, skewed, equal, tiny[0] + 1], tiny):
        size = sum(w.numel() for w in weights)
        check_thresholds(weights, (1, size // 2), sample=200)


def check_marks_of_long_rows() -> None:
    """Rows of 32 chunks of 256 columns, of one more, and of so many that a mark stands for four chunks."""
    for cols in (8192, 8193, 17_000):
        weight = make_weight(3, cols, BF16, kind="heavy_ties", device=DEVICE)
        check_thresholds([weight], (cols,), sample=4096)


def check_written_table() -> None:
    """The table of a call that a CUDA graph captures is the one that other calls copy."""
    from fwanda_kernels._backends.triton.launch import table_of, written_table

    entries = [(0, i, 16 * i, (1 << 57) - i) for i in range(40)]
    like = torch.empty(1, device=DEVICE)
    assert torch.equal(written_table(entries, like), table_of(entries, like))


def check_rows_of_many_parts() -> None:
    """Rows in one part and in several, the last of them full or not, with ties in more than one."""
    for cols, dtype in ((256, BF16), (257, FP16), (1024, BF16), (1024, FP16), (1024, FP32), (3000, BF16)):
        for kind in ("normal", "two_values", "all_equal"):
            check_row_topk(kind, cols=cols, dtype=dtype)


def check_longest_rows() -> None:
    weight, scale = torch.ones(1, 65_537, dtype=BF16, device=DEVICE), torch.ones(65_537, device=DEVICE)
    keep = torch.ones(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(fk.BackendError, match="row_topk_mask: .*triton: declines these arguments"):
        ours.row_topk_mask(weight, scale, keep, None)


def check_scores_of_one_bucket() -> None:
    """Scores whose upper halves agree: they differ in the last bits only, and some are equal."""
    weight = torch.ones(4, 600, device=DEVICE)
    weight.view(torch.int32)[:, ::3] += torch.arange(200, dtype=torch.int32, device=DEVICE)
    weight.view(torch.int32)[2:, 1::3] += 65_535 - torch.arange(200, dtype=torch.int32, device=DEVICE)
    scale = torch.ones(600, device=DEVICE)
    for keep in (1, 200, 201, 399, 599):
        keeps = torch.full((4,), keep, device=DEVICE)
        expected = reference.row_topk_mask(weight, scale, keeps, None)
        assert_masks_equal(ours.row_topk_mask(weight, scale, keeps, None), expected)


def check_foreach_row_topk() -> None:
    weights = [make_weight(r, c, dtype, seed=c, device=DEVICE) for r, c, dtype in ((3, 40, BF16), (5, 33, FP32))]
    scales = [make_scale(w.shape[1], device=DEVICE) for w in weights]
    keeps = [make_keep(*w.shape, device=DEVICE) for w in weights]
    expected = [w.clone() for w in weights]
    reference.foreach_row_topk_prune_(expected, scales, keeps, None)
    found = [w.clone() for w in weights]
    ours.foreach_row_topk_prune_(found, scales, keeps, None)
    assert all(map(torch.equal, found, expected))
    weights[1][4, 7] = float("nan")
    before, bad = [w.clone() for w in weights], torch.zeros(2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="at index 1: weight has NaN or inf"):
        ours.foreach_row_topk_prune_(weights, scales, keeps, None)
    assert all(map(torch.equal, map(torch.nan_to_num, weights), map(torch.nan_to_num, before)))
    ours.foreach_row_topk_prune_(weights, scales, keeps, bad)
    assert bad.tolist() == [0, 1] and torch.equal(weights[0], expected[0])


def check_compress_24(kind: str, rows: int = 64, cols: int = 160) -> None:
    dtype = FP16 if DTYPE_OF[kind] == FP16 else BF16
    weight, scale = make_weight(rows, cols, dtype, kind=kind, device=DEVICE), make_scale(cols, device=DEVICE)
    expected = reference.compress_24(weight, scale, None)
    for given in (weight, weight.t().contiguous().t()):
        for actual, wanted in zip(ours.compress_24(given, scale, None), expected, strict=True):
            assert torch.equal(actual.view(torch.int16), wanted.view(torch.int16))


def check_sq_sums() -> None:
    x = make_weight(300, 70, BF16, device=DEVICE).view(2, 150, 70)
    mask = torch.arange(300, device=DEVICE).view(2, 150) % 3 != 0
    x[~mask] = float("nan")
    acc = torch.ones(70, device=DEVICE)
    ours.accumulate_sq_sums_(acc, x, mask)
    expected = 1 + x[mask].double().square().sum(0)
    assert ((acc - expected).abs() <= 1e-6 * expected).all()


def check_foreach_sq_sums(scale: int = 1) -> None:
    """The bits of single calls, for mixed dtypes, widths, strides, alignments and token counts, and twice the same."""
    shapes = ((300, 48, BF16), (70, 70, BF16), (5, 33, FP32), (0, 16, BF16), (300 * scale, 64, BF16), (9, 16, FP16))
    xs = [make_weight(t, c, dtype, seed=c, device=DEVICE) for t, c, dtype in shapes]
    xs += [xs[0].t().contiguous().t(), make_weight(20, 65, BF16, device=DEVICE)[:, 1:], xs[0].view(3, 100, 48)]
    single = [torch.ones(x.shape[-1], device=DEVICE) for x in xs]
    for acc, x in zip(single, xs, strict=True):
        if x.numel():
            ours.accumulate_sq_sums_(acc, x, None)
    for _ in range(2):
        grouped = [torch.ones(x.shape[-1], device=DEVICE) for x in xs]
        ours.foreach_accumulate_sq_sums_(grouped, xs, None)
        assert all(map(torch.equal, grouped, single))
    mask = torch.arange(20, device=DEVICE) % 3 != 0
    xs, accs = [x[:20].clone() for x in xs[:2]], [torch.zeros(96, device=DEVICE)[::2], torch.zeros(70, device=DEVICE)]
    expected = [x[mask].double().square().sum(0) for x in xs]
    for x in xs:
        x[~mask] = float("nan")
    ours.foreach_accumulate_sq_sums_(accs, xs, mask)
    for acc, wanted in zip(accs, expected, strict=True):
        assert ((acc - wanted).abs() <= 1e-6 * wanted).all()


def check_sq_sums_order() -> None:
    """The order of additions that every device follows, on slabs of 256 tokens and tiles of 128."""
    x = make_weight(400, 24, BF16, device=DEVICE)
    tiles = torch.cat((x.float().square(), torch.zeros(112, 24, device=DEVICE))).view(2, 2, 128, 24)
    while tiles.shape[2] > 16:
        tiles = tiles[:, :, : tiles.shape[2] // 2] + tiles[:, :, tiles.shape[2] // 2 :]
    slabs = tiles[:, 0] + tiles[:, 1]
    while slabs.shape[1] > 1:
        slabs = slabs[:, ::2] + slabs[:, 1::2]
    acc = torch.ones(24, device=DEVICE)
    ours.accumulate_sq_sums_(acc, x, None)
    assert torch.equal(acc, (1 + slabs[:, 0].double().sum(0)).float())


def check_bad_values() -> None:
    good_keep = torch.tensor([1, 2], device=DEVICE)
    for code, value, place in ((1, float("nan"), "weight"), (1, float("inf"), "weight"), (2, -1.0, "scale")):
        weight, scale = torch.ones(2, 8, device=DEVICE), torch.ones(8, device=DEVICE)
        (weight[1] if place == "weight" else scale)[5] = value
        before = weight.clone()
        calls = {
            "row_topk_mask": lambda bad, w=weight, s=scale: ours.row_topk_mask(w, s, good_keep, bad),
            "row_topk_prune_": lambda bad, w=weight, s=scale: ours.row_topk_prune_(w, s, good_keep, bad),
            "nm_mask": lambda bad, w=weight, s=scale: ours.nm_mask(w, s, 2, 4, bad),
            "nm_prune_": lambda bad, w=weight, s=scale: ours.nm_prune_(w, s, 2, 4, bad),
            "compress_24": lambda bad, w=weight, s=scale: ours.compress_24(w.to(BF16).repeat(16, 4), s.repeat(4), bad),
            "select_threshold": lambda bad, w=weight, s=scale: ours.select_threshold([w], [s[:2]], [s], 3, bad),
        }
        for op, call in calls.items():
            with pytest.raises(ValueError) as error:
                call(None)
            assert str(error.value) == fk.bad_message(op, code)
            assert torch.equal(weight.nan_to_num(7), before.nan_to_num(7)), f"{op} wrote before it raised"
            found = flag()
            call(found)
            assert found.item() == code
            weight.copy_(before)
    with pytest.raises(ValueError, match="keep"):
        ours.row_topk_prune_(torch.ones(2, 8, device=DEVICE), scale.abs(), good_keep + 7, None)


def check_negative_zero_scale() -> None:
    scale = torch.tensor([-0.0, 0.0, -0.0, 1.0], device=DEVICE)
    weight, keep = torch.ones(4, 4, device=DEVICE), torch.arange(4, device=DEVICE)
    expected = reference.row_topk_mask(weight, scale, keep, None)
    assert_masks_equal(ours.row_topk_mask(weight, scale, keep, None), expected)


CASES = {f"row_topk-{kind}": (check_row_topk, kind) for kind in KINDS}
CASES |= {f"nm-{kind}": (check_nm, kind) for kind in ("normal", "two_values", "denormal", "one_huge")}
CASES |= {f"compress_24-{kind}": (check_compress_24, kind) for kind in ("normal", "heavy_ties", "zeros", "one_huge")}
CASES |= {f"threshold-{kind}": (check_threshold, kind) for kind in ("normal", "all_equal", "denormal")}
CASES |= OBS_CASES | REMOVED_CASES | PACKED_CASES
CASES |= {
    check.__name__[6:]: (check,)
    for check in (
        check_nm_of_infinite_scores,
        check_misleading_sample,
        check_hard_lists,
        check_marks_of_long_rows,
        check_written_table,
        check_rows_of_many_parts,
        check_longest_rows,
        check_scores_of_one_bucket,
        check_foreach_row_topk,
        check_sq_sums,
        check_sq_sums_order,
        check_foreach_sq_sums,
        check_bad_values,
        check_negative_zero_scale,
    )
}


def outcome(check, *arguments) -> str:
    try:
        check(*arguments)
    except BaseException:
        return traceback.format_exc()
    return ""


def test_interpreted() -> None:
    triton = pytest.importorskip("triton", reason="triton is not installed")
    numpy = pytest.importorskip("numpy", reason="the interpreter needs numpy")
    version = lambda v: tuple(map(int, v.split(".")[:2]))  # noqa: E731
    if version(triton.__version__) < (3, 7) and version(numpy.__version__) >= (2, 4):
        pytest.skip("this Triton's interpreter needs numpy < 2.4")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", __file__]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert outcomes.keys() == CASES.keys()
    failed = {name: error for name, error in outcomes.items() if error}
    assert not failed, "\n".join(f"{name}:\n{error}" for name, error in failed.items())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_spills(arch: int | str) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from fwanda_kernels._backends.triton.aot import compile_kernels

    spills = {name: spilled for name, (_, spilled) in compile_kernels(arch).items() if spilled}
    assert not spills


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@needs_gpu
@pytest.mark.parametrize("case", CASES)
def test_on_gpu(case: str) -> None:
    check, *arguments = CASES[case]
    check(*arguments)


@needs_gpu
@pytest.mark.parametrize(
    ("cols", "dtype"),
    # each number of warps from 1 to 16, with a last part that is full or not; each dtype in the longest rows
    [(cols, BF16) for cols in (1000, 5120, 11008, 13824, 28672, 57_344, 65_535)]
    + [(4096, FP16), (65_535, FP16), (65_535, FP32)],
)
def test_row_lengths_on_gpu(cols: int, dtype: torch.dtype) -> None:
    for kind in ("normal", "two_values", "all_equal"):  # in one test, as all take the same kernels
        check_row_topk(kind, rows=6, cols=cols, dtype=dtype)


@needs_gpu
def test_grouped_sums_on_gpu() -> None:
    check_foreach_sq_sums(scale=100)


@needs_gpu
@pytest.mark.parametrize("kind", ("normal", "two_values"))
def test_compress_24_on_gpu_is_what_torch_packs(kind: str) -> None:
    from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

    for rows, cols in ((32, 32), (4096, 4096), (1376, 11008)):
        weight, scale = make_weight(rows, cols, BF16, kind=kind, device=DEVICE), make_scale(cols, device=DEVICE)
        values, meta = ours.compress_24(weight, scale, flag())
        pruned = weight.clone()
        ours.nm_prune_(pruned, scale, 2, 4, flag())
        packed, reordered = sparse_semi_structured_from_dense_cutlass(pruned)
        assert torch.equal(values, packed) and torch.equal(meta, reordered.view(rows, cols // 16))


@needs_gpu
def test_cuda_graph_replays_the_ops() -> None:
    weight, scale = make_weight(64, 512, BF16, device=DEVICE), make_scale(512, device=DEVICE)
    keep, bad, accs = make_keep(64, 512, device=DEVICE), flag(), torch.zeros(4, 512, device=DEVICE)
    pruned = torch.empty(2, 64, 512, dtype=BF16, device=DEVICE)
    bads = torch.zeros(2, dtype=torch.int32, device=DEVICE)

    def ops():
        accs.zero_()
        ours.accumulate_sq_sums_(accs[0], weight, None)
        xs = [weight, weight[:40], weight[:, 1:78]]
        ours.foreach_accumulate_sq_sums_([accs[1], accs[2], accs[3, :77]], xs, None)
        counts = ours.select_threshold([weight], [scale[:64].contiguous()], [scale], 9000, bad)
        pruned.copy_(weight)
        ours.foreach_row_topk_prune_(list(pruned), [scale, scale], [keep, keep.flip(0)], bads)
        masks = ours.row_topk_mask(weight, scale, keep, bad), ours.nm_mask(weight, scale, 2, 4, bad)
        return *masks, counts, *ours.compress_24(weight, scale, bad), accs, pruned

    ops()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops()
    for seed in (1, 2):
        weight.copy_(make_weight(64, 512, BF16, seed=seed))
        graph.replay()
        replayed = [t.clone() for t in captured]
        assert all(torch.equal(a, b) for a, b in zip(replayed, ops(), strict=True))
    assert not bad.any() and not bads.any()


@needs_gpu
def test_more_than_two_billion_elements_on_gpu() -> None:
    """Rows and columns beyond element 2^31 give what they give alone."""
    rows, cols = 70_000, 32_768
    places = torch.tensor([0, 65_535, 65_536, 65_537, rows - 1], device=DEVICE)
    weight = torch.empty(rows, cols, dtype=BF16, device=DEVICE)
    for piece in weight.split(5000):
        piece.normal_()
    scale, keep, bad = make_scale(cols, device=DEVICE), make_keep(rows, cols, device=DEVICE), flag()
    whole = weight[: rows // 32 * 32]
    values, meta = ours.compress_24(whole, scale, bad)
    alone = reference.compress_24(whole[-32:], scale, None)
    assert torch.equal(values[-32:], alone[0])
    assert torch.equal(meta.view(cols // 32, -1)[:, -64:], alone[1].view(cols // 32, -1))
    del values, meta
    acc, grouped, expected = torch.zeros(3, cols, device=DEVICE)
    ours.accumulate_sq_sums_(acc, weight, None)
    ours.foreach_accumulate_sq_sums_([grouped], [weight], None)
    reference.accumulate_sq_sums_(expected, weight, None)
    assert torch.equal(acc, grouped) and ((acc - expected).abs() <= 1e-5 * expected).all()
    some = weight[places]
    reference.row_topk_prune_(some, scale, keep[places], None)
    ours.row_topk_prune_(weight, scale, keep, bad)
    assert torch.equal(weight[places], some) and not bad.any()


if __name__ == "__main__":
    print(json.dumps({name: outcome(*case) for name, case in CASES.items()}))
