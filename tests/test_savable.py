"""What could stop the saving of a model is found before calibration; what is saved behaves as the model did."""

import copy
import json
import os
import resource
import tempfile
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

import fwanda_pruner
from fwanda_pruner import Report, UserError, load_model, save_pruned
from fwanda_pruner.cli import main
from fwanda_pruner.engine.memory import allocate_large
from fwanda_pruner.run.save import check_savable

TOKENS = tiny.tokens(4, 16)


def edit(file, changes):
    values = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**values, **changes}))


def folder(path, *, config=None, generation=None, tensors=None, model=None):
    """A Hugging Face folder of a tiny Llama with other entries in its files; generation None leaves that file out."""
    (model or tiny.llama()).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    edit(path / "config.json", config or {})
    if generation is None:
        (path / "generation_config.json").unlink()
    else:
        edit(path / "generation_config.json", generation)
    if tensors:
        stored = load_file(path / "model.safetensors")
        save_file(stored | tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def pruned(path, output):
    """Prunes a folder and saves the result; returns the record and both models as they load."""
    model, tokenizer = load_model(str(path), device="cpu")
    report = fwanda_pruner.prune(model, tokenizer, method="magnitude", progress=False)
    save_pruned(model, tokenizer, report, output)
    return report, load_model(str(path), device="cpu").model, load_model(str(output), device="cpu").model


# Settings that transformers loads and refuses to save

ACCEPTED = {  # name: (entries of config.json, entries of generation_config.json or None for no such file)
    "pad -1": ({"pad_token_id": -1}, None),
    "pad -1 twice": ({"pad_token_id": -1}, {"pad_token_id": -1}),
    "early stopping": ({}, {"early_stopping": True}),
    "length penalty": ({}, {"length_penalty": 2.0}),
    "temperature": ({}, {"temperature": 0.9}),
    "temperature 0": ({}, {"temperature": 0.0}),
    "top_k and top_p": ({}, {"top_k": 5, "top_p": 0.5, "do_sample": False}),
    "min_p": ({}, {"min_p": 0.1, "typical_p": 0.3, "epsilon_cutoff": 0.1, "eta_cutoff": 0.1}),
    "scores": ({}, {"output_scores": True}),
    "no cache": ({}, {"use_cache": False, "cache_implementation": "static"}),
    "in config.json": ({"temperature": 0.6, "do_sample": True, "max_length": 20}, None),
    "penalties": ({}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "max_new_tokens": 4}),
    "sampling": ({}, {"do_sample": True, "temperature": 0.6, "top_p": 0.9}),
    "beams": ({}, {"num_beams": 3, "length_penalty": 0.5, "early_stopping": True}),
}


@pytest.mark.fault("unsavable settings")
@pytest.mark.fault("generate() changed")
@pytest.mark.parametrize("name", ACCEPTED)
def test_settings_that_load_are_saved_and_generate_the_same(name, tmp_path):
    config, generation = ACCEPTED[name]
    _, before, after = pruned(folder(tmp_path / "in", config=config, generation=generation), tmp_path / "out")
    ignored = {"transformers_version", "_from_model_config"}
    old, new = (
        {k: v for k, v in m.generation_config.to_diff_dict().items() if k not in ignored} for m in (before, after)
    )
    assert old == new
    before.load_state_dict(after.state_dict())
    texts = []
    for model in (before, after):
        torch.manual_seed(0)
        texts.append(model.generate(TOKENS[:1], max_new_tokens=8))
    assert torch.equal(*texts)


@pytest.mark.fault("generate() changed")
def test_saving_leaves_the_settings_of_the_model_alone(tmp_path):
    model = tiny.llama()
    model.generation_config = original = GenerationConfig(do_sample=False, temperature=0.6)
    model.config.architectures, config, text = None, model.config, model.config.to_json_string()
    report = fwanda_pruner.prune(model, method="magnitude", progress=False)
    save_pruned(model, None, report, tmp_path / "out")
    assert model.generation_config is original and original.do_sample is False
    assert model.config is config and config.to_json_string() == text


def not_json(model, _tokenizer):
    model.config.note = object()


def of_wrong_type(model, _tokenizer):
    model.config.rope_parameters = model.config.rope_scaling = {"rope_type": object()}


def bad_flag(model, _tokenizer):
    model.generation_config.num_return_sequences = 3


