"""A torchrun that is fast: it has imported all packages, and forks the ranks of one job after the other.

It reads a job as a line of JSON from standard input and answers with a line on standard output. As torchrun does, it
holds the store of the ranks, and stops all ranks when one fails.

A job is {"ranks": N, "folder": where each rank writes its streams as RANK.out and RANK.err, "command": [arguments of
`fwanda`] or null, "worker": the module of tests/ whose main(folder) runs without a command, "fault": [rank, stage,
kind] or null}. The answer is {"codes": [exit codes]}.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

import rank_worker
import shard_worker
import torch
import torch.distributed as dist
import tqdm

import fwanda_pruner
from fwanda_pruner import cli
from fwanda_pruner.run import save
from fwanda_pruner.run.stage import Stages

WORKERS = {module.__name__: module.main for module in (rank_worker, shard_worker)}
PATIENCE = 30  # seconds after which a rank that was told to stop is killed, as by torchrun

tqdm.tqdm.monitor_interval = 0  # no thread of its own, whose lock a forked process could never get
for name in fwanda_pruner.__all__:
    getattr(fwanda_pruner, name)


def run(job: dict) -> list[int]:
    """Runs a job; the exit code of each rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [start(job, rank, store.port) for rank in range(job["ranks"])]
    codes: dict[int, int] = {}
    signalled, deadline = False, float("inf")
    while len(codes) < len(ranks):
        left = {rank: process for rank, process in enumerate(ranks) if rank not in codes}
        for rank, process in left.items():
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
        if any(codes.values()) and not signalled:
            signalled, deadline = True, time.monotonic() + PATIENCE
            stop(left.keys() - codes.keys(), ranks, signal.SIGTERM)
        if time.monotonic() > deadline:
            stop(left.keys() - codes.keys(), ranks, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[rank] for rank in range(len(ranks))]


def stop(left: Iterable[int], ranks: list[int], number: signal.Signals) -> None:
    for rank in left:
        os.kill(ranks[rank], number)


def start(job: dict, rank: int, port: int) -> int:
    """Forks a rank; returns its process."""
    if process := os.fork():
        return process
    code = 99
    try:
        torch.set_num_threads(1)  # a forked process has lost the threads of its parent
        signal.signal(signal.SIGINT, signal.default_int_handler)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["ranks"], "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_USE_AGENT_STORE="True")
        for stream, suffix in ((1, "out"), (2, "err")):
            os.dup2(os.open(Path(job["folder"], f"{rank}.{suffix}"), os.O_WRONLY | os.O_CREAT), stream)
        if job.get("fault"):
            plant(*job["fault"])
        worker = WORKERS.get(job["worker"])
        code = worker(Path(job["folder"])) if worker else cli.main(job["command"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def plant(rank: int | None, stage: str, kind: str) -> None:
    """Makes a rank, or all of them if it is None, fail where a stage begins, or where it would save the model."""
    begin, save_pruned = Stages.__call__, save.save_pruned

    def faulty_stage(self, name, *args):
        if name.value == stage and rank in (None, int(os.environ["RANK"])):
            fail(kind)
        return begin(self, name, *args)

    def faulty_save(*args, **options):
        if stage == "save" and rank in (None, int(os.environ["RANK"])):
            fail(kind)
        return save_pruned(*args, **options)

    Stages.__call__, save.save_pruned = faulty_stage, faulty_save


def fail(kind: str) -> None:
    """What happens to the rank: it is killed, told to stop, or its memory or its disk is full."""
    if kind == "Ctrl-C":
        raise KeyboardInterrupt
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps({"codes": run(json.loads(line))}), flush=True)
