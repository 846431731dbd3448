"""`python -m fwanda_kernels`: lists the backend that serves each op here, and why others do not; builds libraries."""

from __future__ import annotations

import argparse
import platform
import sys

import torch

from . import __version__, backends, explain
from ._build import BuildError, build
from ._dispatch import forced_backend


def describe() -> str:
    """Make the table that `python -m fwanda_kernels` prints. Ops that the same backends serve share a paragraph.

    Raises:
        ValueError: FWANDA_BACKEND names no backend.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    lines = [f"fwanda_kernels {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {device}"]
    if forced_backend():
        lines.append(f"forced: {forced_backend()}")
    groups: dict[tuple, list[str]] = {}
    for name in backends():
        groups.setdefault(tuple(_device_lines(name)), []).append(name)
    for about, names in groups.items():
        lines += ["", ", ".join(names), *about]
    return "\n".join(lines)


def _device_lines(name: str) -> list[str]:
    lines = []
    for device, table in explain(name).items():
        if len(set(table.values())) == 1:
            lines.append(f"  {device:5} {next(iter(table.values()))}")
        else:
            lines += [f"  {device:5} {backend:10} {status}" for backend, status in table.items()]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fwanda_kernels",
        description="List the backend that serves each op on this machine, or build the native ones.",
    )
    parser.add_argument("--build", choices=("cpu", "cuda", "all"), help="compile the native backend beside the package")
    args = parser.parse_args()
    try:
        lines = [describe()] if args.build is None else [f"built {path.name}" for path in build(args.build)]
    except (BuildError, ValueError) as error:
        print(f"fwanda_kernels: error: {error}", file=sys.stderr)
        return 2
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
