"""Faults that users of pruning tools reported, by symptom; docs/reliability.md lists them with all their tests."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import oracle
import pytest
import tiny
import torch
import transformers
from helpers_cli import environment
from safetensors import safe_open
from safetensors.torch import save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import fwanda_kernels as fk
import fwanda_pruner
from fwanda_pruner import UserError, cli, load_model

ROOT = Path(__file__).resolve().parents[1]
TOKENS = tiny.tokens(5, 24)


def prune(model, **settings):
    return fwanda_pruner.prune(model, **{"calibration": TOKENS, "progress": False, **settings})


def zeros(model) -> dict[str, torch.Tensor]:
    return {name: oracle.weight_of(module) == 0 for name, module in oracle.linear_layers(model).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny saved model with its tokenizer, and a text."""
    path = tmp_path_factory.mktemp("reliability")
    tiny.llama().save_pretrained(path / "model")
    tiny.tokenizer().save_pretrained(path / "model")
    (path / "text.txt").write_text(tiny.text(800))
    return path


def command(folder, output, *extra, nsamples=16) -> list[str]:
    return [
        "prune", str(folder / "model"), "--calibration", str(folder / "text.txt"), "--nsamples", str(nsamples),
        "--seqlen", "24", "--output", str(output), *extra,
    ]  # fmt: skip


def assert_one_error(capsys, expected: str) -> None:
    error = capsys.readouterr().err
    assert [expected in line for line in error.splitlines() if line.startswith("fwanda: error: ")] == [True], error
    assert "Traceback" not in error


class PeakMemory(TorchDispatchMode):
    """Bytes of the tensors alive at each operation inside the block, at most; those of `given` tensors not counted."""

    def __init__(self, *given: torch.Tensor):
        super().__init__()
        self._given = {t.untyped_storage()._cdata for t in given}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._given:
                storage = tensor.untyped_storage()
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._live = {key: kept for key, kept in self._live.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out


# Attention


@pytest.mark.fault("attention mask")
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_an_attention_mask_that_is_none_or_no_tensor_gives_the_same_masks(attention, method, monkeypatch):
    """SDPA gets None from transformers 5 on, FlexAttention a BlockMask, eager attention a tensor."""
    model, eager = (tiny.llama(attn_implementation=name) for name in (attention, "eager"))
    forward, kinds, seen = LlamaDecoderLayer.forward, [], set()

    def spy(self, *args, **arguments):
        seen.add(type(arguments["attention_mask"]).__name__)
        assert len(arguments["position_embeddings"]) == 2
        return forward(self, *args, **arguments)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", spy)
    for one in (model, eager):
        prune(one, method=method, order="sequential")
        kinds.append(set(seen))
        seen.clear()
    sdpa = "NoneType" if transformers.__version__ >= "5" else "Tensor"
    assert kinds == [{{"sdpa": sdpa, "flex_attention": "BlockMask"}[attention]}, {"Tensor"}]
    for (name, found), expected in zip(zeros(model).items(), zeros(eager).values(), strict=True):
        assert float((found != expected).float().mean()) < 0.01, name


@pytest.mark.fault("grouped queries")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("settings", tiny.RUNS, ids=tiny.run_name)
def test_grouped_query_attention_breaks_no_shape(settings, kv_heads):
    model = tiny.llama(num_key_value_heads=kv_heads)
    report = prune(model, sparsity=0.5, **settings)
    assert len(tiny.check_counts(model, report)) == 14
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (8 * kv_heads, 32)


# Text


@pytest.mark.fault("no network")
@pytest.mark.parametrize("source", ["text.txt", "text.jsonl", "text.parquet", "sample"])
def test_no_network_is_needed_for_local_text_and_the_sample(source, folder, tmp_path, monkeypatch):
    text = tiny.text(800)
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": text}) + "\n")
    if source.endswith("parquet"):
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"text": [text]}), tmp_path / source)

    def refuse(*_):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    text = source if source == "sample" else str(tmp_path / source)
    sources = ("--calibration", text, "--eval", text, "--eval-windows", "4")
    assert cli.main(command(folder, tmp_path / "out", *sources)) == 0


