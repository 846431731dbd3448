"""What is a target in each family of models, and exact counts in one pass and block by block."""

import pytest
import tiny
import torch
import transformers
from tiny import FAMILIES, RUNS, TEXT, WITH_TEXT, build, check_counts, prune, run_name

import fwanda_pruner
from fwanda_pruner import UserError
from fwanda_pruner.model.load import load_model
from fwanda_pruner.model.targets import find_blocks, find_targets
from fwanda_pruner.run.bench import decode_steps


@pytest.mark.fault("model classes")
@pytest.mark.parametrize("settings", RUNS, ids=run_name)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_linear_layer_of_a_block_is_pruned_exactly(family, settings):
    model = build(family)
    embedding = model.get_input_embeddings().weight.detach().clone()
    report = prune(model, **settings)
    assert len(report.matrices) == 2 * FAMILIES[family][3] and all(row.skipped is None for row in report.matrices)
    check_counts(model, report)
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert torch.isfinite(model(tiny.tokens(1, 24)).logits).all()


@pytest.mark.fault("model classes")
def test_a_model_that_changes_its_embeddings_in_place_is_pruned():
    sizes = {"n_embd": 32, "dff": 48, "n_layer": 2, "n_head": 4, "vocab_size": 67, "n_positions": 64}
    model = transformers.CTRLLMHeadModel(transformers.CTRLConfig(**sizes)).eval()
    report = prune(model, method="fwanda")
    assert len(report.matrices) == 2 * 6 and report.sparsity["matrices"] == 0.5


@pytest.mark.fault("model classes")
@pytest.mark.parametrize("method", ["sparsegpt", "fsparsegpt"])
def test_a_model_whose_blocks_return_lists_is_pruned_block_by_block(method):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 67, "n_positions": 64}
    model = transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**sizes)).eval()
    assert prune(model, method=method).sparsity["matrices"] == 0.5
    with pytest.raises(UserError, match="OpenAIGPTLMHeadModel returns no past_key_values, so it cannot write text"):
        fwanda_pruner.prune(model, tiny.tokenizer(), calibration="self", nsamples=2, seqlen=8, progress=False)
    with pytest.raises(UserError, match="OpenAIGPTLMHeadModel returns no past_key_values, so its decoding cannot be"):
        decode_steps(model, TEXT[:1])


@pytest.mark.fault("model classes")
def test_hidden_states_of_another_order_are_refused_in_one_line():
    sizes = {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "vocab_size": 67}
    model = transformers.XLNetLMHeadModel(transformers.XLNetConfig(**sizes)).eval()
    with pytest.raises(
        UserError, match=r"^XLNetLMHeadModel cannot be run block by block.* is \[24, 1, 32\], not \[B, L, H\]"
    ):
        prune(model, method="sparsegpt")


@pytest.mark.fault("model classes")
@pytest.mark.parametrize("method", ["wanda", "fwanda"])
def test_a_model_that_changes_its_weights_while_it_runs_is_refused(method):
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 67, "context_length": 64}
    model = transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes, rescale_every=2)).eval()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(UserError, match="divides its weights by powers of 2 while it runs; set rescale_every to 0"):
        prune(model, method=method)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    plain = transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes, rescale_every=0)).eval()
    weights = {name: p.clone() for name, p in plain.named_parameters()}
    assert prune(plain, method=method).sparsity["matrices"] == 0.5
    assert all(torch.equal(p[p != 0], weights[name][p != 0]) for name, p in plain.named_parameters())


@pytest.mark.fault("model classes")
def test_an_unused_setting_of_rwkv_that_divides_weights_is_refused_before_packing():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 67, "context_length": 64}
    model = transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes, rescale_every=6)).eval()
    with pytest.raises(UserError, match="set rescale_every to 0 in its config.json"):
        fwanda_pruner.pack_(model, force=True)


