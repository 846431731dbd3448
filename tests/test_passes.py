"""How calibration runs: micro-batches, checkpointing, compiled blocks and short memory change no sum."""

import threading
from functools import partial

import pytest
import tiny
import torch
import transformers
from torch import nn
from torch.nn.attention import SDPBackend
from transformers import masking_utils

import fwanda_pruner
from fwanda_pruner.engine import device as devices
from fwanda_pruner.engine import loop as passes
from fwanda_pruner.engine import losses as head
from fwanda_pruner.engine import packing
from fwanda_pruner.engine.loop import PassSettings
from fwanda_pruner.engine.losses import backward_of_summed_loss, find_decoder
from fwanda_pruner.errors import UserError
from fwanda_pruner.measure.statistics import calibrate, frozen
from fwanda_pruner.model.targets import find_blocks, find_targets

SAMPLES, LENGTH = 7, 24


MODELS = {
    "llama": tiny.llama,
    "gpt2": partial(tiny.build, "gpt2"),
    "vocabulary_150k": partial(tiny.llama, vocab_size=150_000),
}


def expected_sums(model, tokens) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """name -> (x2, g2) in float64, from the retained inputs and gradients of the whole summed loss."""
    seen, sums = {}, {}

    def hook_of(name):
        def hook(_module, args, output):
            output.retain_grad()
            seen[name] = (args[0], output)

        return hook

    targets = find_targets(model)[0]
    handles = [target.module.register_forward_hook(hook_of(target.name)) for target in targets]
    model.double()
    for ids in tokens:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        nn.functional.cross_entropy(logits, ids[1:], reduction="sum").backward()
        for name, (x, output) in seen.items():
            found = (x.detach().square().sum((0, 1)), output.grad.square().sum((0, 1)))
            sums[name] = tuple(map(torch.add, sums[name], found)) if name in sums else found
    for handle in handles:
        handle.remove()
    return sums


def assert_close(statistics, expected, tokens: int) -> None:
    assert statistics.x2.keys() == expected.keys()
    for name, (x2, g2) in expected.items():
        assert statistics.n_tokens[name] == tokens
        torch.testing.assert_close(statistics.x2[name].double(), x2.double(), rtol=1e-4, atol=1e-6, msg=name)
        torch.testing.assert_close(statistics.g2[name].double(), g2.double(), rtol=1e-3, atol=1e-6, msg=name)


def measure(model, tokens, **settings):
    return calibrate(model, tokens, find_targets(model)[0], settings=PassSettings(**settings), progress=False)


