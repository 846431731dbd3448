"""Forks of the Wanda reference as a host: their arithmetic is restated here and must be met bit for bit."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fwanda_kernels.testing import KINDS, assert_masks_equal, make_scale, make_weight
from fwanda_pruner import UserError
from fwanda_pruner.integrations.wanda_style import WrappedGPT, wanda_mask, wanda_prune_


def running_mean(batches: list[torch.Tensor], cols: int) -> torch.Tensor:
    """The reference's scaler_row: norms of the columns of each batch, as a mean over samples."""
    mean, seen = torch.zeros(cols), 0
    for x in batches:
        new = 1 if x.dim() == 2 else x.shape[0]
        mean *= seen / (seen + new)
        seen += new
        columns = x.reshape(-1, cols).t().type(torch.float32)
        mean += torch.norm(columns, p=2, dim=1) ** 2 / seen
    return mean


def reference_mask(weight, scaler_row, ratio=0.5, prune_n=0, prune_m=0) -> torch.Tensor:
    """The reference's selection, True = removed."""
    metric = weight.abs() * torch.sqrt(scaler_row.reshape(1, -1))
    mask = torch.zeros_like(metric, dtype=torch.bool)
    if not prune_n:
        order = torch.sort(metric, dim=-1, stable=True).indices
        return mask.scatter_(1, order[:, : int(weight.shape[1] * ratio)], True)
    for a in range(0, weight.shape[1], prune_m):
        lowest = torch.topk(metric[:, a : a + prune_m].float(), prune_n, dim=1, largest=False).indices
        mask.scatter_(1, a + lowest, True)
    return mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scaler_row_has_the_bits_of_the_running_mean(dtype):
    batches = [torch.randn(shape).to(dtype) for shape in [(1, 33, 24), (4, 17, 24), (9, 24), (2, 5, 24)]]
    wrapped = WrappedGPT(nn.Linear(24, 6, dtype=dtype), layer_id=3, layer_name="q")
    for x in batches:
        wrapped.add_batch(x, None)
    assert torch.equal(wrapped.scaler_row, running_mean(batches, 24))
    assert (wrapped.nsamples, wrapped.rows, wrapped.columns, wrapped.layer_id) == (8, 6, 24, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "one_huge"])
@pytest.mark.parametrize("ratio", [0.0, 0.29, 0.5, 0.7, 1.0])
def test_unstructured_masks_are_the_references_ties_included(kind, ratio, dtype):
    weight, scaler_row = make_weight(7, 100, dtype, kind=kind), make_scale(100).square()
    assert_masks_equal(wanda_mask(weight, scaler_row, ratio), reference_mask(weight, scaler_row, ratio))


def test_the_count_is_the_references_binary_floor():
    assert int(wanda_mask(torch.randn(1, 100), torch.ones(100), 0.29).sum()) == 28


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("prune_n", "prune_m"), [(1, 4), (2, 4), (3, 4), (3, 8), (4, 4)])
@pytest.mark.parametrize("cols", [32, 39])  # 39 leaves a shorter group: of 3, or of 7
def test_n_of_m_masks_are_the_references_where_scores_differ(prune_n, prune_m, cols, dtype):
    cols -= cols % 4 * (prune_n == 4)  # the reference fails on a last group shorter than prune_n
    weight = (torch.arange(1, 5 * cols + 1).view(5, cols) * 7919 % 251 + 1).to(dtype)  # exact, and distinct in a row
    scaler_row = torch.ones(cols)
    assert_masks_equal(
        wanda_mask(weight, scaler_row, 0, prune_n, prune_m), reference_mask(weight, scaler_row, 0, prune_n, prune_m)
    )


def test_n_of_m_ties_keep_the_references_count_and_remove_the_lowest_column():
    weight, ones = torch.ones(3, 8), torch.ones(8)
    ours, theirs = wanda_mask(weight, ones, 0, 1, 4), reference_mask(weight, ones, 0, 1, 4)
    assert torch.equal(ours.view(3, 2, 4).sum(2), theirs.view(3, 2, 4).sum(2))
    assert ours[0].tolist() == [True, False, False, False] * 2


@pytest.mark.parametrize("pattern", [(0, 0), (1, 4), (2, 4), (2, 8)])
def test_pruning_in_place_zeroes_exactly_the_mask(pattern):
    weight, scaler_row = torch.randn(6, 20), torch.rand(20)
    if pattern == (2, 8):
        scaler_row[3] = 0
    expected = weight.clone()
    expected[wanda_mask(weight, scaler_row, 0.5, *pattern)] = 0
    wanda_prune_(weight, scaler_row, 0.5, *pattern)
    assert torch.equal(weight, expected)


