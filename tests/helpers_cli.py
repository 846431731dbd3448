"""A folder with a tiny model and texts, and commands on it."""

import os
import subprocess
import sys
from pathlib import Path

import tiny


def make_folder(path: Path) -> Path:
    """A tiny saved model with its tokenizer, and texts."""
    tiny.llama().save_pretrained(path / "model")
    tiny.tokenizer().save_pretrained(path / "model")
    (path / "calibration.txt").write_text(tiny.text(800))
    (path / "eval.txt").write_text(tiny.text(300, seed=1))
    (path / "short.txt").write_text(tiny.text(5))
    (path / "empty.txt").write_text("")
    return path


def arguments(folder: Path, out: Path, *extra: str, method: str = "wanda") -> list[str]:
    """A command that prunes the model of a folder in a second."""
    return [
        "prune", str(folder / "model"), "--method", method, "--calibration", str(folder / "calibration.txt"),
        "--nsamples", "16", "--seqlen", "24", "--device", "cpu", "--output", str(out), *extra,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """For a process of its own, which finds the packages as this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def fwanda(argv: list[str], **options) -> subprocess.CompletedProcess:
    """Runs a command in a process of its own; options as subprocess.run(), env added to this one's."""
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    given["env"] = environment() | options.get("env", {})
    return subprocess.run([sys.executable, "-m", "fwanda_pruner", *argv], timeout=300, **given)
