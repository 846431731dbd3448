"""Packed folders of pruned models: names and bits of experts, records that no longer fit, and limits of files."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file
from test_packed import logits, sparse
from test_save import pruned_model

from fwanda_pruner import Report, UserError, load_model, load_packed, pack_, progress, prune, save_pruned, unpack_
from fwanda_pruner.cli import main
from fwanda_pruner.formats.files import atomic_folder
from fwanda_pruner.run import convert
from fwanda_pruner.run.bench import bench
from fwanda_pruner.run.convert import pack_folder, unpack_folder


def pruned_folders(family, tmp_path):
    """The source of a model, and what prune() makes of it in both forms."""
    tiny.build(family).save_pretrained(tmp_path / "source")
    for save in ("dense", "packed"):
        model = load_model(tmp_path / "source", device="cpu").model
        report = prune(model, method="magnitude", sparsity=0.5, no_check=True, save=save, progress=False)
        save_pruned(model, None, report, tmp_path / save)


def tensors(folder) -> dict:
    return load_file(Path(folder, "model.safetensors"))


def assert_same_files(folder, other) -> None:
    found, expected = tensors(folder), tensors(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.fault("packed experts")
@pytest.mark.parametrize("family", [*tiny.EXPERTS, *tiny.JOINED])
def test_packed_matrices_come_back_under_the_names_that_dense_files_have(family, tmp_path, recwarn):
    if family in tiny.JOINED and not hasattr(transformers, tiny.JOINED[family][1]):
        pytest.skip(f"this transformers has no {family}")
    pruned_folders(family, tmp_path)
    unpack_folder(tmp_path / "packed", tmp_path / "unpacked")
    assert_same_files(tmp_path / "unpacked", tmp_path / "dense")
    pack_folder(tmp_path / "unpacked", tmp_path / "again")
    assert_same_files(tmp_path / "again", tmp_path / "packed")
    unpack_(load_packed(tmp_path / "again", device="cpu").model).save_pretrained(tmp_path / "memory")
    assert_same_files(tmp_path / "memory", tmp_path / "dense")
    warned = [
        str(item.message) for item in recwarn if "saved files" in str(item.message) or "counted" in str(item.message)
    ]
    assert not warned
    assert not any(
        "saved files" in line for name in ("unpacked", "again") for line in Report.load(tmp_path / name).warnings
    )


@pytest.mark.fault("record of other weights")
@pytest.mark.parametrize("save", ["dense", "packed"])
def test_a_record_of_other_weights_is_named_in_one_line(save, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model, report = pruned_model()
    report.config["save"] = save
    save_pruned(model, None, report, "folder")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0] += 1
    (pack_(model) if save == "packed" else model).save_pretrained("folder")
    command = "pack" if save == "dense" else "unpack"
    assert main([command, "folder", "--output", "out"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "folder: its weights are not those of its fwanda.json" in line and "up_proj holds" in line
    assert not Path("out").exists()
    Path("folder/fwanda.json").rename("moved.json")  # as the line says
    assert main([command, "folder", "--output", "out"]) == 0


@pytest.mark.fault("packed file")
@pytest.mark.parametrize("tied", [True, False])
def test_tensors_of_another_dtype_than_the_matrices_keep_theirs(tied, tmp_path):
    model = sparse(tiny.llama(tie_word_embeddings=tied))
    model.model.embed_tokens.half()
    model.model.norm.bfloat16()
    model.save_pretrained(tmp_path / "dense")
    pack_folder(tmp_path / "dense", tmp_path / "packed")
    dtypes = {name: tensor.dtype for name, tensor in tensors(tmp_path / "packed").items()}
    assert dtypes["model.embed_tokens.weight"] == torch.float16 and dtypes["model.norm.weight"] == torch.bfloat16
    unpack_folder(tmp_path / "packed", tmp_path / "unpacked")
    assert_same_files(tmp_path / "unpacked", tmp_path / "dense")
    found, expected = tensors(tmp_path / "unpacked"), tensors(tmp_path / "dense")
    assert all(found[name].dtype == tensor.dtype for name, tensor in expected.items())
    model.model.layers[0].mlp.bfloat16()
    model.save_pretrained(tmp_path / "mixed")
    with pytest.raises(UserError, match="matrices to pack must have one dtype, got torch.bfloat16, torch.float32"):
        pack_folder(tmp_path / "mixed", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("save", ["dense", "packed"])
def test_a_model_that_was_packed_after_pruning_is_saved_packed(save, tmp_path):
    model, report = pruned_model()
    report.config["save"] = save
    expected = logits(pack_(model))
    save_pruned(model, None, report, tmp_path / "out")
    assert Report.load(tmp_path / "out").config["save"] == "packed"
    assert torch.equal(logits(load_packed(tmp_path / "out", device="cpu").model), expected)


@pytest.mark.fault("endless work")
@pytest.mark.parametrize(
    "flags, message",
    [
        (["--batches", "999999"], "--batches must be in [1, 1024], at most 32 of them, got 999999"),
        (["--batches", ",".join(["1"] * 33)], "--batches must be in [1, 1024], at most 32 of them, got 1,1,"),
        (["--prompts", "8,900000", "--tokens", "100001"], "--tokens must be in [1, 100000], got 100001"),
        (["--tokens", "0"], "--tokens must be in [1, 100000], got 0"),
        (["--tokens", "-5"], "--tokens must be in [1, 100000], got -5"),
    ],
    ids=range(5),
)
def test_a_bench_of_more_than_a_machine_can_do_is_refused_at_once(flags, message, tmp_path, capsys):
    assert main(["bench", str(tmp_path), *flags]) == 2
    assert capsys.readouterr().err.startswith(f"fwanda: error: {message}")


def test_the_bench_of_a_dense_model_is_refused_before_it_measures(tmp_path, monkeypatch):
    tiny.llama().save_pretrained(tmp_path)
    monkeypatch.setattr("fwanda_pruner.run.bench.measure", lambda *_args, **_named: pytest.fail("it measured"))
    with pytest.raises(UserError, match="the model is dense: no matrix has 15% zeros.*; prune it first$"):
        bench(tmp_path, device="cpu")


@pytest.mark.fault("full disk")
@pytest.mark.parametrize("error", [OSError(errno.EFBIG, "x"), RuntimeError("I/O error: File too large (os error 27)")])
def test_a_limit_of_the_size_of_files_is_one_line(error, tmp_path):
    with (
        pytest.raises(UserError, match=r"larger than the limit of this process \(ulimit -f\)"),
        atomic_folder(tmp_path / "out"),
    ):
        raise error
    assert not list(tmp_path.iterdir())


@pytest.mark.fault("full disk")
def test_conversions_under_a_limit_of_the_size_of_files_leave_nothing(tmp_path):
    pytest.importorskip("resource")
    sparse(tiny.llama()).save_pretrained(tmp_path / "dense")
    script = (
        "import resource, sys; from fwanda_pruner.cli import main; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)); sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-W", "ignore", "-c", script, "pack", tmp_path / "dense", "--output", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "ulimit -f" in done.stderr.splitlines()[-1], done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


def test_a_bar_counts_the_tensors_that_are_converted(tmp_path, monkeypatch):
    counted = []

    def bar(**facts):
        counted.append(facts["total"])
        return progress.progress_bar(**facts)

    monkeypatch.setattr(convert, "progress_bar", bar)
    monkeypatch.setattr(progress._Lines, "update", lambda self, count=1: counted.append(count))
    sparse(tiny.llama()).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    convert.pack_folder(tmp_path / "model", tmp_path / "packed")
    convert.unpack_folder(tmp_path / "packed", tmp_path / "dense")
    assert counted == 2 * [14, *[1] * 14]
