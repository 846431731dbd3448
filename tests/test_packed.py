"""Packed models: pack and unpack in memory and on disk, loading by transformers, and what must be refused."""

import copy
import json
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_save import pruned_model
from transformers import AutoModelForCausalLM

from fwanda_pruner import (
    Report,
    UserError,
    keep_zeros,
    load_model,
    load_packed,
    pack_,
    prune,
    save_pruned,
    unpack_,
)
from fwanda_pruner.cli import main
from fwanda_pruner.formats import packed as packed_format
from fwanda_pruner.model.packed import PackedExperts, PackedLinear, packed_weights
from fwanda_pruner.model.targets import find_targets

IDS = torch.arange(12).view(2, 6)


def sparse(model, share=0.5):
    """The model in eval mode, with a share of the weights of every matrix set to zero."""
    generator = torch.Generator().manual_seed(0)
    for target in find_targets(model)[0]:
        target.weight.masked_fill_(torch.rand(target.shape, generator=generator) < share, 0)
    return model.eval()


def state(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_state(model, expected) -> None:
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) and found[name].dtype == expected[name].dtype for name in found)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture
def folder(tmp_path):
    """A packed folder of a tiny model in bf16."""
    pack_(sparse(tiny.llama(dtype=torch.bfloat16))).save_pretrained(tmp_path / "packed")
    return tmp_path / "packed"


FAMILIES = ["mistral", "gpt2", "opt", "phi3", "falcon", "mixtral", "gpt_oss", "llama4", "jetmoe"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_packed_saved_loaded_and_unpacked_without_a_changed_bit(family, tmp_path):
    model = sparse(tiny.build(family))
    dense, expected = state(model), logits(model)
    assert pack_(model) is model
    count = sum(1 for _ in packed_weights(model))
    assert count == len(find_targets(sparse(tiny.build(family)))[0])
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    assert sum(1 for _ in packed_weights(loaded)) == count
    assert torch.equal(logits(loaded), logits(model))
    assert_same_state(unpack_(loaded), dense)
    assert torch.equal(logits(loaded), expected)
    assert not hasattr(loaded.config, "quantization_config")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_tied_heads_and_every_dtype(dtype, tied, tmp_path):
    model = sparse(tiny.llama(tie_word_embeddings=tied, dtype=dtype))
    dense = state(model)
    pack_(model).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert_same_state(unpack_(loaded), dense)


def test_a_packed_model_generates_moves_converts_and_keeps_its_state(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    assert model.generate(IDS, max_new_tokens=4, do_sample=False).shape == (2, 10)
    other = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other), logits(model.to("cpu")))
    layer = model.model.layers[0].mlp.up_proj
    before = layer.dense_weight()
    model.to(torch.float32)
    assert layer.header.dtype == torch.float32 and torch.equal(layer.dense_weight(), before.float())
    assert logits(model).dtype == torch.float32


def test_dense_matrices_stay_dense_and_a_dense_model_is_refused():
    model = tiny.llama()
    with pytest.raises(UserError, match="the model is dense.*would take.*--force") as error:
        pack_(model)
    assert "\n" not in str(error.value)
    model.model.layers[0].mlp.up_proj.weight.data[:, ::2] = 0
    assert [name for name, *_ in packed_weights(pack_(model))] == ["model.layers.0.mlp.up_proj.weight"]
    forced = pack_(tiny.llama(), force=True)
    assert sum(isinstance(module, PackedLinear) for module in forced.modules()) == 14
    torch.testing.assert_close(logits(forced.eval()), logits(tiny.llama().eval()), rtol=1e-4, atol=1e-5)


