"""Which models a call measures, prunes or packs at this time: two threads would spoil each other's results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident

import torch
from torch import nn

from ..errors import UserError

_threads: dict[int, int] = {}  # id of a model in use -> id of the thread that uses it
_changing = Lock()


@contextmanager
def in_use(model: nn.Module) -> Iterator[None]:
    """Refuses the model to other threads inside the block, also its forward pass; the thread itself may enter again.

    Raises:
        UserError: another thread uses the model.
    """
    with _changing:
        expect_free(model)
        outermost = id(model) not in _threads
        _threads[id(model)] = get_ident()
    handle = model.register_forward_pre_hook(_expect_own_thread) if outermost else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
            del _threads[id(model)]


def _expect_own_thread(model: nn.Module, _args) -> None:
    if torch._C._current_graph_task_id() == -1:  # a backward pass, which may compute it again, has threads of its own
        expect_free(model)


def expect_free(model: nn.Module) -> None:
    """Refuses a model that another thread uses.

    Raises:
        UserError: it does.
    """
    if _threads.get(id(model), get_ident()) != get_ident():
        raise UserError("another thread prunes or measures this model at this time; wait for it, or give a copy")
