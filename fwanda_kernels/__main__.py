"""`python -m fwanda_kernels`: lists the backend that serves each op here, and why others do not; builds libraries."""

from __future__ import annotations

import argparse
import sys

from . import __version__, describe
from ._build import BuildError, build


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fwanda_kernels",
        description="List the backend that serves each op on this machine, or build the native ones.",
    )
    parser.add_argument("--build", choices=("cpu", "cuda", "all"), help="compile the native backend beside the package")
    args = parser.parse_args()
    try:
        if args.build is None:
            lines = [f"fwanda_kernels {__version__}", describe()]
        else:
            lines = [f"built {path.name}" for path in build(args.build)]
    except (BuildError, ValueError) as error:
        print(f"fwanda_kernels: error: {error}", file=sys.stderr)
        return 2
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
