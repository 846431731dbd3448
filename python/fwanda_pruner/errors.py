"""The error for mistakes that the user can fix, and helpers that keep its message on one line."""

import difflib
import unicodedata
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in the input that the user can fix.

    The message is one line: what is wrong, what was got, what is expected, what to do. The command line prints it
    without a traceback and exits with code 2.
    """


def one_line(error: BaseException, limit: int = 300) -> str:
    """The message of an error on one line, cut after `limit` characters. An error without message gives its type."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit] + " ..."


def shortened(text: str, limit: int = 80) -> str:
    """Any text on one line of at most `limit` characters, with control characters escaped."""
    text = ascii(text)[1:-1] if not text.isprintable() else text
    return text if len(text) <= limit else text[: limit - 3] + "..."


def has_control(text: str) -> bool:
    """Whether a text holds a control character, such as a line break, or a part of a name that is not Unicode."""
    return any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message that asks for the known word most like a mistyped one; "" if none is like it."""
    close = difflib.get_close_matches(word[:80], list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
