"""prune() refuses weights, statistics, models and text that it cannot use, in one line that names them."""

import pytest
import tiny
import torch

import fwanda_pruner
from fwanda_pruner import PruneConfig, UserError

TOKENS = tiny.tokens(5, 24)


def prune(model, **settings):
    return fwanda_pruner.prune(model, calibration=TOKENS, progress=False, **settings)


@pytest.mark.fault("not finite")
def test_nan_in_a_weight_is_named():
    model = tiny.llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    with pytest.raises(UserError, match=r"model.layers.1.mlp.up_proj.weight has NaN or inf"):
        prune(model, method="magnitude")


@pytest.mark.fault("not finite")
@pytest.mark.parametrize("name", ["lm_head", "model.norm", "model.layers.0.input_layernorm"])
def test_nan_outside_the_targets_is_named_too(name):
    model = tiny.llama(tie_word_embeddings=False)
    model.get_submodule(name).weight.data.view(-1)[0] = float("nan")
    with pytest.raises(UserError, match=f"{name}.weight has NaN or inf"):
        prune(model, method="magnitude")


@pytest.mark.fault("not finite")
def test_nan_in_statistics_is_named():
    model = tiny.llama()
    model.model.layers[0].mlp.up_proj.weight.data *= 1e37
    with pytest.raises(UserError, match=r"down_proj\.x2 has NaN or inf"):
        prune(model, method="wanda")


def test_statistics_of_another_model_are_refused():
    statistics = fwanda_pruner.collect(tiny.llama(), config=PruneConfig(), calibration=TOKENS, progress=False)
    with pytest.raises(UserError, match="are of another model"):
        fwanda_pruner.prune(tiny.llama(hidden_size=64), statistics=statistics, method="wanda", progress=False)


def test_statistics_of_another_model_of_the_same_shape_are_refused():
    statistics = fwanda_pruner.collect(tiny.llama(), config=PruneConfig(), calibration=TOKENS, progress=False)
    with pytest.raises(UserError, match="are of another model"):
        fwanda_pruner.prune(tiny.llama(seed=1), statistics=statistics, method="wanda", progress=False)


@pytest.mark.fault("other model")
@pytest.mark.parametrize("part", ["embedding", "norm", "head", "one weight", "rms_norm_eps", "rope"])
def test_statistics_of_a_model_that_differs_in_one_part_are_refused(part):
    def make():
        return tiny.llama(tie_word_embeddings=False)

    statistics = fwanda_pruner.collect(make(), calibration=TOKENS, progress=False)
    model = make()
    if part == "rms_norm_eps":
        model.config.rms_norm_eps = 1e-2
    elif part == "rope":
        model.config.rope_parameters = {"rope_type": "default", "rope_theta": 123.0}
    else:
        modules = {"embedding": model.model.embed_tokens, "norm": model.model.layers[1].input_layernorm}
        modules |= {"head": model.lm_head, "one weight": model.model.layers[0].mlp.up_proj}
        modules[part].weight.data.view(-1)[3] += 1e-3
    with pytest.raises(UserError, match="are of another model"):
        fwanda_pruner.prune(model, statistics=statistics, method="wanda", progress=False)


@pytest.mark.fault("odd config")
def test_an_attention_without_a_backward_pass_is_refused_before_any_pass():
    model = tiny.llama(attn_implementation="flex_attention")
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    line = "flex_attention has no backward pass on a CPU, which .* needs; use a GPU, or take attn_implementation out"
    for settings in ({"method": "fwanda"}, {"method": "fwanda", "allocation": "response"}, {"method": "fsparsegpt"}):
        with pytest.raises(UserError, match=line):
            prune(model, guard="none", **settings)
    with pytest.raises(UserError, match=line):
        fwanda_pruner.collect(model, calibration=TOKENS, progress=False)


def test_an_attention_without_a_backward_pass_serves_methods_that_need_none():
    model = tiny.llama(attn_implementation="flex_attention")
    assert prune(model, method="wanda", guard="none").sparsity["matrices"] == 0.5


def test_blocks_whose_arguments_depend_on_the_tokens_are_refused():
    model = tiny.llama()

    embed = model.model.embed_tokens
    embed.register_forward_hook(lambda _m, _i, out: setattr(model, "seen", out.sum()))
    for block in model.model.layers:
        block.register_forward_pre_hook(lambda _m, a, k: (a, {**k, "extra": model.seen}), with_kwargs=True)
    with pytest.raises(UserError, match="the arguments of its blocks depend on the tokens"):
        prune(model, method="wanda", order="sequential")


def test_blocks_that_are_no_plain_chain_are_refused():
    model = tiny.llama()
    model.model.layers[1].register_forward_pre_hook(
        lambda _m, args, kwargs: ((args[0] * 2, *args[1:]), kwargs), with_kwargs=True
    )
    with pytest.raises(UserError, match="takes more than the output of the one before it"):
        prune(model, method="sparsegpt")


@pytest.mark.fault("untruncated text")
def test_windows_longer_than_learned_positions_are_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=16, vocab_size=64)).eval()
    with pytest.raises(UserError, match="has 16 positions, got windows of 24"):
        prune(model, method="wanda")
    report = fwanda_pruner.prune(model, method="sparsegpt", calibration=tiny.tokens(3, 16), progress=False)
    assert report.sparsity["matrices"] == 0.5 and len(report.matrices) == 4


def test_token_ids_beyond_the_vocabulary_are_refused():
    with pytest.raises(UserError, match=r"token ids must be in \[0, 64\)"):
        fwanda_pruner.prune(tiny.llama(), method="wanda", calibration=TOKENS + 60, progress=False)


@pytest.mark.fault("unused statistics")
@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"method": "sparsegpt"},
            "sparsegpt measures its own sums block by block, so it uses no statistics; leave them",
        ),
        ({"method": "fsparsegpt", "pattern": "2:4"}, "fsparsegpt with --pattern 2:4 measures its own sums"),
        ({"method": "wanda", "order": "sequential"}, "wanda with --order sequential measures .* or --order"),
        ({"method": "magnitude"}, "magnitude reads no text, so it uses no statistics"),
    ],
)
def test_statistics_that_nothing_reads_are_refused_for_what_was_set(settings, message):
    statistics = fwanda_pruner.collect(tiny.llama(), calibration=TOKENS, progress=False)
    with pytest.raises(UserError, match=message) as error:
        fwanda_pruner.prune(tiny.llama(), statistics=statistics, progress=False, **settings)
    assert ("--order" in str(error.value)) == ("order" in settings)


@pytest.mark.fault("unused statistics")
def test_statistics_leave_the_order_of_the_method_alone():
    """F-SparseGPT takes omega from them, and measures its Hessians behind the pruned blocks as without them."""
    statistics = fwanda_pruner.collect(tiny.llama(), calibration=TOKENS, progress=False)
    for method, order in (("fsparsegpt", "sequential"), ("fwanda", "onepass")):
        plain, given = tiny.llama(), tiny.llama()
        settings = {"method": method, "calibration": TOKENS, "progress": False}
        fwanda_pruner.prune(plain, **settings)
        report = fwanda_pruner.prune(given, statistics=statistics, **settings)
        assert report.config["order"] == order
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), given.parameters(), strict=True))
