"""Facts about all weights, read block by block, equal those of the whole model; what is written to a block stays."""

import hashlib
from functools import partial

import pytest
import tiny
import torch
from measuring import engine_of

from fwanda_pruner.engine.all_weights import check_finite, count_weights, count_zeros, fingerprint
from fwanda_pruner.engine.resident import ResidentEngine
from fwanda_pruner.errors import UserError
from fwanda_pruner.model.targets import find_blocks, find_targets


def shared_over_blocks():
    """The second block uses a matrix of the first."""
    model = tiny.llama()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    return model


def shared_with_a_block():
    """A parameter outside the blocks that is also inside one."""
    model = tiny.llama()
    model.model.norm.weight = model.model.layers[1].input_layernorm.weight
    return model


MODELS = {
    "tied": tiny.llama,
    "untied": partial(tiny.llama, tie_word_embeddings=False),
    "shared over blocks": shared_over_blocks,
    "shared with a block": shared_with_a_block,
    "gpt2": partial(tiny.build, "gpt2"),
    "mixtral": partial(tiny.build, "mixtral"),
    "llava": partial(tiny.build, "llava"),
}


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]()


def zeros_of(tensors) -> int:
    return sum(int((tensor == 0).sum()) for tensor in tensors)


def distinct(parameters) -> list[torch.Tensor]:
    return list({id(parameter): parameter for parameter in parameters}.values())


def test_counts_equal_those_of_the_whole_model(model):
    for index, parameter in enumerate(distinct(model.parameters())):
        parameter.data.view(-1)[: 1 + index % 5] = 0
    counts, weights = count_weights(engine_of(model)), [target.weight for target in find_targets(model)[0]]
    parameters, inside = distinct(model.parameters()), distinct(find_blocks(model)[1].parameters())
    assert counts.parameters == sum(p.numel() for p in parameters) and counts.zeros == zeros_of(parameters) > 0
    assert counts.block_parameters == sum(p.numel() for p in inside)
    assert counts.target_parameters == sum(w.numel() for w in weights) and counts.target_zeros == zeros_of(weights) > 0


def test_both_zeros_count():
    assert count_zeros([torch.tensor([0.0, -0.0, 1e-40]), torch.ones(2), torch.zeros(3, dtype=torch.bfloat16)]) == [
        2, 0, 3,
    ]  # fmt: skip
    assert count_zeros([]) == []


def test_the_fingerprint_is_that_of_a_sample_of_each_weight(model):
    digest = hashlib.sha256()
    for target in find_targets(model)[0]:
        rows, cols = target.shape
        digest.update(target.weight[:: max(1, rows // 8), :: max(1, cols // 8)].float().contiguous().numpy().tobytes())
    assert fingerprint(engine_of(model)) == digest.hexdigest()


def test_the_fingerprint_tells_models_apart_and_not_their_dtypes():
    one = fingerprint(engine_of(tiny.llama()))
    assert one == fingerprint(engine_of(tiny.llama()))
    assert one != fingerprint(engine_of(tiny.llama(seed=1)))
    half = tiny.llama(dtype=torch.bfloat16)
    assert fingerprint(engine_of(half)) == fingerprint(engine_of(half.float()))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_parameter_that_is_not_finite_is_named_wherever_it_lies(model, value):
    engine = engine_of(model)
    check_finite(engine)
    inside = {id(p): f"{engine.block_path(i)}.{n}" for i in range(engine.block_count - 1, -1, -1)
              for n, p in find_blocks(model)[1][i].named_parameters()}  # fmt: skip
    for name, parameter in model.named_parameters():
        element = parameter.data.view(-1)[-1:]
        before = element.clone()
        element.fill_(value)
        with pytest.raises(UserError) as error:
            check_finite(engine)
        assert str(error.value).startswith(f"{inside.get(id(parameter), name)} has NaN or inf values: ")
        element.copy_(before)
    check_finite(engine)


def test_parameters_lie_in_a_block_or_outside_and_none_in_both(model):
    engine = engine_of(model)
    outside = [id(parameter) for _, parameter in engine.parameters_outside_blocks()]
    inside = {id(parameter) for parameter in find_blocks(model)[1].parameters()}
    assert len(outside) == len(set(outside)) and not inside & set(outside)
    assert inside | set(outside) == {id(parameter) for parameter in model.parameters()}


# Blocks


def test_a_block_holds_the_weights_of_its_targets(model):
    engine = engine_of(model)
    assert engine.block_count == len(find_blocks(model)[1])
    names = []
    for index in range(engine.block_count):
        with engine.block(index) as block:
            assert block.module is model.get_submodule(engine.block_path(index))
            assert list(block.weights) == [target.name for target in engine.targets if target.block == index]
            names += block.weights
    assert names == [target.name for target in engine.targets]


def test_what_is_written_to_a_block_stays(model):
    engine = engine_of(model)
    dense = engine.window_losses(tiny.TEXT)
    written = {}
    for index in range(engine.block_count):
        with engine.block(index) as block:
            for name, weight in block.weights.items():
                weight[:, ::2] = 0
                written[name] = weight.clone()
    assert not torch.equal(engine.window_losses(tiny.TEXT), dense)
    for target in find_targets(model)[0]:
        assert torch.equal(target.weight, written[target.name])
        assert int(target.weight[:, ::2].count_nonzero()) == 0


def test_a_block_without_targets_holds_no_weights():
    model = tiny.llama()
    engine = ResidentEngine(model, [t for t in find_targets(model)[0] if t.block == 1], progress=False)
    with engine.block(0) as block:
        assert block.weights == {} and block.module is model.model.layers[0]
    assert count_weights(engine).block_parameters == count_weights(engine_of(model)).block_parameters
