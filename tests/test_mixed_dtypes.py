"""Models whose weights have several dtypes: refused in one line before anything changes, unless they run with them."""

import pytest
import tiny
import torch

from fwanda_pruner import UserError, collect, evaluate_model, prune

TEXT = tiny.tokens(16, 24)
QUIET = {"progress": False, "calibration": TEXT, "guard": "none"}


def mixed(change) -> torch.nn.Module:
    model = tiny.llama()
    change(model)
    return model


RUN_NOT = {
    "norm": lambda model: (model.bfloat16(), model.model.layers[1].input_layernorm.float()),
    "embedding": lambda model: (model.bfloat16(), model.model.embed_tokens.float()),
    "block": lambda model: model.model.layers[1].bfloat16(),
    "matrix": lambda model: model.model.layers[0].mlp.up_proj.half(),
}
CALLS = {
    "prune": lambda model: prune(model, **QUIET, method="sparsegpt"),
    "collect": lambda model: collect(model, calibration=TEXT, progress=False),
    "evaluate": lambda model: evaluate_model(model, eval=TEXT, progress=False),
}


@pytest.mark.fault("several dtypes")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("part", RUN_NOT)
def test_a_model_that_does_not_run_with_its_dtypes_is_one_line(part, call):
    model, before = mixed(RUN_NOT[part]), mixed(RUN_NOT[part])
    with pytest.raises(UserError) as error:
        CALLS[call](model)
    message = str(error.value)
    assert message.startswith("the weights have 2 dtypes (model.embed_tokens.weight is ") and "\n" not in message
    assert "; convert all to one, e.g. by model.to(torch." in message
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


def cast_norm(model: torch.nn.Module) -> None:
    """Makes the last norm compute in fp64, and return fp32."""
    model.model.norm.double().register_forward_hook(lambda _module, _args, output: output.float())


@pytest.mark.fault("several dtypes")
@pytest.mark.parametrize("method", ["wanda", "fwanda", "sparsegpt", "fsparsegpt"])
def test_a_model_that_casts_between_its_dtypes_is_pruned(method):
    model = mixed(cast_norm)
    assert prune(model, method=method, eval=TEXT, **QUIET).sparsity["matrices"] == 0.5
    assert model.model.norm.weight.dtype == torch.float64


@pytest.mark.fault("several dtypes")
def test_matrices_of_several_dtypes_are_one_line_even_if_the_model_casts_between_them():
    def cast(model):
        layer = model.model.layers[1].mlp.up_proj.bfloat16()
        layer.register_forward_pre_hook(lambda _module, args: (args[0].bfloat16(),))
        layer.register_forward_hook(lambda _module, _args, output: output.float())

    with pytest.raises(UserError, match=r"^the matrices to prune have 2 dtypes \(model.layers.0.*is float32, .*; conv"):
        prune(mixed(cast), **QUIET, method="wanda")
    report = prune(mixed(cast), **QUIET, method="wanda", order="sequential", exclude=["*layers.1.mlp.up_proj"])
    assert report.sparsity["matrices"] == 0.5
