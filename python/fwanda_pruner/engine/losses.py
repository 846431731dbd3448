"""The loss on top of the decoder, a slice of the positions at a time, so that all logits never exist at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_pre_hook

from ..errors import UserError
from ..model.attributes import replaced

_LOGITS = 1 << 24  # at once: 64 MB in fp32, and as much in their softmax


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


def backward_of_summed_loss(
    model: nn.Module, decoder: nn.Module, ids: Tensor, generator: torch.Generator | None = None
) -> None:
    """One forward pass and the backward pass of the SUM of the next-token losses, in fp32.

    Args:
        model: a causal language model with frozen parameters, whose embedding output wants a gradient.
        decoder: from find_decoder().
        ids: [B, L] int64 windows without padding.
        generator: draws each label from the model's own predictions, as sample_labels(); None: the labels are the text.

    Raises:
        UserError: the output of the decoder does not depend on its embeddings by gradients.

    The head runs on slices of the positions and its gradient is formed at once, so that logits [B L, V] in fp32 never
    exist as a whole: 2 GB for 2,048 tokens and a vocabulary of 262,144. Costs no extra FLOPs.
    """
    output = decoder(input_ids=ids, use_cache=False)
    hidden = output.last_hidden_state
    if not hidden.requires_grad:
        raise UserError(
            f"{type(model).__name__} lets no gradient through to its blocks: it cannot be measured backwards"
        )
    with _head_of(model, decoder, type(output)) as head:
        slices = [_loss_gradient(head, *part, generator) for part in _slices(model, hidden.detach(), ids)]
    batch, length, size = hidden.shape
    gradient = nn.functional.pad(torch.cat(slices).view(batch, length - 1, size), (0, 0, 0, 1))
    edge = get_gradient_edge(hidden)
    del output, hidden, slices  # not needed by the backward pass, when memory is at its peak
    torch.autograd.backward([edge], [gradient])


@torch.no_grad()
def summed_loss(model: nn.Module, decoder: nn.Module, ids: Tensor) -> float:
    """SUM of the next-token losses of ids [B, L], in fp32; the head runs on slices as above."""
    output = decoder(input_ids=ids, use_cache=False)
    total = torch.zeros((), dtype=torch.float64, device=ids.device)
    with _head_of(model, decoder, type(output)) as head:
        for states, labels in _slices(model, output.last_hidden_state, ids):
            total += nn.functional.cross_entropy(head(states[None])[0].float(), labels, reduction="sum")
    return float(total)


def _slices(model: nn.Module, hidden: Tensor, ids: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Pieces, as equal as can be, of the positions that have a label: states [n, H] and labels [n]."""
    states, labels = hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    pieces = max(1, math.ceil(len(labels) * model.config.get_text_config().vocab_size / _LOGITS))
    return zip(states.tensor_split(pieces), labels.tensor_split(pieces), strict=True)


def sample_labels(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a label at each position by inverting the cumulative distribution.

    A position takes one number from the generator, in order, so that the labels depend neither on how the positions
    are divided into calls nor on the device, unless rounding moves a probability across a draw.

    Args:
        probabilities: [n, V] fp32.
        generator: on the CPU.

    Returns:
        [n] int64 in [0, V), on the device of the probabilities.
    """
    draws = torch.rand(len(probabilities), 1, dtype=torch.float64, generator=generator).to(probabilities.device)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    labels = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    return labels[:, 0].clamp(max=probabilities.shape[-1] - 1)


def _loss_gradient(
    head: Callable[[Tensor], Tensor], states: Tensor, labels: Tensor, generator: torch.Generator | None
) -> Tensor:
    """[n, H] gradient of the summed cross-entropy of n positions, which is softmax - label at the logits."""
    states = states.detach().requires_grad_(True)
    logits = head(states[None])
    edge, dtype = get_gradient_edge(logits), logits.dtype
    logits = logits.detach()[0].float()  # the others go before there are more tensors of their size
    gradient = logits.softmax(-1)
    del logits
    if generator is not None:
        labels = sample_labels(gradient, generator)
    gradient[torch.arange(len(labels), device=labels.device), labels] -= 1
    gradient = gradient.to(dtype)
    return torch.autograd.grad([edge], states, [gradient[None]])[0]


@contextmanager
def _head_of(model: nn.Module, decoder: nn.Module, output_type: type) -> Iterator[Callable[[Tensor], Tensor]]:
    """What the model itself does after its decoder (head, scaling, soft caps): [1, n, H] -> logits [1, n, V]."""
    states: list[Tensor] = []

    def head(hidden: Tensor) -> Tensor:
        states[:] = [hidden]
        return model(input_ids=hidden.new_zeros(hidden.shape[:2], dtype=torch.int64), use_cache=False).logits

    def forward(*_args, **_kwargs):
        return output_type(last_hidden_state=states[0])

    with replaced("forward", {decoder: forward}):
        yield head