@pytest.mark.fault("short documents")
def test_documents_all_shorter_than_seqlen_end_at_once(tmp_path):
    """They are joined; a hang would be the symptom."""
    file, model, lengths = tmp_path / "text.jsonl", tiny.llama(), set()
    file.write_text("".join(json.dumps({"text": tiny.text(5, seed=i)}) + "\n" for i in range(40)))
    model.get_input_embeddings().register_forward_pre_hook(lambda _m, args: lengths.add(args[0].shape[-1]))
    settings = {"tokenizer": tiny.tokenizer(), "calibration": str(file), "nsamples": 4, "bos": "none"}
    prune(model, method="wanda", seqlen=50, **settings)
    assert lengths == {50}
    with pytest.raises(UserError, match="has 200 tokens, one sequence needs 201"):
        prune(model, method="wanda", seqlen=201, **settings)


@pytest.mark.fault("untruncated text")
@pytest.mark.parametrize("method", ["wanda", "fwanda", "sparsegpt"])
def test_untruncated_text_never_reaches_the_model(method, tmp_path):
    (tmp_path / "text.txt").write_text(tiny.text(20_000))
    model, lengths = tiny.llama(), set()
    model.get_input_embeddings().register_forward_pre_hook(lambda _m, args: lengths.add(args[0].shape[-1]))
    text = str(tmp_path / "text.txt")
    with PeakMemory(*model.parameters(), *model.buffers()) as memory:
        report = fwanda_pruner.prune(
            model, tiny.tokenizer(), method=method, calibration=text, eval=text, nsamples=16, seqlen=24, bos="none",
            eval_windows=4, progress=False,
        )  # fmt: skip
    assert lengths == {24} and report.perplexity[0]["seqlen"] == 24
    assert memory.peak < 20_000 * 64  # bytes; the ids take 160,000 and the logits of the whole text 5,120,000


@pytest.mark.fault("untruncated text")
def test_a_seqlen_beyond_the_text_is_refused_before_anything_is_allocated(folder, tmp_path, capsys):
    assert cli.main(command(folder, tmp_path / "out", "--seqlen", "1000000")) == 2
    assert_one_error(capsys, "has 800 tokens, one sequence needs 1000000: give more text or a smaller seqlen")


# Memory


def peak_of(nsamples: int, **settings) -> int:
    model, tokens = tiny.llama(), tiny.tokens(nsamples, 24)
    with PeakMemory(tokens, *model.parameters(), *model.buffers()) as memory:
        report = prune(model, calibration=tokens, **settings)
    assert report.peak_memory_bytes > 0
    return memory.peak


@pytest.mark.fault("activations")
@pytest.mark.parametrize("method", ["wanda", "fwanda"])
def test_peak_memory_does_not_grow_with_nsamples(method):
    few, many = (peak_of(n, method=method, order="onepass") for n in (8, 64))
    assert many <= few


@pytest.mark.fault("activations")
@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_activations_of_all_windows_are_never_concatenated(method):
    """Block by block the memory grows by the hidden states alone; these may also lie on the disk."""
    few, many = (peak_of(n, method=method, order="sequential") for n in (8, 64))
    assert many - few <= (64 - 8) * 24 * 32 * 4


@pytest.mark.fault("memory in blocks")
@pytest.mark.parametrize("method, order", [("wanda", "sequential"), ("sparsegpt", "onepass")])
def test_out_of_memory_block_by_block_is_one_line_and_resume_goes_on(
    method, order, folder, tmp_path, capsys, monkeypatch
):
    """Memory is short for even one window, once the first block is kept."""
    plain, first = LlamaDecoderLayer.forward, tmp_path / ".out.resume" / "prune-00000.safetensors"

    def fail(self, *args, **arguments):
        if first.exists():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nGPU 0 has ...")
        return plain(self, *args, **arguments)

    argv = command(folder, tmp_path / "out", "--method", method, "--order", order, "--device", "cpu")
    monkeypatch.setattr(LlamaDecoderLayer, "forward", fail)
    assert cli.main(argv) == 2
    assert_one_error(
        capsys, "a window of 24 tokens does not fit the memory of cpu; use shorter windows (--seqlen, --eval-seqlen)"
    )
    assert first.is_file() and not (tmp_path / "out").exists()
    monkeypatch.setattr(LlamaDecoderLayer, "forward", plain)
    assert cli.main([*argv, "--resume"]) == 0


