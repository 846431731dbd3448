"""GGUF files: read once, converted once, and then loaded from a copy in the cache, with the same bits."""

import errno
import importlib.util
import os
import pwd
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from test_load import refusal, without
from transformers import AutoModelForCausalLM, AutoTokenizer

import fwanda_pruner
from fwanda_pruner import load_model
from fwanda_pruner.cli import main
from fwanda_pruner.model.cache import NotKept, cache_folder, keep_folder, kept_folder

gguf = pytest.importorskip("gguf")
numpy = pytest.importorskip("numpy")
pytest.importorskip("accelerate")


def write_tiny_gguf(file, architecture="llama", kind=gguf.GGMLQuantizationType.F32):
    """A one-block Llama with a small BPE vocabulary; returns its embedding [V, C] fp32 before it is quantised."""
    generator = numpy.random.default_rng(0)
    tokens = ["<|endoftext|>", "<s>", "</s>", *"abcdefghijk", "ab", "cd"]
    writer = gguf.GGUFWriter(file, architecture)
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
        stored = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", gguf.quantize(tensor, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return torch.from_numpy(tensors["token_embd"])


def test_a_broken_gguf_is_refused(tmp_path):
    for content in (b"", b"junk" * 20, b"GGUF"):
        (tmp_path / "x.gguf").write_bytes(content)
        assert "x.gguf" in refusal(tmp_path / "x.gguf")


@pytest.mark.parametrize("key", ["embedding_length", "block_count", "feed_forward_length", "attention.head_count_kv"])
def test_a_gguf_file_that_tells_of_a_huge_model_is_refused_before_it_takes_memory(tmp_path, key):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    content = bytearray((tmp_path / "tiny.gguf").read_bytes())
    value = content.index(f"llama.{key}".encode()) + len(f"llama.{key}") + 4
    content[value : value + 4] = (1 << 24).to_bytes(4, "little")
    (tmp_path / "tiny.gguf").write_bytes(content)
    message = refusal(tmp_path / "tiny.gguf", device="cpu")
    assert "tiny.gguf" in message and "metadata describe a larger model than its 11 tensors hold" in message


