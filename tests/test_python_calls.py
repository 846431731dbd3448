"""The functions of the package, called from Python in any way: one calling style, and one line for each mistake."""

import threading

import pytest
import tiny
import torch
import transformers

import fwanda_pruner
from fwanda_pruner import (
    PruneConfig,
    Report,
    Statistics,
    UserError,
    collect,
    evaluate_model,
    load_masks,
    masks,
    pack_,
    prune,
    save_pruned,
    unpack_,
)
from fwanda_pruner.model import pack
from fwanda_pruner.model.load import LoadedModel
from fwanda_pruner.model.targets import find_targets

TEXT = tiny.TEXT
QUIET = {"calibration": TEXT, "progress": False}


def weights(model) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(model, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(model), weights(other), strict=True))


# One calling style


@pytest.mark.parametrize("call", [prune, collect, evaluate_model])
def test_settings_come_by_config_or_by_name_and_never_by_both(call):
    with pytest.raises(UserError, match="give either config or settings by name, got both .*bos"):
        call(tiny.llama(), config=PruneConfig(), bos="none")
    with pytest.raises(UserError, match="config must be a PruneConfig, got dict; give the settings by name"):
        call(tiny.llama(), config={"bos": "none"})


def test_collect_takes_settings_by_name():
    one = collect(tiny.llama(), fisher="mean", fisher_samples="all", **QUIET)
    other = collect(tiny.llama(), config=PruneConfig(fisher="mean", fisher_samples="all"), **QUIET)
    assert one.fisher == "mean" and one.fingerprint() == other.fingerprint()


def test_evaluate_model_takes_settings_by_name_and_token_ids(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(tiny.text(400))
    named = {"eval": str(path), "eval_seqlen": 12, "eval_windows": 3, "bos": "none"}
    one = evaluate_model(tiny.llama(), tiny.tokenizer(), progress=False, **named)
    other = evaluate_model(tiny.llama(), tiny.tokenizer(), config=PruneConfig(**named), progress=False)
    assert one == other and one["perplexity"][0]["seqlen"] == 12
    (given,) = evaluate_model(tiny.llama(), eval=TEXT, progress=False)["perplexity"]
    assert given["source"] == "tokens" and given["windows"] == len(TEXT)


@pytest.mark.parametrize("call, setting", [(collect, "sparsity"), (collect, "nsample"), (evaluate_model, "method")])
def test_a_setting_by_name_that_has_no_effect_is_refused(call, setting):
    with pytest.raises(UserError, match=f"the setting '{setting}' has no effect here; those that have are"):
        call(tiny.llama(), **{setting: "x"})


# What is no model, no tokenizer and so on

NO_MODELS = {
    "None": (lambda: None, "got NoneType"),
    "a name": (lambda: "smollm2", r"got the name 'smollm2'; load it: load_model\('smollm2'\).model"),
    "a tokenizer": (tiny.tokenizer, "got .*; the model comes before the tokenizer"),
    "what load_model() returns": (
        lambda: LoadedModel(tiny.llama(), None),
        r"unpack it: model, tokenizer = load_model",
    ),
    "a linear layer": (lambda: torch.nn.Linear(2, 2), "got Linear; if it wraps one, give the model inside"),
    "an empty module": (torch.nn.Module, "got Module, which has no parameters"),
    "a list of layers": (lambda: torch.nn.ModuleList([torch.nn.Linear(2, 2)]), "got ModuleList"),
    "a model without a head": (lambda: tiny.llama().model, "got LlamaModel, which has no output head"),
    "a classifier": (
        lambda: transformers.LlamaForSequenceClassification(tiny.llama().config),
        "got LlamaForSequenceClassification, which is of another task",
    ),
    "a masked language model": (
        lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
        ),
        "got BertForMaskedLM, which is of another task",
    ),
    "an encoder and a decoder": (
        lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
        ),
        "got T5ForConditionalGeneration, which has an encoder",
    ),
}


@pytest.mark.fault("odd calls")
@pytest.mark.parametrize("call", [prune, collect, evaluate_model])
@pytest.mark.parametrize("kind", NO_MODELS)
def test_what_is_no_causal_language_model_is_one_line(kind, call):
    make, message = NO_MODELS[kind]
    with pytest.raises(UserError, match=f"^model must be a Hugging Face causal language model, .*{message}"):
        call(make())


