"""Temporary values for attributes of modules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache

from torch import nn


@contextmanager
def replaced(name: str, values: Mapping[nn.Module, object]) -> Iterator[None]:
    """Set an attribute on each module inside the `with` block, and restore it afterwards.

    Args:
        name: the attribute; it hides an attribute of the class with that name.
        values: module -> value; a value is neither a tensor nor a module, which nn.Module would register.
    """
    before = {module: vars(module)[name] for module in values if name in vars(module)}
    try:
        for module, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for module in values:
            vars(module).pop(name, None)
        for module, value in before.items():
            setattr(module, name, value)


def uncached(module: nn.Module) -> dict[str, bool]:
    """The argument with which a model keeps no cache of keys and values; empty if its forward() takes none."""
    parameters = _parameters(type(module).forward)
    takes = "use_cache" in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {"use_cache": False} if takes else {}


@cache
def _parameters(function: Callable) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def called_as(calls: Mapping[nn.Module, Callable]) -> AbstractContextManager[None]:
    """Inside, a call of each module is a call of its function alone: not even hooks of the module run around it."""
    return replaced("_compiled_call_impl", calls)
