"""The count of zeros in the files of a saved model."""

import json

import pytest
import tiny
import torch
from safetensors.torch import save_file

from fwanda_pruner import UserError
from fwanda_pruner.formats.audit import audit

WEIGHTS = {
    "a.weight": torch.tensor([[0.0, -0.0, 1.0], [2.0, 0.0, 1e-40]]),
    "a.bias": torch.zeros(2),
    "b.c.weight": torch.tensor([[0, 3]], dtype=torch.bfloat16),
}
COUNTS = {"b.c": (1, 2), "a": (3, 6)}


def test_audit_counts_zeros_in_a_single_file(tmp_path):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    counts = audit(tmp_path, ["b.c", "a"])
    assert counts == COUNTS and list(counts) == ["b.c", "a"]


def test_audit_counts_zeros_over_shards(tmp_path):
    weight_map = {name: f"model-{i}.safetensors" for i, name in enumerate(WEIGHTS)}
    for name, file in weight_map.items():
        save_file({name: WEIGHTS[name]}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert audit(tmp_path, ["b.c", "a"]) == COUNTS


def test_audit_reads_what_save_pretrained_writes(tmp_path):
    tiny.llama().save_pretrained(tmp_path)
    name = "model.layers.1.mlp.down_proj"
    assert audit(tmp_path, [name]) == {name: (0, 32 * 48)}


def test_audit_names_what_is_missing_or_broken(tmp_path):
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        audit(tmp_path, ["a"])
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"no tensor d\.weight"):
        audit(tmp_path, ["a", "d"])
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match="cannot be read"):
        audit(tmp_path, ["a"])
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a.weight": "gone.safetensors"}}')
    with pytest.raises(UserError, match=r"gone\.safetensors"):
        audit(tmp_path, ["a"])


INDEXES = {
    "list": b"[1]",
    "text": b'"x"',
    "list of tensors": b'{"weight_map": [1]}',
    "number as a file": b'{"weight_map": {"a.weight": 1}}',
    "no tensors": b"{}",
    "no Unicode": b"\xff\xfe",
    "deep": b"[" * 100_000,
    "null byte": b'{"weight_map": {"a.weight": "a\\u0000"}}',
    "folder as a file": b'{"weight_map": {"a.weight": "."}}',
    "file that is gone, of another tensor": b'{"weight_map": {"a.weight": "1.safetensors", "x": "2.safetensors"}}',
    "tensor that its file lacks": b'{"weight_map": {"a.weight": "1.safetensors", "x": "1.safetensors"}}',
}


@pytest.mark.fault("changed output")
@pytest.mark.parametrize("content", INDEXES.values(), ids=INDEXES)
def test_a_broken_index_is_one_line(content, tmp_path):
    save_file(WEIGHTS, tmp_path / "1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(UserError, match="its list of tensors cannot be read: ") as error:
        audit(tmp_path, ["a"])
    assert "\n" not in str(error.value)