def flag_not_json(model, _tokenizer):
    model.generation_config.note = object()


def bad_tokenizer(_model, tokenizer):
    tokenizer.init_kwargs["note"] = object()


def vocabulary_gone(_model, tokenizer):
    class Tokenizer(type(tokenizer)):
        def save_pretrained(self, *_args, **_kwargs):
            return open("/gone/vocab.txt")

    tokenizer.__class__ = Tokenizer


UNSAVABLE = {
    not_json: "the config of the model cannot be saved",
    of_wrong_type: "the config of the model cannot be saved",
    bad_flag: "the generation config of the model cannot be saved and loaded again",
    flag_not_json: "the generation config of the model cannot be saved",
    bad_tokenizer: r"the tokenizer \(\w+\) cannot be saved",
    vocabulary_gone: r"the tokenizer \(\w+\) cannot be saved",
}


@pytest.mark.fault("unsavable settings")
@pytest.mark.parametrize("spoil", UNSAVABLE, ids=lambda spoil: spoil.__name__)
def test_what_cannot_be_saved_is_refused_before_anything_runs(spoil, tmp_path):
    model, tokenizer = tiny.llama(), tiny.tokenizer()
    report = fwanda_pruner.prune(model, method="magnitude", progress=False)
    spoil(model, tokenizer)
    model.model.embed_tokens.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    calls = [
        lambda: fwanda_pruner.prune(model, tokenizer, method="wanda", calibration=TOKENS, progress=False),
        lambda: check_savable(model, tokenizer, tmp_path / "deep" / "out"),
        lambda: save_pruned(model, tokenizer, report, tmp_path / "deep" / "out"),
    ]
    for call in calls:
        with pytest.raises(UserError, match=UNSAVABLE[spoil]) as refused:
            call()
        assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.fault("unsavable settings")
def test_the_command_finds_an_output_that_cannot_be_made_before_calibration(tmp_path, capsys):
    model = folder(tmp_path / "in")
    command = ["prune", str(model), "--method", "wanda", "--calibration", tiny.text_file(tmp_path), "--seqlen", "16"]
    capsys.readouterr()
    assert main([*command, "--output", str(tmp_path / ("x" * 300) / "out")]) == 2
    error = capsys.readouterr().err
    assert "File name too long" in error and error.count("\n") == 1


@pytest.mark.fault("unsavable settings")
def test_a_trial_leaves_nothing_behind(tmp_path):
    check_savable(tiny.llama(), tiny.tokenizer(), tmp_path / "deep" / "out")
    assert not list(tmp_path.iterdir())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    check_savable(tiny.llama(), None, tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "old"]


# What lies beside the weights of the model

EXTRA = {"model.layers.2.eh_proj.weight": torch.ones(4, 8), "mtp.norm.weight": torch.ones(4)}
CARRIED = (
    "LICENSE", "LICENSE-MODEL.txt", "llama_LICENCE.md", "NOTICE", "Third_Party_Notices.txt", "USE_POLICY.md",
    "GEMMA_TERMS.md", "chat_template.json", "extra.jinja", "tokenizer.model", "merges.txt", "preprocessor_config.json",
)  # fmt: skip


