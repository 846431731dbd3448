"""Ctrl-C at any moment ends the process without a traceback: in imports, in destructors, and when Python exits."""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import signal
import sys
import threading
import time

CODE = 130  # exit code
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed
_BURST_SECONDS = 2.0
_SOON = 0.05  # seconds


class Interrupt:
    """Handler that raises KeyboardInterrupt. More signals within _BURST_SECONDS, as from a key held down, do nothing.

    Attributes:
        came: whether there was a signal. Libraries turn KeyboardInterrupt into other errors, as where an import fails.
    """

    def __init__(self):
        self.came = False
        self._last = -math.inf

    def __call__(self, *_):
        now = time.monotonic()
        if now - self._last > _BURST_SECONDS:
            self._last, self.came = now, True
            raise KeyboardInterrupt

    def install(self) -> None:
        """Handles the signals that are not ignored, as under nohup. Only the main thread may; others do nothing."""
        with contextlib.suppress(ValueError):
            _handle(self)

    def repeat(self) -> None:
        """Raises KeyboardInterrupt once more, a moment later."""
        self._last = -math.inf
        again = threading.Timer(_SOON, _thread.interrupt_main)
        again.daemon = True
        again.start()


def repeat_lost() -> None:
    """Repeats each KeyboardInterrupt that Python would only print: out of destructors and of callbacks of C."""

    def repeat(lost) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if lost.exc_type is KeyboardInterrupt and isinstance(handler, Interrupt):
            handler.repeat()
        else:
            sys.__unraisablehook__(lost)

    sys.unraisablehook = repeat


def ignore() -> None:
    """Lets a process that ends do so by itself."""
    with contextlib.suppress(ValueError):  # not the main thread
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def end_at_once() -> None:
    """Makes a signal end the process where nothing is left to clean up."""
    _handle(lambda *_: os._exit(CODE))


def _handle(handler) -> None:
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
