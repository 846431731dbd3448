"""The one error that is the user's to fix."""


class UserError(ValueError):
    """A mistake in the input: one line that says what, got, expected and what to do.

    The command line prints the message without a traceback and exits with code 2.
    """
