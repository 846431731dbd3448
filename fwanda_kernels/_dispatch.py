"""Ordered backends per device: the first that can serve an op serves it."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

NAMESPACE = "fwanda"
BACKENDS = ("native", "triton", "reference")
ORDER = {"cuda": ("native", "triton", "reference"), "cpu": ("native", "reference")}

_library = torch.library.Library(NAMESPACE, "DEF")
_families: dict[str, str] = {}
_forced: str | None = None
_kernels: dict[tuple[str, str, str], Callable | None] = {}
_failures: dict[tuple[str, str, str], str] = {}


class BackendError(RuntimeError):
    """The forced backend cannot serve this call."""


def define(schema: str, *, family: str, fake: Callable) -> Callable:
    """Declare one op and return its overload.

    Args:
        schema: the op's schema in torch's schema language, without namespace.
        family: the module of every backend that implements it.
        fake: shape-and-dtype function for tracing.
    """
    name = schema.split("(")[0]
    _families[name] = family
    _library.define(schema)
    for device, key in (("cpu", "CPU"), ("cuda", "CUDA")):
        _library.impl(name, _serve(name, device), key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def define_composite(schema: str, function: Callable) -> Callable:
    """Declare an op that returns nothing and is made of others, opaque to tracing; returns its overload."""
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *_: None, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _serve(name: str, device: str) -> Callable:
    def run(*args, **kwargs):
        for backend in _candidates(device):
            kernel = _kernel(backend, device, name)
            result = NotImplemented if kernel is None else kernel(*args, **kwargs)
            if result is not NotImplemented:
                return result
        raise BackendError(f"{name}: {_refusal(name, device)}")

    return run


def _candidates(device: str) -> tuple[str, ...]:
    forced = forced_backend()
    return (forced,) if forced else ORDER[device]


def forced_backend() -> str | None:
    """The backend that use_backend() or FWANDA_BACKEND asks for, or None."""
    name = _forced or os.environ.get("FWANDA_BACKEND") or None
    if name is not None and name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r} (use_backend or FWANDA_BACKEND)")
    return name


def _kernel(backend: str, device: str, name: str) -> Callable | None:
    """The backend's function for an op, or None; loaded once, and why not is kept in _failures."""
    key = (backend, device, name)
    if key not in _kernels:
        try:
            _kernels[key] = _load(backend, device, name)
        except ImportError as error:
            _kernels[key], _failures[key] = None, str(error)
    return _kernels[key]


def _load(backend: str, device: str, name: str) -> Callable:
    if backend == "native":
        kernel = importlib.import_module(".native", __package__).load(device).get(name)
    elif backend == "triton":
        if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ImportError("serves CPU tensors only under TRITON_INTERPRET=1, when forced")
        if importlib.util.find_spec("triton") is None:
            raise ImportError("the triton package is not installed")
        if importlib.util.find_spec(f".triton.{_families[name]}", __package__) is None:
            raise ImportError("not implemented by this backend")
        kernel = getattr(importlib.import_module(f".triton.{_families[name]}", __package__), name, None)
    else:
        kernel = getattr(importlib.import_module(".reference", __package__), name)
    if kernel is None:
        raise ImportError("not implemented by this backend")
    return kernel


def _refusal(name: str, device: str) -> str:
    reasons = [f"{b}: {_failures.get((b, device, name), 'declines these arguments')}" for b in _candidates(device)]
    return f"no backend serves this call on {device} ({'; '.join(reasons)})"


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force one backend for the calls inside the block; it then serves or raises BackendError.

    The environment variable FWANDA_BACKEND does the same for a whole process.

    Raises:
        ValueError: name is not a backend.
    """
    global _forced
    previous, _forced = _forced, name
    try:
        forced_backend()
        yield
    finally:
        _forced = previous


def backends() -> dict[str, dict[str, list[str]]]:
    """Which backends can serve each op here, in the order they are tried: {op: {device: [backend, ...]}}.

    Devices that this machine lacks have an empty list.
    """
    return {name: {device: _usable(name, device) for device in ORDER} for name in _families}


def _usable(name: str, device: str) -> list[str]:
    if device == "cuda" and not torch.cuda.is_available():
        return []
    return [backend for backend in ORDER[device] if _kernel(backend, device, name) is not None]


def explain(name: str) -> dict[str, dict[str, str]]:
    """Why each backend does or does not serve an op: {device: {backend: "serves" | "fallback" | reason}}.

    Raises:
        ValueError: name is not an op.
    """
    if name not in _families:
        raise ValueError(f"explain: op must be one of {', '.join(_families)}, got {name!r}")
    table: dict[str, dict[str, str]] = {}
    for device in ORDER:
        usable = _usable(name, device)
        table[device] = {backend: _status(backend, device, name, usable) for backend in BACKENDS}
    return table


def _status(backend: str, device: str, name: str, usable: list[str]) -> str:
    if backend in usable:
        return "serves" if backend == usable[0] else "fallback"
    if device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device"
    return "only when forced" if _kernel(backend, device, name) else _failures[(backend, device, name)]