@pytest.mark.fault("left behind")
def test_tensors_that_the_model_does_not_use_are_warned_of_and_recorded(tmp_path):
    source = folder(tmp_path / "in", tensors=EXTRA | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    with pytest.warns(UserWarning, match=r"2 tensors of .* the first is model\.layers\.2\.eh_proj\.weight"):
        report, _, _ = pruned(source, tmp_path / "out")
    (note,) = [note for note in Report.load(tmp_path / "out").warnings if "tensors of" in note]
    assert note in report.warnings and "\n" not in note


@pytest.mark.fault("left behind")
def test_tensors_of_a_pickle_that_the_model_does_not_use_are_warned_of(tmp_path):
    source = folder(tmp_path / "in")
    torch.save(load_file(source / "model.safetensors") | EXTRA, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    model, _ = load_model(str(source), device="cpu", allow_pickle=True)
    with pytest.warns(UserWarning, match="hold 3 blocks, the model has 2"):
        report = fwanda_pruner.prune(model, method="magnitude", progress=False)
    with pytest.warns(UserWarning, match=r"2 tensors of .* the first is model\.layers\.2\.eh_proj\.weight"):
        save_pruned(model, None, report, tmp_path / "out")


@pytest.mark.fault("left behind")
@pytest.mark.parametrize("shards", [1, 4])
def test_more_blocks_in_the_files_than_in_the_config_are_warned_of(shards, tmp_path):
    model = tiny.llama(blocks=4)
    source = folder(tmp_path / "in", model=model, config={"num_hidden_layers": 3})
    if shards > 1:
        (source / "model.safetensors").unlink()
        model.save_pretrained(source, max_shard_size="30KB")
        edit(source / "config.json", {"num_hidden_layers": 3})
        assert len(list(source.glob("*.safetensors"))) > 1
    with pytest.warns(UserWarning, match="hold 4 blocks, the model has 3: block 3"):
        report, _, _ = pruned(source, tmp_path / "out")
    assert any("hold 4 blocks" in note for note in report.warnings)
    loaded = load_model(str(source), device="cpu").model
    with pytest.warns(UserWarning, match="hold 4 blocks"):
        fwanda_pruner.collect(loaded, config=fwanda_pruner.PruneConfig(), calibration=TOKENS, progress=False)


@pytest.mark.fault("left behind")
@pytest.mark.filterwarnings("error:.*not in the saved files", "error:.*hold")
@pytest.mark.parametrize("family", ["llama", "gemma3_vision", "gpt2", "mixtral", "gpt_oss", "llava"])
def test_a_whole_checkpoint_gives_no_warning(family, tmp_path):
    model = tiny.llama() if family == "llama" else tiny.build(family)
    model.save_pretrained(tmp_path / "in")
    report, _, _ = pruned(tmp_path / "in", tmp_path / "out")
    assert report.warnings == []


@pytest.mark.fault("left behind")
@pytest.mark.filterwarnings("error:.*hold")
def test_blocks_of_other_parts_of_the_files_are_not_counted(tmp_path):
    parts = ("mtp", "vision_tower.encoder", "model.audio_tower", "vpm.encoder")
    source = folder(tmp_path / "in", tensors={f"{part}.layers.5.weight": torch.ones(2) for part in parts})
    with pytest.warns(UserWarning, match="4 tensors of"):
        pruned(source, tmp_path / "out")


@pytest.mark.fault("left behind")
@pytest.mark.filterwarnings("error:.*not in the saved files", "error:.*hold")
def test_a_base_model_without_prefix_gives_no_warning(tmp_path):
    tiny.build("gpt2").save_pretrained(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(tensors, file, metadata={"format": "pt"})
    report, _, _ = pruned(tmp_path / "in", tmp_path / "out")
    assert report.warnings == []


@pytest.mark.fault("left behind")
def test_licences_notices_and_templates_are_carried_over_unchanged(tmp_path):
    source = folder(tmp_path / "in")
    for name in CARRIED:
        (source / name).write_text(f"content of {name}")
    for name in ("pytorch_model.bin.old", "notes.txt", "optimizer.pt"):
        (source / name).write_text("not for the output")
    (source / "LICENSES").mkdir()
    (source / "README.md").write_text("the card of the dense model")
    pruned(source, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= set(CARRIED) and not names & {"pytorch_model.bin.old", "notes.txt", "optimizer.pt", "LICENSES"}
    for name in CARRIED:
        assert (tmp_path / "out" / name).read_text() == f"content of {name}"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# in, pruned by " in card and "the card of the dense model" not in card


@pytest.mark.fault("left behind")
def test_a_vocabulary_is_not_carried_over_without_its_tokenizer(tmp_path):
    source = folder(tmp_path / "in")
    (source / "tokenizer.model").write_text("a vocabulary")
    (source / "LICENSE").write_text("a licence")
    model, _ = load_model(str(source), device="cpu")
    save_pruned(model, None, fwanda_pruner.prune(model, method="magnitude", progress=False), tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").exists()
    assert load_model(str(tmp_path / "out"), device="cpu").tokenizer is None


@pytest.mark.fault("left behind")
def test_the_template_of_the_tokenizer_that_is_saved_wins(tmp_path):
    source = folder(tmp_path / "in")
    (source / "chat_template.jinja").write_text("old")
    model, tokenizer = load_model(str(source), device="cpu")
    tokenizer.chat_template = "new"
    save_pruned(model, tokenizer, fwanda_pruner.prune(model, method="magnitude", progress=False), tmp_path / "out")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == "new"


@pytest.mark.fault("left behind")
def test_files_of_another_tokenizer_are_not_mixed_in(tmp_path):
    source = folder(tmp_path / "in")
    for name in ("tokenizer.model", "chat_template.jinja", "LICENSE"):
        (source / name).write_text("of the model")
    model, _ = load_model(str(source), device="cpu")
    report = fwanda_pruner.prune(model, method="magnitude", progress=False)
    save_pruned(model, tiny.byte_tokenizer(), report, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "LICENSE" in names and not names & {"tokenizer.model", "chat_template.jinja"}


@pytest.mark.fault("left behind")
@pytest.mark.parametrize("named", [True, False])
def test_code_that_the_config_names_is_carried_over(named, tmp_path):
    code = {"AutoConfig": "configuration_tiny.TinyConfig"}
    source = folder(tmp_path / "in", config={"auto_map": code} if named else {})
    (source / "configuration_tiny.py").write_text("# code")
    pruned(source, tmp_path / "out")
    assert (tmp_path / "out" / "configuration_tiny.py").exists() == named


@pytest.mark.fault("left behind")
def test_files_of_a_model_in_the_cache_of_the_hub_are_carried_over(tmp_path, monkeypatch):
    cache = tmp_path / "cache" / "models--someone--tiny"
    snapshot = cache / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.parent.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(snapshot.name)
    folder(snapshot, tensors=EXTRA)
    (snapshot / "LICENSE").write_text("a licence")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.utils.hub.HF_HUB_CACHE", str(tmp_path / "cache"), raising=False)
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(tmp_path / "cache"), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = tiny.llama()
    model.config.name_or_path = "someone/tiny"
    report = fwanda_pruner.prune(model, method="magnitude", progress=False)
    with pytest.warns(UserWarning, match="2 tensors of someone/tiny"):
        save_pruned(model, None, report, tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_text() == "a licence"


@pytest.mark.fault("left behind")
@pytest.mark.parametrize("name", ["", "gone/away", "no such folder", "/nowhere", "text.txt", None, "a\0b"])
def test_a_model_from_nowhere_is_saved_without_extras(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("text.txt").touch()
    Path("LICENSE").write_text("of something else")
    model = tiny.llama()
    model.config.name_or_path = name
    report = fwanda_pruner.prune(model, method="magnitude", progress=False)
    save_pruned(model, None, report, tmp_path / "out")
    assert not (tmp_path / "out" / "LICENSE").exists() and report.warnings == []


def no_folder():
    raise FileNotFoundError(2, "No usable temporary directory found")


@pytest.mark.fault("read-only")
@pytest.mark.parametrize("name, value", [("gettempdir", no_folder), ("tempdir", "/dev/null")])
def test_a_run_that_saves_nothing_needs_no_temporary_folder(name, value, monkeypatch):
    monkeypatch.setattr(tempfile, name, value)
    report = fwanda_pruner.prune(tiny.llama(), tiny.tokenizer(), method="wanda", calibration=TOKENS, progress=False)
    assert report.sparsity["matrices"] == 0.5


@pytest.mark.fault("read-only")
def test_pruned_weights_that_fit_neither_ram_nor_a_temporary_folder_are_one_line(monkeypatch):
    monkeypatch.setattr(tempfile, "gettempdir", no_folder)
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(UserError, match="nor on the disk of the temporary folder: .*; let TMPDIR name a folder"):
        allocate_large((2**50,), torch.ones(1))


EDITS = {  # what Python code may do to a record: what its error says
    "own perplexity": (lambda r: r.perplexity.append({"source": "mine", "dense": 2.0, "pruned": 3.0}), "perplexity"),
    "unknown save": (lambda r: r.config.update(save="zip"), r"config\['save'\] of the report must be one of dense"),
    "save of another type": (lambda r: r.config.update(save=["zip"]), r"config\['save'\] of the report must be one of"),
    "no config": (lambda r: setattr(r, "config", None), "the report is not as prune"),
    "tensor": (lambda r: r.config.update(x=torch.ones(1)), "Tensor is not JSON serializable"),
    "no versions": (lambda r: setattr(r, "versions", None), "versions"),
    "float of a count": (lambda r: setattr(r.matrices[0], "asked", 512.0), r"matrices\[0\].asked"),
    "no rows": (lambda r: r.matrices.append(None), "the report is not as prune"),
    "half a character": (lambda r: r.warnings.append("\ud800"), "surrogates not allowed"),
}


@pytest.mark.fault("unsavable settings")
@pytest.mark.parametrize("edit", EDITS)
def test_a_record_that_could_not_be_loaded_is_not_saved(edit, tmp_path):
    change, message = EDITS[edit]
    model = tiny.llama()
    report = fwanda_pruner.prune(model, method="magnitude", progress=False)
    change(report)
    with pytest.raises(UserError, match=message) as refused:
        save_pruned(model, None, report, tmp_path / "out")
    assert "\n" not in str(refused.value) and not list(tmp_path.iterdir())


@pytest.mark.fault("unsavable settings")
@pytest.mark.parametrize("note", ["\ud800", "a\nb"])
def test_a_note_that_is_no_printable_line_is_refused(note, tmp_path):
    model = tiny.llama()
    report = fwanda_pruner.prune(model, method="magnitude", progress=False)
    with pytest.raises(UserError, match="^note must be one line of printable text, got "):
        save_pruned(model, None, report, tmp_path / "out", note=note)
    assert not list(tmp_path.iterdir())


def test_a_try_that_failed_counts_no_time_of_saving(tmp_path):
    model = tiny.llama()
    report = fwanda_pruner.prune(model, method="magnitude", progress=False)
    (tmp_path / "file").touch()
    before = copy.deepcopy(report.to_dict())
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 1
    with pytest.raises(RuntimeError):
        save_pruned(model, None, report, tmp_path / "out")
    assert report.to_dict() == before and "save" not in report.seconds


def test_the_dict_of_a_report_is_its_own():
    report = fwanda_pruner.prune(tiny.llama(), method="magnitude", progress=False)
    values = report.to_dict()
    values["config"]["method"], values["seconds"]["x"] = "other", 1.0
    values["warnings"].append("mine")
    assert report.config["method"] == "magnitude" and "x" not in report.seconds and "mine" not in report.warnings


def without_files(function):
    """The error of a function in a process that can open no further file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 1, hard))
    try:
        function()
    except Exception as error:
        return error
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(taken[0])


@pytest.mark.fault("unsavable settings")
def test_too_many_open_files_are_one_line_that_says_what_to_do(tmp_path):
    model, statistics = tiny.llama(), fwanda_pruner.collect(tiny.llama(), calibration=TOKENS, progress=False)
    report = fwanda_pruner.prune(model, method="magnitude", progress=False)
    save_pruned(model, None, report, tmp_path / "first")  # imports what saving needs
    fwanda_pruner.RunState(tmp_path / "state").remove()
    statistics.save(tmp_path / "first.safetensors")
    text = tiny.text_file(tmp_path)
    given = {"method": "wanda", "nsamples": 2, "seqlen": 16, "calibration": text, "guard": "none", "progress": False}
    calls = [
        lambda: save_pruned(model, None, report, tmp_path / "out"),
        lambda: fwanda_pruner.RunState(tmp_path / "out"),
        lambda: statistics.save(tmp_path / "out.safetensors"),
        lambda: fwanda_pruner.collect(tiny.llama(), tiny.tokenizer(), calibration=text, nsamples=2, progress=False),
        lambda: fwanda_pruner.prune(tiny.llama(), tiny.tokenizer(), **given),
    ]
    for call in calls:
        error = without_files(call)
        assert isinstance(error, UserError) and "\n" not in str(error), repr(error)
        assert "open files" in str(error) or "files are open" in str(error), error
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.fault("unsavable settings")
@pytest.mark.parametrize("call", [fwanda_pruner.prune, fwanda_pruner.collect, fwanda_pruner.evaluate_model])
def test_memory_that_ends_on_a_cpu_is_one_line(call):
    model = tiny.llama()

    def fail(*_):
        torch.empty(2**60)

    model.model.layers[1].register_forward_pre_hook(fail)
    given = {"eval": TOKENS} if call is fwanda_pruner.evaluate_model else {"calibration": TOKENS}
    with pytest.raises(UserError, match="^not enough memory on the CPU .*; free some, or use a smaller") as error:
        call(model, progress=False, **given)
    assert "\n" not in str(error.value)
