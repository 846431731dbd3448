"""A tokenizer and a model small enough to be made inside a test."""

from functools import lru_cache

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = "the quick brown fox jumps over the lazy dog and runs home before the rain".split()


def sentences(count: int, words: int = 12) -> list[str]:
    """Different lines of text, the same on every call."""
    return [" ".join(WORDS[(i * i + 3 * j + i) % len(WORDS)] for j in range(words)) + f" {i}\n" for i in range(count)]


@lru_cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with BOS id 0, which it adds unless add_special_tokens=False."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sentences(50), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


def tiny_llama(seed: int = 0, vocab_size: int = 300) -> LlamaForCausalLM:
    """Two random fp32 Llama blocks in evaluation mode, with weights large enough for losses that differ."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=0,
    )
    return LlamaForCausalLM(config).eval()