def test_a_gguf_file_whose_metadata_call_for_other_shapes_is_refused(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    content = bytearray((tmp_path / "tiny.gguf").read_bytes())
    value = content.index(key := b"llama.attention.head_count_kv") + len(key) + 4
    content[value : value + 4] = (4).to_bytes(4, "little")
    (tmp_path / "tiny.gguf").write_bytes(content)
    message = refusal(tmp_path / "tiny.gguf", device="cpu")
    assert "k_proj.weight is [16, 32] in its file, and its configuration calls for [32, 32]; download" in message


@pytest.mark.parametrize("at", [8, 16])
def test_counts_beyond_the_end_of_a_gguf_file_are_refused_at_once(tmp_path, at):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    content = bytearray((tmp_path / "tiny.gguf").read_bytes())
    content[at : at + 8] = (1 << 60).to_bytes(8, "little")
    (tmp_path / "tiny.gguf").write_bytes(content)
    assert "is not a complete GGUF file" in refusal(tmp_path / "tiny.gguf", device="cpu")


def test_missing_gguf_packages_are_named(tmp_path, monkeypatch):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", without("gguf", "accelerate"))
    assert "pip install gguf accelerate" in refusal(tmp_path / "x.gguf")


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A tiny quantised file, and an empty cache."""
    monkeypatch.setenv("FWANDA_CACHE", str(tmp_path / "cache"))
    write_tiny_gguf(tmp_path / "tiny.gguf", kind=gguf.GGMLQuantizationType.Q4_1)
    return tmp_path / "tiny.gguf"


def load_silently(file, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return load_model(str(file), device="cpu", **options)


def assert_same(a, b):
    state, other = (dict(loaded[0].state_dict()) for loaded in (a, b))
    assert state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)
    assert {tensor.dtype for tensor in state.values()} == {tensor.dtype for tensor in other.values()}
    tokens = torch.arange(16)[None]
    assert torch.equal(a[0](tokens).logits, b[0](tokens).logits)
    assert a[1].backend_tokenizer.to_str() == b[1].backend_tokenizer.to_str()
    assert a[1].special_tokens_map == b[1].special_tokens_map


def test_a_gguf_file_loads_as_float32_unflagged_and_silently(tmp_path, capfd):
    embedding = write_tiny_gguf(tmp_path / "tiny.gguf")
    capfd.readouterr()
    model, tokenizer = load_model(str(tmp_path / "tiny.gguf"), device="cpu")
    assert capfd.readouterr() == ("", "")
    assert model.dtype == torch.float32 and torch.equal(model.model.embed_tokens.weight, embedding)
    assert not hasattr(model.config, "quantization_config") and tokenizer.convert_tokens_to_ids("ab") == 14
    model.save_pretrained(tmp_path / "out")
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.fault("GGUF")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_converted_and_kept_models_have_the_bits_that_transformers_reads(file, dtype):
    options = {"gguf_file": file.name}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=getattr(torch, dtype), **options).eval()
    expected = model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for _ in range(2):
        assert_same(load_silently(file, dtype=dtype), expected)


@pytest.mark.fault("GGUF")
def test_a_file_is_converted_once_wherever_it_lies(file, tmp_path, monkeypatch):
    first = load_silently(file)
    monkeypatch.setattr(gguf, "dequantize", lambda *_: pytest.fail("converted again"))
    (tmp_path / "elsewhere").mkdir()
    moved = file.rename(tmp_path / "elsewhere" / "renamed.gguf")
    assert_same(load_silently(moved), first)
    assert load_silently(moved).model.config.name_or_path == str(moved)


@pytest.mark.fault("GGUF")
def test_other_content_under_the_same_name_is_converted_anew(file):
    before = load_silently(file).model.model.embed_tokens.weight
    embedding = write_tiny_gguf(file)
    after = load_silently(file).model.model.embed_tokens.weight
    assert torch.equal(after, embedding) and not torch.equal(after, before)


def copies(file):
    return list((file.parent / "cache").iterdir())


@pytest.mark.fault("GGUF")
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "sha256.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "removed"])
def test_a_broken_copy_is_made_anew_with_one_warning(file, name, damage):
    expected = load_silently(file)
    (copy,) = copies(file)
    content = bytearray((copy / name).read_bytes())
    content[-9] ^= 1
    (copy / name).unlink()
    if damage != "removed":
        (copy / name).write_bytes(content[:-20] if damage == "cut" else content)
    with pytest.warns(UserWarning, match="the converted copy of tiny.gguf is made anew") as caught:
        assert_same(load_model(str(file), device="cpu"), expected)
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    assert_same(load_silently(file), expected)
    assert copies(file) == [copy]


@pytest.mark.fault("no home")
@pytest.mark.parametrize("place", ["a file", "no home"])
def test_without_a_cache_a_file_loads_with_one_warning(file, place, monkeypatch):
    expected = load_silently(file)
    if place == "a file":
        monkeypatch.setenv("FWANDA_CACHE", str(file / "cache"))
    else:
        forget_home(monkeypatch)
    with pytest.warns(UserWarning, match="tiny.gguf is converted at each load, .* set FWANDA_CACHE") as caught:
        assert_same(load_model(str(file), device="cpu"), expected)
    assert len(caught) == 1 and "\n" not in str(caught[0].message)


def forget_home(monkeypatch):
    for name in ("FWANDA_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])  # KeyError, as for a user without an entry


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FWANDA_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"FWANDA_CACHE": "~/a", "HOME": "/c"}, "/c/a"),
        ({"FWANDA_CACHE": "", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/fwanda"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/c"}, "/c/.cache/fwanda"),
    ],
)
def test_where_the_cache_is(variables, expected, monkeypatch):
    forget_home(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)


@pytest.mark.fault("no home")
def test_output_is_overwritten_by_a_user_without_a_home(tmp_path, monkeypatch):
    forget_home(monkeypatch)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    report = fwanda_pruner.prune(model := tiny.llama(), method="magnitude", progress=False)
    fwanda_pruner.save_pruned(model, None, report, tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "old").exists() and (tmp_path / "out" / "fwanda.json").exists()


@pytest.mark.fault("GGUF")
def test_writers_of_one_copy_at_once_get_the_same_folder_and_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("FWANDA_CACHE", str(tmp_path))
    together = threading.Barrier(8)

    def write(folder):
        (folder / "model").write_text("weights")
        together.wait()

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: keep_folder("key", write, 0), range(8)))
    assert set(found) == {tmp_path / "key"} == set(tmp_path.iterdir())
    assert kept_folder("key") == tmp_path / "key" and (tmp_path / "key" / "model").read_text() == "weights"


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("FWANDA_CACHE", str(tmp_path))

    def write(folder):
        (folder / "model").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(NotKept, match="No space left on device"):
        keep_folder("key", write, 0)
    with pytest.raises(NotKept, match="are free"):
        keep_folder("key", lambda folder: pytest.fail("written"), 1 << 60)
    assert list(tmp_path.iterdir()) == [] and kept_folder("key") is None


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path, monkeypatch):
    monkeypatch.setenv("FWANDA_CACHE", str(tmp_path))
    for name, age in ((".tmp-old", 2 * 24 * 3600), (".tmp-young", 60)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    keep_folder("key", lambda folder: None, 0)
    assert {path.name for path in tmp_path.iterdir()} == {".tmp-young", "key"}


def test_doctor_says_what_the_cache_holds_and_how_to_clear_it(file, capsys):
    assert main(["doctor"]) == 0
    assert (
        f"{file.parent / 'cache'} holds 0.0 MiB, converted GGUF models: 0; to clear it, delete the folders"
        in capsys.readouterr().out
    )
    load_silently(file)
    assert main(["doctor"]) == 0
    assert "converted GGUF models: 1" in capsys.readouterr().out


@pytest.mark.fault("no home")
def test_doctor_says_why_there_is_no_cache(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    for place in ("file", "file/cache", "a" * 300):
        monkeypatch.setenv("FWANDA_CACHE", str(tmp_path / place))
        assert main(["doctor"]) == 0
        assert f"{tmp_path / place} cannot be written; set FWANDA_CACHE" in capsys.readouterr().out
    forget_home(monkeypatch)
    assert main(["doctor"]) == 0
    assert "there is no home folder; set FWANDA_CACHE to a folder" in capsys.readouterr().out


@pytest.mark.parametrize("architecture", ["t5", "bert", "clip", "nonesuch"])
def test_a_file_of_another_kind_of_model_is_refused(tmp_path, architecture):
    write_tiny_gguf(tmp_path / "other.gguf", architecture)
    assert "other.gguf" in refusal(tmp_path / "other.gguf", device="cpu")


def test_a_big_endian_file_and_a_repeated_key_are_refused(tmp_path):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(content[:4] + content[4:8][::-1] + content[8:])
    assert "it is big-endian" in refusal(tmp_path / "tiny.gguf")
    (tmp_path / "tiny.gguf").write_bytes(content.replace(b"ggml.eos_token_id", b"ggml.bos_token_id"))
    assert "it holds tokenizer.ggml.bos_token_id twice" in refusal(tmp_path / "tiny.gguf")
