"""2:4 models on torch's semi-structured tensors: what is refused, and, on a GPU, what they compute."""

import pytest
import tiny
import torch
from torch.nn.functional import linear

import fwanda_kernels as fk
from fwanda_kernels.testing import make_weight
from fwanda_pruner import UserError, pack_, to_semi_structured
from fwanda_pruner.model.semi_structured import as_cutlass
from fwanda_pruner.model.targets import find_targets

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def pruned(dtype=torch.bfloat16, **sizes) -> torch.nn.Module:
    model = tiny.llama(**sizes).to(dtype).eval()
    for target in find_targets(model)[0]:
        fk.nm_prune_(target.module.weight.data, torch.ones(target.shape[1]), 2, 4)
    return model


def weights(model) -> list[torch.Tensor]:
    return [target.weight.clone() for target in find_targets(model)[0]]


def refusal(model, **arguments) -> str:
    before = weights(model)
    with pytest.raises(UserError) as error:
        to_semi_structured(model, **arguments)
    assert all(map(torch.equal, weights(model), before)) and "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(32, 64), (96, 320)], ids=str)
def test_the_form_of_cutlass_gives_every_weight_back(shape, dtype):
    weight = make_weight(*shape, dtype)
    fk.nm_prune_(weight, torch.ones(shape[1]), 2, 4)
    weight[0] = 0  # groups that keep fewer than two
    assert torch.equal(as_cutlass(weight).to_dense(), weight)


@pytest.mark.fault("2:4 input")
def test_what_is_not_2_4_is_refused_by_name():
    model = pruned()
    target = find_targets(model)[0][3]
    target.module.weight.data[1, 4:7] = 1
    assert f"{target.name} is not 2:4: " in refusal(model) and "--pattern 2:4" in refusal(model)


@pytest.mark.fault("2:4 input")
def test_what_does_not_fit_is_refused_in_one_line():
    assert "is float32, expected bfloat16 or float16" in refusal(pruned(torch.float32))
    model = pruned()
    find_targets(model)[0][0].module.weight.data[0, 0] = float("inf")
    assert "has NaN or inf" in refusal(model)
    assert "tokens must be a whole number from 1 on, got 0" in refusal(pruned(), tokens=0)
    assert "tokens must be a whole number from 1 on, got True" in refusal(pruned(), tokens=True)
    with pytest.raises(UserError, match="model must be a Hugging Face causal language model"):
        to_semi_structured(torch.nn.Linear(4, 4))
    with pytest.raises(UserError, match=r"the model is packed .*unpack_\(model\)"):
        to_semi_structured(pack_(pruned()))


@pytest.mark.fault("2:4 input")
def test_a_model_that_is_not_on_a_gpu_is_refused():
    assert refusal(pruned()).endswith("the model is on cpu, expected a GPU; move it: model.to('cuda')")


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
def test_products_are_those_of_the_dense_weights_on_gpu(tokens):
    model = pruned(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4).cuda()
    layers = [target.module for target in find_targets(model)[0]]
    dense = weights(model)
    to_semi_structured(model, tokens=tokens)
    for layer, weight in zip(layers, dense, strict=True):
        x = torch.randn(tokens, weight.shape[1], device="cuda").bfloat16()
        expected = linear(x.double(), weight.double())
        assert ((layer(x).double() - expected).norm() <= 1e-2 * expected.norm()).all()
    assert model(torch.arange(12, device="cuda").view(2, 6)).logits.isfinite().all()
    with pytest.raises(UserError, match="converted already"):
        to_semi_structured(model)


@needs_gpu
def test_shapes_that_do_not_fit_are_refused_on_gpu():
    model = pruned(hidden_size=40, intermediate_size=44, num_attention_heads=2, num_key_value_heads=2).cuda()
    with pytest.raises(UserError, match="needs multiples of"):
        to_semi_structured(model)