def test_a_whole_layer_comes_out_as_from_the_reference():
    layer, batches = nn.Linear(48, 20), [torch.randn(2, 31, 48) for _ in range(5)]
    weight, mean = layer.weight.detach().clone(), running_mean(batches, 48)
    wrapped = WrappedGPT(layer)
    hook = layer.register_forward_hook(lambda _, inp, out: wrapped.add_batch(inp[0].data, out.data))
    for x in batches:
        layer(x)
    hook.remove()
    layer.weight.data[wanda_mask(layer.weight.data, wrapped.scaler_row, 0.6)] = 0
    weight[reference_mask(weight, mean, 0.6)] = 0
    assert torch.equal(layer.weight, weight)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.5,), "sparsity_ratio must be in"),
        ((0.5, 5, 4), "got 5:4"),
        ((0.5, 3, 9), "too short to prune 3 of 9"),
    ],
)
def test_ratios_and_patterns_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        wanda_mask(torch.ones(2, 20), torch.ones(20), *arguments)


def test_a_scaler_row_of_another_layer_is_refused():
    with pytest.raises(UserError, match=r"scaler_row must be \[C\]=\[20\]"):
        wanda_mask(torch.ones(2, 20), torch.ones(24), 0.5, 2, 4)


def test_values_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="weight has NaN or inf"):
        wanda_mask(torch.full((2, 8), torch.nan), torch.ones(8))
    with pytest.raises(ValueError, match="scale must be finite"):
        wanda_mask(torch.ones(2, 8), torch.full((8,), torch.nan))


def test_layers_that_are_not_plain_linear_are_refused_by_name():
    with pytest.raises(UserError, match="q_proj must be an nn.Linear, got Conv1d"):
        WrappedGPT(nn.Conv1d(4, 4, 1), layer_name="q_proj")
    with pytest.raises(UserError, match="already parametrised"):
        WrappedGPT(parametrizations.weight_norm(nn.Linear(4, 4)))


@pytest.mark.fault("not finite")
@pytest.mark.parametrize("column", [0, 9])  # of the groups of four, and of the shorter last group
@pytest.mark.parametrize("pattern", [(0, 0), (2, 4)])
def test_a_refused_value_leaves_the_whole_weight_as_it_was(pattern, column):
    weight, scaler_row = torch.randn(4, 10), torch.rand(10)
    weight[1, column] = torch.nan
    before = weight.clone()
    with pytest.raises(ValueError, match="weight has NaN or inf"):
        wanda_prune_(weight, scaler_row, 0.5, *pattern)
    assert torch.equal(weight.nan_to_num(7), before.nan_to_num(7))


@pytest.mark.fault("not finite")
@pytest.mark.parametrize(
    "batch",
    [
        [[1.0]],
        (torch.ones(2, 3, 8),),
        None,
        torch.tensor(3.0),
        torch.ones(8),
        torch.ones(3, 1),
        torch.ones(2, 2, 3, 8),
        torch.ones(3, 8, dtype=torch.complex64),
        torch.ones(3, 8, dtype=torch.int64),
        torch.ones(3, 8).to_sparse(),
        torch.ones(3, 8, device="meta"),
    ],
    ids=range(11),
)
def test_batches_that_are_no_inputs_of_the_layer_are_one_line_and_add_nothing(batch):
    wrapped = WrappedGPT(nn.Linear(8, 4))
    with pytest.raises(UserError, match="^inp must be ") as error:
        wrapped.add_batch(batch, None)
    assert "\n" not in str(error.value) and wrapped.nsamples == 0 and not wrapped.scaler_row.any()


def test_a_batch_of_no_sequences_adds_nothing_and_no_gradient_is_kept():
    wrapped = WrappedGPT(nn.Linear(8, 4))
    wrapped.add_batch(torch.ones(0, 3, 8), None)
    assert wrapped.nsamples == 0
    wrapped.add_batch(torch.ones(2, 3, 8, requires_grad=True), None)
    assert wrapped.scaler_row.tolist() == pytest.approx([3.0] * 8) and not wrapped.scaler_row.requires_grad


@pytest.mark.parametrize("call", [wanda_mask, wanda_prune_])
def test_tensors_that_no_mask_can_be_read_from_are_one_line(call):
    weight, row = torch.randn(8, 32), torch.ones(32)
    with pytest.raises(UserError, match="^scaler_row must be float32, got torch.float8_e4m3fn$"):
        call(weight, row.to(torch.float8_e4m3fn))
    with pytest.raises(UserError, match="^weight is on the meta device and holds no numbers"):
        call(weight.to("meta"), row)
    with pytest.raises(UserError, match="^scaler_row is on the meta device and holds no numbers"):
        call(weight, row.to("meta"))
