"""How windows run: micro-batches, checkpointing and short memory change no sum."""

from collections.abc import Callable

import measuring
import oracle
import pytest
import tiny
import torch
from measuring import MODELS, assert_close, batch_above, measure, out_of_memory, sums_of
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaForCausalLM

import fwanda_pruner
from fwanda_pruner.engine.model_windows import ModelWindows
from fwanda_pruner.errors import UserError

SAMPLES, LENGTH = 7, 24


@pytest.mark.parametrize("name", MODELS)
def test_sums_equal_a_float64_restatement(name):
    tokens = tiny.tokens(3, LENGTH)
    found = measure(MODELS[name](), tokens, micro_batch=3)
    assert_close(found, oracle.sums_of_squares(MODELS[name](), tokens), 3 * LENGTH)


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch": 3},
        {"micro_batch": SAMPLES},
        {"micro_batch": 100},
        {"micro_batch": 2, "checkpointing": "on"},
        {"micro_batch": 2, "compile": "on"},
        {"compile": "on"},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sums_do_not_depend_on_how_the_passes_run(name, settings, monkeypatch):
    measuring.quick_compile(monkeypatch)
    tokens = tiny.tokens(SAMPLES, LENGTH)
    one = measure(MODELS[name](), tokens)
    other = measure(MODELS[name](), tokens, **settings)
    assert other.passes["compiled"] == ("compile" in settings)
    assert_close(other, sums_of(one), SAMPLES * LENGTH)


@pytest.mark.fault("attention mask")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_sums_do_not_depend_on_the_attention(attention):
    tokens = tiny.tokens(2, LENGTH)
    model = tiny.llama(attn_implementation=attention)
    assert model.config._attn_implementation == attention
    assert_close(measure(model, tokens), oracle.sums_of_squares(tiny.llama(), tokens), 2 * LENGTH)


def test_a_micro_batch_is_that_many_windows_and_the_last_one_what_is_left():
    model = tiny.llama()
    with measuring.input_sizes(model.get_input_embeddings()) as sizes:
        measure(model, tiny.tokens(SAMPLES, LENGTH), micro_batch=3)
    assert sizes == [3, 3, 1]


def test_a_forward_pass_alone_takes_four_times_the_windows():
    """On a GPU: 2^23 activations [tokens, hidden size] keep it busy, and without a backward pass few are held."""
    model, tokens = tiny.llama(), tiny.tokens(1, 1024)
    sizes = [ModelWindows(model, tokens, backward=backward).busy_windows for backward in (True, False)]
    assert sizes == [256, 1024] == [n >> 15 for n in (1 << 23, 1 << 25)]


# Short memory


@pytest.mark.fault("memory while calibrating")
def test_out_of_memory_halves_the_micro_batch_and_counts_nothing_twice():
    tokens, model = tiny.tokens(SAMPLES, LENGTH), tiny.llama()
    one = measure(tiny.llama(), tokens)
    with (
        out_of_memory(model.model.norm, batch_above(1)),  # all blocks have then counted their inputs
        measuring.input_sizes(model.get_input_embeddings()) as sizes,
        pytest.warns(UserWarning, match="ran out of memory: starting again with . windows at a time") as warned,
    ):
        other = measure(model, tokens, micro_batch=4)
    assert len(warned) == 2 and sizes == [4, 2] + [1] * SAMPLES
    assert other.passes["micro_batch"] == 1 and not other.passes["checkpointing"]
    assert_close(other, sums_of(one), SAMPLES * LENGTH)


@pytest.mark.fault("memory while calibrating")
def test_out_of_memory_after_some_windows_counts_them_once():
    tokens, model = tiny.tokens(SAMPLES, LENGTH), tiny.llama()
    one = measure(tiny.llama(), tokens)
    with (
        measuring.input_sizes(model.get_input_embeddings()) as calls,
        out_of_memory(model.model.norm, lambda x: len(x) > 1 and len(calls) > 2),
        pytest.warns(UserWarning, match="ran out of memory"),
    ):
        other = measure(model, tokens, micro_batch=2)
    assert calls == [2, 2, 2] + [1] * SAMPLES
    assert_close(other, sums_of(one), SAMPLES * LENGTH)


def keeps_activations(model) -> Callable[[torch.Tensor], bool]:
    """For out_of_memory(): whether the first block keeps an activation of its last forward pass."""
    outputs = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda _module, _args, output: outputs.append(StorageWeakRef(output.untyped_storage()))
    )
    return lambda _x: not outputs[-1].expired()


@pytest.mark.fault("memory while calibrating")
def test_one_window_that_does_not_fit_is_checkpointed():
    tokens, model = tiny.tokens(SAMPLES, LENGTH), tiny.llama()
    one = measure(tiny.llama(), tokens)
    with (
        out_of_memory(model.model.norm, keeps_activations(model)),
        pytest.warns(UserWarning, match="starting again with checkpointing of each block"),
    ):
        other = measure(model, tokens)
    assert other.passes["checkpointing"]
    assert_close(other, sums_of(one), SAMPLES * LENGTH)


