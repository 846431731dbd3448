"""Perplexity, the choice of BOS, and the sanity check of the dense model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..config import PruneConfig
from ..engine.device import evaluating
from ..engine.engine import Engine, make_engine
from ..engine.loop import PassSettings
from ..errors import UserError

DAMAGED = 4.0  # times the perplexity of the dense model
_SETTINGS = PassSettings(compile="off", checkpointing="off")


def perplexity(model: nn.Module, tokens: Tensor, *, progress: bool = True, label: str = "perplexity") -> float:
    """Perplexity over windows: exp of the mean next-token loss over the L - 1 targets of each window.

    The model runs on its own device, in evaluation mode (each module's mode is put back) and without gradients. Losses
    are computed in fp32 on slices of the positions and added up in fp64.

    Args:
        model: a Hugging Face causal language model.
        tokens: [S, L] integer token ids, L >= 2, on any device.
        progress: show a progress bar.
        label: its title.

    Returns:
        The perplexity; inf where it overflows, nan where a logit is nan.

    Raises:
        UserError: tokens of another shape or dtype, a token id beyond the vocabulary, or a window that does not fit the
            memory.
    """
    with evaluating(model):
        return engine_perplexity(make_engine(model, [], progress=progress), tokens, label=label)


def engine_perplexity(engine: Engine, tokens: Tensor, *, label: str) -> float:
    """perplexity() of the model of an engine, in evaluation mode."""
    check_tokens(engine.model, tokens)
    return perplexity_of(float(engine.window_losses(tokens.long(), settings=_SETTINGS, label=label).mean()))


def perplexity_of(loss: float | None) -> float:
    """exp of a mean loss in nats; inf where it overflows, or where the loss is None because it was not finite."""
    try:
        return math.inf if loss is None else math.exp(loss)
    except OverflowError:
        return math.inf


def choose_bos(engine: Engine, tokenizer: Any, window: Tensor) -> bool:
    """Decides whether windows should begin with BOS: the lower loss on the same targets wins.

    Both inputs end with the same tokens and neither is longer than the window. A tie, or a loss that is nan, means no.

    Args:
        engine: of a causal language model in evaluation mode.
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
    check_tokens(engine.model, with_bos[None])
    loss_with = engine.window_losses(with_bos[None].long(), first_target=2)
    return bool(loss_with < engine.window_losses(without[None].long()))


def check_dense(perplexity: float, vocab_size: int, source: str) -> str | None:
    """Judges the perplexity of a model that is not pruned yet.

    Args:
        perplexity: of the dense model.
        vocab_size: of the model. Guessing evenly among all tokens has this perplexity.
        source: name of the text.

    Returns:
        A warning of one line if the perplexity is at least a tenth of vocab_size, else None.

    Raises:
        UserError: the perplexity is not finite.
    """
    if not math.isfinite(perplexity):
        raise UserError(
            f"the dense model has perplexity {perplexity} on {source}: its weights or its dtype are broken, "
            "check the checkpoint or try --dtype float32"
        )
    if perplexity < vocab_size / 10:
        return None
    return (
        f"the dense model has perplexity {perplexity:.1f} on {source}, not far from guessing among {vocab_size} "
        "tokens: the checkpoint, its tokenizer or the text is probably wrong, and pruning results will mean little"
    )


def check_pruned(measured: Mapping[str, tuple[float, float]], vocab_size: int, config: PruneConfig) -> str | None:
    """Judges a pruned model by its perplexity beside that of the dense model.

    A text is damaged if the perplexity of the pruned model on it is not finite, or at least DAMAGED times that of the
    dense model, or at least a tenth of vocab_size where that of the dense model is below. Texts on which the dense
    model has no finite perplexity do not count.

    Args:
        measured: name of each text -> perplexity of the dense and of the pruned model.
        vocab_size: of the model. Guessing evenly among all tokens has this perplexity.
        config: of the run, for the advice.

    Returns:
        A warning of one line that names the worst text; None if no text is damaged.
    """
    measured = {name: pair for name, pair in measured.items() if math.isfinite(pair[0])}
    damaged = [name for name, (dense, pruned) in measured.items() if _is_damaged(dense, pruned, vocab_size)]
    if not damaged:
        return None
    ratios = {name: pruned / dense for name, (dense, pruned) in measured.items()}
    worst = max(damaged, key=lambda name: ratios[name] if math.isfinite(ratios[name]) else math.inf)
    dense, pruned = measured[worst]
    times = f"{ratios[worst]:.3g} times that of the dense model ({dense:.1f})"
    if not pruned < vocab_size / 10:
        times += f" and not far from guessing among {vocab_size} tokens"
    where = f" (damaged: {len(damaged)} of {len(measured)} texts)" if len(measured) > 1 else ""
    less = "a lower --sparsity" if config.nm is None else "a --pattern that keeps more"
    better = "" if config.responds else ", or --method fwanda --allocation auto"
    return f"pruning has damaged the model: perplexity {pruned:.1f} on {worst}, {times}{where}; try {less}{better}"


def _is_damaged(dense: float, pruned: float, vocab_size: int) -> bool:
    guessing = vocab_size / 10
    return not pruned < DAMAGED * dense or (dense < guessing and not pruned < guessing)


def check_tokens(model: nn.Module, tokens: Tensor) -> None:
    """Refuses tokens that are not integer [S >= 1, L >= 2] within the model's vocabulary.

    Raises:
        UserError: saying what was got.
    """
    floating = tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
    if floating or tokens.dim() != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 2:
        got = f"{list(tokens.shape)} {str(tokens.dtype).removeprefix('torch.')}"
        raise UserError(f"tokens must be integer [S >= 1, L >= 2], got {got}")
    check_ids(model, tokens)


def check_ids(model: nn.Module, tokens: Tensor) -> None:
    """Refuses token ids, integers of any shape, that are beyond the vocabulary of the model.

    Raises:
        UserError: saying what was got.
    """
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    vocab_size = min(layer.weight.shape[0] for layer in layers if layer is not None)
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise UserError(
            f"token ids must be in [0, {vocab_size}), got {int(tokens.min())} to {int(tokens.max())}: "
            "was the text tokenised for this model?"
        )