def test_saving_packed_leaves_the_model_dense_and_the_files_hold_the_zeros_of_the_report(tmp_path):
    model, report = pruned_model()
    dense, parameter = state(model), model.model.layers[0].mlp.up_proj.weight
    report.config["save"] = "packed"
    save_pruned(model, None, report, tmp_path / "out")
    assert model.model.layers[0].mlp.up_proj.weight is parameter
    assert_same_state(model, dense)
    assert load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].dtype == torch.uint8
    assert_same_state(load_model(tmp_path / "out", device="cpu").model, dense)
    assert Report.load(tmp_path / "out").config["save"] == "packed"
    report.matrices[0] = replace(report.matrices[0], kept_zero=2)
    with pytest.raises(RuntimeError, match=r"up_proj holds \d+ zeros"):
        save_pruned(model, None, report, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_zeros_of_fused_experts_are_counted_in_packed_files(tmp_path):
    model = sparse(tiny.build("gpt_oss"))
    targets = find_targets(model)[0]
    expected = {target.name: int((target.weight == 0).sum()) for target in targets}
    slices = {
        target.name: packed_format.Part(target.parameter, target.slice_of.index)
        for target in targets
        if target.slice_of is not None
    }
    packed_format.write(tmp_path, model, None)
    assert not any(isinstance(module, PackedExperts) for module in model.modules())
    counts = packed_format.count_zeros(tmp_path, list(expected), slices=slices)
    assert {name: count.zeros for name, count in counts.items()} == expected


def test_pruning_writes_packed_and_the_command_line_converts_both_ways(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tokenizer = tiny.byte_tokenizer()
    tiny.llama(vocab_size=len(tokenizer)).save_pretrained("model")
    tokenizer.save_pretrained("model")

    def run(*arguments) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return (code, *capsys.readouterr())

    assert (
        run("prune", "model", "--method", "magnitude", "--no-check", "--save", "packed", "--output", "packed")[0] == 0
    )
    assert run("unpack", "packed", "--output", "dense")[0] == 0
    code, out, _ = run("pack", "dense", "--output", "again")
    assert code == 0 and out.startswith("again: weights take")
    files = [load_file(f"{name}/model.safetensors") for name in ("packed", "again")]
    assert files[0].keys() == files[1].keys() and all(torch.equal(files[0][key], files[1][key]) for key in files[0])
    assert run("report", "packed")[0] == 0
    records = [json.loads((tmp_path / name / "fwanda.json").read_text()) for name in ("dense", "packed")]
    assert records[0]["seconds"] == records[1]["seconds"]  # those of the run, not of the copy
    windows = ("--eval", "sample", "--eval-windows", "1", "--eval-seqlen", "32")
    measured = [json.loads(run("eval", name, *windows)[1]) for name in ("packed", "dense")]
    assert {**measured[0], "model": ""} == {**measured[1], "model": ""}
    code, out, _ = run("bench", "packed", "--batches", "1,2", "--tokens", "2", "--prompts", "8", "--json")
    rows = [(row["form"], row["work"], row["batch"]) for row in json.loads(out)]
    decoding = ["decode eager", "decode graphs"] if torch.cuda.is_available() else ["decode eager"]
    works = [*((work, batch) for work in decoding for batch in (1, 2)), ("prefill", 1)]
    assert rows == [(form, *work) for form in ("dense", "packed") for work in works]
    for arguments, message in [
        (("pack", "packed", "--output", "x"), "packed already"),
        (("unpack", "dense", "--output", "x"), "dense is not packed"),
        (("pack", "model", "--output", "x"), "the model is dense"),
        (("pack", "dense", "--output", "dense"), "choose another folder"),
        (
            ("pack", "nosuch", "--force", "--output", "x"),
            "model 'nosuch': no such folder; give the folder that a run of fwanda prune wrote",
        ),
        (
            ("unpack", "nosuch", "--output", "x"),
            "model 'nosuch': no such folder; give the folder that a run of fwanda prune wrote",
        ),
        (
            ("pack", "model/config.json", "--output", "x"),
            "'model/config.json' is a file; expected the folder of a model",
        ),
        (("bench", "packed", "--prompts", "200000"), "at most 131072 tokens, --prompts asks for 200000"),
        (("bench", "packed", "--tokens", "200000"), "--tokens must be in [1, 100000], got 200000"),
        (("prune", "model", "--save", "packed", "--sparsity", "0.1", "--output", "x"), "at least 15 % zeros"),
        (("bench", "packed", "--batches", "0"), "--batches must be numbers in [1, 999999]"),
    ]:
        code, _, error = run(*arguments)
        assert code == 2 and message in error.splitlines()[-1]
        assert not (tmp_path / "x").exists()


def test_a_packed_model_in_memory_is_refused_where_dense_weights_are_needed(folder):
    model = load_packed(folder, device="cpu").model
    with pytest.raises(UserError, match="make it dense first: unpack_"):
        prune(model, method="magnitude", sparsity=0.5)


# loading by transformers


@pytest.mark.parametrize(
    "first", ["import fwanda_pruner", "import transformers", "from transformers import LlamaModel"]
)
def test_from_pretrained_loads_a_packed_folder_in_any_order_of_imports(first, folder):
    code = f"""if True:
        {first}
        import fwanda_pruner, sys
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
        print(type(model.model.layers[0].mlp.up_proj).__name__)"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, folder], capture_output=True, text=True)
    assert done.stdout.strip() == "PackedLinear", done.stderr


def test_importing_the_pruner_imports_neither_torch_nor_transformers():
    code = "import sys, fwanda_pruner; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.fault("packed file")
def test_without_the_pruner_loading_fails_and_says_what_to_import(folder):
    code = "import sys; from transformers import AutoModelForCausalLM as A; A.from_pretrained(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert done.returncode != 0 and "import fwanda_pruner" in done.stderr


# bad input


def change(folder, name, edit):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = edit(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def flipped(tensor):
    tensor[-1] ^= 1
    return tensor


def of_version_2(tensor):
    tensor[4] = 2
    return tensor


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.fault("packed file")
@pytest.mark.parametrize("load", [load_packed, load_model], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: change(f, UP, flipped), "SHA-256"),
        (lambda f: change(f, UP, of_version_2), "got version 2"),
        (lambda f: change(f, UP, lambda t: t[:-16]), UP),
        (lambda f: change(f, UP, lambda t: torch.zeros(48, 32)), UP),
        (
            lambda f: change(f, UP, lambda t: t.float()),
            "write the packed folder again",
        ),
        (lambda f: change(f, UP, lambda t: t.char()), "write the packed folder again"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:9000]), ""),
    ],
    ids=["altered", "version", "truncated tensor", "dense tensor", "float32", "int8", "truncated file"],
)
def test_broken_packed_files_are_one_line_and_nothing_is_loaded(break_it, message, load, folder):
    break_it(folder)
    with pytest.raises(UserError) as error:
        load(folder, device="cpu")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.fault("packed file")
def test_another_version_of_the_config_is_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["version"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="version 2, this fwanda reads version 1"):
        load_packed(folder, device="cpu")


@pytest.mark.fault("packed file")
@pytest.mark.parametrize("load", [load_packed, AutoModelForCausalLM.from_pretrained], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": None}, "version None"),
        ({"version": "1"}, "version '1'"),
        ({"dtype": "nn"}, "dtype of a packed model must be one of float32, bfloat16, float16, got 'nn'"),
        ({"packed_bytes": None}, "must name its weights, got None"),
        ({"packed_bytes": {UP: -1}}, f"must be a number of bytes, got -1 for {UP}"),
        ({"packed_bytes": {UP: 10**30}}, "must be a number of bytes"),
        ({"packed_bytes": {UP.replace("weight", "packed_weight_0"): 800}}, f"{UP} is packed as 1 experts"),
        ({"packed_bytes": {"model.packed_norm_0": 800}}, "model.norm is packed as 1 experts"),
    ],
    ids=str,
)
def test_altered_settings_of_a_packed_folder_are_refused_in_one_line(changed, message, load, folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(changed)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        load(folder)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_matrices_of_two_dtypes_are_refused_and_the_model_stays_dense():
    model = sparse(tiny.llama())
    model.model.layers[1].mlp.to(torch.bfloat16)
    with pytest.raises(UserError, match="one dtype, got torch.bfloat16, torch.float32"):
        pack_(model)
    assert next(packed_weights(model), None) is None


@pytest.mark.fault("packed file")
def test_load_packed_names_what_it_cannot_load(folder):
    with pytest.raises(UserError, match="dtype must be one of float32, bfloat16, float16, got 'float64'"):
        load_packed(folder, device="cpu", dtype="float64")
    with pytest.raises(UserError, match="no such folder"):
        load_packed("", device="cpu")


def test_a_packed_model_is_neither_packed_again_nor_held_at_its_zeros():
    model = pack_(sparse(tiny.llama()))
    for call in (pack_, lambda m: pack_(m, force=True), keep_zeros):
        with pytest.raises(UserError, match=r"is packed \(model.layers.0.*unpack_\(model\)"):
            call(model)


@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_and_pickles_of_packed_models_are_packed_and_whole(again, family):
    model = pack_(sparse(tiny.build(family)))
    expected, other = logits(model), again(model)
    unpack_(model)
    assert next(packed_weights(model), None) is None
    assert sum(1 for _ in packed_weights(other)) == len(find_targets(model)[0])
    assert torch.equal(logits(other), expected)
    assert_same_state(unpack_(other), state(model))


@pytest.mark.fault("packed file")
@pytest.mark.parametrize(
    ("save", "file", "name"),
    [("packed", "model.safetensors", UP), ("masks", "masks.safetensors", UP.removesuffix(".weight"))],
)
def test_resuming_finds_altered_bits_in_a_finished_folder(save, file, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny.llama().save_pretrained("model")
    command = ["prune", "model", "--method", "magnitude", "--no-check", "--save", save, "--output", "out", "--resume"]
    assert main(command) == 0 and main(command) == 0
    tensors = load_file(f"out/{file}")
    tensors[name].view(-1)[-1] ^= 1
    save_file(tensors, f"out/{file}", metadata={"format": "pt"})
    capsys.readouterr()
    assert main(command) == 2
    assert UP.removesuffix(".weight") in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.fault("packed file")
def test_a_dense_folder_is_not_loaded_as_packed(tmp_path):
    tiny.llama().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is not packed; load it by load_model"):
        load_packed(tmp_path, device="cpu")
