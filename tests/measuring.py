"""What the tests of measurements share: models, an engine, short memory, slices of logits, a quick compiler."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import tiny
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fwanda_pruner.engine.loop import PassSettings
from fwanda_pruner.engine.resident import ResidentEngine
from fwanda_pruner.measure.statistics import Statistics, measure_statistics
from fwanda_pruner.model.targets import find_targets

LARGE_VOCABULARY = 262_144  # 64 positions have SLICE logits
SLICE = 1 << 24  # logits that may exist at once
MODELS = {
    "llama": tiny.llama,
    "gpt2": partial(tiny.build, "gpt2"),
    "vocabulary_262k": partial(tiny.llama, vocab_size=LARGE_VOCABULARY),  # three windows of 24: two slices
}


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


def assert_close(statistics, expected, tokens: int) -> None:
    """Compares statistics with `expected`: name -> (x2, g2)."""
    assert statistics.x2.keys() == expected.keys()
    for name, (x2, g2) in expected.items():
        assert statistics.n_tokens[name] == tokens
        torch.testing.assert_close(statistics.x2[name].double(), x2.double(), rtol=1e-4, atol=1e-6, msg=name)
        torch.testing.assert_close(statistics.g2[name].double(), g2.double(), rtol=1e-3, atol=1e-6, msg=name)


def sums_of(statistics) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (statistics.x2[name], statistics.g2[name]) for name in statistics.x2}


@contextmanager
def slices_of(model) -> Iterator[list[int]]:
    """Inside the block: the positions in each call of the head. Fails where the logits of an earlier call are alive."""
    positions: list[int] = []
    logits: list[StorageWeakRef] = []

    def before(_module, _args):
        assert all(earlier.expired() for earlier in logits)

    def after(_module, _args, output):
        positions.append(output.numel() // output.shape[-1])
        logits.append(StorageWeakRef(output.untyped_storage()))

    head = model.get_output_embeddings()
    handles = [head.register_forward_pre_hook(before), head.register_forward_hook(after)]
    try:
        yield positions
    finally:
        for handle in handles:
            handle.remove()
