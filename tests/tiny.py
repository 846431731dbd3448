"""Tiny random models of every family, tokenizers, text and token ids: what the tests of the pruner run on.

`llama()` is the model of most tests; `build("mixtral")` makes any family of `FAMILIES`, `EXPERTS` or `MULTIMODAL`.
"""

import json
import random
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import fwanda_pruner
from fwanda_pruner.methods_table import METHODS
from fwanda_pruner.model.targets import find_targets

VOCABULARY = 64

# Models

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {  # name: (model class, config class, config, matrices in a block)
    "mistral": ("MistralForCausalLM", "MistralConfig", {**SIZES, "sliding_window": 8}, 7),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", SIZES, 7),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**SIZES, "head_dim": 8}, 7),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**SIZES, "head_dim": 8, "sliding_window": 8}, 7),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**SIZES, "head_dim": 8, "sliding_window": 8}, 7),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**SIZES, "pad_token_id": 0, "eos_token_id": 2}, 4),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**GPT, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
        6,
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **ENDS},
        4,
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**GPT, "intermediate_size": 48}, 4),
    "falcon": ("FalconForCausalLM", "FalconConfig", GPT, 4),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}, 4),
}

# transformers 5 fuses the experts of these into 3-D parameters, where 4 has lists of linear layers
MOE = {**SIZES, "num_experts_per_tok": 2}
QWEN_MOE = {**MOE, "num_experts": 4, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
EXPERTS = {  # name: (model class, config class, config, weights of the matrices in a block, its routers)
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**MOE, "num_local_experts": 4}, 3072 + 4 * 4608, 1),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**QWEN_MOE, "shared_expert_intermediate_size": 16},
        3072 + 5 * 1536,
        2,
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**QWEN_MOE, "head_dim": 8}, 3072 + 4 * 1536, 1),
    "olmoe": (
        "OlmoeForCausalLM",
        "OlmoeConfig",
        {**MOE, "num_experts": 4, "pad_token_id": 0, "eos_token_id": 2},
        3072 + 4 * 4608,
        1,
    ),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", {**MOE, "num_local_experts": 4}, 3072 + 4 * 4608, 1),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**MOE, "head_dim": 8, "num_local_experts": 4, "sliding_window": 8},
        3072 + 4 * 4608,
        1,
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **MOE, "num_experts_per_tok": 1, "head_dim": 8, "num_local_experts": 4, "interleave_moe_layer_step": 1,
            "attention_chunk_size": 64,
        },
        3072 + 5 * 4608,
        1,
    ),
    "jetmoe": (
        "JetMoeForCausalLM",
        "JetMoeConfig",
        {
            "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "kv_channels": 8,
            "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2,
        },
        1024 + 4 * 1024 + 4 * 4608,
        2,
    ),
}  # fmt: skip
FUSED = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"] if transformers.__version__ >= "5" else []
FUSED += ["granitemoe", "gpt_oss", "llama4", "jetmoe"]

VISION = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


# Newer versions of transformers store several linear layers of these as one matrix
JOINED = {  # name: (model class, config class, config)
    "sarvam_moe": (
        "Glm4MoeForCausalLM",
        "SarvamMoEConfig",
        {**MOE, "head_dim": 8, "n_routed_experts": 4, "moe_intermediate_size": 16, "max_position_embeddings": 64},
    ),
    "hrm_text": ("HrmTextForCausalLM", "HrmTextConfig", {**SIZES, "head_dim": 8, "max_position_embeddings": 64}),
}


