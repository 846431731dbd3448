"""The calibration windows, one decoder block at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .calibrate import model_device
from .errors import UserError
from .model import find_blocks


class _Captured(Exception):
    """Ends a forward pass once the inputs of the first block are known."""


class BlockStream:
    """The calibration windows, one decoder block at a time.

    Holds the hidden state of every window at the input of the current block, and the other arguments that each block
    gets (masks, position embeddings), which must be the same for all windows of one length.

    Args:
        model: a causal language model in eval mode.
        tokens: [S, L] int64 windows without padding.

    Raises:
        UserError: the model's blocks are not a plain chain.
    """

    def __init__(self, model: nn.Module, tokens: Tensor):
        self.blocks = find_blocks(model)[1]
        self._arguments = self._capture_arguments(model, tokens[:1])
        if len(tokens) > 1 and not _same(self._arguments, self._capture_arguments(model, tokens[-1:])):
            raise UserError(f"{_not_streamable(model)}: the arguments of its blocks depend on the tokens")
        self.hidden = [self._capture_hidden(model, window[None]) for window in tokens]

    @torch.no_grad()
    def _capture_arguments(self, model: nn.Module, ids: Tensor) -> list[tuple[tuple, dict]]:
        """Arguments of each block in one forward pass, which also shows that the blocks form a plain chain."""
        captured: list[tuple[tuple, dict]] = []
        before: list[Tensor] = []

        def hook(_module, args, kwargs):
            hidden = args[0] if args else kwargs["hidden_states"]
            if captured and not _close(self._block_output(len(captured) - 1, before.pop(), captured[-1]), hidden):
                raise UserError(f"{_not_streamable(model)}: a block takes more than the output of the one before it")
            captured.append((args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"}))
            before.append(hidden)

        handles = [block.register_forward_pre_hook(hook, with_kwargs=True) for block in self.blocks]
        try:
            model.base_model(input_ids=ids.to(model_device(model)), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        if len(captured) != len(self.blocks):
            raise UserError(f"{_not_streamable(model)}: it called {len(captured)} of {len(self.blocks)} blocks")
        return captured

    def _block_output(self, index: int, hidden: Tensor, arguments: tuple[tuple, dict]) -> Tensor:
        args, kwargs = arguments
        output = self.blocks[index].forward(hidden, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    @torch.no_grad()
    def _capture_hidden(self, model: nn.Module, ids: Tensor) -> Tensor:
        def hook(_module, args, kwargs):
            raise _Captured(args[0] if args else kwargs["hidden_states"])

        handle = self.blocks[0].register_forward_pre_hook(hook, with_kwargs=True)
        try:
            model.base_model(input_ids=ids.to(model_device(model)), use_cache=False)
        except _Captured as captured:
            return captured.args[0]
        finally:
            handle.remove()
        raise AssertionError("the first block was not called")

    @torch.no_grad()
    def run(self, index: int, *, advance: bool) -> None:
        """Run every window through block `index`; with advance, its outputs become the inputs of the next block."""
        for i, hidden in enumerate(self.hidden):
            output = self._block_output(index, hidden, self._arguments[index])
            if advance:
                self.hidden[i] = output


def _not_streamable(model: nn.Module) -> str:
    return f"{type(model).__name__} cannot be run block by block, use wanda or fwanda with --order onepass"


def _same(a, b) -> bool:
    """Equal structures with equal tensors; what is neither is not compared."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return True


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).float().norm() <= 1e-2 * b.float().norm())