@pytest.mark.fault("model classes")
@pytest.mark.parametrize("method", ["wanda", "fwanda"])
def test_a_model_whose_logits_need_more_than_hidden_states_is_one_line(method):
    sizes = {"hidden_size": 32, "num_decoder_layers": 2, "num_decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    config = transformers.ProphetNetConfig(**sizes, vocab_size=67, max_position_embeddings=64, is_decoder=True)
    model = transformers.ProphetNetForCausalLM(config).eval()
    with pytest.raises(
        UserError, match="no loss can be computed from the hidden states of ProphetNetForCausalLM .*--method magnitude"
    ):
        prune(model, method=method)


class GroupedLinear(torch.nn.Linear):
    """Two groups of inputs, each with its own half of the outputs: DeepSeek-V4 has such a layer."""

    def forward(self, x):
        groups = x.reshape(-1, 2, self.in_features).transpose(0, 1)
        y = torch.bmm(groups, self.weight.view(2, -1, self.in_features).transpose(1, 2)).transpose(0, 1)
        return y.reshape(*x.shape[:-2], -1, self.out_features)


class GroupedOutput(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.grouped = GroupedLinear(size // 2, size, bias=False)

    def forward(self, x):
        return self.grouped(x.unflatten(-1, (2, -1))).squeeze(-2)


@pytest.mark.fault("model classes")
@pytest.mark.parametrize("method", ["wanda", "fwanda"])
def test_a_layer_that_is_not_linear_stays_dense_and_is_listed(method, tmp_path):
    model = tiny.llama()
    for block in model.model.layers:
        block.self_attn.o_proj = GroupedOutput(32)
    before = [block.self_attn.o_proj.grouped.weight.clone() for block in model.model.layers]
    report = prune(model, method=method, save="packed")
    skipped = {row.name: row.skipped for row in report.matrices if row.skipped}
    why = "a GroupedLinear, which computes something else than a linear layer"
    assert skipped == {f"model.layers.{block}.self_attn.o_proj.grouped": why for block in (0, 1)}
    check_counts(model, report)
    after = [block.self_attn.o_proj.grouped.weight for block in model.model.layers]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    fwanda_pruner.pack_(model)
    assert torch.isfinite(model(tiny.tokens(1, 8)).logits).all()


@pytest.mark.fault("model classes")
def test_a_larger_vision_tower_of_a_language_model_is_not_pruned():
    vision = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.GitConfig(**sizes, vocab_size=67, vision_config=vision, num_image_with_embedding=None)
    model = transformers.GitForCausalLM(config).eval()
    report = prune(model, method="fwanda")
    assert len(report.matrices) == 2 * 6 and all("git.encoder.layer." in row.name for row in report.matrices)
    assert report.sparsity["matrices"] == 0.5


class Observed(torch.nn.Linear):
    """Keeps the largest input in a buffer, and the shapes of its inputs in a list."""

    def __init__(self, *sizes):
        super().__init__(*sizes, bias=False)
        self.register_buffer("largest", torch.zeros(()))
        self.shapes = []

    def forward(self, x):
        self.largest = torch.maximum(self.largest, x.abs().amax())
        self.shapes.append(x.shape)
        return super().forward(x)


@pytest.mark.fault("model classes")
@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_a_layer_that_observes_its_inputs_is_pruned_and_sees_no_trial(method):
    model = tiny.llama()
    for block in model.model.layers:
        block.mlp.up_proj = Observed(32, 48)
    layer = model.model.layers[0].mlp.up_proj
    find_targets(model)
    assert layer.shapes == [] and layer.largest == 0 and not layer.largest.is_meta
    assert prune(model, method=method, no_check=True).sparsity["matrices"] == 0.5
    assert torch.isfinite(model(tiny.tokens(1, 8)).logits).all() and not layer.largest.is_meta


@pytest.mark.fault("model classes")
def test_blocks_are_found_where_the_config_of_the_language_model_itself_is_named_after_audio():
    class AudioChatConfig(transformers.LlamaConfig):
        pass

    model = transformers.LlamaForCausalLM(AudioChatConfig(**tiny.SIZES))
    model.audio_tower = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(4))
    assert find_blocks(model)[0] == "model.layers"


class ForgetfulLlama(transformers.LlamaForCausalLM):
    """A model that cannot go on from what it has read."""

    def forward(self, *args, past_key_values=None, use_cache=None, **kwargs):
        if use_cache:
            raise IndexError("index -1 is out of bounds")
        return super().forward(*args, use_cache=False, **kwargs)


@pytest.mark.fault("model classes")
def test_a_model_that_writes_no_text_is_named_in_one_line():
    model = tiny.llama()
    model.__class__ = ForgetfulLlama
    settings = {"method": "wanda", "calibration": "self", "nsamples": 2, "seqlen": 8, "progress": False}
    with pytest.raises(
        UserError, match=r"^ForgetfulLlama cannot write text token by token \(index -1 is out of bounds"
    ):
        fwanda_pruner.prune(model, tiny.tokenizer(), **settings)


# Multimodal models


@pytest.mark.fault("model classes")
@pytest.mark.parametrize("settings", RUNS, ids=run_name)
@pytest.mark.parametrize("family", WITH_TEXT)
def test_only_the_language_model_of_a_multimodal_one_is_pruned(family, settings, tmp_path):
    model = build(family)
    before = {name: p.clone() for name, p in model.named_parameters()}
    report = prune(model, **settings)
    rows = check_counts(model, report)
    assert all(row.name.startswith("model.language_model.layers.") for row in rows) and len(rows) == 14
    changed = {name for name, p in model.named_parameters() if not torch.equal(before[name], p)}
    assert changed and all(".language_model.layers." in name for name in changed)
    left = {row.name: row.numel for row in report.matrices if row.skipped is not None}
    vision = sum(p.numel() for name, p in model.named_parameters() if "language_model" not in name)
    heads = sum(p.numel() for p in model.get_output_embeddings().parameters())
    assert sum(left.values()) in (vision, vision - heads) and 1 <= len(left) <= 2
    fwanda_pruner.save_pruned(model, None, report, tmp_path / "out")
    loaded = load_model(str(tmp_path / "out"), device="cpu").model
    assert type(loaded) is type(model) and torch.equal(loaded(TEXT).logits, model(TEXT).logits)
    assert "AutoModelForImageTextToText" in (tmp_path / "out" / "README.md").read_text()


def test_a_family_that_needs_images_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"does not run model\.language_model\.layers\.1 on text alone") as error:
        prune(build("mllama"), method="wanda")
    assert "\n" not in str(error.value)
    report = prune(build("mllama"), method="wanda", exclude=["*.layers.1.*"])
    assert report.sparsity["asked"] == 0.5


def test_settings_of_the_image_processor_are_kept(tmp_path):
    model = build("llava")
    model.save_pretrained(tmp_path / "in")
    (tmp_path / "in" / "preprocessor_config.json").write_text('{"size": 28}')
    model, _ = load_model(str(tmp_path / "in"), device="cpu")
    fwanda_pruner.save_pruned(model, None, prune(model, method="magnitude"), tmp_path / "out")
    assert (tmp_path / "out" / "preprocessor_config.json").read_text() == '{"size": 28}'
