"""Decoder blocks compiled by torch.compile, beside hooks on their modules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType

import torch
from torch import nn

from ..errors import one_line
from ..model.attributes import called_as


class CompileError(Exception):
    """A block could not be compiled; the message is one line."""


class CompiledBlocks:
    """Compiled calls of blocks and norms, switched on for one pass at a time.

    Blocks of the same structure with hooks on the same modules share one graph.

    Args:
        blocks: the modules to compile.
        observed: the modules that have hooks.
    """

    def __init__(self, blocks: Sequence[nn.Module], observed: Iterable[nn.Module]):
        self.blocks, self.observed = blocks, set(observed)
        self.calls: dict[nn.Module, Callable] | None = None

    @contextmanager
    def on(self, wanted: bool) -> Iterator[None]:
        """Runs the blocks compiled inside the block of code, if `wanted`.

        Raises:
            CompileError: the compiler fails in the first pass.
        """
        if not wanted:
            yield
            return
        calls = self.calls or self._compile()
        try:
            with called_as(calls):
                yield
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler raises many types; after one good pass an error is not its own
            if self.calls is not None:
                raise
            raise CompileError(one_line(error)) from error
        self.calls = calls

    def _compile(self) -> dict[nn.Module, Callable]:
        own = {block: _call_of(self._structure(block)) for block in self.blocks}
        compiled = {call: torch.compile(call, dynamic=False) for call in own.values()}
        return {block: partial(compiled[call], block) for block, call in own.items()}

    def _structure(self, block: nn.Module) -> Hashable:
        """What blocks that share a graph have in common: type, weights, and which modules have hooks."""
        weights = tuple((name, weight.shape, weight.dtype) for name, weight in block.named_parameters())
        return type(block), weights, tuple(n for n, module in block.named_modules() if module in self.observed)


def norms_beside(model: nn.Module, blocks_path: str) -> list[nn.Module]:
    """The modules beside the blocks that hold vectors alone. Uncompiled, the last norm needs five copies in fp32."""
    beside = model.get_submodule(blocks_path.rpartition(".")[0]).children()
    dims = {module: {parameter.dim() for parameter in module.parameters()} for module in beside}
    return [module for module, dimensions in dims.items() if dimensions == {1}]


def _call(block: nn.Module, *args, **kwargs):
    return block._call_impl(*args, **kwargs)


@cache
def _call_of(structure: Hashable) -> Callable:
    """A copy of _call() for each structure.

    torch.compile keeps up to eight graphs for each code object and does not compare hooks. With code of its own, a
    block is never mistaken for one with other hooks, and one model does not use up the places of the next.
    """
    return FunctionType(_call.__code__.replace(), globals())
