"""Starts the ranks of a run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import helpers_cli

TESTS = Path(__file__).parent


class Job(NamedTuple):
    """What the ranks of a job left: exit codes by rank, and their streams one after the other."""

    codes: list[int]
    stdout: str
    stderr: str


class Launcher:
    """Runs jobs by tests/rank_launcher.py."""

    def __enter__(self) -> "Launcher":
        command = [sys.executable, str(TESTS / "rank_launcher.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment(), **pipes)
        return self

    def __exit__(self, *_) -> None:
        self._process.stdin.close()
        self._process.wait(60)

    def run(
        self,
        ranks: int,
        folder: Path,
        command: list[str] | None = None,
        fault: tuple | None = None,
        *,
        worker: str = "rank_worker",
    ) -> Job:
        """Runs a command of `fwanda` on some ranks, or without one what a worker does.

        Args:
            ranks: their number.
            folder: for the streams and results of the ranks.
            command: arguments.
            fault: rank, stage and kind.
            worker: name of a module of tests/ that has main(folder).
        """
        folder.mkdir()
        worker = worker if command is None else None
        job = {"ranks": ranks, "folder": str(folder), "command": command, "worker": worker, "fault": fault}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        codes = json.loads(self._process.stdout.readline())["codes"]
        streams = ("".join((folder / f"{rank}.{s}").read_text() for rank in range(ranks)) for s in ("out", "err"))
        return Job(codes, *streams)


def environment() -> dict[str, str]:
    """One thread, so that the bits do not depend on how many ranks share the cores; and the tests can be imported."""
    given = helpers_cli.environment()
    path = os.pathsep.join([str(TESTS), given["PYTHONPATH"]])
    return {**given, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def torchrun(ranks: int, *argv: str, more: str = "") -> subprocess.CompletedProcess:
    """Runs a command of `fwanda` by torchrun; the last rank gets the words of `more`, too."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    given = {"capture_output": True, "text": True, "timeout": 240, "env": environment()}
    if not more:
        return subprocess.run([*launch, "-m", "fwanda_pruner", *argv], **given)
    script = f'[ $RANK = {ranks - 1} ] && set -- "$@" {more}; exec "$0" -m fwanda_pruner "$@"'
    return subprocess.run([*launch, "--no-python", "bash", "-c", script, sys.executable, *argv], **given)
