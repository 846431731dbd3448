"""Forward hooks that belong to one module alone, and what such a hook reads of a call.

torch keeps hooks in the state of a module, so a copy of the module would call them too. A hook of this file is left out
of deep copies, shallow copies and pickles of its module, and so is what the caller stores on the module beside it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ._checks import WEIGHT_DTYPES, expect_dense

_KEY = "_fwanda_hooks"  # the attribute of a hooked module that holds its _Hooks
_TABLES = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")  # of every nn.Module


class _Hooks:
    """What one module must not hand to its copies.

    While a module has hooks, state() and deepcopy() are its `__getstate__` and `__deepcopy__`.

    Attributes:
        ids: of the hooks.
        names: of attributes of the module that go with the hooks.
    """

    def __init__(self, module: nn.Module):
        self.module, self.ids, self.names = module, set(), {_KEY, "__getstate__", "__deepcopy__"}

    def state(self) -> Any:
        """The module's state, for a pickle or a shallow copy."""
        getstate = getattr(type(self.module), "__getstate__", None)  # objects have one since Python 3.11
        state = vars(self.module) if getstate is None else getstate(self.module)
        return self._without(state) if isinstance(state, dict) else state

    def _without(self, state: dict) -> dict:
        state = {name: value for name, value in state.items() if name not in self.names}
        for table in _TABLES:
            if table in state:
                state[table] = type(state[table])((k, v) for k, v in state[table].items() if k not in self.ids)
        return state

    def deepcopy(self, memo: dict) -> nn.Module:
        own = getattr(type(self.module), "__deepcopy__", None)
        if own is None:
            make, arguments, state = self.module.__reduce_ex__(4)[:3]
            twin = memo[id(self.module)] = make(*arguments)
            twin.__setstate__(copy.deepcopy(state, memo))
        else:  # of a parametrised module, which copies the whole dict
            twin = own(self.module, memo)
            vars(twin).update(self._without(vars(twin)))
            for name in self.names & vars(twin).keys():
                del vars(twin)[name]
        return twin

    def __deepcopy__(self, memo: dict) -> _Hooks:
        return self  # where a module copies its whole dict; deepcopy() then removes it


class Hook:
    """A forward hook of one module, called with (module, args, kwargs, output).

    put() stores values beside it, on the module, where compiled code finds them.
    """

    def __init__(self, module: nn.Module, call: Callable):
        self._module, self._names = module, set()
        hooks = vars(module).get(_KEY)
        if hooks is None:
            hooks = _Hooks(module)
            vars(module).update({_KEY: hooks, "__getstate__": hooks.state, "__deepcopy__": hooks.deepcopy})
        self._hooks, self._handle = hooks, module.register_forward_hook(call, with_kwargs=True)
        hooks.ids.add(self._handle.id)

    def put(self, name: str, value: object) -> None:
        """Set an attribute of the module that no copy of it gets, until remove()."""
        self._names.add(name)
        self._hooks.names.add(name)
        vars(self._module)[name] = value

    def remove(self) -> None:
        self._handle.remove()
        for name in self._names:
            vars(self._module).pop(name, None)
        self._hooks.ids.discard(self._handle.id)
        self._hooks.names -= self._names
        if not self._hooks.ids:
            for name in self._hooks.names:
                vars(self._module).pop(name, None)


def free_name(module: nn.Module, stem: str) -> str:
    """The first of stem_0, stem_1, ... that is no attribute of the module: several collectors may keep one each."""
    depth = 0
    while f"{stem}_{depth}" in vars(module):
        depth += 1
    return f"{stem}_{depth}"


def is_own(op: str, name: str, module: nn.Module, called: nn.Module) -> bool:
    """Whether the called module is the hooked one, and not a copy that has its hooks all the same.

    Raises:
        RuntimeError: it is a replica that torch.nn.DataParallel made, whose calls would be lost.
    """
    if called is not module and getattr(called, "_is_replica", False):
        raise RuntimeError(f"{op}: {name} was called through a replica; call the model itself, without DataParallel")
    return called is module


def expect_modules(op: str, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Raise ValueError unless it is a mapping whose values are modules; returns a dict."""
    if not isinstance(modules, Mapping):
        raise ValueError(f"{op}: modules must map names to modules, e.g. {{'fc': layer}}, got {type(modules).__name__}")
    for name, module in modules.items():
        if not isinstance(module, nn.Module):
            raise ValueError(f"{op}: {name} must be an nn.Module, got {type(module).__name__}")
    return dict(modules)


def input_of(op: str, name: str, args: tuple, kwargs: dict) -> Tensor:
    """The input [..., C] of a call: the first matrix of floats among the arguments, those by position first."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2:
            _expect_weight_like(op, f"the input of {name}", value)
            return value
    given = [_kind(value) for value in args] + [f"{key}={_kind(value)}" for key, value in kwargs.items()]
    raise ValueError(
        f"{op}: {name} must be called with a floating tensor [..., C] of two dimensions or more, got "
        f"{', '.join(given) or 'nothing'}"
    )


def _kind(value: object) -> str:
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def output_of(op: str, name: str, output: object) -> Tensor:
    """The output [..., R] of a call, at least two dimensions: a tensor, or the first entry of a tuple or list."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(first, Tensor) or not first.is_floating_point():
        raise ValueError(f"{op}: {name} must return a floating tensor [..., R], got {type(output).__name__}")
    if first.dim() < 2:
        raise ValueError(f"{op}: {name} must return [..., R], at least 2 dimensions, got {list(first.shape)}")
    _expect_weight_like(op, f"the output of {name}", first)
    return first


def hook_gradient(output: Tensor, call: Callable[[Tensor], None]) -> None:
    """Call a function with the gradient at an output [..., R], once a backward pass reaches it.

    nn.Linear with a bias returns a view of another shape. If the caller changes that in place, as nn.ReLU(inplace=True)
    does, torch drops the hooks of the view, but not those of the tensor behind it.
    """
    base, shape = output._base, output.shape
    same = base is not None and base.requires_grad and base.shape == (shape[:-1].numel(), shape[-1])
    hooked = base if same and base.is_contiguous() and output.is_contiguous() else output
    hooked.register_hook(lambda gradient: call(gradient.reshape(shape)))


def _expect_weight_like(op: str, what: str, value: Tensor) -> None:
    expect_dense(op, what, value)
    if value.dtype not in WEIGHT_DTYPES:
        raise ValueError(f"{op}: {what} must be bfloat16, float16 or float32, got {value.dtype}")


def recomputing() -> bool:
    """True inside a backward pass: activation checkpointing is then running a block's forward again."""
    return torch._C._current_graph_task_id() != -1