# Numbers


@pytest.mark.fault("broken checkpoint")
def test_a_broken_checkpoint_is_seen_by_its_dense_perplexity():
    """These weights are random: nothing was learnt."""
    with pytest.warns(UserWarning, match="the dense model has perplexity"):
        report = prune(tiny.llama(), method="wanda", eval=tiny.tokens(3, 16))
    assert any("the dense model has perplexity" in line for line in report.warnings)
    assert report.perplexity[0]["dense"] > tiny.VOCABULARY / 10


@pytest.mark.fault("broken checkpoint")
def test_a_dense_perplexity_that_is_not_finite_is_refused_before_anything_is_pruned():
    model = tiny.llama(tie_word_embeddings=False)
    model.lm_head.weight.data.mul_(1e37)
    dense = [p.clone() for p in model.parameters()]
    with pytest.raises(UserError, match="perplexity (inf|nan) on tokens: its weights or its dtype are broken"):
        prune(model, method="wanda", eval=tiny.tokens(3, 16))
    assert all(torch.equal(a, b) for a, b in zip(dense, model.parameters(), strict=True))


@pytest.mark.fault("not finite")
@pytest.mark.parametrize("method, order", [("wanda", "sequential"), ("sparsegpt", "sequential"), ("fwanda", "onepass")])
def test_activations_that_overflow_name_the_tensor(method, order):
    model = tiny.llama()
    model.model.layers[1].mlp.up_proj.weight.data *= 1e37
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.down_proj.*NaN or inf") as error:
        prune(model, method=method, order=order)
    assert "\n" not in str(error.value)


def failing_factor(monkeypatch, below: float) -> list[float]:
    """Factors of Hessians with 48 columns fail where the damping is smaller; returns the dampings that were tried."""
    plain, tried = fk.obs_factor, []

    def factor(hessian, damping):
        found, info = plain(hessian, damping)
        if len(hessian) == 48:
            tried.append(damping)
            info = torch.ones_like(info) if damping < below else info
        return found, info

    monkeypatch.setattr(fk, "obs_factor", factor)
    return tried


@pytest.mark.fault("Cholesky")
def test_a_hessian_that_is_not_positive_definite_is_damped_named_and_recorded(monkeypatch):
    tried = failing_factor(monkeypatch, below=0.5)
    expected = "the Hessian of model.layers.0.mlp.down_proj needed a damping of 1, not 0.01"
    model = tiny.llama()
    with pytest.warns(UserWarning, match=expected):
        report = prune(model, method="sparsegpt")
    assert expected in report.warnings and tried == 2 * [0.01, 0.1, 1.0]
    tiny.check_counts(model, report)


@pytest.mark.fault("Cholesky")
def test_a_hessian_that_no_damping_makes_positive_definite_is_refused_by_name(monkeypatch):
    failing_factor(monkeypatch, below=1e9)
    with pytest.raises(UserError, match=r"the Hessian of model\.layers\.0\.mlp\.down_proj has no factor"):
        prune(tiny.llama(), method="sparsegpt")


# What is pruned, and how much


@pytest.mark.fault("lm_head")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", ["magnitude", "wanda", "fwanda", "sparsegpt"])
def test_lm_head_and_embedding_are_never_pruned(method, tied):
    model = tiny.llama(tie_word_embeddings=tied)
    before = [model.lm_head.weight.detach().clone(), model.model.embed_tokens.weight.detach().clone()]
    report = prune(model, method=method)
    assert torch.equal(before[0], model.lm_head.weight) and torch.equal(before[1], model.model.embed_tokens.weight)
    assert not [row.name for row in report.matrices if "lm_head" in row.name or "embed" in row.name]


