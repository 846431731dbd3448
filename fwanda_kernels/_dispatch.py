"""Declares ops and sends each call to the first backend that can serve it.

A call of a declared op passes torch's dispatcher only where that has something to do: tracing, modes, subclasses of
tensors, autograd. With kernels of Python, it would take longer than the whole rest of a call.

A backend is one module for each device, or for each family of ops; its functions have the names and arguments of the
ops. It is imported on the first call that could use it. Importing a backend that cannot serve on this machine raises
ImportError with the reason. A function that returns NotImplemented declines its arguments; the next backend is tried.
The same happens if a function raises ImportError, which it may do before it changes anything; it is then not called
again for this op. A module may have a function about(): explain() adds its text, which says where kernels come from.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch.autograd import forward_ad

from . import _autograd
from ._checks import PLAIN_TYPES, one_line, quoted
from ._memory import checking_memory

try:  # kernel-builder writes this module into its copies, so that several versions live in one process
    from ._ops import add_op_namespace_prefix
except ImportError:
    NAMESPACE = "fwanda"
else:
    NAMESPACE = add_op_namespace_prefix("").removesuffix("::")
MODULES = {
    "native": {"cpu": "._backends.native_cpu", "cuda": "._backends.cuda.{family}"},
    "triton": {"cpu": "._backends.triton.{family}", "cuda": "._backends.triton.{family}"},
}
BACKENDS = (*MODULES, "reference")
ORDER = {"cuda": ("native", "triton", "reference"), "cpu": ("native", "reference")}

_count_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state
_autocast = torch._C._is_any_autocast_enabled

_library = torch.library.Library(NAMESPACE, "DEF")
_environment = os.environ.get("FWANDA_BACKEND") or None
_forced: tuple[list[str], ...] = ()  # the open blocks of use_backend(), the last entered at the end: [name] each
_forcing = Lock()
_refused: dict[tuple[str, str, str], str] = {}  # backend, device, op -> the reason of an ImportError at a call


@dataclass(frozen=True)
class Op:
    """What an op's family file says about it.

    Attributes:
        family: name of the family file, and of the Triton module that serves the op.
        reference: plain-torch definition of the op.
        sample: from the inputs that testing.py makes to small valid arguments of `torch.ops.fwanda.<name>`.
        prepare: from the arguments of a call to the one argument that backends receive; None hands them on as they are.
    """

    family: str
    reference: Callable
    sample: Callable[[Any], tuple]
    prepare: Callable | None


OPS: dict[str, Op] = {}


class BackendError(RuntimeError):
    """The forced backend cannot serve this call."""


def define(schema: str, *, fake: Callable, sample: Callable, prepare: Callable | None = None) -> Callable:
    """Decorate the reference of an op: declare the op, and put a function that calls it in the place of the function.

    Args:
        schema: the op in torch's schema language, without a namespace.
        fake: gives results of the right shape and dtype, for tracing.
        sample: as in Op.
        prepare: as in Op; it runs once for a call, before a backend is chosen.
    """
    name = schema.split("(")[0]

    def declare(reference: Callable) -> Callable:
        OPS[name] = Op(reference.__module__.rpartition(".")[2], reference, sample, prepare)
        _library.define(schema)
        overload = _with_fake(name, fake)
        serve = {device: _serve(name, device, overload._schema) for device in ORDER}
        for device, key in (("cpu", "CPU"), ("cuda", "CUDA")):
            _library.impl(name, _autograd.below(serve[device]), key)
        return _caller(overload, serve["cpu"], serve["cuda"])

    return declare


def _caller(overload: torch._ops.OpOverload, serve_cpu: Callable, serve_cuda: Callable) -> Callable:
    """The function that calls an op by the shortest way."""
    count_changes = _autograd.counting_changes(overload._schema)

    def call(*args):
        if not _is_plain(args):
            return overload(*args)
        like = args[0] if type(args[0]) is not list else args[0][0]
        serve = serve_cuda if like.is_cuda else serve_cpu if like.is_cpu else overload
        if serve is not overload:
            count_changes(args)
        return serve(*args)

    return call


def _is_plain(args: tuple) -> bool:
    """Whether a call leaves nothing to do for torch's dispatcher but to choose the kernel of a device."""
    if torch.compiler.is_compiling() or _count_modes() or forward_ad._current_level >= 0:
        return False
    if _transform() is not None or _tracing() is not None or _autograd.is_below():
        return False
    needs_grad = torch.is_grad_enabled()
    for arg in args:
        for tensor in arg if type(arg) is list else (arg,):
            if type(tensor) in PLAIN_TYPES:
                if needs_grad and tensor.requires_grad:
                    return False
            elif isinstance(tensor, torch.Tensor):
                return False
    return True


def define_composite(schema: str, function: Callable) -> Callable:
    """Declare an op that calls other ops and returns nothing, opaque to tracing; returns its overload."""
    name = schema.split("(")[0]
    _library.define(schema)
    _library.impl(name, _autograd.below(function), "CompositeExplicitAutograd")
    return _with_fake(name, lambda *_: None)


