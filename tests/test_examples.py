"""The scripts of examples/, each in a process of its own."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from helpers_cli import environment

ROOT = Path(__file__).resolve().parents[1]


def run(script: str, *arguments, folder: Path, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """Run a script; the modules of `without` are those that an environment lacks."""
    block = "".join(f"sys.modules[{name!r}] = None;" for name in without)
    path = str(ROOT / "examples" / script)
    code = f"import runpy, sys; {block} sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-W", "ignore", "-c", code, path, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)


@pytest.mark.parametrize("script", ["ao_sparsifier.py", "nn_prune.py", "wanda_style.py"])
def test_adapters_of_torch_remove_half_of_the_weights(script, tmp_path):
    done = run(script, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    shares = [int(share) for share in re.findall(r"(\d+)% zeros", done.stdout)]
    assert len(shares) == 2
    assert all(30 <= share <= 70 for share in shares)


def test_a_pruned_model_recovers_a_little_and_keeps_its_zeros(tmp_path):
    tiny.llama(vocab_size=len(tiny.byte_tokenizer())).save_pretrained(tmp_path / "model")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "model")
    done = run("recover.py", "model", "recovered", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.search(r"text ([\d.]+) -> ([\d.]+)", done.stdout).groups())
    assert last < first
    assert (tmp_path / "recovered" / "config.json").is_file()  # the zeros were counted as it was saved
    assert "fine-tuned for eight steps" in (tmp_path / "recovered" / "README.md").read_text()
    assert "fine-tuned for eight steps" in (tmp_path / "recovered" / "fwanda.json").read_text()


@pytest.mark.fault("kept zeros")
def test_zeros_of_a_pruned_model_survive_quantisation_and_loading(tmp_path):
    if not (importlib.util.find_spec("torchao") and importlib.util.find_spec("accelerate")):
        pytest.skip("torchao or accelerate is missing")
    tiny.llama(vocab_size=len(tiny.byte_tokenizer())).save_pretrained(tmp_path / "model")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "model")
    done = run("prune_then_quantise.py", "model", "int8", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "int8" / "config.json").is_file()
    share = float(re.search(r"([\d.]+)% zeros in the int8 model; 0 removed weights came back", done.stdout)[1])
    assert share >= 50


@pytest.mark.parametrize(
    ("script", "package", "hint"),
    [
        ("llmcompressor_fwanda.py", "llmcompressor", 'pip install ".[prune,llmcompressor]"'),
        ("prune_then_quantise.py", "torchao.quantization", "pip install torchao accelerate"),
    ],
)
def test_a_missing_package_is_one_line_that_says_what_to_install(script, package, hint, tmp_path):
    done = run(script, folder=tmp_path, without=(package,))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert hint in done.stderr