@pytest.mark.fault("lm_head")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
def test_asking_for_lm_head_or_the_embedding_is_an_error(name, tied):
    with pytest.raises(UserError, match=f"--include '{name}' matches none of 14 matrices"):
        prune(tiny.llama(tie_word_embeddings=tied), method="wanda", include=[name])


@pytest.mark.fault("pattern sparsity")
@pytest.mark.parametrize(
    "sparsity, pattern", [("0.75", "2:4"), ("0.5", "1:4"), ("0.25", "2:4"), ("0.51", "4:8"), ("0", "2:4")]
)
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_a_sparsity_that_contradicts_the_pattern_is_refused(method, sparsity, pattern):
    with pytest.raises(UserError, match=f"contradicts --pattern {pattern}"):
        prune(tiny.llama(), method=method, sparsity=sparsity, pattern=pattern)


TIES = {
    "constant weights": lambda weight: weight.fill_(0.02),
    "two values": lambda weight: weight.sign_().mul_(0.02),
    "mostly zero": lambda weight: weight.mul_(weight.abs() > weight.abs().quantile(0.7)),
}


@pytest.mark.fault("ties")
@pytest.mark.parametrize("kind", TIES)
@pytest.mark.parametrize(("method", "allocation", "order"), tiny.EVERY_RUN)
def test_constant_weights_and_ties_meet_the_exact_count(method, allocation, order, kind):
    model = tiny.llama()
    for module in oracle.linear_layers(model).values():
        TIES[kind](module.weight.data)
    report = prune(model, method=method, allocation=allocation, order=order, sparsity="0.6")
    for row, found in zip(report.matrices, zeros(model).values(), strict=True):
        assert row.kept == row.asked and int(found.sum()) == row.numel - row.kept + row.kept_zero
    size = sum(row.numel for row in report.matrices)
    if allocation == "global":
        assert sum(row.kept for row in report.matrices) == size - size * 6 // 10


# Statistics


