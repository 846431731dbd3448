"""The process of a command. `python -m fwanda_pruner` is `fwanda`."""

import sys


def run() -> int:
    """Runs the command line, with Ctrl-C handled from the first import to the end. Returns the exit code."""
    try:
        from . import interrupt
        from .cli import main

        interrupt.repeat_lost()
        code = main()
        interrupt.end_at_once()
        return code
    except KeyboardInterrupt:  # before main() handles it
        print("fwanda: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(run())
