"""The error for mistakes that the user can fix, and helpers that keep its message on one line."""

import unicodedata


class UserError(ValueError):
    """A mistake in the input that the user can fix.

    The message is one line: what is wrong, what was got, what is expected, what to do. The command line prints it
    without a traceback and exits with code 2.
    """


def install_hint(extra: str, *more: str) -> str:
    """How to install an extra of this package: no package index has it, so the command runs in a clone.

    Args:
        extra: its name in pyproject.toml.
        more: further requirements for the same call of pip.
    """
    return " ".join([f'in a clone of fwanda-kernels, run: pip install ".[{extra}]"', *(f'"{item}"' for item in more)])


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
