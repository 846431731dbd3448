"""A model whose config asks for plain tuples (return_dict=False) is pruned and measured like any other."""

import pytest
import tiny
import torch

import fwanda_pruner

pytestmark = [pytest.mark.fault("tuple outputs"), pytest.mark.filterwarnings("ignore::UserWarning")]
TOKENS = tiny.tokens(16, 24)


@pytest.mark.parametrize("family", ["llama", "opt"])
@pytest.mark.parametrize("method", ["wanda", "fwanda", "sparsegpt"])
def test_every_method_gives_the_same_weights_and_the_config_is_kept(method, family):
    models = [tiny.llama() if family == "llama" else tiny.build(family) for _ in range(2)]
    models[0].config.return_dict = False
    for model in models:
        fwanda_pruner.prune(model, None, method=method, calibration=TOKENS, eval=tiny.tokens(2, 24), progress=False)
    assert models[0].config.return_dict is False
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_text_that_the_model_writes_is_the_same():
    found = []
    for asks in (False, True):
        model = tiny.llama()
        model.config.return_dict = asks
        fwanda_pruner.prune(
            model, tiny.tokenizer(), method="wanda", calibration="self", nsamples=16, seqlen=24, progress=False
        )
        found.append(model.state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
