"""Energy of greedy decoding, for each generated token."""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn

from .repeats import repeated

GENERATED = 128  # tokens
PROMPT = 16  # tokens


def decoding_energy(model: nn.Module, tokens: Tensor) -> dict | str:
    """Joules per token of a greedy decoding of 128 tokens at batch 1, or why they were not measured.

    The prompt is the first 16 of tokens [S, L]. Reading it is part of the work.
    """
    prompt = tokens[:1, :PROMPT]
    measured = repeated(lambda: decode(model, prompt, GENERATED), tokens.device, units=GENERATED)
    return measured if isinstance(measured, str) else dataclasses.asdict(measured) | {"generated": GENERATED}


def decode(model: nn.Module, prompt: Tensor, count: int) -> Tensor:
    """[1, count] ids that follow prompt [1, L], each the likeliest; for a model without an end token."""
    mask = prompt.new_ones(prompt.shape)
    return model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=count)[:, prompt.shape[1] :]
