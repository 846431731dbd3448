"""Attributes of modules that differ for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn


@contextmanager
def replaced(name: str, values: Mapping[nn.Module, object]) -> Iterator[None]:
    """Within the block, each module has its value as an attribute of its own; afterwards what it had before, if any.

    Args:
        name: of the attribute.
        values: module -> value, neither a tensor nor a module.
    """
    had = {module: vars(module)[name] for module in values if name in vars(module)}
    try:
        for module, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for module in values:
            vars(module).pop(name, None)
        for module, value in had.items():
            setattr(module, name, value)
