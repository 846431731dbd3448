"""The next-token loss, formed on slices of the positions so that all logits never exist at once."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers.utils import ModelOutput

from ..errors import UserError, one_line
from ..model.attributes import called_as, uncached

_FORWARD = "use --method wanda or sparsegpt"  # which need no backward pass
_LOGITS = 1 << 24  # logits that exist at once: 64 MB in fp32, and as much again for their softmax


class _FirstSubmodule(Exception):
    """Ends a forward pass once it calls a submodule."""


def find_decoder(model: nn.Module) -> nn.Module:
    """The submodule that a causal language model calls first: everything but the output head.

    Raises:
        UserError: the model calls no submodule.
    """

    thread = threading.get_ident()  # the hook is global, and other threads may run other models

    def hook(module, _args):
        if module is not model and threading.get_ident() == thread:
            raise _FirstSubmodule(module)

    handle = register_module_forward_pre_hook(hook)
    try:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
        model(input_ids=ids, **uncached(model))
    except _FirstSubmodule as first:
        return first.args[0]
    finally:
        handle.remove()
    raise UserError(f"{type(model).__name__} calls no submodule; this model cannot be calibrated")


def first_output(output) -> Tensor:
    """Hidden states or logits, from an output with names, a tuple of outputs, or a tensor alone.

    Raises:
        UserError: the output is none of these.
    """
    if not isinstance(output, Tensor):
        output = output[0] if isinstance(output, (tuple, ModelOutput)) and len(output) else output
    if not isinstance(output, Tensor):
        raise UserError(
            f"the model returns a {type(output).__name__}, expected a tensor, a tuple of them, or a ModelOutput of "
            f"transformers; this model cannot be pruned"
        )
    return output


@torch.no_grad()
def summed_losses(model: nn.Module, decoder: nn.Module, ids: Tensor, *, first_target: int = 1) -> Tensor:
    """Sums of the next-token losses of windows, computed in fp32 and added up in fp64.

    Args:
        model: a causal language model.
        decoder: from find_decoder().
        ids: [B, L] int64 windows without padding, on the model's device.
        first_target: position of the first token that is predicted, at least 1.

    Returns:
        [B] fp64 losses in nats, on the device.
    """
    output = decoder(input_ids=ids, **uncached(decoder))
    with _head_of(model, decoder, type(output)) as head:
        losses = [
            nn.functional.cross_entropy(head(states[None])[0].float(), labels, reduction="none")
            for states, labels in _slices(model, first_output(output), ids, first_target)
        ]
    return torch.cat(losses).view(len(ids), -1).sum(1, dtype=torch.float64)


def backward_of_summed_loss(
    model: nn.Module, decoder: nn.Module, ids: Tensor, generator: torch.Generator | None = None
) -> None:
    """Runs the forward pass, and the backward pass of the SUM of the next-token losses in fp32.

    The gradient of the head is formed slice by slice, so that logits [B L, V] in fp32 never exist as a whole: they
    would be 2 GB for 2,048 tokens and a vocabulary of 262,144. This costs no extra operations.

    Args:
        model: a causal language model with frozen parameters, whose embedding output wants a gradient.
        decoder: from find_decoder().
        ids: [B, L] int64 windows without padding, on the model's device.
        generator: draws each label from the model's own prediction, as sample_labels() does; None: the labels are the
            text.

    Raises:
        UserError: the output of the decoder does not depend on its embeddings by gradients, or the model has no
            backward pass.
    """
    output = decoder(input_ids=ids, **uncached(decoder))
    hidden = first_output(output)
    if not hidden.requires_grad:
        raise UserError(
            f"{type(model).__name__} lets no gradient through to its blocks, so no Fisher information can be measured; "
            f"{_FORWARD}"
        )
    with _head_of(model, decoder, type(output)) as head:
        slices = [_loss_gradient(head, *part, generator) for part in _slices(model, hidden.detach(), ids)]
    batch, length, size = hidden.shape
    gradient = nn.functional.pad(torch.cat(slices).view(batch, length - 1, size), (0, 0, 0, 1))
    edge = get_gradient_edge(hidden)
    del output, hidden, slices  # the backward pass does not need them, and it is the peak of the memory
    try:
        torch.autograd.backward([edge], [gradient])
    except AssertionError as error:
        raise UserError(
            f"{type(model).__name__} has no backward pass here ({one_line(error, 200)}); {_FORWARD}"
        ) from error
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise UserError(
            f"{type(model).__name__} changes a tensor in place that its backward pass needs; try --checkpointing off "
            f"and --allocation global, or {_FORWARD}"
        ) from error


def sample_labels(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Draws a label at each position by inverting the cumulative distribution.

    Each position takes one number from the generator, in order. So the labels depend neither on how the positions are
    split into calls nor on the device, unless rounding moves a probability across a drawn number.

    Args:
        probabilities: [n, V] fp32.
        generator: on the CPU.

    Returns:
        [n] int64 in [0, V), on the device of the probabilities.
    """
    draws = torch.rand(len(probabilities), 1, dtype=torch.float64, device="cpu", generator=generator).to(
        probabilities.device
    )
    return invert_distribution(probabilities, draws)


