"""Packed models where users load them: evaluation, tasks, saving, moving, copies and state dicts."""

import copy
import importlib.util
import io
import json
import pickle

import pytest
import tiny
import torch
import transformers
from test_packed import IDS, assert_same_state, logits, sparse, state
from test_tasks import examples, write_task
from transformers import AutoModelForCausalLM

from fwanda_pruner import UserError, evaluate_model, load_model, load_packed, pack_, prune, save_pruned, unpack_
from fwanda_pruner.evaluate.lm_eval_tasks import evaluate_tasks
from fwanda_pruner.model.packed import PackedLinear, packed_weights
from fwanda_pruner.model.targets import find_targets

needs_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed")
needs_accelerate = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
FAMILIES = ["mistral", "gpt2", "gpt_oss"]


@pytest.fixture
def folder(tmp_path):
    """A packed folder of a tiny model in bf16."""
    pack_(sparse(tiny.llama(dtype=torch.bfloat16))).save_pretrained(tmp_path / "packed")
    return tmp_path / "packed"


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options).eval()


def is_packed(model) -> bool:
    return next(packed_weights(model), None) is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_of_a_packed_model_gives_what_the_dense_one_gives(family):
    model = sparse(tiny.build(family))
    windows = torch.arange(3 * 20).view(3, 20)  # more than 16 tokens are multiplied with the unpacked weight
    expected = evaluate_model(model, eval=windows, progress=False)
    assert expected["sparsity"]["matrices"] > 0.4
    assert evaluate_model(pack_(model), eval=windows, progress=False) == expected
    assert is_packed(model)


def test_zeros_of_matrices_that_stayed_dense_count_too():
    model = tiny.llama().eval()
    model.model.layers[0].mlp.up_proj.weight.data[:, ::2] = 0
    expected = evaluate_model(model, eval=IDS, progress=False)["sparsity"]
    assert evaluate_model(pack_(model), eval=IDS, progress=False)["sparsity"] == expected


