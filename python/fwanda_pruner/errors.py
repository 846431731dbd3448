"""The error for mistakes that the user can fix, and helpers that keep its message on one line."""

import difflib
import os
import reprlib
import shlex
import sys
import unicodedata
from collections.abc import Iterable

_BIDI = ("LRE", "LRO", "RLE", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


class UserError(ValueError):
    """A mistake in the input that the user can fix.

    The message is one line: what is wrong, what was got, what is expected, what to do. The command line prints it
    without a traceback and exits with code 2.
    """


class OtherRankError(UserError):
    """A UserError that another rank of the same run met; that rank reports it."""


def install_hint(*requirements: str) -> str:
    """How to install packages that are missing. It names them, and not an extra of this package.

    To install an extra, pip would install this package again: over an editable install, and without what was built.

    Args:
        requirements: names, perhaps with versions, as pip takes them.
    """
    return f"run: pip install {' '.join(map(shlex.quote, requirements))}"


def one_line(error: BaseException | str, limit: int = 300) -> str:
    """A message on one line, cut after `limit` characters. An error without message gives its type."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit] + " ..."


def refuse_pipe(path: str | os.PathLike, what: str = "its content") -> None:
    """Refuses a pipe or a device: it may never end, and can be read only once.

    Args:
        path: of a file to be read; it may be missing.
        what: to write to a file instead.

    Raises:
        UserError: it is neither a file nor a folder.
    """
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise UserError(f"{shown_path(path)}: is a pipe or a device; write {what} to a file first")


class _Short(reprlib.Repr):
    """Writes only the ends of long texts and lists, and of a number with thousands of digits only its size."""

    def __init__(self, limit: int):
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = limit
        self.maxlist = self.maxtuple = self.maxdict = 20

    def repr_int(self, value: int, level: int) -> str:
        try:
            return super().repr_int(value, level)
        except ValueError:
            return f"a number of {value.bit_length()} bits"


def shortened(text: str, limit: int = 80) -> str:
    """Any text on one line of at most `limit` characters, with control characters escaped."""
    text = ascii(text)[1:-1] if not text.isprintable() else text
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def shown_path(path: str | os.PathLike) -> str:
    """A path as it is in a message: on one line, and cut if it is very long."""
    return shortened(str(path), 200)


def visible(text: str) -> str:
    """A text whose control characters, and those that turn or break the text around them, are U+FFFD."""
    return text if text.isprintable() else "".join("\ufffd" if _hides(character) else character for character in text)


def _hides(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(character) in _BIDI


def show(value, limit: int = 80) -> str:
    """Any value as Python writes it, on one line of at most `limit` characters."""
    return shortened(" ".join(_Short(limit).repr(value).split()), limit)


def has_control(text: str) -> bool:
    """Whether a text holds a control character, such as a line break, or a part of a name that is not Unicode."""
    return any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message that asks for the known word most like a mistyped one; "" if none is like it."""
    close = difflib.get_close_matches(word[:80], list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error says that another rank is gone."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, dist.DistError) or any(name in str(error).lower() for name in ("gloo", "nccl"))
