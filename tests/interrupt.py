"""Ctrl-C at known moments: while a command reads its text, and once a stage is kept."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from fwanda_pruner.run.state import RunState
from fwanda_pruner.text import windows


@contextlib.contextmanager
def interrupted_while_reading(runs: Callable[[], bool]) -> Iterator[None]:
    """Inside the block, a command gets KeyboardInterrupt when it reads a text to draw windows from it.

    Args:
        runs: whether the command is past its checks; before that, texts are read as usual.
    """
    read = windows.load_documents

    def interrupted(*args, **options):
        if runs():
            raise KeyboardInterrupt
        return read(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "load_documents", interrupted)
        yield


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
