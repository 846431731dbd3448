"""Checks that a model and a tokenizer given in Python are what they should be."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import UserError


def expect_model(model: Any) -> None:
    """Refuses what is no Hugging Face causal language model.

    Raises:
        UserError: saying what was given instead.
    """
    wanted = "model must be a Hugging Face causal language model"
    if isinstance(model, str) or hasattr(model, "__fspath__"):
        raise UserError(f"{wanted}, got the name {str(model)!r}; load it: load_model({str(model)!r}).model")
    if isinstance(model, tuple) and hasattr(model, "_fields"):
        raise UserError(f"{wanted}, got all that load_model() returns; unpack it: model, tokenizer = load_model(...)")
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        hint = "; the model comes before the tokenizer" if _is_tokenizer(model) else ""
        raise UserError(f"{wanted}, got {name}{hint}")
    if next(model.parameters(), None) is None:
        raise UserError(f"{wanted}, got {name}, which has no parameters")
    if not all(hasattr(model, part) for part in ("config", "get_input_embeddings", "get_output_embeddings")):
        raise UserError(f"{wanted}, got {name}; if it wraps one, give the model inside")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"{wanted}, got {name}, which has an encoder; only decoders can be pruned")
    if model.get_output_embeddings() is None:
        raise UserError(f"{wanted}, got {name}, which has no output head; load it by AutoModelForCausalLM")


def expect_tokenizer(tokenizer: Any, *, needed: bool = False) -> None:
    """Refuses what is no tokenizer. None, which stands for no tokenizer, is refused if one is needed.

    Raises:
        UserError: saying what was given instead.
    """
    if _is_tokenizer(tokenizer) or (tokenizer is None and not needed):
        return
    inside = "; give its tokenizer attribute" if hasattr(tokenizer, "tokenizer") else ""
    raise UserError(f"tokenizer must be a Hugging Face tokenizer, got {type(tokenizer).__name__}{inside}")


def expect_type(name: str, value: Any, kind: type, advice: str, *, needed: bool = False) -> None:
    """Refuses a value of another type; None, which stands for no value, only if one is needed.

    Raises:
        UserError: naming the argument.
    """
    if not isinstance(value, kind) and (value is not None or needed):
        raise UserError(f"{name} must be a {kind.__name__}, got {type(value).__name__}; {advice}")


def _is_tokenizer(value: Any) -> bool:
    """Whether a value can be called on text and knows its BOS token."""
    return callable(value) and not isinstance(value, nn.Module) and hasattr(value, "bos_token_id")
