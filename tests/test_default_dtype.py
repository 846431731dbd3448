"""The process's default dtype and device change nothing: each tensor has the dtype and the device that it needs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import tiny
import torch
from torch import nn

import fwanda_kernels as fk
import fwanda_pruner
from fwanda_kernels import testing
from fwanda_pruner.integrations import nn_prune, wanda_style
from fwanda_pruner.model.load import load_model

pytestmark = [
    pytest.mark.fault("default dtype"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*deprecated:DeprecationWarning"),
]

DEFAULTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64, "meta": torch.device("meta")}


@contextmanager
def default(value: torch.dtype | torch.device) -> Iterator[None]:
    """Inside the block the process's default dtype or default device is another one."""
    is_dtype, before = isinstance(value, torch.dtype), torch.get_default_dtype()
    torch.set_default_dtype(value) if is_dtype else torch.set_default_device(value)
    try:
        yield
    finally:
        torch.set_default_dtype(before) if is_dtype else torch.set_default_device(None)


def tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors(item)] if isinstance(value, (list, tuple)) else []


def assert_same(found, expected) -> None:
    found, expected = tensors(found), tensors(expected)
    assert len(found) == len(expected) > 0
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)


def assert_unchanged(make: Callable[[], Callable], value) -> None:
    """make() gives a call on inputs of its own; its result is the same under the other default."""
    expected = make()()
    call = make()
    with default(value):
        found = call()
    assert_same(found, expected)


defaults = pytest.mark.parametrize("value", DEFAULTS.values(), ids=DEFAULTS)
fewer_defaults = pytest.mark.parametrize("value", [torch.bfloat16, torch.float64, torch.device("meta")], ids=str)


# kernels


@defaults
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("op", fk.backends())
def test_every_op_gives_the_same_bits(op, value):
    def make():
        args = testing.sample_arguments()[op]
        return lambda: (getattr(torch.ops.fwanda, op)(*args), args)

    assert_unchanged(make, value)


@defaults
def test_inputs_for_tests_are_the_same(value):
    def make():
        return lambda: [
            *(testing.make_weight(3, 8, kind=kind) for kind in testing.KINDS),
            testing.make_scale(8),
            testing.make_keep(3, 8),
            *testing.sample_arguments().values(),
        ]

    assert_unchanged(make, value)


@defaults
def test_budgets_and_row_scales_are_the_same(value):
    weights, omegas = [torch.randn(5, 8), torch.randn(3, 8)], [torch.rand(5) + 0.1, torch.rand(3).double()]
    norms = [torch.rand(8), torch.rand(8)]

    def make():
        return lambda: (
            fk.allocate_budgets(omegas, [20, 12], k_max=[8, 8]),
            fk.global_row_scales(weights, omegas, norms),
            fk.select_threshold(weights, fk.global_row_scales(weights, omegas, norms), norms, 30),
            fk.row_topk_mask(weights[0], norms[0], 3, among=weights[0] > 0),
        )

    assert_unchanged(make, value)


@defaults
def test_statistics_and_hessians_are_the_same(value):
    def make():
        torch.manual_seed(0)
        layer, x = nn.Linear(8, 4), torch.randn(2, 5, 8, requires_grad=True)

        def call():
            weights = {"fc": torch.ones(10, dtype=torch.float32, device="cpu")}
            with fk.collect_statistics({"fc": layer}) as stats, fk.collect_hessians({"fc": layer}, weights) as hessians:
                layer(x).square().sum().backward()
            found = stats["fc"]
            return [found.x2, found.g2, found.norm, found.omega, hessians["fc"], *fk.obs_factor(hessians["fc"])]

        return call

    assert_unchanged(make, value)


# pruner

RUNS = [
    {"method": "magnitude"},
    {"method": "wanda"},
    {"method": "wanda", "pattern": "2:4"},
    {"method": "wanda", "order": "sequential"},
    {"method": "fwanda", "allocation": "row"},
    {"method": "fwanda", "allocation": "global"},
    {"method": "fwanda", "allocation": "auto"},
    {"method": "sparsegpt"},
    {"method": "fsparsegpt", "allocation": "row"},
]


@fewer_defaults
@pytest.mark.parametrize("settings", RUNS, ids=lambda s: "-".join(s.values()))
def test_every_method_gives_the_same_weights(settings, value):
    tokens = tiny.tokens(16, 24)

    def make():
        model = tiny.llama()
        prune = partial(fwanda_pruner.prune, model, None, calibration=tokens, progress=False, **settings)
        return lambda: prune() and model.state_dict()

    assert_unchanged(make, value)


@fewer_defaults
def test_experts_give_the_same_weights(value):
    tokens = tiny.tokens(16, 24)

    def make():
        model = tiny.build("mixtral")
        prune = partial(fwanda_pruner.prune, model, None, method="fwanda", calibration=tokens, progress=False)
        return lambda: prune() and model.state_dict()

    assert_unchanged(make, value)


@pytest.mark.parametrize("value", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_a_model_is_loaded_in_the_dtype_asked_for(value, dtype, tmp_path):
    tiny.llama().save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    expected = load_model(str(tmp_path), device="cpu", dtype=dtype)[0].state_dict()
    with default(value):
        found = load_model(str(tmp_path), device="cpu", dtype=dtype)[0].state_dict()
    assert_same(found, expected)


@fewer_defaults
def test_text_that_the_model_writes_and_perplexity_are_the_same(value, tmp_path):
    text = tiny.text_file(tmp_path)

    def make():
        model, words = tiny.llama(), tiny.tokenizer()
        settings = {"method": "fwanda", "calibration": "self", "nsamples": 16, "seqlen": 24, "progress": False}
        config = fwanda_pruner.PruneConfig(eval=(text,), eval_seqlen=24)

        def call():
            fwanda_pruner.prune(model, words, **settings)
            found = fwanda_pruner.evaluate_model(model, words, config=config, progress=False)
            perplexities = [row["perplexity"] for row in found["perplexity"]]
            return [model.state_dict(), torch.tensor(perplexities, dtype=torch.float64, device="cpu")]

        return call

    assert_unchanged(make, value)


# adapters


@defaults
def test_adapters_give_the_same_masks(value):
    def make():
        torch.manual_seed(0)
        first, second, x = nn.Linear(8, 4), nn.Linear(8, 4), torch.randn(6, 8, requires_grad=True)
        with fk.collect_statistics({"first": first, "second": second}) as stats:
            (first(x) * second(x)).square().sum().backward()

        def call():
            wrapped = wanda_style.WrappedGPT(second)
            wrapped.add_batch(x.detach(), None)
            mask = wanda_style.wanda_mask(second.weight.detach(), wrapped.scaler_row, 0.5)
            nn_prune.wanda_unstructured(first, "weight", stats, 0.25)
            nn_prune.wanda_unstructured(first, "weight", stats, 0.5)
            nn_prune.global_fwanda_unstructured([(first, "weight"), (second, "weight")], stats, 0.5)
            return [wrapped.scaler_row, mask, first.weight_mask, second.weight_mask]

        return call

    assert_unchanged(make, value)