@pytest.mark.fault("odd calls")
@pytest.mark.parametrize("argument", ["tokenizer", "statistics", "state", "calibration", "eval"])
@pytest.mark.parametrize(
    "value",
    [5, 1.5, {"a": 1}, [1], object(), TEXT.tolist(), torch.nn.Linear(2, 2)],
    ids=["int", "float", "dict", "list", "object", "ids", "module"],
)
def test_arguments_of_other_types_are_one_line_and_prune_nothing(argument, value):
    model = tiny.llama()
    with pytest.raises(UserError, match=f"{argument} (must be|as token ids)") as error:
        prune(model, **{**QUIET, "method": "wanda", argument: value})
    assert "\n" not in str(error.value) and same(model, tiny.llama())


@pytest.mark.fault("odd calls")
def test_a_path_of_statistics_is_refused_with_the_way_to_read_it():
    with pytest.raises(UserError, match=r"statistics must be a Statistics, got str; .*Statistics.load\(\)"):
        prune(tiny.llama(), statistics="s.safetensors", **QUIET)


@pytest.mark.fault("odd calls")
@pytest.mark.parametrize("value", [None, 5, b"path"], ids=str)
def test_paths_of_other_types_are_one_line_that_names_the_argument(value):
    model, report = tiny.llama(), tiny.prune(tiny.llama(), method="magnitude")
    for name, call in {
        "report": lambda: Report.load(value),
        "config": lambda: PruneConfig.load(value),
        "folder": lambda: load_masks(value),
        "statistics": lambda: Statistics.load(value),
        "output": lambda: save_pruned(model, None, report, value),
    }.items():
        with pytest.raises(UserError, match=f"^{name} must be a path, got {type(value).__name__}; give"):
            call()