def invert_distribution(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The labels in whose intervals of the cumulative distribution given numbers lie.

    Args:
        probabilities: [n, V] fp32.
        uniforms: [n, 1] fp64 in [0, 1), on the same device.

    Returns:
        [n] int64 in [0, V).
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    labels = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return labels[:, 0].clamp(max=probabilities.shape[-1] - 1)


@torch.no_grad()
def predictions(model: nn.Module, ids: Tensor, places: Tensor) -> Tensor:
    """What a causal language model predicts after some tokens of one window.

    Args:
        model: a causal language model.
        ids: [1, L] int64, on the model's device.
        places: [n] int64 positions of the tokens, on the same device.

    Returns:
        [n, V] fp32 probabilities of the next token.
    """
    decoder = find_decoder(model)
    output = decoder(input_ids=ids, **uncached(decoder))
    with _head_of(model, decoder, type(output)) as head:
        return head(first_output(output)[:, places])[0].float().softmax(-1)


def _slices(model: nn.Module, hidden: Tensor, ids: Tensor, first_target: int = 1) -> Iterable[tuple[Tensor, Tensor]]:
    """The positions that have a label, in pieces of nearly equal size: states [n, H] and labels [n]."""
    states, labels = hidden[:, first_target - 1 : -1].flatten(0, 1), ids[:, first_target:].flatten()
    pieces = max(1, math.ceil(len(labels) * model.config.get_text_config().vocab_size / _LOGITS))
    return zip(states.tensor_split(pieces), labels.tensor_split(pieces), strict=True)


def _loss_gradient(
    head: Callable[[Tensor], Tensor], states: Tensor, labels: Tensor, generator: torch.Generator | None
) -> Tensor:
    """[n, H] gradient of the summed cross-entropy of n positions. At the logits it is softmax - label."""
    states = states.detach().requires_grad_(True)
    logits = head(states[None])
    edge, dtype = get_gradient_edge(logits), logits.dtype
    logits = logits.detach()[0].float()  # the other copies go before more tensors of this size appear
    gradient = logits.softmax(-1)
    del logits
    if generator is not None:
        labels = sample_labels(gradient, generator)
    gradient[torch.arange(len(labels), device=labels.device), labels] -= 1
    gradient = gradient.to(dtype)
    return torch.autograd.grad([edge], states, [gradient[None]])[0]


@contextmanager
def _head_of(model: nn.Module, decoder: nn.Module, output_type: type) -> Iterator[Callable[[Tensor], Tensor]]:
    """What the model itself computes after its decoder (head, scaling, soft caps): [1, n, H] -> logits [1, n, V]."""
    states: list[Tensor] = []

    def head(hidden: Tensor) -> Tensor:
        states[:] = [hidden]
        ids = hidden.new_zeros(hidden.shape[:2], dtype=torch.int64)
        try:
            return first_output(model(input_ids=ids, **uncached(model)))
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise UserError(
                f"no loss can be computed from the hidden states of {type(model).__name__} ({one_line(error, 100)}); "
                f"--method magnitude with --no-check prunes it without one"
            ) from error

    def forward(*_args, **_kwargs):
        if issubclass(output_type, Tensor):
            return states[0]
        return (states[0],) if issubclass(output_type, tuple) else output_type(last_hidden_state=states[0])

    with called_as({decoder: forward}):
        yield head
