"""Perplexity, and the sanity checks around it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..errors import UserError

# Positions whose logits are held in fp32 at once: 256 MB for a vocabulary of 262,144.
_CHUNK = 256


def perplexity(model: nn.Module, tokens: Tensor, *, progress: bool = True, label: str = "perplexity") -> float:
    """Perplexity over windows: exp of the mean cross-entropy of the L - 1 targets of each window.

    One window at a time, on the device of the model, in evaluation mode (the mode is put back) and without gradients.
    Losses are computed in fp32 and summed in fp64.

    Args:
        model: a Hugging Face causal language model.
        tokens: [S, L] integer token ids, L >= 2, on any device.
        progress: show a progress bar.
        label: its title.

    Returns:
        The perplexity; inf where it overflows, nan where a logit is nan.

    Raises:
        UserError: tokens of another shape or dtype, or a token id beyond the vocabulary of the model.
    """
    check_tokens(model, tokens)
    samples, length = tokens.shape
    total = 0.0
    with evaluating(model), torch.no_grad():
        for window in tqdm(tokens, desc=label, unit="window", disable=None if progress else True):
            total += _loss_sum(model, window, first_target=1)
    try:
        return math.exp(total / (samples * (length - 1)))
    except OverflowError:
        return math.inf


def choose_bos(model: nn.Module, tokenizer: Any, window: Tensor) -> bool:
    """Decide whether windows should begin with BOS: the lower loss on the same targets wins.

    Both inputs end with the same tokens and neither is longer than the window. A tie, or a loss that is nan, means no.

    Args:
        model: a Hugging Face causal language model.
        tokenizer: its tokenizer; without a BOS token the answer is no.
        window: [L] integer token ids of plain text without BOS, L >= 3.

    Returns:
        True if BOS helps.

    Raises:
        UserError: a window of another shape or dtype, or a token id beyond the vocabulary of the model.
    """
    bos = tokenizer.bos_token_id
    if bos is None:
        return False
    if window.dim() != 1 or len(window) < 3:
        raise UserError(f"window must be integer [L], L >= 3, got {list(window.shape)}")
    without = window[:-1]
    with_bos = torch.cat([window.new_tensor([bos]), without])
    check_tokens(model, with_bos[None])
    with evaluating(model), torch.no_grad():
        return _loss_sum(model, with_bos, first_target=2) < _loss_sum(model, without, first_target=1)


def check_dense(perplexity: float, vocab_size: int) -> str | None:
    """Judge the perplexity of a model that is not pruned yet.

    Args:
        perplexity: of the dense model.
        vocab_size: of the model; guessing evenly has this perplexity.

    Returns:
        One line of warning from a tenth of vocab_size on, else None.

    Raises:
        UserError: the perplexity is not finite.
    """
    if not math.isfinite(perplexity):
        raise UserError(
            f"the dense model has perplexity {perplexity}: its weights or its dtype are broken, "
            "check the checkpoint or try --dtype float32"
        )
    if perplexity < vocab_size / 10:
        return None
    return (
        f"the dense model has perplexity {perplexity:.1f}, not far from guessing among {vocab_size} tokens: the "
        "checkpoint, its tokenizer or the text is probably wrong, and pruning results will mean little"
    )


def check_tokens(model: nn.Module, tokens: Tensor) -> None:
    """Refuse tokens that are not integer [S >= 1, L >= 2] within the model's vocabulary.

    Raises:
        UserError: saying what was got.
    """
    floating = tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
    if floating or tokens.dim() != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 2:
        got = f"{list(tokens.shape)} {str(tokens.dtype).removeprefix('torch.')}"
        raise UserError(f"tokens must be integer [S >= 1, L >= 2], got {got}")
    vocab_size = model.get_input_embeddings().weight.shape[0]
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise UserError(
            f"token ids must be in [0, {vocab_size}), got {int(tokens.min())} to {int(tokens.max())}: "
            "was the text tokenised for this model?"
        )


def _loss_sum(model: nn.Module, window: Tensor, *, first_target: int) -> float:
    """Sum of the losses of window[first_target:] given what stands before each, window [L]."""
    window = window.to(model.get_input_embeddings().weight.device, torch.int64)
    logits = model(input_ids=window[None], use_cache=False).logits[0, first_target - 1 : -1]
    targets = window[first_target:].to(logits.device)
    chunks = zip(logits.split(_CHUNK), targets.split(_CHUNK), strict=True)
    return sum(F.cross_entropy(x.float(), y, reduction="none").sum(dtype=torch.float64).item() for x, y in chunks)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block, the mode that each module had before after it."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