def test_checkpointing_keeps_no_activation_of_a_block():
    model = tiny.llama()
    with out_of_memory(model.model.norm, keeps_activations(model)):
        assert measure(model, tiny.tokens(SAMPLES, LENGTH), checkpointing="on").passes["checkpointing"]
        with pytest.raises(UserError, match="a window of 24 tokens does not fit"):
            measure(model, tiny.tokens(SAMPLES, LENGTH), checkpointing="off")


@pytest.mark.fault("memory while calibrating")
@pytest.mark.parametrize("settings", [{}, {"checkpointing": "off"}, {"checkpointing": "on"}], ids=str)
@pytest.mark.filterwarnings("ignore:.*ran out of memory")
def test_a_window_that_never_fits_is_one_line(settings):
    model = tiny.llama()
    with (
        out_of_memory(model.model.norm, batch_above(0)),
        pytest.raises(UserError, match="a window of 24 tokens does not fit") as error,
    ):
        measure(model, tiny.tokens(2, LENGTH), **settings)
    assert "\n" not in str(error.value)


# Settings and the record


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"micro_batch": "0"}, "--micro-batch must be auto or a number of windows in .1, 999999., got '0'"),
        ({"micro_batch": "x"}, "--micro-batch must be auto or a number of windows in .1, 999999., got 'x'"),
        ({"compile": "maybe"}, "--compile must be one of auto, on, off, got 'maybe'"),
        ({"compile": "on", "checkpointing": "on"}, "--compile on contradicts --checkpointing on"),
        ({"max_memory": "16"}, "--max-memory must be a size above 0 with its unit, e.g. 16GiB or 900MB, got '16'"),
        ({"max_memory": "0GiB"}, "--max-memory must be a size above 0"),
        ({"max_memory": "1GiB"}, "--max-memory limits the memory of a GPU, but the model is on cpu"),
    ],
    ids=str,
)
def test_bad_settings_are_one_line(settings, message):
    with pytest.raises(UserError, match=f"^{message}"):
        fwanda_pruner.prune(tiny.llama(), calibration=tiny.tokens(2, LENGTH), progress=False, **settings)


def test_sizes_are_read_as_bytes():
    sizes = {"16GiB": 16 << 30, "900MB": 900 * 10**6, "1.5GiB": 3 << 29, "2 TB": 2 * 10**12}
    for text, size in sizes.items():
        assert fwanda_pruner.PruneConfig(max_memory=text).memory_limit == size


def test_the_report_says_how_the_passes_ran():
    report = fwanda_pruner.prune(tiny.llama(), calibration=tiny.tokens(4, LENGTH), micro_batch=2, progress=False)
    assert report.passes == {"micro_batch": 2, "compiled": False, "checkpointing": False, "compile_seconds": 0.0}
    assert {"calibrate", "budgets", "prune"} <= report.seconds.keys()


# What a measurement leaves of the model


@pytest.mark.parametrize("fault", ["inference", "detached"])
def test_a_model_without_a_backward_pass_is_one_line(fault):
    with torch.inference_mode(fault == "inference"):
        model = tiny.llama()
    if fault == "detached":
        model.model.layers[-1].register_forward_hook(lambda _module, _args, output: output.detach())
    before = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(UserError, match="inference_mode|lets no gradient through to its blocks"):
        measure(model, tiny.tokens(4, LENGTH))
    assert [parameter.requires_grad for parameter in model.parameters()] == before


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    "settings", [{"method": "wanda"}, {"method": "wanda", "pattern": "2:4"}, {"method": "sparsegpt"}]
)
def test_a_trainable_model_made_under_inference_mode_is_pruned_where_no_gradient_is_needed(settings):
    with torch.inference_mode():
        model = LlamaForCausalLM(tiny.llama().config)  # its parameters want gradients
    report = fwanda_pruner.prune(model, calibration=tiny.tokens(16, LENGTH), progress=False, **settings)
    assert report.sparsity["matrices"] == 0.5
    with pytest.raises(UserError, match="inference_mode"):
        fwanda_pruner.prune(model, method="fwanda", calibration=tiny.tokens(16, LENGTH), progress=False)


def test_no_parameter_gets_a_gradient_and_those_that_want_one_still_do():
    model = tiny.llama()
    model.model.layers[0].requires_grad_(False)
    before = [parameter.requires_grad for parameter in model.parameters()]
    measure(model, tiny.tokens(4, LENGTH))
    assert [parameter.requires_grad for parameter in model.parameters()] == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_each_module_keeps_its_training_mode():
    model = tiny.llama().train()
    model.model.layers[0].eval()
    fwanda_pruner.prune(model, calibration=tiny.tokens(4, LENGTH), progress=False)
    assert model.training and model.model.layers[1].training and not model.model.layers[0].mlp.training
