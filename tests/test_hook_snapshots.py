"""What collectors hand out stays as it is; buffers, masks and shared inputs that change between passes are counted."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fwanda_kernels as fk

ONES = torch.ones(3, 4)


def column(layer: fk.LayerStatistics) -> float:
    return float(layer.x2[0])


@pytest.mark.fault("stale buffer")
@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_later_passes_and_changes_do_not_reach_what_was_handed_out(context):
    layer = nn.Linear(4, 2)
    with fk.collect_statistics({"fc": layer}) as stats:
        layer(ONES).sum().backward()
        with context():
            first = stats["fc"]
        layer(ONES).sum().backward()
        assert (column(first), first.g2[0], first.n_tokens) == (3, 3, 3)
        for tensor in (first.x2, first.g2):
            tensor.zero_()
        assert (column(stats["fc"]), stats["fc"].g2[0], stats["fc"].n_tokens) == (6, 6, 6)


@pytest.mark.fault("stale buffer")
def test_sums_to_continue_from_are_handed_out_as_a_copy():
    start = fk.LayerStatistics(torch.ones(4), torch.ones(2), 3)
    stats = fk.collect_statistics({"fc": nn.Linear(4, 2)}, {"fc": start})
    stats["fc"].x2.zero_(), stats["fc"].g2.zero_()
    assert column(stats["fc"]) == stats["fc"].g2[0] == column(start) == 1


def test_the_number_of_tokens_of_g2_is_set_on_what_was_handed_out():
    layer = nn.Linear(4, 2)
    with fk.collect_statistics({"fc": layer}) as stats:
        layer(ONES).sum().backward()
        layer(ONES)
    found = stats["fc"]
    found.g2_tokens = 3
    assert found.omega.tolist() == [1, 1] and stats["fc"].g2_tokens is None


@pytest.mark.parametrize("g2_tokens, later", [(None, None), (6, 9), (0, 3)])
def test_a_collection_that_continues_counts_the_tokens_of_g2_on(g2_tokens, later):
    layer = nn.Linear(4, 2)
    start = fk.LayerStatistics(torch.ones(4), torch.ones(2), 12, g2_tokens=g2_tokens)
    with fk.collect_statistics({"fc": layer}, {"fc": start}) as stats:
        assert stats["fc"].g2_tokens == g2_tokens
        layer(ONES).sum().backward()
        assert (stats["fc"].n_tokens, stats["fc"].g2_tokens) == (15, later)
        stats.reset()
        layer(ONES)
        assert (stats["fc"].n_tokens, stats["fc"].g2_tokens) == (3, None)


# resets


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_reset_in_any_mode_is_followed_by_passes_in_any_other(context):
    layer = nn.Linear(4, 2)
    with fk.collect_statistics({"fc": layer}) as stats:
        layer(ONES)
        with context():
            stats.reset()
            layer(ONES)
        layer(ONES).sum().backward()
    assert (column(stats["fc"]), stats["fc"].g2[0]) == (6, 3)


@pytest.mark.fault("stale buffer")
def test_gradients_of_passes_before_a_reset_do_not_count():
    layer = nn.Linear(4, 2)
    with fk.collect_statistics({"fc": layer}) as stats:
        early = layer(ONES).sum()
        stats.reset()
        early.backward()
        assert stats["fc"].n_tokens == 0 and not stats["fc"].g2.any()
        layer(ONES).sum().backward()
    assert stats["fc"].n_tokens == stats["fc"].g2[0] == 3


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_hessians_of_passes_in_inference_mode_go_on_outside(context):
    a, b = nn.Linear(4, 2), nn.Linear(4, 2)
    with fk.collect_hessians({"a": a, "b": b}) as hessians:
        for mode in (torch.enable_grad, context, torch.enable_grad):
            with mode():
                x = ONES.clone()
                a(x), b(x)
    assert hessians["a"] is hessians["b"] and hessians["a"].tolist() == [[9.0] * 4] * 4


# memory that is filled anew


@pytest.mark.fault("stale buffer")
@pytest.mark.parametrize("change", ["in place", "data", "numpy"])
def test_a_mask_that_is_filled_anew_counts_as_it_is(change):
    first, second = nn.Linear(4, 2), nn.Linear(4, 2)
    mask = torch.tensor([True, True, True])
    fill = {"in place": mask, "data": mask.data, "numpy": mask.numpy()}[change]
    with fk.collect_statistics({"first": first, "second": second}) as stats:
        stats.token_mask = mask
        x = ONES.clone().requires_grad_()
        (first(x) + second(x)).sum().backward()
        y = (first(x) + second(x)).sum()
        fill[1:] = False
        y.backward()  # its pass had all three tokens
        x = ONES.clone().requires_grad_()
        (first(x) + second(x)).sum().backward()
    for layer in stats.values():
        assert (column(layer), layer.n_tokens, layer.g2[0]) == (7, 7, 7)


@pytest.mark.fault("stale buffer")
@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("change", ["data", "numpy"])
def test_an_input_that_is_filled_anew_between_passes_is_reduced_again(change, context):
    q, k, o = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    modules = {"q": q, "k": k, "o": o}
    for passes in ([q], [q, k], [q, k, o]):
        x = torch.zeros(3, 4)
        fill = x.numpy() if change == "numpy" else x.data
        with context(), fk.collect_statistics(modules) as stats, fk.collect_hessians(modules) as hessians:
            for value in (1, 2, 3):
                fill[:] = value
                for layer in passes:
                    layer(x)
        assert [column(layer) for layer in stats.values()] == [3 * (1 + 4 + 9)] * len(passes)
        assert [float(hessian[0, 0]) for hessian in hessians.values()] == [3 * (1 + 4 + 9)] * len(passes)


# inputs that modules share


@pytest.mark.fault("shared once")
@pytest.mark.parametrize("later", ["another input", "not called", "the last one not called"])
def test_modules_that_no_longer_share_their_inputs_have_no_shared_hessian(later):
    a, b = nn.Linear(4, 2), nn.Linear(4, 2)
    with pytest.raises(ValueError, match="shared their first input, but not a later one") as error:
        with fk.collect_hessians({"a": a, "b": b}):
            a(ONES), b(ONES)
            a(2 * ONES)
            if later == "another input":
                b(3 * ONES)
            if later == "not called":
                a(ONES), b(ONES)
    assert "\n" not in str(error.value) and error.value.args[0].startswith("collect_hessians: b and a shared")


@pytest.mark.fault("shared once")
def test_a_module_has_no_part_in_inputs_before_its_first():
    a, b, z = nn.Linear(4, 2), nn.Linear(4, 2), 2 * ONES
    modules = {"a": a, "b": b}
    with torch.no_grad(), fk.collect_statistics(modules) as stats, fk.collect_hessians(modules) as hessians:
        a(ONES)
        a(z), b(z)
    assert (float(hessians["a"][0, 0]), float(hessians["b"][0, 0])) == (15, 12)
    assert (column(stats["a"]), column(stats["b"])) == (15, 12)


@pytest.mark.fault("shared once")
def test_compiled_calls_before_the_first_call_of_a_module_are_not_its():
    torch._dynamo.reset()
    a, b = nn.Linear(4, 2), nn.Linear(4, 2)
    with torch.no_grad(), fk.collect_statistics({"a": a, "b": b}) as stats:
        a(ONES)
        torch.compile(a, backend="eager")(ONES)
        x = ONES.clone()
        a(x), b(x)
    assert (column(stats["a"]), stats["a"].n_tokens) == (9, 9) and (column(stats["b"]), stats["b"].n_tokens) == (3, 3)


@pytest.mark.fault("shared once")
def test_modules_that_share_may_be_called_in_any_order():
    a, b = nn.Linear(4, 2), nn.Linear(4, 2)
    with fk.collect_hessians({"a": a, "b": b}) as hessians:
        for order in ([a, b], [b, a], [b, a]):
            x = ONES.clone()
            [layer(x) for layer in order]
    assert hessians["a"] is hessians["b"] and hessians["a"][0, 0] == 9


@pytest.mark.fault("shared once")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_counts_once_in_hessians(use_reentrant):
    a, b = nn.Linear(4, 2), nn.Linear(4, 2)
    with fk.collect_hessians({"a": a, "b": b}) as hessians:
        for _ in range(2):
            x = ONES.clone().requires_grad_()
            checkpoint(lambda x: a(x) * b(x), x, use_reentrant=use_reentrant).sum().backward()
    assert hessians["a"] is hessians["b"] and hessians["a"][0, 0] == 6


# odd calls and values


class Returns(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.fault("odd module")
@pytest.mark.parametrize("function", [torch.sum, lambda x: x.sum(0), lambda x: (x.sum(),)], ids=["0-d", "1-d", "tuple"])
def test_an_output_without_rows_is_refused_by_name(function):
    layer = Returns(function)
    with fk.collect_statistics({"fc": layer}) as stats:
        with pytest.raises(ValueError, match=r"^collect_statistics: fc must return \[..., R\], at least 2 dimensions"):
            layer(ONES)
    assert stats.unseen == ["fc"]


@pytest.mark.fault("odd module")
@pytest.mark.parametrize(
    "change",
    [torch.Tensor.double, torch.Tensor.to_sparse, lambda x: torch.nested.as_nested_tensor(list(x[None]))],
    ids=["double", "sparse", "nested"],
)
def test_an_input_or_output_that_cannot_be_summed_is_refused_by_name(change):
    with fk.collect_statistics({"fc": (layer := Returns(change))}):
        with pytest.raises(ValueError, match="^collect_statistics: the output of fc must be "):
            layer(ONES)
    for collect in (fk.collect_statistics, fk.collect_hessians):
        with collect({"fc": (layer := Returns(lambda _: ONES))}):
            with pytest.raises(ValueError, match=f"^{collect.__name__}: the input of fc must be "):
                layer(change(ONES))


def test_a_mask_without_values_is_refused():
    with pytest.raises(ValueError, match="token_mask is on the meta device and holds no numbers"):
        fk.collect_statistics({}).token_mask = torch.ones(3, dtype=torch.bool, device="meta")


@pytest.mark.fault("odd module")
@pytest.mark.parametrize("width", [1, 6])
@pytest.mark.parametrize("what", ["input", "output"])
def test_another_width_than_before_is_refused_by_name(what, width):
    layer = Returns(lambda x: x if what == "input" else x.sum(-1, keepdim=True).expand(-1, widths.pop()))
    widths = [width, 4]
    with fk.collect_statistics({"fc": layer}) as stats:
        layer(ONES)
        with pytest.raises(ValueError, match=f"the {what} of fc must have the width 4 as before, got {width}"):
            layer(torch.ones(3, width if what == "input" else 4))
    assert stats["fc"].n_tokens == 3
    if what == "input":
        with fk.collect_hessians({"fc": layer}):
            layer(ONES)
            with pytest.raises(ValueError, match=f"the input of fc must have the width 4 as before, got {width}"):
                layer(torch.ones(3, width))


@pytest.mark.fault("odd module")
def test_an_output_that_does_not_fit_the_mask_is_refused_by_name():
    layer = Returns(lambda x: x.reshape(2, 6))
    with fk.collect_statistics({"fc": layer}) as stats:
        stats.token_mask = torch.ones(3, dtype=torch.bool)
        with pytest.raises(ValueError, match=r"the output of fc must have the leading shape of token_mask \[3\]"):
            layer(ONES.clone().requires_grad_())


def test_a_block_inside_another_of_one_collector_leaves_it_started():
    layer = nn.Linear(4, 2)
    stats = fk.collect_statistics({"fc": layer})
    with stats:
        with stats:
            layer(ONES)
        with pytest.raises(KeyError), stats:
            raise KeyError
        layer(ONES)
    layer(ONES)
    assert stats["fc"].n_tokens == 6 and not layer._forward_hooks
    stats.start()
    with stats:
        pass
    layer(ONES)
    stats.stop()
    assert stats["fc"].n_tokens == 9 and not layer._forward_hooks


@pytest.mark.parametrize(
    "weight",
    [torch.tensor([-1.0]), torch.tensor([torch.nan]), torch.tensor([torch.inf]), torch.tensor([1j]), torch.eye(2)],
    ids=["negative", "NaN", "inf", "complex", "matrix"],
)
def test_weights_of_tokens_are_finite_and_not_negative(weight):
    with pytest.raises(ValueError, match="^collect_hessians: token_weight of fc must be ") as error:
        with fk.collect_hessians({"fc": nn.Linear(4, 2)}, {"fc": weight}):
            pass
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("sums", [(None, None), ([1.0], None), (torch.ones(4), [1.0])])
def test_sums_are_tensors(sums):
    with pytest.raises(ValueError, match="^LayerStatistics: [xg]2 must be a torch.Tensor"):
        fk.LayerStatistics(*sums, 3)