@needs_lm_eval
def test_tasks_of_lm_eval_run_on_a_packed_model(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    model, task = sparse(tiny.llama()), write_task(tmp_path, "word_choice", examples(12))
    tokenizer = tiny.tokenizer()
    dense = evaluate_tasks(model, tokenizer, [task], progress=False)
    packed = evaluate_tasks(pack_(model), tokenizer, [task], progress=False)
    assert is_packed(model) and packed == dense


# as users load and save


@needs_accelerate
@pytest.mark.parametrize(
    "options", [{"device_map": "cpu"}, {"device_map": {"": "cpu"}}, {"low_cpu_mem_usage": True}], ids=str
)
def test_options_of_from_pretrained(options, folder):
    assert torch.equal(logits(load(folder, **options)), logits(load(folder)))


@pytest.mark.parametrize("family", FAMILIES)
def test_state_dicts_are_written_by_torch_and_loaded_again(family):
    model, other = pack_(sparse(tiny.build(family))), pack_(sparse(tiny.build(family)))
    expected, file = logits(model), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    for _, packed, _ in packed_weights(other):
        packed.zero_()
    assert other.load_state_dict(torch.load(file, weights_only=True)).missing_keys == []
    assert torch.equal(logits(other), expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("convert", ["half", "bfloat16"])
def test_conversions_of_dtypes_give_what_the_dense_model_gives(convert, family, tmp_path):
    model, dense = (sparse(tiny.build(family)) for _ in range(2))
    expected = state(getattr(dense, convert)())
    assert_same_state(unpack_(copy.deepcopy(getattr(pack_(model), convert)())), expected)
    model.save_pretrained(tmp_path / "packed")  # its config must name the new sizes
    dense.save_pretrained(tmp_path / "dense")  # some parameters load as fp32
    assert_same_state(unpack_(load(tmp_path / "packed")), load(tmp_path / "dense").state_dict())


@pytest.mark.fault("packed file")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_dtype_that_cannot_be_packed_is_refused_in_one_line(family):
    with pytest.raises(UserError, match=r"packed weights can be .*, not torch.float64; .*unpack_\(model\)$"):
        pack_(sparse(tiny.build(family))).double()


@pytest.mark.parametrize("tied", [True, False])
def test_shards_are_written_and_loaded(tied, tmp_path):
    model = pack_(sparse(tiny.llama(tie_word_embeddings=tied)))
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = load(tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    loaded.save_pretrained(tmp_path / "again")
    names = ("config.json", "generation_config.json")
    first, second = (
        [json.loads((place / name).read_text()) for name in names] for place in (tmp_path, tmp_path / "again")
    )
    assert first == second and torch.equal(logits(load(tmp_path / "again")), logits(model))


def test_generation_in_batches_with_padding_and_sampling(folder):
    model, dense = load(folder), unpack_(load(folder))
    ids = torch.arange(3 * 5).view(3, 5)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    settings = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    model, dense = model.to(torch.float32), dense.to(torch.float32)
    assert torch.equal(model.generate(ids, **settings), dense.generate(ids, **settings))


def test_a_packed_model_moves_between_devices_and_dtypes_at_once(folder):
    model = load(folder)
    model.to("meta")
    assert all(packed.is_meta for _, packed, _ in packed_weights(model))
    model = load(folder).to(device="cpu", dtype=torch.float32)
    assert model.dtype == torch.float32 and logits(model).dtype == torch.float32
    assert all(header.dtype == torch.float32 for *_, header in packed_weights(model))


def test_a_packed_model_is_not_trained(folder):
    model = load(folder)
    with pytest.raises((RuntimeError, UserError), match="packed"):
        model(IDS, labels=IDS).loss.backward()


def test_a_pipeline_of_transformers_generates(folder):
    from transformers import pipeline

    tokenizer = tiny.byte_tokenizer()
    model = pack_(sparse(tiny.llama(vocab_size=len(tokenizer))))
    text = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    assert text("ab", max_new_tokens=2, do_sample=False)[0]["generated_text"].startswith("ab")


def trainable(model) -> list[tuple[str, bool]]:
    return [(name, parameter.requires_grad) for name, parameter in model.named_parameters()]


def freeze(model, frozen):
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_({"none": True, "all": False, "some": index % 3 > 0}[frozen])
    return model


@pytest.mark.fault("frozen weights")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("frozen", ["none", "some", "all"])
def test_unpacked_weights_are_trainable_as_before_and_in_their_order(frozen, family):
    model = freeze(sparse(tiny.build(family)), frozen)
    before, names = trainable(model), list(model.state_dict())
    assert trainable(unpack_(copy.deepcopy(pack_(model)))) == before
    assert trainable(unpack_(model)) == before and list(model.state_dict()) == names


@pytest.mark.fault("frozen weights")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_folder_loads_as_a_model_that_trains(family, tmp_path):
    model = sparse(tiny.build(family))
    before = trainable(model)
    pack_(model).save_pretrained(tmp_path)
    for loaded in (load_model(tmp_path, device="cpu").model, unpack_(load_packed(tmp_path, device="cpu").model)):
        assert trainable(loaded) == before
    optimizer, weights = torch.optim.SGD(loaded.parameters(), lr=0.5), state(loaded)
    loaded(IDS, labels=IDS).loss.backward()
    optimizer.step()
    for target in find_targets(loaded)[0]:
        name = target.parameter
        assert not torch.equal(loaded.get_parameter(name), weights[name]), name


@pytest.mark.fault("packed file")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_a_state_dict_that_does_not_fit_leaves_a_packed_model_as_it_was(assign, family):
    model, expected = pack_(sparse(tiny.build(family))), state(sparse(tiny.build(family)))
    before, other = logits(model), pack_(sparse(tiny.build(family), share=0.7)).state_dict()
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(other, assign=assign)
    assert torch.equal(logits(model), before)
    assert_same_state(unpack_(model), expected)


@pytest.mark.fault("packed file")
@pytest.mark.parametrize("family", ["mistral", "mixtral"])
def test_an_altered_packed_weight_of_a_state_dict_is_refused(family):
    model = pack_(sparse(tiny.build(family)))
    before, altered = logits(model), state(model)
    name = next(name for name, *_ in packed_weights(model) if family == "mistral" or "experts" in name)
    altered[name][-20] ^= 1
    with pytest.raises(RuntimeError, match=f"{name}: packed differs from the SHA-256"):
        model.load_state_dict(altered)
    assert torch.equal(logits(model), before)


@pytest.mark.fault("own layers")
@pytest.mark.parametrize("family", ["mistral", "gpt2", "falcon"])
def test_layers_come_back_with_their_class_and_attributes(family):
    model = sparse(tiny.build(family))
    before = {target.name: target.module for target in find_targets(model)[0]}
    for index, layer in enumerate(before.values()):
        layer.mine = index
    expected = logits(model)
    again = pickle.loads(pickle.dumps(pack_(model)))
    for unpacked in (unpack_(model), unpack_(again)):
        found = {target.name: target.module for target in find_targets(unpacked)[0]}
        assert [(name, type(layer), layer.mine) for name, layer in found.items()] == [
            (name, type(layer), index) for index, (name, layer) in enumerate(before.items())
        ]
        assert torch.equal(logits(unpacked), expected)


@pytest.mark.fault("own layers")
def test_a_forward_of_its_own_that_computes_a_linear_layer_comes_back():
    model = sparse(tiny.llama())
    layer, calls, expected = model.model.layers[0].mlp.up_proj, [], logits(model)

    def forward(x):
        calls.append(1)
        return torch.nn.functional.linear(x, layer.weight)

    layer.forward = forward
    torch.testing.assert_close(logits(pack_(model)), expected)
    calls.clear()
    assert torch.equal(logits(unpack_(model)), expected) and len(calls) == 1


@pytest.mark.fault("own layers")
def test_a_model_that_cannot_be_packed_to_be_saved_stays_as_it_is(tmp_path):
    model = tiny.llama()
    report = prune(model, method="magnitude", no_check=True, progress=False, save="packed")
    model.model.layers[1].mlp.up_proj.forward = lambda x: x.new_ones(*x.shape[:-1], 48)
    dense, expected = state(model), logits(model)
    with pytest.raises(UserError, match="up_proj .* computes something else than a linear layer"):
        save_pruned(model, None, report, tmp_path / "out")
    assert_same_state(model, dense)
    assert torch.equal(logits(model), expected) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_a_packed_layer_takes_a_vector_as_a_dense_one(family):
    model = sparse(tiny.build(family))
    name = find_targets(model)[0][0].name
    x = torch.linspace(-1, 1, find_targets(model)[0][0].shape[1])
    expected = torch.nn.functional.linear(x, find_targets(model)[0][0].weight, model.get_submodule(name).bias)
    torch.testing.assert_close(pack_(model).get_submodule(name)(x), expected)


@pytest.mark.filterwarnings("ignore")
def test_layers_whose_weight_the_model_reads_itself_stay_dense():
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=67, state_size=8)
    model = sparse(transformers.MambaForCausalLM(config).eval())
    expected = logits(model)
    pack_(model)
    mixer = model.backbone.layers[0].mixer
    assert isinstance(mixer.in_proj, PackedLinear) and isinstance(mixer.dt_proj, torch.nn.Linear)
    assert torch.allclose(logits(model), expected, atol=1e-5)


@needs_accelerate
@pytest.mark.parametrize("buffers", [False, True])
def test_a_packed_model_runs_with_its_weights_offloaded_by_accelerate(buffers, folder):
    from accelerate import cpu_offload

    model = load_packed(folder, device="cpu").model
    expected = logits(model)
    offloaded = cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=buffers)
    assert torch.equal(logits(offloaded), expected)
    with pytest.raises(UserError, match="the model is offloaded by accelerate; load it again without device_map"):
        unpack_(offloaded)


class Readers(torch.nn.Module):
    """Reads the weights of its layers in several ways, and gives one its input by keyword."""

    def __init__(self, size):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(size, 4, batch_first=True)
        self.inner = torch.nn.Sequential(torch.nn.Linear(size, size))
        self.local, self.named = (torch.nn.Linear(size, size) for _ in range(2))

    def forward(self, x):
        local = self.local
        x = x + self.attention(x, x, x, need_weights=False)[0] + self.named(input=x).to(local.weight.dtype)
        weight = self.inner[0].weight
        return x + torch.nn.functional.linear(x, weight) + torch.nn.functional.linear(x, local.weight, local.bias)


def test_layers_whose_weight_is_read_stay_dense_and_one_called_by_keyword_is_packed():
    torch.manual_seed(0)
    model = tiny.llama()
    for block in model.model.layers:
        block.mlp = Readers(32)
    report = prune(model, method="fwanda", allocation="response", calibration=tiny.tokens(16, 24), progress=False)
    assert report.sparsity["matrices"] == pytest.approx(0.5, abs=1e-3)
    expected = model(IDS).logits
    pack_(model)
    for name in ("attention.out_proj", "inner.0", "local"):
        assert not isinstance(model.get_submodule(f"model.layers.0.mlp.{name}"), PackedLinear)
    assert isinstance(model.model.layers[0].mlp.named, PackedLinear)
    assert torch.allclose(model(IDS).logits, expected, atol=1e-5)


class ReadsAnEntry(torch.nn.Module):
    """Reads the weight of a layer in a way that its source does not show."""

    def __init__(self, size):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(size, size)])

    def forward(self, x):
        return sum(torch.nn.functional.linear(x, getattr(layer, "weight")) for layer in self.layers)  # noqa: B009


@pytest.mark.fault("own layers")
@pytest.mark.parametrize("training", [False, True])
def test_a_model_that_does_not_run_packed_is_refused_and_dense_again(training):
    model = tiny.llama()
    for block in model.model.layers:
        block.mlp = ReadsAnEntry(32)
    sparse(model).train(training)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=r"^the model does not run with packed layers \(.*\), because some code reads"):
        pack_(model)
    assert not is_packed(model) and model.training is training
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert torch.isfinite(model(IDS).logits).all()
