"""Lines on standard error that never stop a run, and colours where a person reads them."""

import contextlib
import os
import sys
from typing import TextIO

_STYLES = {"bold": "1", "red": "1;31", "yellow": "33"}


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person may be reading; False for a stream that is closed, absent or an object without isatty()."""
    try:
        return stream is not None and bool(stream.isatty())
    except (AttributeError, OSError, ValueError):
        return False


def styled(text: str, style: str, stream: TextIO | None) -> str:
    """Text in a style if the stream is a terminal, and NO_COLOR is not set.

    Args:
        style: bold, red or yellow.
        stream: where the text will be written.
    """
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not is_terminal(stream)
    return text if plain else f"\033[{_STYLES[style]}m{text}\033[0m"


def say(text: str) -> None:
    """Writes a line on standard error, above the progress bars. Where nobody can read it, it is lost."""
    if sys.stderr is None:
        return
    try:
        if (bars := sys.modules.get("tqdm")) is not None:
            bars.tqdm.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr)
        getattr(sys.stderr, "flush", lambda: None)()  # what stands for a stream may have only write()
    except Exception:  # a closed pipe, a full disk, an object of the caller that cannot take the text
        discard(sys.stderr)


def discard(stream: TextIO | None) -> None:
    """Sends a stream that cannot be written to nowhere. Else Python would fail once more when it exits."""
    if stream is None:
        return
    with contextlib.suppress(AttributeError, OSError, ValueError):  # not a file
        descriptor = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)
