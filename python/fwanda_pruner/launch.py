"""The ranks of a command under torchrun: how they join each other, and how all of them end when one fails.

Without torchrun, a command is one process and uses none of this. torchrun sets the environment variables read here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from .errors import UserError, one_line

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE = timedelta(days=7)  # of ranks that wait while the first writes or runs tasks; a dead one is noticed at once
_CONNECT_SECONDS = 60  # to reach the store
_MEET_SECONDS = 300  # to wait in the store for the other ranks
_FAILED = "failed"  # a key of the store: how many ranks have claimed to report a failure
_DIVIDED = ("prune", "calibrate", "evaluate", "sweep", "sample")  # functions of the commands that ranks can share
_CLAIM_SECONDS = 5.0  # to notice a dead rank: first its connections close, then its process disappears
_STUCK_SECONDS = 10.0  # after which a rank that was told to stop, but waits for a GPU, ends


def is_rank() -> bool:
    """Whether torchrun started this process."""
    return all(name in os.environ for name in _VARIABLES)


def is_first() -> bool:
    """Whether this process may print and write files: rank 0, or the only one."""
    return not is_rank() or _number("RANK") == 0


def device_of(name: str) -> str:
    """The device of this process for a setting `device`: each rank of a machine gets a GPU of its own.

    Raises:
        UserError: there are more ranks than GPUs, or the setting names one GPU for all.
    """
    if not is_rank() or name == "cpu":
        return name
    import torch

    local, count = _number("LOCAL_RANK", "0"), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto" and not count:
        return name
    if name not in ("auto", "cuda"):
        raise UserError(f"--device {name} names one GPU for all ranks; leave it out, and each rank gets its own")
    if local >= count:
        raise UserError(f"rank {local} of this machine has no GPU, there are {count}; use --nproc-per-node {count}")
    torch.cuda.set_device(local)
    return f"cuda:{local}"


class Job:
    """The ranks of a command, for as long as it runs.

    The output of all ranks but the first is discarded. A rank that fails records this in the store that all ranks
    share, prints one line and ends; torchrun then stops the others. They look into the store, and print
    nothing if a rank has reported a failure. If none has, a rank was killed: the first to notice this prints the line.
    """

    def __init__(self):
        self.rank, self.size = _number("RANK"), _number("WORLD_SIZE")
        if not 0 <= self.rank < self.size:
            raise UserError(
                f"the variable RANK must be in [0, WORLD_SIZE), got RANK={self.rank} and WORLD_SIZE={self.size}; start "
                f"the ranks by torchrun"
            )
        if not os.environ.get("FWANDA_TRACEBACK"):  # else each attempt to connect prints the frames of C++
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        self._error_stream: TextIO = sys.stderr
        self._store = None
        self._server = None  # serves the store, if torchrun does not
        if self.rank > 0:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  until the process ends

    def join(self) -> None:
        """Joins the process group of torchrun.

        Raises:
            UserError: the other ranks cannot be reached.
        """
        import torch
        import torch.distributed as dist

        place, connect = (os.environ["MASTER_ADDR"], _number("MASTER_PORT")), timedelta(seconds=_CONNECT_SECONDS)
        if not place[0] or not 0 < place[1] < 1 << 16:
            raise UserError(
                f"the variables MASTER_ADDR and MASTER_PORT must be a host and a port from 1 to 65535, got "
                f"{place[0]!r} and {place[1]}; start the ranks by torchrun"
            )
        stores = []
        attempt = f"fwanda {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        try:
            if self.rank == 0 and not _torchrun_holds_store():
                self._server = dist.TCPStore(*place, is_master=True, wait_for_workers=False, timeout=connect)
            # two connections: while the ranks meet, one of them is blocked and could not report a failure
            for _ in range(2):
                stores.append(dist.TCPStore(*place, is_master=False, timeout=connect))
                stores[-1].set_timeout(timedelta(seconds=_MEET_SECONDS))
            self._store, meeting = (dist.PrefixStore(attempt, store) for store in stores)
            self._store.set(_process_key(self.rank), f"{os.getpid()} {socket.gethostname()}")
            group = {"rank": self.rank, "world_size": self.size, "timeout": _PATIENCE}
            dist.init_process_group(backend, store=dist.PrefixStore("group", meeting), **group)
        except (RuntimeError, ValueError) as error:
            if len(stores) == 2:
                raise UserError(f"the ranks cannot reach each other: {one_line(error)}") from error
            raise UserError(
                f"the ranks cannot reach MASTER_ADDR:MASTER_PORT {place[0]}:{place[1]} (tried for up to "
                f"{_CONNECT_SECONDS} s: {one_line(error)}); correct these variables, or start the ranks by torchrun"
            ) from error

    def leave(self) -> None:
        """Waits for the other ranks at the end of a command, and leaves the process group."""
        import torch.distributed as dist

        from .engine.ranks import Ranks

        Ranks.current().gather(None)
        dist.destroy_process_group()

    def explain(self, message: str, *, own: bool) -> str | None:
        """The line about a failure that this rank must print; None if another rank prints it.

        Args:
            message: describes the error of this rank.
            own: whether the failure began in this rank; else it was told to stop, or lost the connection to another.
        """
        if self._store is None:  # before join() all ranks fail alike; rank 0 reports, and torchrun stops the others
            if self.rank and not own:
                return None
            if self.rank:
                with contextlib.suppress(ValueError):  # not the main thread
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(_CLAIM_SECONDS)
            return self._named(message)
        if own:
            return self._named(message) if self._claims() else None
        end = time.monotonic() + _CLAIM_SECONDS + (self.rank > 0)  # after Ctrl-C, rank 0 knows whether --resume works
        while time.monotonic() < end:
            if self._claimed():
                return None
            if (dead := self._dead_rank()) is not None:
                return _killed(dead, self.size) if self._claims() else None
            time.sleep(0.1)
        if (missing := self._missing_rank()) is not None:
            message = f"rank {missing} of {self.size} did not start, so all ranks stop"
        else:
            message = self._named(message)
        return message if self._claims() else None

    @contextlib.contextmanager
    def speaking(self) -> Iterator[None]:
        """Inside the block, lines on standard error appear, whichever rank this is."""
        sys.stderr, before = self._error_stream, sys.stderr
        try:
            yield
        finally:
            sys.stderr = before

    def _named(self, message: str) -> str:
        return f"rank {self.rank} of {self.size}: {message}"

    def _claims(self) -> bool:
        """Whether this rank is the first to report a failure."""
        try:
            return self._store.add(_FAILED, 1) == 1
        except RuntimeError:  # the store was that of the rank that failed
            return self.rank == min(1, self.size - 1)

    def _claimed(self) -> bool:
        try:
            return self._store.add(_FAILED, 0) > 0
        except RuntimeError:
            return False

    def _missing_rank(self) -> int | None:
        """A rank that never joined; None if there is none."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            return next((r for r in range(self.size) if not self._store.check([_process_key(r)])), None)
        return None

    def _dead_rank(self) -> int | None:
        """A rank of this machine whose process is gone; None if there is none."""
        try:
            for rank in range(self.size):
                if self._store.check([_process_key(rank)]):
                    process, machine = self._store.get(_process_key(rank)).decode().split(" ", 1)
                    if machine == socket.gethostname() and not _runs(int(process)):
                        return rank
        except RuntimeError:  # the store is gone, and with it rank 0, unless torchrun held the store
            return None if _torchrun_holds_store() else 0
        return None


