"""Output appears whole or not at all, reloads with equal logits, and holds the zeros it reports."""

import errno
import json
import os
import shutil
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.prune import identity
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from fwanda_pruner import MatrixRow, Report, UserError, save_pruned
from fwanda_pruner.formats import dense
from fwanda_pruner.formats.audit import ZeroCount
from fwanda_pruner.formats.files import atomic_file, atomic_folder, check_output, remove_leftovers
from fwanda_pruner.model.names import check_names

NAMES = ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj")


def pruned_model(tied=True, dtype=torch.float32):
    """A tiny Llama with half of two matrices removed and one kept weight that is zero; and its report."""
    model = tiny.llama(tie_word_embeddings=tied, dtype=dtype)
    rows = []
    for name in NAMES:
        weight = model.get_submodule(name).weight.data
        weight[:, ::2] = 0
        weight[0, 1] = 0
        half = weight.numel() // 2
        rows.append(MatrixRow(name, tuple(weight.shape), asked=half, kept=half, kept_zero=1))
    size = model.lm_head.weight.numel()
    rows.append(MatrixRow("lm_head", tuple(model.lm_head.weight.shape), size, size, kept_zero=0, skipped="tied"))
    protocol = {"seqlen": 8, "windows": 2, "tokens_sha256": "00", "bos": False, "tokenizer": "tiny"}
    report = Report(
        config={"model": "tiny", "method": "wanda", "allocation": "uniform"},
        matrices=rows,
        block_parameters=sum(p.numel() for p in model.model.layers.parameters()),
        model_parameters=sum(p.numel() for p in model.parameters()),
        model_zeros=sum(int((p == 0).sum()) for p in model.parameters()),
        perplexity=[{"source": "text.txt", "dense": 20.5, "pruned": 35.25, **protocol}],
        seconds={"prune": 1.0},
        peak_memory_bytes=1,
        energy="not measured: device is cpu",
        energy_details={},
        versions={},
        tokens_sha256=None,
        bos=False,
        warnings=[],
        omega_floored_rows=None,
        domains=[],
        passes=None,
    )
    return model, report


