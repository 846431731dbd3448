"""Files whose weights, masks or packed weights are stored as something else than they should: one line names it."""

import shutil
from pathlib import Path

import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fwanda_pruner import UserError, load_masks, load_model, load_packed, prune, save_pruned
from fwanda_pruner.cli import main
from fwanda_pruner.formats.audit import audit
from fwanda_pruner.run.convert import pack_folder, unpack_folder

MATRIX, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
TYPES = {"BOOL": torch.bool, "C64": torch.complex64, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Folders dense, packed and masks of one pruned model."""
    path = tmp_path_factory.mktemp("types")
    for save in ("dense", "packed", "masks"):
        model = tiny.llama()
        report = prune(model, calibration=tiny.TEXT, method="magnitude", guard="none", save=save, progress=False)
        save_pruned(model, tiny.tokenizer(), report, path / save)
    return path


def restored(folder: Path, copy: Path, tensor: str, dtype: torch.dtype, name: str = "model.safetensors") -> Path:
    """A copy of a folder that stores one tensor in another type."""
    shutil.copytree(folder, copy)
    with safe_open(copy / name, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(copy / name)
    tensors[tensor] = tensors[tensor].to(dtype)
    save_file(tensors, copy / name, metadata=metadata)
    return copy


def one_line(call, words: str) -> None:
    with pytest.raises(UserError) as error:
        call()
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.fault("stored type")
@pytest.mark.parametrize("tensor", [MATRIX, NORM])
@pytest.mark.parametrize("kind", TYPES)
def test_dense_weights_that_are_no_floats_are_refused_by_every_reader(kind, tensor, folders, tmp_path, capsys):
    folder = restored(folders / "dense", tmp_path / "x", tensor, TYPES[kind])
    one_line(lambda: load_model(folder, device="cpu"), f"{tensor} is stored as ")
    one_line(lambda: pack_folder(folder, tmp_path / "out"), f"{tensor} is stored as ")
    one_line(lambda: audit(folder, [tensor.removesuffix(".weight")]), f"{tensor} must be floats of 16 bits or more")
    assert main(["eval", str(folder)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("fwanda: error: model ") and f"{tensor} is stored as" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.fault("stored type")
@pytest.mark.parametrize("kind", ["BOOL", "C64"])
def test_a_bias_that_is_no_float_is_refused(kind, tmp_path):
    model = tiny.build("gpt2")
    model.save_pretrained(tmp_path / "model")
    name = next(name for name, _ in model.named_parameters() if name.endswith("ln_1.bias"))
    stored = next(key for key in load_file(tmp_path / "model" / "model.safetensors") if name.endswith(key))
    folder = restored(tmp_path / "model", tmp_path / "x", stored, TYPES[kind])
    one_line(lambda: load_model(folder, device="cpu"), f"{stored} is ")


@pytest.mark.fault("stored type")
@pytest.mark.parametrize("kind", TYPES)
def test_packed_folders_with_other_types_are_refused_by_every_reader(kind, folders, tmp_path):
    for number, tensor in enumerate((MATRIX, NORM)):
        folder = restored(folders / "packed", tmp_path / str(number), tensor, TYPES[kind])
        for call in (
            lambda folder=folder: load_packed(folder, device="cpu"),
            lambda folder=folder: load_model(folder, device="cpu"),
            lambda folder=folder: unpack_folder(folder, tmp_path / "out"),
        ):
            one_line(call, tensor)
    assert not (tmp_path / "out").exists()


@pytest.mark.fault("stored type")
@pytest.mark.parametrize("kind", TYPES)
def test_masks_with_other_types_are_refused(kind, folders, tmp_path):
    mask = MATRIX.removesuffix(".weight")
    folder = restored(folders / "masks", tmp_path / "x", mask, TYPES[kind], "masks.safetensors")
    one_line(lambda: load_masks(folder), f"{mask} must be [R, ceil(C/8)] uint8, got ")
