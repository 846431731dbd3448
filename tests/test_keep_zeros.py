"""Removed weights stay zero while a model is fine-tuned: by torch, by Trainer, and after a merge of adapters."""

import pytest
import tiny
import torch
from safetensors.torch import save_file
from test_packed import sparse

from fwanda_pruner import UserError, keep_zeros, load_masks, pack_, prune, save_pruned
from fwanda_pruner.model.targets import find_targets

IDS = torch.randint(60, (4, 12), generator=torch.Generator().manual_seed(0))


def zeros(model) -> dict[str, torch.Tensor]:
    return {target.name: target.weight == 0 for target in find_targets(model)[0]}


def assert_held(model, before) -> None:
    for name, mask in zeros(model).items():
        assert bool(mask[before[name]].all()), name


def train(model, optimizer, steps=3) -> None:
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.fault("kept zeros")
@pytest.mark.parametrize("family", ["mistral", "gpt2", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD], ids=lambda o: o.__name__)
def test_zeros_stay_while_other_weights_change(optimizer, family):
    model = sparse(tiny.build(family))
    before, weights = zeros(model), {t.name: t.weight.clone() for t in find_targets(model)[0]}
    with keep_zeros(model):
        train(model, optimizer(model.parameters(), lr=1e-2))
    assert_held(model, before)
    assert any(not torch.equal(target.weight, weights[target.name]) for target in find_targets(model)[0])
    train(model, optimizer(model.parameters(), lr=1e-2))  # nothing is held any more
    assert any(bool((~zeros(model)[name] & before[name]).any()) for name in before)


@pytest.mark.fault("kept zeros")
def test_zeros_stay_in_the_trainer_of_transformers(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model = sparse(tiny.llama())
    before = zeros(model)
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no"
    )
    with keep_zeros(model):
        Trainer(model=model, args=arguments, train_dataset=rows).train()
    assert_held(model, before)


@pytest.mark.fault("kept zeros")
def test_zeros_come_back_after_a_merge_of_adapters():
    model = sparse(tiny.llama())
    before, kept = zeros(model), keep_zeros(model)
    with torch.no_grad():
        for target in find_targets(model)[0]:
            target.weight.add_(0.01)  # what a merge does to all weights
    kept.apply_()
    kept.remove()
    assert_held(model, before)


@pytest.mark.fault("kept zeros")
def test_zeros_come_back_after_a_merge_by_peft():
    peft = pytest.importorskip("peft")
    model = sparse(tiny.llama())
    before, kept = zeros(model), keep_zeros(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    merged = adapted.merge_and_unload()
    kept.apply_()
    assert_held(merged, before)


def test_masks_of_a_saved_model_are_one_bit_a_weight_and_hold_its_zeros(tmp_path):
    model = tiny.llama()
    report = prune(model, method="magnitude", sparsity=0.5, no_check=True, save="masks")
    before = zeros(model)
    save_pruned(model, None, report, tmp_path / "out")
    masks = load_masks(tmp_path / "out")
    assert sum(mask.numel() for mask in masks.values()) * 8 == sum(mask.numel() for mask in before.values())
    other = tiny.llama()
    keep_zeros(other, masks).remove()
    assert all(torch.equal(mask, before[name]) for name, mask in zeros(other).items())


def test_masks_that_do_not_fit_are_refused(tmp_path):
    model = tiny.llama()
    with pytest.raises(UserError, match="no weight of the model is zero"):
        keep_zeros(model)
    with pytest.raises(UserError, match="no matrix nowhere"):
        keep_zeros(model, {"nowhere": torch.zeros(2, 2, dtype=torch.uint8)})
    with pytest.raises(UserError, match=r"must be \[48, 4\] uint8"):
        keep_zeros(model, {"model.layers.0.mlp.up_proj": torch.zeros(2, 2, dtype=torch.uint8)})
    for given, got in [("masks", "str"), ([1], "list")]:
        with pytest.raises(UserError, match=f"masks must be a Mapping, got {got}"):
            keep_zeros(model, given)
    with pytest.raises(UserError, match=r"mask of model.layers.0.mlp.up_proj must be a Tensor, got NoneType"):
        keep_zeros(model, {"model.layers.0.mlp.up_proj": None})
    with pytest.raises(UserError, match=r"masks\.safetensors"):
        load_masks(tmp_path)
    save_file({"x": torch.ones(2)}, tmp_path / "masks.safetensors")
    with pytest.raises(UserError, match=r"x must be \[R, ceil\(C/8\)\] uint8, got \[2\] torch.float32"):
        load_masks(tmp_path)


def test_a_model_trained_without_its_zeros_is_not_saved_and_the_error_says_how_to_train_it(tmp_path):
    model = tiny.llama()
    report = prune(model, method="magnitude", no_check=True, progress=False)
    train(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    with pytest.raises(RuntimeError, match=r"holds 0 zeros .*train it inside .*keep_zeros"):
        save_pruned(model, None, report, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.fault("kept zeros")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["mistral", "gpt2", "gpt_oss"])
def test_zeros_stay_in_another_dtype(family, dtype):
    model = sparse(tiny.build(family))
    before, kept = zeros(model), keep_zeros(model)
    model.to(dtype)
    with kept:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert_held(model.float(), before)


@pytest.mark.fault("kept zeros")
@pytest.mark.parametrize("change", [pack_, lambda m: m.to("meta")], ids=["packed", "meta"])
def test_an_optimizer_steps_beside_a_model_whose_weights_are_gone(change):
    model, other = sparse(tiny.llama()), torch.nn.Parameter(torch.ones(2))
    with keep_zeros(model):
        change(model)
        other.grad = torch.ones(2)
        torch.optim.SGD([other], lr=0.5).step()
    assert other.tolist() == [0.5, 0.5]


@pytest.mark.fault("kept zeros")
def test_a_block_of_code_that_is_entered_again_keeps_the_zeros_again():
    model = sparse(tiny.llama())
    before, kept, optimizer = zeros(model), keep_zeros(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with kept:
            train(model, optimizer, steps=1)
        assert_held(model, before)
    train(model, optimizer, steps=1)
    assert any(bool((~zeros(model)[name] & before[name]).any()) for name in before)


def replace(layer, model):
    model.set_submodule("model.layers.0.mlp.up_proj", torch.nn.Linear(32, 48, bias=False))


CHANGES = {
    "replaced": replace,
    "parametrised": lambda layer, _: torch.nn.utils.parametrizations.weight_norm(layer),
    "weight_norm": lambda layer, _: torch.nn.utils.weight_norm(layer),
    "sparse": lambda layer, _: setattr(layer, "weight", torch.nn.Parameter(layer.weight.detach().to_sparse())),
    "float8": lambda layer, _: layer.to(torch.float8_e4m3fn),
    "deleted": lambda layer, _: delattr(layer, "weight"),
}


@pytest.mark.fault("kept zeros")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_matrix_that_cannot_keep_its_zeros_any_more_is_one_line(change):
    model = sparse(tiny.llama())
    with keep_zeros(model) as kept:
        CHANGES[change](model.model.layers[0].mlp.up_proj, model)
        with pytest.raises(UserError, match="layers.0.mlp.up_proj was replaced, parametrised or converted meanwhile"):
            kept.apply_()
