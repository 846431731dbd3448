"""Model families by tiny random configurations: what is a target, and exact counts in one pass and block by block."""

import pytest
import tiny
import torch
import transformers

import fwanda_pruner

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GPT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {  # name: (model class, config class, config, matrices in a block)
    "mistral": ("MistralForCausalLM", "MistralConfig", {**SIZES, "sliding_window": 8}, 7),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", SIZES, 7),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**SIZES, "head_dim": 8}, 7),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**SIZES, "head_dim": 8, "sliding_window": 8}, 7),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**SIZES, "head_dim": 8, "sliding_window": 8}, 7),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**SIZES, "pad_token_id": 0}, 4),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**GPT, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
        6,
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        4,
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**GPT, "intermediate_size": 48}, 4),
    "falcon": ("FalconForCausalLM", "FalconConfig", GPT, 4),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}, 4),
}


def build(family: str):
    model_class, config_class, settings, matrices = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**settings)
    return getattr(transformers, model_class)(config).eval(), matrices


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "fwanda", "allocation": "global", "order": "onepass"},
        {"method": "wanda", "order": "sequential"},
        {"method": "sparsegpt", "order": "sequential"},
    ],
    ids=lambda s: f"{s['method']}-{s['order']}",
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_of_a_block_is_pruned_exactly(family, settings):
    model, matrices = build(family)
    embedding = model.get_input_embeddings().weight.detach().clone()
    report = fwanda_pruner.prune(model, sparsity=0.5, calibration=tiny.tokens(3, 24), progress=False, **settings)
    assert len(report.matrices) == 2 * matrices and all(row.skipped is None for row in report.matrices)
    assert report.sparsity["asked"] == report.sparsity["matrices"] == pytest.approx(0.5, abs=1e-3)
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert torch.isfinite(model(tiny.tokens(1, 24)).logits).all()
