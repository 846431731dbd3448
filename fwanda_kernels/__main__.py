"""`python -m fwanda_kernels`: which backend serves which op here, and why not the others."""

from __future__ import annotations

import argparse
import platform
import sys

import torch

from . import __version__, backends, explain
from ._build import BuildError, build


def describe() -> str:
    """The table that `python -m fwanda_kernels` prints."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    lines = [f"fwanda_kernels {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {device}"]
    for name in backends():
        lines.append(name)
        for where, table in explain(name).items():
            if len(set(table.values())) == 1:
                lines.append(f"  {where:5} {next(iter(table.values()))}")
                continue
            lines.append(f"  {where:5} " + "; ".join(f"{backend}: {status}" for backend, status in table.items()))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fwanda_kernels", description=__doc__)
    parser.add_argument("--build", choices=("cpu", "cuda", "all"), help="compile the native backend beside the package")
    args = parser.parse_args()
    if args.build is None:
        print(describe())
        return 0
    try:
        for path in build(args.build):
            print(f"built {path.name}")
    except BuildError as error:
        print(f"fwanda_kernels: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
