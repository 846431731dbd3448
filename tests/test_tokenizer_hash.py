"""The hash that tells one tokenizer from another."""

import pytest
import tiny
from transformers import AutoTokenizer

from fwanda_pruner.text.tokenizer_hash import tokenizer_sha256


class Words:
    """A tokenizer without a fast backend: one token a character."""

    bos_token_id = None

    def __init__(self, first: int = 0):
        self.first = first

    def __call__(self, text, **_options):
        return {"input_ids": [self.first + ord(character) % 60 for character in text]}


def test_a_tokenizer_keeps_its_hash_through_calls_and_files(tmp_path):
    tokenizer = tiny.byte_tokenizer()
    before = tokenizer_sha256(tokenizer)
    tokenizer(["a", "bcd"], truncation=True, max_length=2)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert before == tokenizer_sha256(tokenizer) == tokenizer_sha256(loaded)
    assert tokenizer_sha256(None) is None and tokenizer_sha256(Words()) == tokenizer_sha256(Words())


CHANGES = {
    "token": lambda tokenizer: tokenizer.add_tokens(["new"]),
    "BOS": lambda tokenizer: setattr(tokenizer, "bos_token", "a"),
    "chat template": lambda tokenizer: setattr(tokenizer, "chat_template", "{{ messages }}"),
}


@pytest.mark.fault("other model")
@pytest.mark.parametrize("change", CHANGES)
def test_the_hash_changes_with_what_decides_tokens(change, tmp_path):
    tiny.byte_tokenizer().save_pretrained(tmp_path)
    one, other = (AutoTokenizer.from_pretrained(tmp_path) for _ in range(2))
    CHANGES[change](other)
    assert tokenizer_sha256(one) != tokenizer_sha256(other)


def test_the_hash_tells_vocabularies_and_classes_apart():
    tokenizers = [tiny.tokenizer(), tiny.tokenizer(turned=True), tiny.byte_tokenizer(), Words(), Words(1)]
    assert len(set(map(tokenizer_sha256, tokenizers))) == len(tokenizers)
