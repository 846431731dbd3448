"""Checks of the types of arguments that are given in Python."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..errors import UserError

_OTHER_TASK = re.compile(r"For(?!CausalLM$|\w*Generation$|ImageTextToText$)[A-Z]\w*$")  # ends the name of a class


def expect_model(model: Any) -> None:
    """Refuses what is no Hugging Face causal language model; model.plain.check_plain() also looks at its weights.

    Raises:
        UserError: saying what was given instead.
    """
    wanted = "model must be a Hugging Face causal language model"
    if isinstance(model, str) or hasattr(model, "__fspath__"):
        raise UserError(f"{wanted}, got the name {str(model)!r}; load it: load_model({str(model)!r}).model")
    if isinstance(model, tuple) and hasattr(model, "_fields"):
        raise UserError(f"{wanted}, got all that load_model() returns; unpack it: model, tokenizer = load_model(...)")
    name = type(model).__name__
    if isinstance(model, nn.Module) and hasattr(model, "_orig_mod"):
        raise UserError("the model is a wrapper of torch.compile; give the model itself, model._orig_mod")
    if not isinstance(model, nn.Module):
        hint = "; the model comes before the tokenizer" if _is_tokenizer(model) else ""
        raise UserError(f"{wanted}, got {name}{hint}")
    if next(model.parameters(), None) is None:
        raise UserError(f"{wanted}, got {name}, which has no parameters")
    methods = all(hasattr(model, method) for method in ("get_input_embeddings", "get_output_embeddings"))
    if not methods or not hasattr(getattr(model, "config", None), "get_text_config"):
        raise UserError(f"{wanted}, got {name}; if it wraps one, give the model inside")
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(f"{wanted}, got {name}, which has an encoder; only decoders can be pruned")
    if _OTHER_TASK.search(name):
        raise UserError(f"{wanted}, got {name}, which is of another task; load it by AutoModelForCausalLM")
    if _found(model.get_input_embeddings) is None:
        raise UserError(f"{wanted}, got {name}, whose get_input_embeddings() does not find its token embedding")
    head = _found(model.get_output_embeddings)
    if head is None or not isinstance(getattr(head, "weight", None), Tensor):
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


def _found(find: Callable[[], nn.Module | None]) -> nn.Module | None:
    """The result of a method that some classes of transformers do not implement; None for those."""
    try:
        return find()
    except (AttributeError, NotImplementedError):
        return None


def _is_tokenizer(value: Any) -> bool:
    """Whether a value can be called on text and knows its BOS token."""
    return callable(value) and not isinstance(value, nn.Module) and hasattr(value, "bos_token_id")
