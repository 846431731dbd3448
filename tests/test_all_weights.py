"""Facts about all weights, read block by block, equal those of the whole model; what is written to a block stays."""

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


def other_tensors(model):
    """The name of one parameter or stored buffer after the other, while its first, last or middle entry is another."""
    for number, (name, tensor) in enumerate(model.state_dict().items()):
        place = (0, tensor.numel() - 1, tensor.numel() // 2)[number % 3]
        entry = tensor.view(-1)[place : place + 1]
        before = entry.clone()
        entry.copy_(before + 1)
        yield name
        entry.copy_(before)


@pytest.mark.fault("other model")
def test_the_fingerprint_changes_with_each_parameter_and_stored_buffer(model):
    model.model_extra = torch.nn.Module()
    model.model_extra.register_buffer("steps", torch.arange(5))
    model.model_extra.register_buffer("scratch", torch.zeros(3), persistent=False)
    engine = engine_of(model)
    one = fingerprint(engine)
    found = {name: fingerprint(engine) for name in other_tensors(model)}
    assert len(found) > 10 and "model_extra.steps" in found
    assert [name for name, other in found.items() if other == one] == []
    model.model_extra.scratch += 1
    assert fingerprint(engine) == one


@pytest.mark.fault("other model")
@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 200_000])
def test_the_fingerprint_changes_with_any_entry_of_a_tensor(size):
    model = tiny.llama()
    values = torch.zeros(size)
    model.register_parameter("more", torch.nn.Parameter(values))
    engine, found = engine_of(model), set()
    for place in {0, size // 2, size - 1}:
        for value in (0.0, 1e-45, 1.0, torch.finfo(torch.float32).max):  # the bits 0, 1, and more
            values[place] = value
            found.add(fingerprint(engine))
        values[place] = 0
    assert len(found) == 1 + 3 * len({0, size // 2, size - 1})


@pytest.mark.fault("other model")
def test_the_fingerprint_changes_where_rows_or_equal_matrices_trade_places():
    model = tiny.llama()
    engine, mlp = engine_of(model), model.model.layers[0].mlp
    found = [fingerprint(engine)]
    mlp.gate_proj.weight.data = mlp.gate_proj.weight.data.flip(0)
    found.append(fingerprint(engine))
    mlp.gate_proj.weight.data, mlp.up_proj.weight.data = mlp.up_proj.weight.data, mlp.gate_proj.weight.data
    found.append(fingerprint(engine))
    assert len(set(found)) == 3


@pytest.mark.fault("other model")
def test_the_fingerprint_changes_with_settings_that_change_outputs_and_with_no_others():
    model = tiny.llama()
    one = fingerprint(engine_of(model))
    changes = {"hidden_act": "gelu", "rms_norm_eps": 1e-3, "num_key_value_heads": 4}
    rope = "rope_parameters" if hasattr(model.config, "rope_parameters") else "rope_theta"
    changes[rope] = {"rope_theta": 5e5, "rope_type": "default"} if rope == "rope_parameters" else 5e5
    for name, value in changes.items():
        before = getattr(model.config, name)
        setattr(model.config, name, value)
        assert fingerprint(engine_of(model)) != one, name
        setattr(model.config, name, before)
    model.config.name_or_path, model.config.use_cache = "elsewhere", False
    assert fingerprint(engine_of(model)) == one


@pytest.mark.parametrize("kind", ["tied", "untied", "gpt2", "mixtral", "llava"])
def test_the_fingerprint_of_a_saved_model_is_that_of_the_model(tmp_path, kind):
    model = MODELS[kind]()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert fingerprint(engine_of(loaded)) == fingerprint(engine_of(model))


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
