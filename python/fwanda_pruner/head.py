"""The loss on top of the decoder, a slice of the positions at a time, so that all logits never exist at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .errors import UserError

_LOGITS = 1 << 25  # held in fp32 at once: 128 MB, and a few copies of that


class _Found(Exception):
    """Ends a forward pass once the decoder is known."""


def find_decoder(model: nn.Module) -> nn.Module:
    """The submodule that a causal language model calls first: all of it but the output head.

    Raises:
        UserError: the model calls none.
    """

    def hook(module, _args):
        if module is not model:
            raise _Found(module)

    handle = register_module_forward_pre_hook(hook)
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device), use_cache=False)
    except _Found as found:
        return found.args[0]
    finally:
        handle.remove()
    raise UserError(f"{type(model).__name__} calls no submodule; this model cannot be calibrated")


def backward_of_summed_loss(model: nn.Module, decoder: nn.Module, ids: Tensor) -> None:
    """One forward pass and the backward pass of the SUM of the next-token losses, in fp32.

    Args:
        model: a causal language model with frozen parameters, whose embedding output wants a gradient.
        decoder: from find_decoder().
        ids: [B, L] int64 windows without padding.

    The head runs on slices of the positions and its gradient is formed at once, so that logits [B L, V] in fp32 never
    exist as a whole: 2 GB for 2,048 tokens and a vocabulary of 262,144. Costs no extra FLOPs.
    """
    output = decoder(input_ids=ids, use_cache=False)
    hidden = output.last_hidden_state
    gradient = torch.zeros_like(hidden)
    states, labels = hidden.detach()[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    size = max(1, _LOGITS // model.config.get_text_config().vocab_size)
    with _head_of(model, decoder, type(output)) as head:
        slices = [
            _loss_gradient(head, state, label)
            for state, label in zip(states.split(size), labels.split(size), strict=True)
        ]
    gradient[:, :-1] = torch.cat(slices).view_as(gradient[:, :-1])
    hidden.backward(gradient)


def _loss_gradient(head: Callable[[Tensor], Tensor], states: Tensor, labels: Tensor) -> Tensor:
    """[n, H] gradient of the summed loss of n positions."""
    states = states.detach().requires_grad_(True)
    logits = head(states[None])[0].float()
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    return torch.autograd.grad(loss, states)[0]


@contextmanager
def _head_of(model: nn.Module, decoder: nn.Module, output_type: type) -> Iterator[Callable[[Tensor], Tensor]]:
    """What the model itself does after its decoder (head, scaling, soft caps): [1, n, H] -> logits [1, n, V]."""
    states: list[Tensor] = []
    had = decoder.__dict__.get("forward")

    def head(hidden: Tensor) -> Tensor:
        states[:] = [hidden]
        return model(input_ids=hidden.new_zeros(hidden.shape[:2], dtype=torch.int64), use_cache=False).logits

    decoder.forward = lambda *_args, **_kwargs: output_type(last_hidden_state=states[0])
    try:
        yield head
    finally:
        if had is None:
            del decoder.forward
        else:
            decoder.forward = had
