"""The fast backends. Each module has functions with the names and arguments of the ops it serves.

native_cpu wraps the library that `python -m fwanda_kernels --build cpu` compiles from csrc/; cuda/ and triton/ have a
module for each family of ops. _dispatch.py imports a module on the first call that could use it. A module that cannot
serve on this machine raises ImportError with the reason; a function returns NotImplemented for arguments it declines.

The underscore keeps the name `fwanda_kernels.backends` for the function.
"""

from __future__ import annotations

import torch

from .._build import find_library


def load_library(*schemas: str) -> None:
    """Load the compiled library for CPUs into `torch.ops.fwanda_C`. Nothing is compiled here.

    Args:
        schemas: those of the ops of `torch.ops.fwanda_C` that the caller needs, without a namespace.

    Raises:
        ImportError: the library is not built, cannot be loaded, or lacks an op; the message says what to do.
    """
    path = find_library()
    if path is None:
        raise ImportError("not built; run python -m fwanda_kernels --build cpu")
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(f"{path.name} cannot be loaded: {error}") from error
    if any(_schema_of(schema.partition("(")[0]) != f"fwanda_C::{schema}" for schema in schemas):
        raise ImportError(f"{path.name} is of another version; run python -m fwanda_kernels --build cpu")


def _schema_of(name: str) -> str | None:
    packet = getattr(torch.ops.fwanda_C, name, None)
    return packet and str(packet.default._schema)