@pytest.mark.fault("padding")
def test_padded_and_unpadded_batches_give_equal_statistics():
    """Windows of several lengths at once, padded on the right, against each of them alone."""
    model, lengths = tiny.llama().requires_grad_(False), (24, 17, 5)
    modules = oracle.linear_layers(model)
    mask = torch.arange(24) < torch.tensor(lengths)[:, None]
    ids = TOKENS[:3] * mask
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda _m, _i, out: out.requires_grad_(True))

    def run(ids, mask) -> None:
        logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        (losses * mask[:, 1:]).sum().backward()

    with fk.collect_statistics(modules) as padded:
        padded.token_mask = mask
        run(ids, mask)
    with fk.collect_statistics(modules) as alone:
        for row, length in zip(ids, lengths, strict=True):
            run(row[None, :length], torch.ones(1, length, dtype=torch.bool))
    with fk.collect_statistics(modules) as counted:
        run(ids, mask)
    for name, layer in alone.items():
        assert padded[name].n_tokens == layer.n_tokens == sum(lengths) < counted[name].n_tokens
        torch.testing.assert_close(padded[name].x2, layer.x2, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(padded[name].g2, layer.g2, rtol=1e-3, atol=1e-6)
        assert not torch.allclose(counted[name].x2, layer.x2, rtol=1e-2)


@pytest.mark.fault("reload")
@pytest.mark.parametrize("method", ["magnitude", "wanda", "fwanda", "sparsegpt"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_logits_before_save_equal_logits_after_load(family, method, tmp_path):
    model = tiny.build(family)
    fwanda_pruner.save_pruned(model, None, tiny.prune(model, method=method), tmp_path / "out")
    loaded = load_model(str(tmp_path / "out"), device="cpu").model
    found, expected = loaded(tiny.TEXT).logits, model(tiny.TEXT).logits
    assert torch.equal(found, expected) and found.isfinite().all()


# Processes, disks and folders


# Sends itself the signal of Ctrl-C at the first file that is opened after the texts are kept.
INTERRUPTED = """
import os, runpy, signal, sys

kept = []

def audit(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("text.safetensors"):
        kept.append(True)
    elif event == "open" and kept:
        kept.clear()
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(audit)
runpy.run_module("fwanda_pruner", run_name="__main__")
"""


@pytest.mark.fault("Ctrl-C")
def test_a_real_ctrl_c_is_one_line_with_a_hint_and_resume_finishes(folder, tmp_path):
    arguments = command(folder, tmp_path / "out", nsamples=200)
    argv = [sys.executable, "-m", "fwanda_pruner", *arguments]
    run = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *arguments], env=environment(), capture_output=True, text=True, timeout=120
    )
    error = run.stderr
    assert run.returncode == 130 and "Traceback" not in error, error
    assert error.splitlines()[-1] == "fwanda: interrupted; continue with the same command and --resume"
    assert not (tmp_path / "out").exists()
    done = subprocess.run([*argv, "--resume"], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# The same, and again and again for a second, as of a key that is held down, from a thread of its own.
INTERRUPTED_OFTEN = INTERRUPTED.replace("import os,", "import threading, time, os,").replace(
    "os.kill(os.getpid(), signal.SIGINT)", "threading.Thread(target=burst, daemon=True).start()"
).replace(
    "sys.addaudithook",
    "def burst():\n"
    "    for n in range(200):\n"
    "        os.kill(os.getpid(), signal.SIGINT if n % 2 else signal.SIGTERM)\n"
    "        time.sleep(0.005)\n\n"
    "sys.addaudithook",
)  # fmt: skip


@pytest.mark.fault("Ctrl-C")
def test_a_burst_of_signals_is_one_line(folder, tmp_path):
    argv = [sys.executable, "-c", INTERRUPTED_OFTEN, *command(folder, tmp_path / "out", nsamples=200)]
    run = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=120)
    assert run.returncode == 130 and "Traceback" not in run.stderr and "Exception ignored" not in run.stderr, run.stderr
    assert run.stderr.count("interrupted") == 1 and "continue with the same command and --resume" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == [".out.resume"]


def changed_state(path: Path, change: str) -> None:
    """Replace a stage by another valid file."""
    with safe_open(path, framework="pt") as file:
        facts, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}
    name = min(tensors)
    if change == "value":
        tensors[name].view(-1)[0] += 1
    elif change == "shape":
        tensors[name] = tensors[name][1:].clone()
    elif change == "dtype":
        tensors[name] = tensors[name].half()
    elif change == "missing":
        del tensors[name]
    else:
        facts["fwanda"] = json.dumps({"facts": {}, "notes": []})
    save_file(tensors, path, metadata=facts)


@pytest.fixture(scope="module")
def failed_run(folder, tmp_path_factory) -> tuple[list[str], Path]:
    """Command and state of an F-Wanda run that failed in its last step, where all stages are kept."""
    output = tmp_path_factory.mktemp("failed") / "out"
    argv = command(folder, output, "--method", "fwanda")

    def fail(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.PreTrainedModel, "save_pretrained", fail)
        assert cli.main(argv) == 2
    return argv, output.parent / ".out.resume"


@pytest.mark.fault("changed state")
@pytest.mark.parametrize("change", ["value", "shape", "dtype", "missing", "facts"])
@pytest.mark.parametrize("stage", ["text", "calibrate", "budgets"])
def test_a_changed_stage_is_never_taken_by_resume(stage, change, failed_run, tmp_path, capsys):
    argv, state = failed_run
    argv = [*argv, "--resume"]
    argv[argv.index("--output") + 1] = str(tmp_path / "out")
    shutil.copytree(state, tmp_path / ".out.resume")
    path = tmp_path / ".out.resume" / f"{stage}.safetensors"
    for later in path.parent.iterdir():  # as a run that ended right after this stage
        if later.stat().st_mtime_ns > path.stat().st_mtime_ns:
            later.unlink()
    changed_state(path, change)
    assert cli.main(argv) == 2
    assert_one_error(capsys, f"{stage}.safetensors is broken (its checksum differs)")


def can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    trial = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(trial, capture_output=True).returncode == 0


# KiB of the disk, windows of text: the weights take 71 KiB, the tokens of 400 windows and of the domains 84
FULL_DISKS = {
    "before the run": (8, 16),
    "keeping the statistics": (112, 400),
    "before saving": (80, 16),
    "saving": (104, 16),
}


