"""`python -m fwanda_kernels`: lists the backend that serves each op here, and why others do not; builds native code."""

from __future__ import annotations

import argparse
import sys

from . import __version__, describe
from ._build import CHOICES, BuildError, build


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fwanda_kernels",
        description="List the backend that serves each op on this machine, or build native code ahead of time.",
    )
    parser.add_argument("--build", choices=CHOICES, help="compile the native code beside the package")
    parser.add_argument(
        "--arch",
        metavar="LIST",
        help='for --build cuda: compute capabilities, such as "90,100,120" (these are the default)',
    )
    args = parser.parse_args()
    try:
        if args.arch is not None and args.build not in ("cuda", "all"):
            raise ValueError("--arch needs --build cuda")
        if args.build is None:
            lines = [f"fwanda_kernels {__version__}", describe()]
        else:
            lines = [f"built {path.name}" for path in build(args.build, archs=_archs(args.arch))]
    except (BuildError, ValueError) as error:
        print(f"fwanda_kernels: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fwanda_kernels: interrupted", file=sys.stderr)
        return 130
    print(*lines, sep="\n")
    return 0


def _archs(listed: str | None) -> list[int] | None:
    if listed is None:
        return None
    try:
        return [int(arch) for arch in listed.split(",")]
    except ValueError:
        raise ValueError(f"--arch must be a list such as 90,100,120, got {listed!r}") from None


if __name__ == "__main__":
    raise SystemExit(main())
