"""Tiny random models, a tiny tokenizer and text, for the tests of the pruner."""

import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 64


def llama(*, blocks: int = 2, seed: int = 0, dtype=torch.float32, **overrides) -> LlamaForCausalLM:
    """A random Llama with grouped-query attention: hidden 32, FFN 48, 4 heads, 2 key-value heads."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": blocks,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **overrides,
        }
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # not model.to(): the rotary frequencies stay fp32, as after loading
        parameter.data = parameter.data.mul(3).to(dtype)  # far from the even predictions of a fresh model
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: w3 ... w63, with <unk>, <s> and </s> before them."""
    words = ["<unk>", "<s>", "</s>"] + [f"w{i}" for i in range(3, VOCABULARY)]
    base = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=base, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def text(words: int, seed: int = 0) -> str:
    """That many random words."""
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(3, VOCABULARY)}" for _ in range(words))


def tokens(samples: int, length: int, seed: int = 0) -> torch.Tensor:
    """[samples, length] int64 random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (samples, length), generator=generator)