def _with_fake(name: str, fake: Callable) -> Callable:
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    _autograd.register(_library, _overload(name))
    return _overload(name)


def _overload(name: str) -> torch._ops.OpOverload:
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _serve(name: str, device: str, schema: torch.FunctionSchema) -> Callable:
    prepare, check_memory = OPS[name].prepare, checking_memory(schema)

    def run(*args):
        if _autocast():  # the products of a backend would be in another dtype
            with torch._C._DisableAutocast():
                return run(*args)
        candidates = _candidates(device)
        args = check_memory(args)
        if prepare is not None:
            args = (prepare(*args),)
        for backend in candidates:
            kernel = _kernel(backend, device, name)
            if not callable(kernel):
                continue
            try:
                result = kernel(*args)
            except ImportError as error:
                _refused[backend, device, name] = one_line(error)
                continue
            if result is not NotImplemented:
                return result
        raise BackendError(f"{name}: {_refusal(name, device)}")

    return run


def _candidates(device: str) -> tuple[str, ...]:
    forced = forced_backend()
    return (forced,) if forced else ORDER[device]


def forced_backend() -> str | None:
    """Name of the backend that use_backend() or FWANDA_BACKEND asks for, or None."""
    blocks = _forced
    name = blocks[-1][0] if blocks else _environment
    if (blocks or name is not None) and not (isinstance(name, str) and name in BACKENDS):
        raise ValueError(
            f"backend must be one of {', '.join(BACKENDS)}, got {quoted(name)} (use_backend or FWANDA_BACKEND)"
        )
    return name


def _kernel(backend: str, device: str, name: str) -> Callable | str:
    """A backend's function for an op, or the reason why it has none."""
    return _refused.get((backend, device, name)) or _find(backend, device, name)


@cache
def _find(backend: str, device: str, name: str) -> Callable | str:
    """As _kernel(), before any call has failed. It is searched for once in a process."""
    try:
        return _load(backend, device, name)
    except ImportError as error:
        return one_line(error)


def _load(backend: str, device: str, name: str) -> Callable:
    if backend == "reference":
        return OPS[name].reference
    if backend == "triton" and device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ImportError("serves CPU tensors only under TRITON_INTERPRET=1, when forced")
    module = MODULES[backend][device].format(family=OPS[name].family)
    found = importlib.util.find_spec(module, __package__) is not None
    kernel = getattr(importlib.import_module(module, __package__), name, None) if found else None
    if kernel is None:
        raise ImportError("has no kernel for this op")
    return kernel


def _refusal(name: str, device: str) -> str:
    found = {backend: _kernel(backend, device, name) for backend in _candidates(device)}
    reasons = [f"{b}: {'declines these arguments' if callable(kernel) else kernel}" for b, kernel in found.items()]
    instead = "; choose another one, or none, by FWANDA_BACKEND or use_backend()" if forced_backend() else ""
    return f"no backend serves this call on {device} ({'; '.join(reasons)}){instead}"


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force one backend for the calls inside the block; it then serves or raises BackendError.

    It counts for all threads, because backward passes run in threads of their own; of several open blocks, the one
    entered last counts. The environment variable FWANDA_BACKEND, read at import, does the same for a whole process.

    Raises:
        ValueError: name is not a backend.
    """
    global _forced
    block = [name]
    with _forcing:
        _forced = (*_forced, block)
    try:
        forced_backend()
        yield
    finally:
        with _forcing:  # blocks of several threads may end in any order
            _forced = tuple(other for other in _forced if other is not block)


def backends() -> dict[str, dict[str, list[str]]]:
    """List the backends that can serve each op here, in the order they are tried: {op: {device: [backend, ...]}}.

    Devices that this machine lacks have an empty list.
    """
    return {name: {device: _usable(name, device) for device in ORDER} for name in OPS}


def _usable(name: str, device: str) -> list[str]:
    if device == "cuda" and not torch.cuda.is_available():
        return []
    return [backend for backend in ORDER[device] if callable(_kernel(backend, device, name))]


def explain(name: str) -> dict[str, dict[str, str]]:
    """Say why each backend does or does not serve an op: {device: {backend: "serves" | "fallback" | reason}}.

    "serves" and "fallback" may be followed by where the kernels come from: "serves (built by NVRTC 13.0)".

    Raises:
        ValueError: name is not an op.
    """
    if not isinstance(name, str) or name not in OPS:
        raise ValueError(f"explain: op must be one of {', '.join(OPS)}, got {quoted(name)}")
    table: dict[str, dict[str, str]] = {}
    for device in ORDER:
        usable = _usable(name, device)
        table[device] = {backend: _status(backend, device, name, usable) for backend in BACKENDS}
    return table


def _status(backend: str, device: str, name: str, usable: list[str]) -> str:
    if backend in usable:
        about = getattr(sys.modules[_kernel(backend, device, name).__module__], "about", None)
        return ("serves" if backend == usable[0] else "fallback") + (f" ({about()})" if about else "")
    if device == "cuda" and not torch.cuda.is_available():
        return "no CUDA device"
    kernel = _kernel(backend, device, name)
    return "only when forced" if callable(kernel) else kernel
