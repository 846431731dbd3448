"""A hash that tells one tokenizer from another."""

import hashlib
import json
import string
from typing import Any

_STATE = ("padding", "truncation")  # what a call leaves in the rules of a tokenizer
_SAMPLE = string.printable + "The word for World is forest, 1972. Größe naïve 日本語 русский 🙂"


def tokenizer_sha256(tokenizer: Any) -> str | None:
    """Hash of what decides which tokens a text becomes: vocabulary, rules, special tokens and chat template.

    Args:
        tokenizer: a Hugging Face tokenizer. Of one without a fast backend, the tokens of a sample stand for its rules.

    Returns:
        sha256 in hex; None for None.
    """
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if hasattr(backend, "to_str"):
        rules = json.loads(backend.to_str())
        rules = {key: value for key, value in rules.items() if key not in _STATE}
    else:
        vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
        rules = [sorted(vocabulary.items()), list(tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"])]
    names = ("bos_token_id", "eos_token_id", "add_bos_token", "chat_template")
    facts = [type(tokenizer).__name__, rules, [getattr(tokenizer, name, None) for name in names]]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
