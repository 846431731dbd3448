"""What pack_() and keep_zeros() refuse, and what is said of packed models where dense ones are needed."""

import pytest
import tiny
import torch
from test_keep_zeros import IDS, zeros
from test_packed import logits, sparse, state
from test_plain import ADAPTED, COMPILED, TWICE
from test_save import pruned_model

from fwanda_pruner import UserError, collect, keep_zeros, load_packed, masks, pack_, prune, save_pruned
from fwanda_pruner.model.packed import packed_weights

CALLS = {"pack_": lambda model: pack_(model, force=True), "keep_zeros": keep_zeros}


@pytest.fixture(params=CALLS)
def call(request):
    return CALLS[request.param]


def refuse(call, model, match):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=match) as error:
        call(model)
    assert "\n" not in str(error.value)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.fault("adapters")
@pytest.mark.parametrize("case", ADAPTED)
def test_adapters_are_neither_packed_nor_held_at_zero(case, call):
    change, match = ADAPTED[case]
    refuse(call, change(sparse(tiny.llama())), match)


@pytest.mark.fault("adapters")
def test_zeros_are_kept_in_a_model_with_merged_adapters():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"])
    model = peft.get_peft_model(sparse(tiny.llama()), config).merge_and_unload()
    model.requires_grad_(True)
    before = zeros(model)
    with keep_zeros(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    assert all(torch.equal(mask, before[name]) for name, mask in zeros(model).items())


@pytest.mark.fault("compiled")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_parts_are_neither_packed_nor_held_at_zero(case, call):
    change, match = COMPILED[case]
    refuse(call, change(sparse(tiny.llama())), match)


@pytest.mark.fault("one module twice")
@pytest.mark.parametrize("share", TWICE, ids=lambda share: share.__name__)
def test_what_stands_at_two_places_is_neither_packed_nor_held_at_zero(share, call):
    model = sparse(tiny.llama())
    share(model)
    refuse(call, model, TWICE[share])


@pytest.mark.fault("one module twice")
@pytest.mark.parametrize("share", TWICE, ids=lambda share: share.__name__)
def test_what_stands_at_two_places_is_not_saved(share, tmp_path):
    model, report = pruned_model()
    share(model)
    refuse(lambda model: save_pruned(model, None, report, tmp_path / "out"), model, TWICE[share])
    assert not list(tmp_path.iterdir())


def test_the_hook_of_keep_zeros_is_gone_if_the_masks_cannot_be_applied():
    model = sparse(tiny.llama())
    mask = torch.zeros(48, 4, dtype=torch.uint8, device="meta")
    with pytest.raises(UserError, match="must be a dense tensor with numbers, got one on the meta device"):
        keep_zeros(model, {"model.layers.0.mlp.up_proj": mask})
    other = torch.nn.Parameter(torch.ones(2))
    torch.optim.SGD([other], lr=0.5).step()  # a hook that was left would raise again


def test_masks_of_nothing_are_refused():
    with pytest.raises(UserError, match="masks is empty, so no zero would be kept"):
        keep_zeros(sparse(tiny.llama()), {})


def test_calls_that_need_dense_weights_say_how_to_make_a_packed_model_dense(tmp_path):
    model, report = pruned_model()
    pack_(model)
    report.config["save"] = "masks"
    for call in (
        lambda: prune(model, method="magnitude", sparsity=0.5),
        lambda: collect(model, calibration=tiny.TEXT),
        lambda: list(masks(model, report)),
        lambda: save_pruned(model, None, report, tmp_path / "out"),
        lambda: keep_zeros(model),
        lambda: pack_(model),
    ):
        with pytest.raises(
            UserError, match=r"the model is packed \(model.layers.0.*make it dense first: unpack_\(model\)"
        ):
            call()
    assert not (tmp_path / "out").exists()


def test_a_loaded_packed_model_takes_half_and_float(tmp_path):
    pack_(sparse(tiny.llama())).save_pretrained(tmp_path)
    model = load_packed(tmp_path, device="cpu").model
    expected = state(model)
    assert logits(model.half()).dtype == torch.float16
    assert {header.dtype for _, _, header in packed_weights(model.float())} == {torch.float32}
    assert state(model).keys() == expected.keys()


@pytest.mark.parametrize("convert", [lambda m: m.double(), lambda m: m.to(torch.float64)], ids=["double", "to"])
@pytest.mark.parametrize("family", ["mistral", "gpt_oss"])
def test_a_dtype_that_packed_weights_lack_is_refused_and_what_was_converted_comes_back(convert, family):
    model = pack_(sparse(tiny.build(family)))
    expected = state(model)
    with pytest.raises(UserError, match=r"packed weights can be .*model.to\(torch.float32\) undoes"):
        convert(model)
    model.to(torch.float32)
    found = state(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def doubled(layer):
    layer.__class__ = Doubled


def own_forward(layer):
    layer.forward = lambda x: torch.nn.functional.linear(x, layer.weight) + 1


def three_dimensions(layer):
    layer.forward = lambda x: torch.einsum("btc,rc->btr", x, layer.weight)


ALTERED = {
    "subclass": (doubled, r"\(Doubled\) computes something else than a linear layer \(outputs differ by 0.5"),
    "forward": (own_forward, r"\(Linear\) computes something else than a linear layer"),
    "not called": (three_dimensions, r"\(Linear\) computes something else than a linear layer \(einsum"),
    "hook": (lambda layer: layer.register_forward_hook(print), "has hooks, which a packed layer would not run"),
    "pre-hook": (lambda layer: layer.register_forward_pre_hook(print), "has hooks"),
    "backward hook": (lambda layer: layer.register_full_backward_hook(print), "has hooks"),
    "buffer": (lambda layer: layer.register_buffer("scale", torch.ones(1)), r"\(Linear\) has buffers"),
}


@pytest.mark.fault("own layers")
@pytest.mark.parametrize("case", ALTERED)
def test_layers_that_a_packed_one_cannot_stand_for_are_refused_before_any_is_packed(case):
    change, match = ALTERED[case]
    model = sparse(tiny.llama())
    change(model.model.layers[1].mlp.up_proj)
    refuse(pack_, model, rf"^model.layers.1.mlp.up_proj {match}")
    assert next(packed_weights(model), None) is None


@pytest.mark.fault("own layers")
def test_a_model_with_hooks_is_saved_packed_and_keeps_them(tmp_path):
    model, report = pruned_model()
    calls = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: calls.append(1))
    report.config["save"] = "packed"
    save_pruned(model, None, report, tmp_path / "out")
    calls.clear()
    expected = logits(model)
    assert len(calls) == 1
    torch.testing.assert_close(logits(load_packed(tmp_path / "out", device="cpu").model), expected)


@pytest.mark.parametrize("change", [lambda m: m.to("meta"), lambda m: m.to_sparse()], ids=["meta", "sparse"])
def test_masks_without_dense_numbers_are_refused_before_any_weight_is_changed(change):
    names = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj")
    zero = torch.zeros(48, 4, dtype=torch.uint8)
    given = {names[0]: zero, names[1]: change(zero)}
    refuse(lambda m: keep_zeros(m, given), sparse(tiny.llama()), f"the mask of {names[1]} must be a dense tensor")
