"""fwanda pack and fwanda unpack: the bytes of a conversion in memory, one file of weights at a time, all or nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from test_packed import assert_same_state, sparse, state

import fwanda_kernels as fk
from fwanda_pruner import UserError, load_model, pack_, unpack_
from fwanda_pruner.formats import dense
from fwanda_pruner.model.pack import pack_lazily_, unpack_lazily_
from fwanda_pruner.model.packed import packed_weights
from fwanda_pruner.run.convert import pack_folder, unpack_folder


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


@pytest.mark.parametrize("family", ["mistral", "gpt2", "gpt_oss", "jetmoe"])
def test_files_are_those_of_a_conversion_in_memory(family, tmp_path, monkeypatch):
    size = {"max_shard_size": "20KB"}
    monkeypatch.setattr(dense, "FILE_BYTES", 20_000)
    model = sparse(tiny.build(family))
    model.save_pretrained(tmp_path / "dense")
    pack_folder(tmp_path / "dense", tmp_path / "packed")
    unpack_folder(tmp_path / "packed", tmp_path / "again")
    pack_(load_model(tmp_path / "dense", device="cpu").model).save_pretrained(tmp_path / "packed-whole", **size)
    load_model(tmp_path / "packed", device="cpu").model.save_pretrained(tmp_path / "again-whole", **size)
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) > 1
    assert contents(tmp_path / "packed") == contents(tmp_path / "packed-whole")
    assert contents(tmp_path / "again") == contents(tmp_path / "again-whole")
    assert_same_state(load_model(tmp_path / "again", device="cpu").model, state(model))


def test_experts_that_files_hold_one_by_one_come_back(tmp_path):
    model = sparse(tiny.build("mixtral"))
    model.save_pretrained(tmp_path / "dense")
    pack_folder(tmp_path / "dense", tmp_path / "packed")
    unpack_folder(tmp_path / "packed", tmp_path / "again")
    assert_same_state(load_model(tmp_path / "again", device="cpu").model, state(model))


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss"])
def test_lazy_conversions_have_the_tensors_of_the_others(family):
    model, other = sparse(tiny.build(family)), sparse(tiny.build(family))
    pack_lazily_(model), pack_(other)
    assert {n: t.shape for n, t in model.state_dict().items()} == {n: t.shape for n, t in other.state_dict().items()}
    assert all(
        torch.equal(a.contiguous(), b)
        for (_, a, _), (_, b, _) in zip(packed_weights(model), packed_weights(other), strict=True)
    )
    expected = state(unpack_(pack_(sparse(tiny.build(family)))))
    found = {name: tensor.contiguous() for name, tensor in unpack_lazily_(other).state_dict().items()}
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)


@pytest.mark.parametrize("shape", [(1, 1), (17, 257), (40, 100), (300, 7), (0, 5), (5, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_size_is_known_before_packing(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    weight, mask = torch.randn(shape, generator=generator).to(dtype), torch.rand(shape, generator=generator) < 0.4
    assert fk.packed_size(weight, mask) == len(fk.pack_weight(weight, mask))
    assert fk.packed_size(weight * mask) == len(fk.pack_weight(weight * mask))
    with pytest.raises(ValueError, match="packed_size: mask must be"):
        fk.packed_size(weight, mask[:-1] if shape[0] else mask.T)


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads the memory of a process from /proc")
def test_conversions_hold_a_file_of_weights_and_not_the_model(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = sparse(tiny.llama(blocks=12, head_dim=64, **sizes))
    model.save_pretrained(tmp_path / "source", max_shard_size="4MB")  # 31 MB; packed, 18 MB
    script = Path(__file__).with_name("peak_memory.py")
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", script, tmp_path / "source", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    packing, unpacking = json.loads(done.stdout)
    assert packing < 20 and unpacking < 20  # with one file of weights they take 23 and 33 MB


@pytest.mark.fault("stopped conversion")
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, OSError(28, "No space left on device")], ids=["Ctrl-C", "disk full"]
)
def test_an_interrupted_conversion_leaves_nothing(error, tmp_path, monkeypatch):
    sparse(tiny.llama()).save_pretrained(tmp_path / "dense")
    calls = []

    def stop(weight):
        calls.append(weight)
        if len(calls) == 3:
            raise error
        return fk.pack_weight(weight)

    monkeypatch.setattr("fwanda_pruner.model.pack.pack_weight", stop)
    with pytest.raises((KeyboardInterrupt, UserError)):
        pack_folder(tmp_path / "dense", tmp_path / "out")
    assert len(calls) == 3 and [path.name for path in tmp_path.iterdir()] == ["dense"]