@pytest.fixture
def quick_compile(monkeypatch):
    """The graphs of torch.compile without its code generator, which takes half a minute on a CPU."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))


@pytest.mark.parametrize("name", MODELS)
def test_sums_equal_a_float64_restatement(name, monkeypatch):
    monkeypatch.setattr("fwanda_pruner.engine.losses._LOGITS", 150_000 * 5)  # several slices of the head
    tokens = tiny.tokens(3, LENGTH)
    assert_close(measure(MODELS[name](), tokens), expected_sums(MODELS[name](), tokens), 3 * LENGTH)


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
def test_sums_do_not_depend_on_how_the_passes_run(name, settings, quick_compile):
    tokens = tiny.tokens(SAMPLES, LENGTH)
    one = measure(MODELS[name](), tokens)
    other = measure(MODELS[name](), tokens, **settings)
    assert other.passes["compiled"] == ("compile" in settings)
    assert_close(other, {n: (one.x2[n], one.g2[n]) for n in one.x2}, SAMPLES * LENGTH)


@pytest.mark.fault("attention mask")
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_sums_do_not_depend_on_the_attention(attention):
    tokens = tiny.tokens(2, LENGTH)
    model = tiny.llama(attn_implementation=attention)
    assert model.config._attn_implementation == attention
    assert_close(measure(model, tokens), expected_sums(tiny.llama(), tokens), 2 * LENGTH)


def test_the_forward_pass_alone_may_be_compiled(quick_compile):
    tokens = tiny.tokens(SAMPLES, LENGTH)
    targets = find_targets(model := tiny.llama())[0]
    found = calibrate(model, tokens, targets, fisher=None, settings=PassSettings(2, "on"), progress=False)
    assert found.passes["compiled"] and not found.g2
    one = measure(tiny.llama(), tokens)
    for name, x2 in one.x2.items():
        torch.testing.assert_close(found.x2[name], x2)
        assert found.n_tokens[name] == SAMPLES * LENGTH


def test_blocks_are_as_before_afterwards(quick_compile):
    model = tiny.llama()
    before = [dict(vars(module)) for module in model.modules()]
    for settings in ({"compile": "on"}, {"checkpointing": "on"}):
        measure(model, tiny.tokens(4, LENGTH), **settings)
        for module, facts in zip(model.modules(), before, strict=True):
            assert vars(module).keys() == facts.keys() and "forward" not in vars(module)
            assert not module._forward_hooks and module._compiled_call_impl is None


@pytest.mark.parametrize("name", MODELS)
def test_the_last_norm_is_compiled_with_the_blocks(name, monkeypatch):
    model, called = MODELS[name](), []

    def compile(call, dynamic):
        return lambda block, *args, **kwargs: called.append(block) or call(block, *args, **kwargs)

    monkeypatch.setattr(torch, "compile", compile)
    measure(model, tiny.tokens(4, LENGTH), micro_batch=2, compile="on")
    norm = next(module for path, module in model.named_modules() if path.rpartition(".")[2] in ("norm", "ln_f"))
    assert called[-1] is norm and len(set(called)) == len(find_blocks(model)[1]) + 1


def test_many_models_in_a_process_are_all_compiled(quick_compile):
    """The compiler keeps eight graphs of one function, and then quietly makes no more."""
    for hidden in range(16, 16 + 8 * 10, 8):
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        measure(tiny.llama(hidden_size=hidden), tiny.tokens(4, LENGTH), micro_batch=2, compile="on")
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before


def failing_pass(monkeypatch, fails, error):
    """Passes for which `fails(runner, size)` holds do the forward pass and then raise."""
    plain = passes.Passes._pass

    def run(self, start, size):
        if fails(self, size):
            self.decoder(input_ids=self.tokens[start : start + size], use_cache=False)
            raise error
        return plain(self, start, size)

    monkeypatch.setattr(passes.Passes, "_pass", run)


@pytest.mark.fault("memory while calibrating")
def test_out_of_memory_halves_the_micro_batch_and_counts_nothing_twice(monkeypatch):
    tokens = tiny.tokens(SAMPLES, LENGTH)
    one = measure(tiny.llama(), tokens)
    failing_pass(monkeypatch, lambda _self, size: size > 1, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.warns(UserWarning, match="ran out of memory"):
        other = measure(tiny.llama(), tokens, micro_batch=4)
    assert other.passes["micro_batch"] == 1 and not other.passes["checkpointing"]
    assert_close(other, {n: (one.x2[n], one.g2[n]) for n in one.x2}, SAMPLES * LENGTH)


def checkpointed(runner) -> bool:
    return "forward" in vars(runner.blocks[0])


@pytest.mark.fault("memory while calibrating")
def test_one_window_that_does_not_fit_is_checkpointed(monkeypatch):
    tokens = tiny.tokens(SAMPLES, LENGTH)
    one = measure(tiny.llama(), tokens)
    failing_pass(monkeypatch, lambda self, _size: not checkpointed(self), torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.warns(UserWarning, match="checkpointing of each block"):
        other = measure(tiny.llama(), tokens)
    assert other.passes["checkpointing"]
    assert_close(other, {n: (one.x2[n], one.g2[n]) for n in one.x2}, SAMPLES * LENGTH)


@pytest.mark.fault("memory while calibrating")
@pytest.mark.parametrize("settings", [{}, {"checkpointing": "off"}, {"checkpointing": "on"}], ids=str)
@pytest.mark.filterwarnings("ignore:.*ran out of memory")
def test_a_window_that_never_fits_is_one_line(monkeypatch, settings):
    failing_pass(monkeypatch, lambda *_: True, torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(UserError, match="a window of 24 tokens does not fit") as error:
        measure(tiny.llama(), tiny.tokens(2, LENGTH), **settings)
    assert "\n" not in str(error.value)


def broken_compile(function, **_):
    def call(*args, **kwargs):
        raise RuntimeError("no compiler\nat all")

    return call


def test_blocks_that_cannot_be_compiled_are_one_line(monkeypatch):
    monkeypatch.setattr(torch, "compile", broken_compile)
    with pytest.raises(UserError, match="--compile off: no compiler at all$"):
        measure(tiny.llama(), tiny.tokens(3, LENGTH), compile="on")


def test_auto_goes_on_without_a_compiler(monkeypatch):
    tokens = tiny.tokens(SAMPLES, LENGTH)
    one = measure(tiny.llama(), tokens)
    monkeypatch.setattr(torch, "compile", broken_compile)
    monkeypatch.setattr(
        passes.Passes, "_should_compile", lambda self, how, seconds, *_: how == "auto" and len(seconds) == 2
    )
    with pytest.warns(UserWarning, match="cannot be compiled, going on without"):
        other = measure(tiny.llama(), tokens)
    assert not other.passes["compiled"]
    assert_close(other, {n: (one.x2[n], one.g2[n]) for n in one.x2}, SAMPLES * LENGTH)


def test_auto_does_not_compile_on_a_cpu():
    assert not measure(tiny.llama(), tiny.tokens(4, LENGTH)).passes["compiled"]


def test_the_head_keeps_what_the_model_does_after_its_decoder(monkeypatch):
    """Gemma 2 caps its logits, so the head is more than a matrix."""
    monkeypatch.setattr("fwanda_pruner.engine.losses._LOGITS", 64 * 5)
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.1,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).eval().requires_grad_(False)
    outputs = []
    model.get_input_embeddings().register_forward_hook(lambda _m, _i, out: outputs.append(out.requires_grad_(True)))
    ids = tiny.tokens(2, LENGTH)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").backward()
    backward_of_summed_loss(model, find_decoder(model), ids)
    torch.testing.assert_close(outputs[0].grad, outputs[1].grad)
    assert "forward" not in vars(find_decoder(model))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"micro_batch": "0"}, "--micro-batch must be auto or a number of sequences, got '0'"),
        ({"micro_batch": "x"}, "--micro-batch must be auto or a number of sequences, got 'x'"),
        ({"compile": "maybe"}, "--compile must be one of auto, on, off, got 'maybe'"),
        ({"compile": "on", "checkpointing": "on"}, "--compile on contradicts --checkpointing on"),
        ({"max_memory": "16"}, "--max-memory must be a size above 0, e.g. 16GiB or 900MB, got '16'"),
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


def test_compiled_blocks_that_hide_inputs_are_noticed(monkeypatch, quick_compile):
    """A block may compute otherwise when it is compiled, past the hooks: its sums would be silently wrong."""
    tokens = tiny.tokens(SAMPLES, LENGTH)
    model = tiny.llama()
    mlp = model.model.layers[0].mlp

    def forward(x):
        if torch.compiler.is_compiling():
            gate, up = (nn.functional.linear(x, m.weight) for m in (mlp.gate_proj, mlp.up_proj))
            return mlp.down_proj(mlp.act_fn(gate) * up)
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))

    mlp.forward = forward
    with pytest.raises(UserError, match="compiled blocks do not show all inputs"):
        measure(model, tokens, compile="on")
    one = measure(tiny.llama(), tokens)
    monkeypatch.setattr(passes.Passes, "_should_compile", lambda self, how, *_: how != "off")
    with pytest.warns(UserWarning, match="going on without: compiled blocks do not show"):
        other = measure(model, tokens)
    assert_close(other, {n: (one.x2[n], one.g2[n]) for n in one.x2}, SAMPLES * LENGTH)


def test_compiled_calls_without_hooks_are_not_mistaken_for_those_with(quick_compile):
    tokens, model = tiny.tokens(SAMPLES, LENGTH), tiny.llama()
    one = measure(tiny.llama(), tokens)
    bare = passes.Passes(model, {}, tokens, backward=True, settings=PassSettings(2, "on"))
    with frozen(model, backward=True):
        assert bare.run()[1].compiled
    other = measure(model, tokens, micro_batch=2, compile="on")
    assert_close(other, {n: (one.x2[n], one.g2[n]) for n in one.x2}, SAMPLES * LENGTH)


@pytest.mark.parametrize("skipped", ["layers.0.mlp.up_proj", "layers.0.self_attn.k_proj", "layers.1.", "down_proj"])
def test_compiled_blocks_with_other_hooks_share_no_graph(skipped, quick_compile):
    """Neither within a run nor with one before it in the process."""
    tokens = tiny.tokens(SAMPLES, LENGTH)
    one = measure(tiny.llama(), tokens)
    for wanted in (lambda name: skipped not in name, lambda name: True):
        model = tiny.llama()
        targets = [target for target in find_targets(model)[0] if wanted(target.name)]
        other = calibrate(model, tokens, targets, settings=PassSettings(2, "on"), progress=False)
        assert other.passes["compiled"]
        assert_close(other, {t.name: (one.x2[t.name], one.g2[t.name]) for t in targets}, SAMPLES * LENGTH)


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


def test_each_module_keeps_its_training_mode():
    model = tiny.llama().train()
    model.model.layers[0].eval()
    fwanda_pruner.prune(model, calibration=tiny.tokens(4, LENGTH), progress=False)
    assert model.training and model.model.layers[1].training and not model.model.layers[0].mlp.training


def test_a_wrapper_of_torch_compile_is_refused_in_one_line():
    with pytest.raises(UserError, match="give the model itself, model._orig_mod"):
        fwanda_pruner.prune(torch.compile(tiny.llama()), calibration=tiny.tokens(4, LENGTH), progress=False)


@pytest.mark.parametrize(
    ("capability", "heads", "deterministic", "first"),
    [((9, 0), 1, False, True), ((8, 0), 1, False, False), ((9, 0), 4, False, False), ((9, 0), 1, True, False)],
)
def test_hopper_takes_cudnn_s_attention_first(capability, heads, deterministic, first, monkeypatch):
    model = tiny.llama(hidden_size=64, num_attention_heads=heads, num_key_value_heads=heads, head_dim=64 // heads)
    monkeypatch.setattr(devices, "model_device", lambda model: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    before = torch._C._get_sdp_priority_order()
    with devices.fast_attention(model):
        order = torch._C._get_sdp_priority_order()
    assert (order[0] == int(SDPBackend.CUDNN_ATTENTION)) == first
    assert torch._C._get_sdp_priority_order() == before


def test_the_slices_of_the_head_differ_by_at_most_one_position(monkeypatch):
    monkeypatch.setattr(head, "_LOGITS", 64 * 5)
    ids = tiny.tokens(1, 18)
    slices = list(head._slices(tiny.llama(vocab_size=64), torch.randn(1, 18, 8), ids))
    assert [len(states) for states, _ in slices] == [5, 4, 4, 4]
    assert torch.cat([labels for _, labels in slices]).equal(ids[:, 1:].flatten())


def packed_logits(model):
    """Of the second of two sequences in one window, and of the same sequence by itself."""
    ids, positions = tiny.tokens(1, 8), torch.arange(8)[None] % 4
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, 4:]
    return packed, model(input_ids=ids[:, 4:], use_cache=False).logits[0]


def test_no_pass_waits_for_the_device_to_look_for_packed_sequences(monkeypatch):
    asked = []
    monkeypatch.setattr(packing, "_find", asked.append)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", asked.append)
    model, tokens = tiny.llama(), tiny.tokens(4, LENGTH)
    model(input_ids=tokens, use_cache=False)
    assert len(asked) == 1  # transformers still looks there
    measure(model, tokens, micro_batch=1)
    assert len(asked) == 1
    model(input_ids=tokens, use_cache=False)
    assert len(asked) == 2


def test_packed_sequences_of_other_threads_are_found():
    inside, left = threading.Event(), threading.Event()

    def other_calibration():
        with packing.single_sequences():
            inside.set()
            left.wait(60)

    thread = threading.Thread(target=other_calibration)
    with packing.single_sequences():
        thread.start()
        assert inside.wait(60)
    model = tiny.llama()
    torch.testing.assert_close(*packed_logits(model))  # beside a calibration that still runs
    left.set()
    thread.join()
    assert masking_utils.find_packed_sequence_indices is packing._find
    with pytest.raises(RuntimeError), packing.single_sequences():
        raise RuntimeError
    torch.testing.assert_close(*packed_logits(model))
