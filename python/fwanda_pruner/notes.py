"""Warnings of a run: shown to the caller, and kept for the record."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_PACKAGE = str(Path(__file__).parent)
# Each thread has its own.
_notes: ContextVar[list[str] | None] = ContextVar("notes", default=None)
_muted: ContextVar[bool] = ContextVar("muted", default=False)
_shown: ContextVar[bool] = ContextVar("shown", default=True)
_raising: ContextVar[bool] = ContextVar("raising", default=True)


def warn(message: str) -> None:
    """Warns once in a run, at the line that called this package, and adds the message to the notes of the run.

    The filters of the caller decide what is shown. The notes have every message.
    """
    if _muted.get():
        return
    notes = _notes.get()
    if notes is not None:
        if message in notes:
            return
        notes.append(message)
    if not _shown.get():
        return
    try:
        warnings.warn(message, UserWarning, stacklevel=_levels_to_caller())
    except UserWarning:  # the filters make it an error
        if _raising.get():
            raise


def raise_no_more() -> None:
    """Until the block of recording() ends, warn() in this thread raises nothing, also where filters make it an error.

    A run calls this before it changes the first weight: from there on, an error would lose the record of the run.
    """
    _raising.set(False)


def noted() -> list[str]:
    """The notes of the run so far."""
    return list(_notes.get() or ())


@contextmanager
def recording(notes: list[str]) -> Iterator[None]:
    """Inside the block, warn() in this thread also adds its messages to `notes`."""
    token, raising = _notes.set(notes), _raising.set(True)
    try:
        yield
    finally:
        _notes.reset(token)
        _raising.reset(raising)


@contextmanager
def showing(wanted: bool) -> Iterator[None]:
    """Inside the block, warn() in this thread shows its messages only if `wanted`; the notes have them either way."""
    token = _shown.set(wanted and _shown.get())
    try:
        yield
    finally:
        _shown.reset(token)


@contextmanager
def muted() -> Iterator[None]:
    """Inside the block, warn() in this thread does nothing: for work that is repeated later, and warns then."""
    token = _muted.set(True)
    try:
        yield
    finally:
        _muted.reset(token)


def _levels_to_caller() -> int:
    """The stacklevel, in warn(), of the frame that called the outermost function of this package."""
    frame, level, caller = inspect.currentframe().f_back, 1, 1
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            caller = level + 1
        frame, level = frame.f_back, level + 1
    return caller
