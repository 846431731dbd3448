"""A model that returns tuples, always or because its config asks for them, is pruned like one with named outputs."""

import pytest
import tiny
import torch
import transformers

import fwanda_pruner
from fwanda_pruner import UserError

pytestmark = [pytest.mark.fault("tuple outputs"), pytest.mark.filterwarnings("ignore::UserWarning")]


class TupleLlama(transformers.LlamaForCausalLM):
    """A model whose outputs never have names."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs).to_tuple()


def assert_same_weights(one, other):
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt", "fwanda"])
@pytest.mark.parametrize("family", ["gpt2", "qwen2", "opt", "gemma3_vision"])
def test_return_dict_false_changes_no_weight_and_stays(family, method):
    plain, tuples = tiny.build(family), tiny.build(family)
    for config in {id(c): c for c in (tuples.config, tuples.config.get_text_config())}.values():
        config.return_dict = False
    plain_report, report = (tiny.prune(model, method=method, eval=tiny.tokens(2, 24)) for model in (plain, tuples))
    assert_same_weights(plain, tuples)
    assert report.perplexity == plain_report.perplexity and tuples.config.return_dict is False


def test_return_dict_false_changes_no_text_that_the_model_writes():
    models = [tiny.llama() for _ in range(2)]
    models[1].config.return_dict = False
    for model in models:
        fwanda_pruner.prune(
            model, tiny.tokenizer(), method="wanda", calibration="self", nsamples=16, seqlen=24, progress=False
        )
    assert_same_weights(*models)


@pytest.mark.parametrize("method", ["wanda", "sparsegpt", "fwanda"])
def test_a_model_that_always_returns_tuples_is_pruned_as_one_with_names(method):
    plain, tuples = tiny.llama(), tiny.llama()
    tuples.__class__ = TupleLlama
    reports = [tiny.prune(model, method=method) for model in (plain, tuples)]
    assert reports[0].domains == reports[1].domains
    assert_same_weights(plain, tuples)


def test_a_model_that_always_returns_tuples_writes_no_text():
    model = tiny.llama()
    model.__class__ = TupleLlama
    with pytest.raises(UserError, match="TupleLlama returns a tuple without logits, so it cannot write text"):
        fwanda_pruner.prune(
            model, tiny.tokenizer(), method="wanda", calibration="self", nsamples=2, seqlen=8, progress=False
        )