@pytest.mark.fault("full disk")
@pytest.mark.parametrize("when", FULL_DISKS)
def test_a_really_full_disk_is_one_line_and_with_room_resume_finishes(when, folder, tmp_path):
    if not can_mount():
        pytest.skip("a user may not mount a file system here")
    kib, nsamples = FULL_DISKS[when]
    (disk := tmp_path / "disk").mkdir()
    argv = command(folder, disk / "out", "--method", "wanda", nsamples=nsamples)
    script = f"""
        mount -t tmpfs -o size={kib}k none {disk} || exit 1
        "$@"; echo "code $?"; ls -A {disk}; echo "left"
        mount -o remount,size=4m {disk} || exit 1
        "$@" --resume; echo "code $?"; ls -A {disk}
    """
    shell = ["unshare", "-rm", "sh", "-c", script, "sh", sys.executable, "-m", "fwanda_pruner", *argv]
    done = subprocess.run(shell, env=environment(), capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("fwanda: error: ")]
    assert len(errors) == 1 and "make room" in errors[0], done.stderr
    full, room = done.stdout.split("left\n")
    assert full.split("code 2\n")[1].split() == [".out.resume"] * (when != "before the run")
    assert room.split("code 0\n")[1].split() == ["out"]


@pytest.mark.fault("read-only")
@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="no folder here that even root may not write to")
def test_a_read_only_folder_is_one_line(folder, capsys):
    assert cli.main(command(folder, "/sys/kernel/out")) == 2
    assert_one_error(capsys, "not writable")


@pytest.mark.fault("vanishing file")
@pytest.mark.parametrize("vanishes", ["text", "model", "output"])
def test_a_file_that_vanishes_during_the_run_is_one_line(vanishes, folder, tmp_path, capsys, monkeypatch):
    shutil.copytree(folder, tmp_path / "in")
    (tmp_path / "parent").mkdir()
    gone = {
        "text": tmp_path / "in" / "text.txt",
        "model": tmp_path / "in" / "model" / "model.safetensors",
        "output": tmp_path / "parent",
    }[vanishes]
    read = transformers.AutoConfig.from_pretrained

    def late(*args, **kwargs):
        """Right before the model is read, which is after the first look at all paths."""
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink(missing_ok=True)
        return read(*args, **kwargs)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", late)
    assert cli.main(command(tmp_path / "in", tmp_path / "parent" / "out")) == 2
    assert_one_error(capsys, {"output": "is gone", "text": "text.txt"}.get(vanishes, "model"))
    assert not (tmp_path / "parent" / "out").exists()


# What is not installed


def run_without(absent: list[str], code: str) -> str:
    block = f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", block + code], env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def test_kernels_run_without_numpy_triton_and_transformers():
    code = """
import torch, fwanda_kernels as fk
layer, x = torch.nn.Linear(8, 4), torch.randn(6, 8)
with fk.collect_statistics({"a": layer}) as statistics:
    layer(x).square().sum().backward()
keep = fk.allocate_row_budgets(statistics["a"].omega.sqrt(), 16, k_max=8)
fk.row_topk_prune_(layer.weight.data, statistics["a"].norm, keep)
fk.obs_prune_(layer.weight.data, x.T @ x, sparsity=0.75)
print(int((layer.weight == 0).sum()), fk.nm_mask(torch.randn(4, 8), torch.ones(8), 2, 4).sum().item())
"""
    assert run_without(["numpy", "triton", "transformers"], code) == "24 16"


def test_the_pruner_runs_without_triton():
    code = f"""
sys.path.insert(0, {str(ROOT / "tests")!r})
import tiny, fwanda_pruner
print(fwanda_pruner.prune(tiny.llama(), calibration=tiny.tokens(5, 24), progress=False).sparsity["matrices"])
"""
    assert run_without(["triton"], code) == "0.5"


# The table


def test_the_table_of_faults_is_what_the_markers_say():
    script = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "reliability.py"), "--check"]
    plain = {name: value for name, value in environment().items() if name != "FWANDA_FUZZ"}
    done = subprocess.run(script, env=plain, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
