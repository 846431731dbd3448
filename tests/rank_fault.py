"""`fwanda` as one rank of torchrun, with a fault on one rank where a stage begins.

torchrun --nproc-per-node N tests/rank_fault.py RANK STAGE KIND prune ...
"""

from __future__ import annotations

import errno
import os
import signal
import sys

import torch

from fwanda_pruner import cli
from fwanda_pruner.run.stage import Stages

KINDS = ("kill", "memory", "disk")


def fail(kind: str) -> None:
    """What happens to the rank."""
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory")
    if kind == "disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def main(rank: int, stage: str, kind: str, argv: list[str]) -> int:
    run = Stages.__call__

    def faulty(self, name, *args):
        if name.value == stage and rank == int(os.environ["RANK"]):
            fail(kind)
        return run(self, name, *args)

    Stages.__call__ = faulty
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]))
