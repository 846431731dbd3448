"""The one error that is the user's to fix, and any error on one line."""


class UserError(ValueError):
    """A mistake in the input: one line that says what, got, expected and what to do.

    The command line prints the message without a traceback and exits with code 2.
    """


def one_line(error: BaseException, limit: int = 300) -> str:
    """The message of an error on one line, cut off after `limit` characters; its type where it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[:limit] + " ..."