@pytest.mark.fault("odd calls")
@pytest.mark.parametrize(
    "folder", ["x" * 5000, "y/" * 3000, "a\nb", "a\0b"], ids=["long name", "long path", "line", "nul"]
)
def test_masks_of_a_path_that_no_folder_has_are_one_line(folder):
    with pytest.raises(UserError, match="holds no masks.safetensors; write it by fwanda prune") as error:
        load_masks(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


@pytest.mark.fault("odd calls")
def test_settings_and_records_of_other_types_are_one_line(tmp_path):
    model, report = tiny.llama(), tiny.prune(tiny.llama(), method="magnitude")
    for call, message in [
        (lambda: PruneConfig.from_dict(5), "settings must be a dict, got int"),
        (lambda: Report.from_dict(None), ""),
        (lambda: save_pruned(model, None, {}, tmp_path / "out"), "report must be a Report, got dict"),
        (lambda: save_pruned("model", None, report, tmp_path / "out"), "model must be .* got the name 'model'"),
        (lambda: save_pruned(model, None, report, tmp_path / "out", note=5), "note must be a str, got int"),
    ]:
        with pytest.raises(UserError, match=message) as error:
            call()
        assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.fault("odd calls")
def test_the_tasks_refuse_what_is_no_model_or_no_tokenizer():
    with pytest.raises(UserError, match="model must be"):
        fwanda_pruner.evaluate_tasks(None, tiny.tokenizer(), ["boolq"])
    with pytest.raises(UserError, match="tokenizer must be a Hugging Face tokenizer, got NoneType"):
        fwanda_pruner.evaluate_tasks(tiny.llama(), None, ["boolq"])


# The state of torch and of the model

MODES = {
    "no_grad": torch.no_grad,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
STATES = {
    "in training": lambda model: model.train(),
    "frozen": lambda model: model.requires_grad_(False),
    "with gradient checkpointing": lambda model: (model.train(), model.gradient_checkpointing_enable()),
    "with gradients at its inputs": lambda model: model.enable_input_require_grads(),
    "with gradients": lambda model: model(TEXT).logits.sum().backward(),
    "with hidden states": lambda model: setattr(model.config, "output_hidden_states", True),
    "with a cache": lambda model: setattr(model.config, "use_cache", True),
    "with hooks": lambda model: [
        module.register_forward_hook(lambda _module, _args, _output: None) for module in model.modules()
    ],
}
METHODS = ["wanda", "fwanda", "sparsegpt", "fsparsegpt"]


@pytest.mark.fault("odd calls")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", METHODS)
def test_modes_of_torch_change_no_bit(method, mode):
    plain, model = tiny.llama(), tiny.llama()
    expected = prune(plain, method=method, eval=TEXT, **QUIET)
    with MODES[mode]():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        report = prune(model, method=method, eval=TEXT, **QUIET)
        assert before == (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        )  # fmt: skip
    assert same(plain, model) and (report.perplexity, report.domains) == (expected.perplexity, expected.domains)


@pytest.mark.fault("odd calls")
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("method", METHODS)
def test_states_of_the_model_change_no_bit_and_stay(method, state):
    plain, model = tiny.llama(), tiny.llama()
    prune(plain, method=method, **QUIET)
    STATES[state](model)
    before = [module.training for module in model.modules()], [p.requires_grad for p in model.parameters()]
    prune(model, method=method, **QUIET)
    assert same(plain, model)
    assert before == ([module.training for module in model.modules()], [p.requires_grad for p in model.parameters()])


@pytest.mark.fault("odd calls")
@pytest.mark.parametrize("method", METHODS)
def test_a_model_made_in_inference_mode_is_pruned_or_refused_in_one_line(method):
    with torch.inference_mode():
        model = tiny.llama()
    if method.startswith("f"):
        with pytest.raises(UserError, match="made under torch.inference_mode"):
            prune(model, method=method, **QUIET)
    else:
        assert prune(model, method=method, **QUIET).sparsity["matrices"] == 0.5


# Masks


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_masks_are_those_of_the_weights_and_give_the_counts_of_rows(family):
    model = tiny.build(family)
    report = prune(model, method="fwanda", exclude=["*.1.*"], **QUIET)
    found = dict(masks(model, report))
    rows = {row.name: row for row in report.matrices if row.skipped is None}
    assert list(found) == list(rows) and len(rows) < len(find_targets(model)[0])
    for name, mask in found.items():
        assert mask.dtype == torch.bool and tuple(mask.shape) == rows[name].shape
        counts = mask.sum(1)
        assert counts.shape == (rows[name].shape[0],) and int(counts.sum()) == rows[name].kept - rows[name].kept_zero


def test_masks_of_another_model_or_of_no_report_are_one_line():
    report = prune(tiny.llama(), method="magnitude", **QUIET)
    with pytest.raises(UserError, match="the report is of another model"):
        dict(masks(tiny.llama(num_hidden_layers=1), report))
    with pytest.raises(UserError, match="report must be a Report, got NoneType"):
        dict(masks(tiny.llama(), None))


# Threads


@pytest.mark.fault("threads")
@pytest.mark.parametrize("call", [prune, collect, evaluate_model, pack_, unpack_])
def test_a_model_in_use_is_refused_to_other_threads_and_free_afterwards(call):
    model, found = tiny.llama(), []
    settings = {prune: {"method": "wanda", **QUIET}, collect: QUIET, evaluate_model: {"eval": TEXT, "progress": False}}

    def second(*_):
        if not found:
            thread = threading.Thread(target=lambda: found.append(refusal()))
            thread.start()
            thread.join()

    def refusal():
        with pytest.raises(UserError) as error:
            call(model, **settings.get(call, {}))
        return str(error.value)

    hook = model.model.layers[0].register_forward_hook(second)
    prune(model, method="wanda", **QUIET)
    hook.remove()
    assert found == ["another thread prunes or measures this model at this time; wait for it, or give a copy"]
    assert prune(model, method="wanda", sparsity=0.75, **QUIET).sparsity["matrices"] == 0.75


@pytest.mark.fault("threads")
def test_a_forward_pass_of_another_thread_is_refused_while_a_model_is_pruned():
    model, found = tiny.llama(), []

    def second(*_):
        if not found:
            thread = threading.Thread(target=lambda: found.append(pytest.raises(UserError, model, TEXT[:1]).value))
            thread.start()
            thread.join()

    hook = model.model.layers[0].register_forward_hook(second)
    prune(model, method="wanda", **QUIET)
    hook.remove()
    assert str(found[0]).startswith("another thread prunes or measures this model at this time")
    assert torch.isfinite(model(TEXT[:1]).logits).all() and not model._forward_pre_hooks


@pytest.mark.fault("threads")
@pytest.mark.parametrize("call", [pack_, unpack_])
def test_a_model_that_is_packed_or_unpacked_is_refused_to_other_threads(call, monkeypatch):
    model, found = tiny.llama(), []
    prune(model, method="magnitude", progress=False)
    if call is unpack_:
        pack_(model)

    def refused(*_, **_named):
        thread = threading.Thread(target=lambda: found.append(str(pytest.raises(UserError, prune, model).value)))
        thread.start()
        thread.join()
        monkeypatch.undo()
        raise UserError("stop")

    monkeypatch.setattr(pack, "check_whole" if call is pack_ else "unpack_layers_", refused)
    with pytest.raises(UserError, match="^stop$"):
        call(model)
    assert found == ["another thread prunes or measures this model at this time; wait for it, or give a copy"]
    call(model)


@pytest.mark.fault("odd calls")
@pytest.mark.parametrize("call", [prune, collect, evaluate_model])
def test_a_head_without_weights_is_refused(call):
    model = tiny.llama()
    model.lm_head = torch.nn.Identity()
    with pytest.raises(UserError, match="which has no output head"):
        call(model)


class BytesPath:
    def __fspath__(self):
        return b"folder"


@pytest.mark.fault("odd calls")
def test_a_path_of_bytes_is_one_line_that_names_the_argument():
    for call, name in (
        (lambda: fwanda_pruner.RunState(BytesPath()), "output"),
        (lambda: fwanda_pruner.Report.load(BytesPath()), "report"),
        (lambda: fwanda_pruner.Statistics.load(BytesPath()), "statistics"),
    ):
        with pytest.raises(UserError, match=f"^{name} must be a path, got BytesPath; give the path of a file"):
            call()


@pytest.mark.fault("odd calls")
def test_a_name_with_a_line_break_makes_no_second_line(tmp_path):
    with pytest.raises(UserError, match="no such file or folder") as error:
        fwanda_pruner.Report.load(tmp_path / "a\nb")
    assert "\n" not in str(error.value)


@pytest.mark.fault("value of Python")
@pytest.mark.parametrize("name, value", [("sparsity", "٠.٥"), ("pattern", "٢:٤"), ("max_memory", "٢GB")])
def test_only_ascii_digits_are_numbers(name, value):
    with pytest.raises(UserError, match=f"^--{name.replace('_', '-')} must be"):
        PruneConfig(**{name: value})


@pytest.mark.fault("odd module")
@pytest.mark.parametrize("change", ["pack", "remove", "no weight"])
def test_masks_of_a_model_that_changes_meanwhile_are_one_line(change):
    model = tiny.llama()
    report = fwanda_pruner.prune(model, method="magnitude", progress=False)
    found = fwanda_pruner.masks(model, report)
    next(found)
    if change == "pack":
        fwanda_pruner.pack_(model)
    elif change == "remove":
        del model.model.layers[:]
    else:
        for layer in model.model.layers:
            layer.mlp.up_proj.weight = None
    with pytest.raises(UserError, match="is gone: the model was changed between two masks; read them again$"):
        list(found)


@pytest.mark.fault("odd module")
def test_a_weight_that_is_a_buffer_or_complex_is_named_as_what_it_is():
    model = tiny.llama()
    layer = model.model.layers[0].mlp.up_proj
    weight = layer.weight.detach()
    layer.weight = torch.nn.Parameter(weight.to(torch.complex64))
    with pytest.raises(UserError, match="up_proj.weight is torch.complex64; load the model in"):
        fwanda_pruner.prune(model, method="magnitude", progress=False)
    del layer.weight
    layer.register_buffer("weight", weight)
    with pytest.raises(UserError, match="up_proj.weight is a buffer; make it a parameter"):
        fwanda_pruner.prune(model, method="magnitude", progress=False)


@pytest.mark.fault("packed file")
def test_a_packed_weight_that_cannot_be_unpacked_is_named():
    model = tiny.llama()
    fwanda_pruner.prune(model, method="magnitude", sparsity=0.7, progress=False)
    fwanda_pruner.pack_(model)
    model.model.layers[1].mlp.up_proj.weight.zero_()
    with pytest.raises(UserError, match="^model.layers.1.mlp.up_proj cannot be unpacked: .*; load the model again$"):
        fwanda_pruner.unpack_(model)
