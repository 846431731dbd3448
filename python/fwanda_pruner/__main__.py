"""The process of a command. `python -m fwanda_pruner` is `fwanda`."""

import atexit
import contextlib
import os
import sys
from typing import NoReturn


def run() -> int:
    """Runs the command line, with Ctrl-C handled from the first import to the end. Returns the exit code."""
    try:
        from . import interrupt
        from .cli import main
        from .launch import is_rank

        interrupt.repeat_lost()
        code = main()
        interrupt.end_at_once()
        if is_rank():
            _end(code)
        return code
    except KeyboardInterrupt:  # before main() handles it
        print("fwanda: interrupted", file=sys.stderr)
        return 130


def _end(code: int) -> NoReturn:
    """Ends a rank at once: while Python shuts down, threads of torch.distributed may abort the process."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    raise SystemExit(run())
