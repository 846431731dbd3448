"""What the tests of measurements share: an engine, statistics, short memory, a quick compiler."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from fwanda_pruner.engine.loop import PassSettings
from fwanda_pruner.engine.resident import ResidentEngine
from fwanda_pruner.measure.statistics import Statistics, measure_statistics
from fwanda_pruner.model.targets import find_targets


def engine_of(model: nn.Module, **settings) -> ResidentEngine:
    """An engine for all targets of a model; the settings are fields of PassSettings."""
    return ResidentEngine(model, find_targets(model)[0], PassSettings(**settings), progress=False)


def measure(model: nn.Module, tokens: Tensor, fisher: str | None = "empirical", *, seed=0, **settings) -> Statistics:
    """Statistics of all targets; the settings are fields of PassSettings."""
    return measure_statistics(engine_of(model, **settings), tokens, fisher=fisher, seed=seed)


@contextmanager
def out_of_memory(module: nn.Module, fails: Callable[[Tensor], bool]) -> Iterator[None]:
    """Inside the block a call of the module raises torch's error for short memory if `fails(its first argument)`."""

    def hook(_module, args):
        if fails(args[0]):
            raise torch.OutOfMemoryError("CUDA out of memory")

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def batch_above(size: int) -> Callable[[Tensor], bool]:
    """For out_of_memory(): whether a tensor [B, ...] has more than `size` windows."""
    return lambda x: len(x) > size


@contextmanager
def input_sizes(module: nn.Module) -> Iterator[list[int]]:
    """Inside the block: the windows B in each call of a module, whose first argument is [B, ...]."""
    sizes: list[int] = []
    handle = module.register_forward_pre_hook(lambda _module, args: sizes.append(len(args[0])))
    try:
        yield sizes
    finally:
        handle.remove()


def quick_compile(monkeypatch) -> None:
    """The graphs of torch.compile without its code generator, which takes half a minute on a CPU."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
