"""Kill runs of `fwanda prune` at random moments, go on with --resume, and compare the files with those of a whole run.

    python tests/kill.py 50

Prints one line a trial; the exit code is the number of trials that ended otherwise.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import tiny
import torch
import tqdm

import fwanda_pruner
from fwanda_pruner import cli

COMMANDS = {
    "fwanda row, own text": ["--method", "fwanda", "--allocation", "row", "--calibration", "self"],
    "fwanda global": ["--method", "fwanda", "--allocation", "global"],
    "fwanda response": ["--method", "fwanda", "--allocation", "response"],
    "fwanda true": ["--method", "fwanda", "--fisher", "true", "--fisher-samples", "4"],
    "wanda sequential": ["--method", "wanda", "--order", "sequential"],
    "sparsegpt": ["--method", "sparsegpt"],
    "sparsegpt onepass": ["--method", "sparsegpt", "--order", "onepass"],
    "fsparsegpt global": ["--method", "fsparsegpt", "--allocation", "global", "--order", "true-sequential"],
    "magnitude": ["--method", "magnitude"],
}
LONGEST_RUN = 60  # seconds; one takes less than two
SETTINGS = ["--sparsity", "0.5", "--nsamples", "16", "--seqlen", "24", "--eval-windows", "8"]

tqdm.tqdm.monitor_interval = 0  # no thread of its own, whose lock a forked process could never get
for name in fwanda_pruner.__all__:  # imported before the fork, so that a run is short
    getattr(fwanda_pruner, name)


def prepare(folder: Path) -> None:
    """A tiny model, its tokenizer and a text."""
    tiny.llama(blocks=4).save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    (folder / "text.txt").write_text(tiny.text(2000))


def start(folder: Path, output: Path, command: list[str]) -> int:
    """Begin a run in a process of its own; returns its id."""
    text = str(folder / "text.txt")
    argv = ["prune", str(folder / "model"), *command, *SETTINGS, "--calibration", text, "--eval", text]
    pid = os.fork()
    if pid:
        return pid
    torch.set_num_threads(1)  # a forked process has lost the threads of its parent
    clock = time.monotonic
    time.monotonic = lambda: 1e5 * clock()  # progress is kept once a minute: now after nearly every pass
    log = os.open(output.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 99
    try:
        code = cli.main([*argv, "--output", str(output), "--resume"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def finish(pid: int) -> int:
    """Exit code of a run; -9 of one that was killed.

    Raises:
        RuntimeError: it does not end.
    """
    deadline = time.monotonic() + LONGEST_RUN
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    raise RuntimeError(f"a run did not end within {LONGEST_RUN} s")


def result(output: Path) -> tuple[str, list]:
    """What must not depend on interruptions: the weights, and facts of the report."""
    weights = hashlib.sha256((output / "model.safetensors").read_bytes()).hexdigest()
    report = json.loads((output / "fwanda.json").read_text())
    warnings = sorted(note for note in report["warnings"] if not note.startswith("resumed:"))
    return weights, [report["matrices"], report["perplexity"], report["tokens_sha256"], warnings, report["domains"]]


def whole_run(folder: Path, name: str) -> tuple[tuple[str, list], float]:
    """Result and seconds of a run that nobody disturbs."""
    output, begin = folder / f"whole {name}", time.monotonic()
    code = finish(start(folder, output, COMMANDS[name]))
    if code:
        raise RuntimeError(f"{name} ended with {code}: {output.with_suffix('.log').read_text()}")
    return result(output), time.monotonic() - begin


def trial(folder: Path, name: str, expected: tuple[str, list], seconds: float, draw: random.Random) -> str | None:
    """Kill a run once to three times, let it finish, and say what is wrong; None if nothing is."""
    output = folder / f"killed {name} {draw.random()}"
    for _ in range(draw.randint(1, 3)):
        pid = start(folder, output, COMMANDS[name])
        time.sleep(draw.uniform(0, seconds))
        os.kill(pid, signal.SIGKILL)
        finish(pid)
    code = finish(start(folder, output, COMMANDS[name]))
    if code:
        return f"exit code {code}: {output.with_suffix('.log').read_text()[-600:]}"
    weights, facts = result(output)
    if weights != expected[0]:
        return "other weights"
    if facts != expected[1]:
        return "another report"
    left = [path.name for path in folder.iterdir() if output.name in path.name and path.name.startswith(".")]
    return f"left behind: {left}" if left else None


def main(trials: int, seed: int = 0) -> int:
    """Run trials over all commands in turn; returns how many went wrong."""
    draw, wrong, runs = random.Random(seed), 0, {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for index in range(trials):
            command = list(COMMANDS)[index % len(COMMANDS)]
            if command not in runs:
                runs[command] = whole_run(folder, command)
            failure = trial(folder, command, *runs[command], draw)
            wrong += failure is not None
            print(f"{index + 1:3} {command:20} {failure or 'same bits'}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
