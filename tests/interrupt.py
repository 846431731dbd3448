"""Ctrl-C at known moments: while a command waits for its text, and once a stage is kept."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fwanda_pruner.run.state import RunState


@contextlib.contextmanager
def interrupted_while_reading(pipe: Path, text: str, runs: Callable[[], bool]) -> Iterator[None]:
    """The first reader of a new named pipe gets the text; the next one gets SIGINT while it waits.

    Args:
        pipe: path of the pipe. A command reads a text once to check it, and again when it runs.
        text: what the check reads.
        runs: whether the command is past the check.
    """
    os.mkfifo(pipe)
    done = threading.Event()

    def serve() -> None:
        pipe.write_text(text)
        while not runs():
            if done.wait(0.01):
                return
        with pipe.open("w"):  # returns when the command reads again
            while True:  # a signal that comes just before the read blocks does not end it
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                if done.wait(10):
                    return

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextlib.contextmanager
def interrupted_after(stage: str) -> Iterator[None]:
    """Inside the block, a run gets KeyboardInterrupt once it has kept a file of its state.

    Args:
        stage: name of the file, without .safetensors.
    """
    keep = RunState.keep

    def interrupted(self, name, *args):
        keep(self, name, *args)
        if name == stage:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunState, "keep", interrupted)
        yield


class InterruptedState(RunState):
    """A state in which Ctrl-C comes once the n-th file is written."""

    saves_left = 0

    def keep(self, *arguments) -> None:
        super().keep(*arguments)
        self.saves_left -= 1
        if self.saves_left == 0:
            raise KeyboardInterrupt
