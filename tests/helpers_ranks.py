"""Starts the ranks of a run: by torchrun, or as processes of their own."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import helpers_cli

TESTS = Path(__file__).parent
LONGEST = 240  # seconds of a job; the tests need a tenth of it


def environment() -> dict[str, str]:
    """One thread, so that the bits do not depend on how many ranks share the cores; and the tests can be imported."""
    given = helpers_cli.environment()
    path = os.pathsep.join([str(TESTS), given["PYTHONPATH"]])
    return {**given, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FWANDA_TRACEBACK": ""}


def torchrun(ranks: int, *argv: object) -> subprocess.CompletedProcess:
    """Runs a script or "-m" and a module on some ranks."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    given = {"capture_output": True, "text": True, "timeout": LONGEST, "env": environment()}
    return subprocess.run([*launch, *map(str, argv)], **given)


def start_workers(ranks: int, folder: Path) -> list[subprocess.Popen]:
    """Starts tests/rank_worker.py on some ranks, without torchrun."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, str(TESTS / "rank_worker.py"), str(folder)],
            env={**environment(), **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def finish(workers: list[subprocess.Popen]) -> None:
    """Waits for processes, which must succeed."""
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=LONGEST)
            assert worker.returncode == 0, errors
    finally:
        for worker in workers:
            worker.kill()