def scaled(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Three times the weights: far from the even predictions, and the undecided routers, of a fresh model."""
    for parameter in model.parameters():  # not model.to(): the rotary frequencies stay fp32, as after loading
        parameter.data = parameter.data.mul(3).to(dtype)
    return model.eval()


def llama(*, blocks: int = 2, seed: int = 0, dtype=torch.float32, **overrides) -> LlamaForCausalLM:
    """A random Llama with grouped-query attention: hidden 32, FFN 48, 4 heads, 2 key-value heads."""
    torch.manual_seed(seed)
    settings = {
        "num_hidden_layers": blocks,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        **ENDS,
    }
    return scaled(LlamaForCausalLM(LlamaConfig(**{**SIZES, **settings, **overrides})), dtype)


def llava():
    vision, text = transformers.CLIPVisionConfig(**VISION), transformers.LlamaConfig(**SIZES)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=5)
    return transformers.LlavaForConditionalGeneration(config)


def gemma3_vision():
    text = {**SIZES, "head_dim": 8, "sliding_window": 8}
    config = transformers.Gemma3Config(
        vision_config=VISION, text_config=text, image_token_index=5, mm_tokens_per_image=4
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def qwen2_5_vl():
    vision = {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 32}
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    text = {**SIZES, "rope_scaling": rope, "bos_token_id": 1, "eos_token_id": 2}
    special = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = transformers.Qwen2_5_VLConfig(
        vision_config=vision, text_config=text, **dict(zip(special, range(4, 8), strict=True))
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def mllama():
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_global_layers": 1,
        "attention_heads": 4, "image_size": 28, "patch_size": 14, "vision_output_dim": 64,
        "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]],
    }  # fmt: skip
    text = {**SIZES, "num_hidden_layers": 3, "cross_attention_layers": [1]}
    text |= {"rope_scaling": {"rope_type": "default"}, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.MllamaConfig(vision_config=vision, text_config=text)
    return transformers.MllamaForConditionalGeneration(config)


MULTIMODAL = {"llava": llava, "gemma3_vision": gemma3_vision, "qwen2_5_vl": qwen2_5_vl, "mllama": mllama}
WITH_TEXT = [name for name in MULTIMODAL if name != "mllama"]


def build(family: str, dtype=torch.float32) -> nn.Module:
    """A random model of a family by its name in FAMILIES, EXPERTS, JOINED or MULTIMODAL."""
    torch.manual_seed(0)
    if family in MULTIMODAL:
        return MULTIMODAL[family]().to(dtype).eval()
    model_class, config_class, settings = (FAMILIES | EXPERTS | JOINED)[family][:3]
    config = getattr(transformers, config_class)(**settings)
    return scaled(getattr(transformers, model_class)(config), dtype)


# Tokenizers, text and token ids

WORDS = "the quick brown fox jumps over the lazy dog and runs home before the rain".split()


def tokenizer(*, turned: bool = False) -> PreTrainedTokenizerFast:
    """One token a word: w3 ... w63, with <unk>, <s> and </s> before them; turned: w63 ... w3."""
    names = [f"w{i}" for i in range(3, VOCABULARY)]
    words = ["<unk>", "<s>", "</s>", *(reversed(names) if turned else names)]
    base = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=base, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@lru_cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
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


def text(words: int, seed: int = 0) -> str:
    """That many random words."""
    draw = random.Random(seed)
    return " ".join(f"w{draw.randrange(3, VOCABULARY)}" for _ in range(words))


def text_file(folder: Path) -> str:
    """A file of one document, 2,000 random words."""
    path = folder / "text.txt"
    path.write_text(text(2000))
    return str(path)


def guard_file(folder: Path) -> str:
    """A file of 30 other documents, one a line."""
    path = folder / "guard.jsonl"
    path.write_text("".join(json.dumps({"text": text(40, seed=i)}) + "\n" for i in range(30)))
    return str(path)


def sentences(count: int, words: int = 12) -> list[str]:
    """Different lines of text, the same on every call."""
    return [" ".join(WORDS[(i * i + 3 * j + i) % len(WORDS)] for j in range(words)) + f" {i}\n" for i in range(count)]


def tokens(samples: int, length: int, seed: int = 0) -> torch.Tensor:
    """[samples, length] int64 random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (samples, length), generator=generator)


TEXT = tokens(6, 24).clamp(min=9)  # the ids below stand for images in the multimodal models

# Runs

EVERY_RUN = [  # (method, allocation, order)
    (method, allocation, order)
    for method, facts in METHODS.items()
    for allocation in facts.allocations
    for order in (("onepass",) if method == "magnitude" else ("onepass", "sequential"))
]
RUNS = [  # of each family
    {"method": "fwanda", "allocation": "global", "order": "onepass"},
    {"method": "wanda", "order": "sequential"},
    {"method": "sparsegpt", "order": "sequential"},
]


def prune(model, **settings):
    """Prune half of a family's model, calibrated on TEXT."""
    return fwanda_pruner.prune(model, calibration=TEXT, progress=False, **{"sparsity": 0.5, **settings})


def trained(model, windows: torch.Tensor, steps: int = 60):
    """The model after it has learnt windows [S, L] by heart, so that pruning can damage it."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        model(windows, labels=windows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def run_name(settings) -> str:
    return "-".join(settings.values())


def check_counts(model, report) -> list:
    """Count the zeros of every pruned matrix in the weights themselves; returns the rows of the report."""
    rows = [row for row in report.matrices if row.skipped is None]
    targets = find_targets(model)[0]
    assert [row.name for row in rows] == [target.name for target in targets]
    for row, target in zip(rows, targets, strict=True):
        assert row.shape == tuple(target.weight.shape) and row.asked == row.kept
        assert int((target.weight == 0).sum()) == row.numel - row.asked + row.kept_zero
    assert report.sparsity["asked"] == pytest.approx(0.5, abs=1e-3)
    return rows