@pytest.fixture
def old(tmp_path):
    """An output folder of an earlier run."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "fwanda.json").write_text("old")
    return tmp_path / "out"


def assert_untouched(old):
    assert [path.name for path in old.parent.iterdir()] == ["out"]
    assert [path.name for path in old.iterdir()] == ["fwanda.json"]
    assert (old / "fwanda.json").read_text() == "old"


FAILURES = {
    "OSError of a full disk": (OSError(errno.ENOSPC, "No space left on device"), UserError),
    "OSError of a quota": (OSError(errno.EDQUOT, "Disk quota exceeded"), UserError),
    "safetensors on a full disk": (
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), UserError,
    ),
    "read-only file system": (OSError(errno.EROFS, "Read-only file system"), UserError),
    "forbidden folder": (PermissionError(errno.EACCES, "Permission denied"), UserError),
    "another error": (SafetensorError("Error while serializing: tensors share memory"), SafetensorError),
    "Ctrl-C": (KeyboardInterrupt(), KeyboardInterrupt),
}  # fmt: skip
STEPS = {
    "weights": (LlamaForCausalLM, "save_pretrained"),
    "tokenizer": (PreTrainedTokenizerFast, "save_pretrained"),
    "card": (Path, "write_text"),
    "count of zeros": (torch, "count_nonzero"),
    "flush": (os, "fsync"),
    "rename": (os, "rename"),
}


def fail_after(function, error):
    """Does the work, then raises: the step has left its files when it fails."""

    def failing(*args, **kwargs):
        function(*args, **kwargs)
        raise error

    return failing


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reloaded_logits_are_bit_equal(tied, dtype, tmp_path):
    model, report = pruned_model(tied, dtype)
    save_pruned(model, tiny.tokenizer(), report, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    loaded = dense.load(str(tmp_path / "out"), device="cpu").model
    tokens = torch.arange(16).view(2, 8)
    with torch.no_grad():
        logits = model(tokens).logits
        assert torch.equal(logits, again(tokens).logits) and torch.equal(logits, loaded(tokens).logits)
    assert again.dtype == dtype
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w3 w5")["input_ids"] == [3, 5]


def test_the_folder_is_a_normal_one_with_card_and_report(tmp_path):
    model, report = pruned_model()
    save_pruned(model, tiny.tokenizer(), report, tmp_path / "deep" / "out", note="Fine-tuned afterwards.")
    out = tmp_path / "deep" / "out"
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    files = {path.name for path in out.iterdir()}
    assert files >= {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    assert Report.load(out) == report and report.warnings == ["Fine-tuned afterwards."]
    card = (out / "README.md").read_text()
    assert (
        "Wanda" in card
        and report.warnings[0] in card
        and "| text.txt | 20.50 | 35.25 | " in card
        and "from_pretrained" in card
    )
    assert len(card.splitlines()) < 80


def test_no_tokenizer_and_no_perplexity_are_fine(tmp_path):
    model, report = pruned_model()
    report.perplexity = []
    save_pruned(model, None, report, tmp_path / "out")
    assert not list((tmp_path / "out").glob("token*"))
    assert "## Perplexity" not in (tmp_path / "out" / "README.md").read_text()


def test_every_file_has_the_mode_of_a_plain_new_file(tmp_path):
    model, report = pruned_model()
    save_pruned(model, tiny.tokenizer(), report, tmp_path / "out")
    (tmp_path / "plain").touch()
    expected = stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()} == {expected}
    (tmp_path / "folder").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "folder").stat().st_mode


def test_sampling_flags_without_do_sample_do_not_lose_the_run(tmp_path):
    model, report = pruned_model()
    model.generation_config = original = GenerationConfig(do_sample=False, temperature=0.6, top_p=0.9)
    save_pruned(model, None, report, tmp_path / "out")
    saved = GenerationConfig.from_pretrained(tmp_path / "out")
    assert saved.temperature == 0.6 and not saved.do_sample
    assert model.generation_config is original and original.do_sample is False


@pytest.mark.parametrize("field", ["asked", "kept_zero"])
def test_zeros_that_differ_from_the_report_name_the_matrix_and_leave_nothing(field, tmp_path):
    model, report = pruned_model()
    setattr(report.matrices[1], field, getattr(report.matrices[1], field) + 1)
    with pytest.raises(RuntimeError, match=NAMES[1]):
        save_pruned(model, None, report, tmp_path / "out", note="fine-tuned")
    assert not list(tmp_path.iterdir()) and report.warnings == []


class RenamingLlama(LlamaForCausalLM):
    """A model that stores its second matrix under another name, as transformers does with some."""

    def save_pretrained(self, folder, **kwargs):
        super().save_pretrained(folder, **kwargs)
        file = Path(folder, "model.safetensors")
        tensors = load_file(file)
        tensors["renamed"] = tensors.pop(f"{NAMES[1]}.weight")
        save_file(tensors, file, metadata={"format": "pt"})


class OpaqueLlama(RenamingLlama):
    """A model that also refuses to save other tensors than its own."""

    def save_pretrained(self, folder, state_dict=None, **kwargs):
        if state_dict is not None:
            raise ValueError("not my weights")
        super().save_pretrained(folder, **kwargs)


def test_a_matrix_that_the_files_hold_under_another_name_is_counted(tmp_path):
    model, report = pruned_model()
    model.__class__ = RenamingLlama
    save_pruned(model, None, report, tmp_path / "out")
    counts = dense.count_zeros(tmp_path / "out", NAMES, model=model)
    assert counts[NAMES[1]] == ZeroCount(zeros=513, weights=1024) and list(counts) == list(NAMES)
    assert list(dense.count_zeros(tmp_path / "out", NAMES)) == [NAMES[0]]
    report.matrices[1].kept_zero += 1
    with pytest.raises(RuntimeError, match=NAMES[1]):
        save_pruned(model, None, report, tmp_path / "other")


def test_a_matrix_that_is_not_found_in_the_files_is_warned_of(tmp_path):
    model, report = pruned_model()
    model.__class__ = OpaqueLlama
    with pytest.warns(UserWarning, match=f"1 matrices were not counted.*{NAMES[1]}"):
        save_pruned(model, None, report, tmp_path / "out")
    assert Report.load(tmp_path / "out") == report


@pytest.mark.fault("full disk")
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("step", STEPS)
def test_a_failure_at_any_step_leaves_nothing(step, failure, tmp_path, monkeypatch):
    model, report = pruned_model()
    error, expected = FAILURES[failure]
    named = "made/out"
    if (step, expected) == ("tokenizer", SafetensorError):
        expected, named = UserError, "the tokenizer"  # found by the trial, before the weights are written
    owner, name = STEPS[step]
    work = (lambda *args: None) if step == "rename" else getattr(owner, name)
    monkeypatch.setattr(owner, name, fail_after(work, error))
    with pytest.raises(expected) as raised:
        save_pruned(model, tiny.tokenizer(), report, tmp_path / "made" / "out")
    if expected is UserError:
        assert "\n" not in str(raised.value) and named in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.fault("full disk")
@pytest.mark.parametrize("failure", ["OSError of a full disk", "Ctrl-C"])
@pytest.mark.parametrize("step", [step for step in STEPS if step != "rename"])
def test_the_old_output_survives_a_failed_overwrite(step, failure, old, monkeypatch):
    model, report = pruned_model()
    error, expected = FAILURES[failure]
    owner, name = STEPS[step]
    monkeypatch.setattr(owner, name, fail_after(getattr(owner, name), error))
    with pytest.raises(expected):
        save_pruned(model, tiny.tokenizer(), report, old, overwrite=True)
    assert_untouched(old)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), KeyboardInterrupt()])
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("call", [1, 2])
def test_a_failure_between_the_two_renames_leaves_one_whole_folder(call, after, error, old, monkeypatch):
    model, report = pruned_model()
    rename, calls = os.rename, []

    def failing(source, target):
        calls.append(source)
        if len(calls) != call:
            return rename(source, target)
        if after:
            rename(source, target)
        raise error

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(type(error)):
        save_pruned(model, None, report, old, overwrite=True)
    if (call, after) == (2, True):
        assert [path.name for path in old.parent.iterdir()] == ["out"]
        assert Report.load(old) == report
    else:
        assert_untouched(old)


def test_overwrite_replaces_the_whole_folder(old):
    (old / "stale.safetensors").write_text("stale")
    model, report = pruned_model()
    save_pruned(model, None, report, old, overwrite=True)
    assert [path.name for path in old.parent.iterdir()] == ["out"]
    assert Report.load(old) == report and not (old / "stale.safetensors").exists()


def test_a_folder_filled_meanwhile_is_not_replaced(tmp_path, monkeypatch):
    model, report = pruned_model()

    def fill(*args):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "theirs").touch()

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(UserError, match="meanwhile"):
        save_pruned(model, None, report, tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


def test_a_link_to_a_folder_is_followed(tmp_path):
    model, report = pruned_model()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save_pruned(model, None, report, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and Report.load(tmp_path / "real") == report


def test_existing_output_is_refused_without_overwrite(old):
    with pytest.raises(UserError, match="not empty.*--overwrite"):
        save_pruned(*pruned_model()[:1], None, pruned_model()[1], old)
    assert_untouched(old)
    check_output(old, overwrite=True)


def test_an_empty_or_missing_folder_is_accepted_and_nothing_is_written(tmp_path):
    (tmp_path / "empty").mkdir()
    check_output(tmp_path / "empty", overwrite=False)
    check_output(tmp_path / "a" / "b", overwrite=False)
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"]


def test_a_file_is_no_output_folder(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(UserError, match="is a file"):
            check_output(path, overwrite=True)


def test_the_current_and_home_folders_are_never_overwritten(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(UserError, match="never overwritten"):
        check_output(tmp_path, overwrite=True)
    monkeypatch.chdir("/")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match="never overwritten"):
        check_output(tmp_path, overwrite=True)


@pytest.mark.parametrize("path", ["x" * 300, "x" * 300 + "/out", "new/" + "x" * 300 + "/out", "y/" * 3000, "a\0b"])
def test_a_path_that_no_file_system_takes_is_refused_in_one_line(path, tmp_path):
    with pytest.raises(UserError, match="is not a usable path|more than 200 bytes") as refused:
        check_output(f"{tmp_path}/{path}", overwrite=False)
    assert "\n" not in str(refused.value)


@pytest.mark.fault("file of the user")
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_neither_file_nor_folder_is_never_replaced(kind, tmp_path):
    path = tmp_path / "there"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/null")
    before = os.stat(path).st_mode
    for refused in (lambda: check_output(path, overwrite=True), lambda: atomic_file(path).__enter__()):
        with pytest.raises(UserError, match="is a device, a pipe or a socket; choose another name"):
            refused()
    assert os.stat(path).st_mode == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.fault("read-only")
def test_an_unwritable_parent_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(UserError, match="not writable"):
        check_output(tmp_path / "out", overwrite=False)


def test_too_little_disk_says_how_much(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * 2**30))
    check_output(tmp_path / "out", overwrite=False, needed_bytes=3 * 2**30)
    with pytest.raises(UserError, match=r"needs 4.00 GiB, .* 3.00 GiB free"):
        check_output(tmp_path / "out", overwrite=False, needed_bytes=4 * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match="MiB"):
        save_pruned(*pruned_model()[:1], None, pruned_model()[1], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def dead_process() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_leftovers_of_killed_processes_go_and_those_of_living_ones_stay(tmp_path):
    dead, living = dead_process(), os.getppid()
    for name in (f".out.{dead}-0123abcd.tmp", f".out.{living}-0123abcd.tmp", f".other.{dead}-0123abcd.tmp"):
        (tmp_path / name).mkdir()
    remove_leftovers(tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {
        f".out.{living}-0123abcd.tmp", f".other.{dead}-0123abcd.tmp",
    }  # fmt: skip


def test_a_folder_that_a_killed_process_moved_aside_comes_back(old):
    old.rename(old.with_name(f".out.{dead_process()}-0123abcd.old"))
    remove_leftovers(old)
    assert_untouched(old)


def test_atomic_file_appears_only_at_the_end(tmp_path):
    (tmp_path / "f").write_text("old")
    with atomic_file(tmp_path / "f") as temporary:
        temporary.write_text("new")
        assert (tmp_path / "f").read_text() == "old"
        assert temporary.name == "f" and temporary.parent.parent == tmp_path
    assert (tmp_path / "f").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.fault("full disk")
@pytest.mark.parametrize("failure", FAILURES)
def test_atomic_file_keeps_the_old_file_on_any_failure(failure, tmp_path):
    error, expected = FAILURES[failure]
    (tmp_path / "f").write_text("old")
    with pytest.raises(expected), atomic_file(tmp_path / "f") as temporary:
        temporary.write_text("half")
        raise error
    assert (tmp_path / "f").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


# Changed between prune() and save_pruned()


class Wrapper(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, *args, **kwargs):
        return self.inside(*args, **kwargs)


def wrap(model, name):
    model.set_submodule(name, Wrapper(model.get_submodule(name)))


CHANGES = {
    "compiled": lambda model: model.set_submodule("model.layers.0.mlp", torch.compile(model.model.layers[0].mlp)),
    "compiled block": lambda model: model.set_submodule("model.layers.1", torch.compile(model.model.layers[1])),
    "wrapped": lambda model: wrap(model, "model.layers.1.self_attn.q_proj"),
    "wrapped norm": lambda model: wrap(model, "model.norm"),
    "weight norm": lambda model: parametrizations.weight_norm(model.model.layers[0].mlp.up_proj),
    "mask": lambda model: identity(model.model.layers[0].mlp.up_proj, "weight"),
    "no parameter": lambda model: (
        delattr(model.model.norm, "weight"), setattr(model.model.norm, "weight", torch.ones(32)),
    ),
    "lost block": lambda model: model.model.layers.pop(1),
}  # fmt: skip


@pytest.mark.fault("wrapped before saving")
@pytest.mark.parametrize("save", ["dense", "packed", "masks"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_would_not_load_again_is_refused_before_anything_is_written(change, save, old):
    model, report = pruned_model()
    report.config["save"] = save
    CHANGES[change](model)
    before = old.parent.stat().st_mtime_ns
    with pytest.raises(
        UserError, match=r"does not hold model\.\S+, which the saved model needs to be loaded; undo"
    ) as e:
        save_pruned(model, None, report, old, overwrite=True)
    assert "\n" not in str(e.value) and ".tmp" not in str(e.value) and old.parent.stat().st_mtime_ns == before
    assert_untouched(old)


@pytest.mark.parametrize("family", [*tiny.FAMILIES, *tiny.EXPERTS, *tiny.MULTIMODAL])
def test_every_family_holds_the_tensors_that_its_class_names(family):
    model = tiny.build(family)
    check_names(model)
    name, _ = next(iter(model.named_parameters()))
    path, _, leaf = name.rpartition(".")
    delattr(model.get_submodule(path), leaf)
    with pytest.raises(UserError, match=f"does not hold {name}"):
        check_names(model)


def test_a_model_that_is_compiled_in_place_is_saved(old):
    model, report = pruned_model()
    model.model.layers[0].compile()
    save_pruned(model, None, report, old, overwrite=True)
    assert set(AutoModelForCausalLM.from_pretrained(old).state_dict()) == set(model.state_dict())


@pytest.mark.fault("wrapped before saving")
def test_an_error_names_the_output_and_not_the_hidden_folder(tmp_path):
    with pytest.raises(UserError) as error, atomic_folder(tmp_path / "out") as folder:
        raise UserError(f"{folder}/model.safetensors: cannot be read")
    assert str(error.value) == f"{tmp_path}/out/model.safetensors: cannot be read"