@contextlib.contextmanager
def joined(job: Job | None, args: argparse.Namespace) -> Iterator[None]:
    """Inside the block, the ranks of a job share the work of a command.

    Args:
        job: None if there is one process; the block then runs as it is.
        args: the arguments of the command; `run` is its function.

    Raises:
        UserError: the command does not divide its work, or the other ranks cannot be reached or have other arguments.
    """
    if job is None:
        yield
        return
    command = args.run.__name__
    if command not in _DIVIDED:
        raise UserError(f"fwanda {command} runs in one process; start it without torchrun")
    job.join()
    from .engine.ranks import Ranks

    given = {"command": command, **{name: value for name, value in vars(args).items() if name != "run"}}
    Ranks.current().check_same(lambda: given)  # ranks with other arguments would wait for each other for ever
    yield
    job.leave()


@contextlib.contextmanager
def ended_if_stuck(end: Callable[[], None]) -> Iterator[None]:
    """Inside the block, a process that still runs some seconds after SIGTERM or SIGHUP calls `end`, from a thread.

    Python handles a signal only between two bytecode instructions. A rank may be blocked inside one, waiting for a rank
    that is gone.
    """
    try:
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    except ValueError:  # not the main thread
        yield
        return

    def watch() -> None:
        while number := reading.recv(1):
            if number[0] in (signal.SIGTERM, signal.SIGHUP):
                time.sleep(_STUCK_SECONDS)
                end()

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writing.close()


def _torchrun_holds_store() -> bool:
    """Whether the store outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _process_key(rank: int) -> str:
    """Key of the store for the process id of a rank and the name of its machine."""
    return f"process {rank}"


def _killed(rank: int, size: int) -> str:
    return (
        f"rank {rank} of {size} was killed, perhaps because memory ran out, so all ranks stop; continue "
        f"fwanda prune with --resume"
    )


def _runs(process: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _number(name: str, default: str | None = None) -> int:
    text = os.environ.get(name, default)
    try:
        return int(text)
    except (TypeError, ValueError):
        raise UserError(f"the variable {name} must be a number, got {text!r}; start the ranks by torchrun") from None
