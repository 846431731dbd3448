"""llm-compressor with our modifier, and with our kernels under its own modifiers, against the real package."""

import importlib
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import tiny
import torch
import torch.nn.utils.prune
from torch.utils.data import DataLoader

import fwanda_kernels as fk
from fwanda_pruner import UserError, prune

host = pytest.importorskip("llmcompressor", reason="llm-compressor is missing: pip install llmcompressor")

from llmcompressor.modifiers import Modifier  # noqa: E402
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier  # noqa: E402
from llmcompressor.modifiers.pruning.sparsegpt import base as sparsegpt  # noqa: E402
from llmcompressor.modifiers.pruning.wanda import base as wanda  # noqa: E402

from fwanda_pruner.integrations import llmcompressor as ours  # noqa: E402

FWandaModifier, use_fwanda_kernels = ours.FWandaModifier, ours.use_fwanda_kernels
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved tiny model with its tokenizer: the host reads the config of a model from its folder."""
    path = tmp_path_factory.mktemp("tiny")
    tiny.llama(blocks=2).save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


def fresh(folder, dtype=torch.float32):
    model = tiny.LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()


def loader(tokens=None, **settings) -> DataLoader:
    tokens = tiny.tokens(6, 24) if tokens is None else tokens
    samples = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in tokens]
    return DataLoader(samples, **{"batch_size": 1, **settings})


def run(folder, recipe, *, data=None, model=None, **settings):
    """The model after oneshot()."""
    model = fresh(folder) if model is None else model
    data = loader() if data is None else data
    host.oneshot(model=model, recipe=recipe, dataset=data, tokenizer=tiny.tokenizer(), **settings)
    return model


def weights(model) -> dict:
    return {
        name: module.weight.detach().clone()
        for name, module in model.named_modules()
        if name.endswith(LINEAR) and "layers" in name
    }


def assert_same_masks(left, right):
    left, right = weights(left), weights(right)
    assert left.keys() == right.keys() and len(left) == 14
    for name, weight in left.items():
        assert torch.equal(weight != 0, right[name] != 0), name


# the modifier


@pytest.mark.parametrize("allocation", ["row", "global", "uniform"])
@pytest.mark.parametrize("pipeline, order", [("sequential", "sequential"), ("basic", "onepass")])
def test_the_modifier_gives_the_masks_of_the_pruner(folder, allocation, pipeline, order):
    recipe = FWandaModifier(sparsity=0.6, allocation=allocation)
    model = run(folder, recipe, pipeline=pipeline)
    expected = fresh(folder)
    prune(
        expected, method="fwanda", allocation=allocation, sparsity=0.6, order=order, calibration=tiny.tokens(6, 24),
        progress=False,
    )  # fmt: skip
    assert_same_masks(model, expected)
    assert torch.equal(model.lm_head.weight, expected.lm_head.weight)


def test_a_yaml_recipe_finds_the_modifier_and_the_folder_loads_again(folder, tmp_path):
    recipe = """
        pruning_stage:
          pruning_modifiers:
            FWandaModifier: {sparsity: 0.7, allocation: global}
    """
    model = run(folder, recipe, output_dir=str(tmp_path / "out"))
    kept = sum(int((w != 0).sum()) for w in weights(model).values())
    size = sum(w.numel() for w in weights(model).values())
    assert kept == size - size * 7 // 10
    again = tiny.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    for name, weight in weights(model).items():
        assert torch.equal(weights(again)[name], weight)


def test_the_fisher_pass_runs_once_over_the_samples_that_the_pipeline_draws(folder):
    model, seen = fresh(folder), []
    model.model.embed_tokens.register_forward_hook(lambda _m, args, _out: seen.append(args[0].detach()))
    tokens = tiny.tokens(12, 16)
    sampler = torch.utils.data.RandomSampler(tokens, num_samples=5)
    run(folder, FWandaModifier(sparsity=0.5), model=model, data=loader(tokens, sampler=sampler), pipeline="basic")
    measured, of_the_pipeline = torch.cat(seen).split(5)
    assert torch.equal(measured, of_the_pipeline)


def test_samples_of_many_lengths_add_up(folder):
    """The budgets are those of all samples together, restated with the hooks of the kernels."""
    samples = [ids[:length] for ids, length in zip(tiny.tokens(5, 24), (24, 9, 24, 16, 9), strict=True)]
    model = run(folder, FWandaModifier(sparsity=0.6), data=loader(samples), pipeline="basic")
    dense = fresh(folder)
    modules = {name: dense.get_submodule(name) for name in weights(dense)}
    with fk.collect_statistics(modules) as statistics:
        for ids in samples:
            logits = dense(input_ids=ids[None]).logits[0, :-1]
            torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").backward()
    for name, weight in weights(dense).items():
        layer, (rows, cols) = statistics[name], weight.shape
        keep = fk.allocate_row_budgets(layer.omega**0.5, rows * cols - rows * cols * 6 // 10, k_max=cols)
        assert torch.equal(weights(model)[name] != 0, fk.row_topk_mask(weight, layer.norm, keep)), name


def test_parameters_want_gradients_again_and_hooks_are_gone(folder):
    model = run(folder, FWandaModifier(sparsity=0.5))
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_one_of_four_pruned_keeps_three(folder):
    with pytest.warns(UserWarning, match="exactly Wanda's"):
        recipe = FWandaModifier(mask_structure="1:4")
    model = run(folder, recipe)
    for weight in weights(model).values():
        assert ((weight.view(weight.shape[0], -1, 4) == 0).sum(-1) == 1).all()
    assert_same_masks(
        model, run(folder, WandaPruningModifier(sparsity=0.25, mask_structure="1:4", ignore=["re:.*lm_head"]))
    )


def test_a_module_that_sees_no_token_is_pruned_by_magnitude(folder):
    model = fresh(folder)
    model.model.layers[1].mlp.spare = torch.nn.Linear(32, 8, bias=False)
    weight = model.model.layers[1].mlp.spare.weight.detach().clone()
    with pytest.warns(UserWarning, match="spare saw no calibration token"):
        run(folder, FWandaModifier(sparsity=0.5, allocation="global"), model=model)
    mask = fk.row_topk_mask(weight, torch.ones(32), 16)
    assert torch.equal(model.model.layers[1].mlp.spare.weight != 0, mask)


@pytest.fixture
def offloaded(monkeypatch):
    """Weights are copies while a layer runs, as where the host keeps a model on the CPU and runs it on a GPU."""
    from compressed_tensors.offload.cache.cpu import CPUCache, send_tensors

    monkeypatch.setattr(CPUCache, "onload", lambda self, tensor: send_tensors(tensor, self.onload_device, copy=True))


@pytest.mark.parametrize("settings", [{"allocation": "row"}, {"allocation": "global"}, {"mask_structure": "2:4"}])
def test_offloaded_weights_are_pruned_where_they_live(folder, offloaded, settings):
    model = run(folder, FWandaModifier(**settings), pipeline="sequential")
    pattern = {"pattern": "2:4"} if "mask_structure" in settings else settings
    expected = fresh(folder)
    prune(expected, method="fwanda", order="sequential", calibration=tiny.tokens(6, 24), progress=False, **pattern)
    assert_same_masks(model, expected)


# the host's own modifiers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{"sparsity": 0.7}, {"sparsity": 0.75, "mask_structure": "3:4"}])
def test_stock_wanda_gives_the_same_bits(folder, settings, dtype):
    settings = {"ignore": ["re:.*lm_head"], **settings}
    stock = run(folder, WandaPruningModifier(**settings), model=fresh(folder, dtype))
    with use_fwanda_kernels():
        patched = run(folder, WandaPruningModifier(**settings), model=fresh(folder, dtype))
    for name, weight in weights(stock).items():
        assert torch.equal(weights(patched)[name], weight), name


@pytest.mark.parametrize(
    "settings",
    [
        {"sparsity": 0.7, "block_size": 20},  # 32 and 48 columns: blocks of 20, 12 and 20, 20, 8
        {"sparsity": 0.5},
        {"sparsity": 0.5, "mask_structure": "2:4"},
        {"sparsity": 0.25, "mask_structure": "1:4", "block_size": 16},
        {"sparsity": 0.6, "preserve_sparsity_mask": True},
    ],
)
def test_stock_sparsegpt_gives_the_same_masks(folder, settings):
    settings = {"ignore": ["re:.*lm_head"], **settings}
    stock = run(folder, SparseGPTModifier(**settings))
    with use_fwanda_kernels():
        patched = run(folder, SparseGPTModifier(**settings))
    assert_same_masks(stock, patched)
    for name, weight in weights(stock).items():
        torch.testing.assert_close(weights(patched)[name], weight, rtol=1e-3, atol=1e-3)


def coarse() -> torch.nn.Linear:
    """Weights of seven values, so that most scores are equal to others."""
    module = torch.nn.Linear(30, 16, bias=False)
    module.weight.data = torch.randint(-3, 4, (16, 30)).float()
    return module


def wanda_weights(module, **settings):
    """What the host's function and ours make of one module whose inputs all have one norm."""
    functions = [wanda.sparsify_weight]
    with use_fwanda_kernels():
        functions.append(wanda.sparsify_weight)
    return [f(module=module, row_scalars_dict={module: torch.ones(30)}, **settings) for f in functions]


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.7, 1.0])
def test_wanda_removes_the_host_s_count_and_ties(sparsity):
    stock, patched = wanda_weights(coarse(), sparsity=sparsity, prune_n=0, prune_m=0)
    assert torch.equal(stock, patched)


@pytest.mark.parametrize("settings", [{"prune_n": 0, "prune_m": 0}, {"prune_n": 2, "prune_m": 4}])
@pytest.mark.parametrize("what", ["weight", "scale"])
def test_wanda_refuses_what_is_not_finite_and_leaves_the_weight(settings, what):
    module, squares = coarse(), torch.ones(30)
    (module.weight.data[2] if what == "weight" else squares)[3] = torch.inf
    before = module.weight.detach().clone()
    with use_fwanda_kernels(), pytest.raises(UserError, match=f"a layer: {what} (has|must be)"):
        wanda.sparsify_weight(module=module, row_scalars_dict={module: squares}, sparsity=0.5, **settings)
    assert torch.equal(module.weight, before)


def test_wanda_under_a_pattern_keeps_equal_scores_where_the_host_s_ties_are_undefined():
    stock, patched = wanda_weights(coarse(), sparsity=None, prune_n=1, prune_m=4)  # 7 groups and 2 columns
    for start in range(0, 30, 4):
        left, right = (w[:, start : start + 4].abs().sort().values for w in (stock, patched))
        assert torch.equal(left, right)


def module_and_hessian(dead: bool = False):
    module = torch.nn.Linear(32, 24, bias=False)
    x = torch.randn(200, 32)
    if dead:
        x[:, [3, 17]] = 0
    return module, x.T @ x


@pytest.mark.parametrize("dead", [False, True])
def test_the_sweep_reports_the_loss_of_the_host(dead):
    results = []
    settings = dict(
        sparsity=0.5, prune_n=0, prune_m=0, block_size=16, dampening_frac=0.01, preserve_sparsity_mask=False
    )
    module, hessian = module_and_hessian(dead)
    sweeps = [sparsegpt.sparsify_weight]
    with use_fwanda_kernels():
        sweeps.append(sparsegpt.sparsify_weight)
    for sweep in sweeps:
        results.append(sweep(module=module, hessians_dict={module: hessian.clone()}, **settings))
    (loss, weight), (our_loss, our_weight) = results
    assert our_loss == pytest.approx(loss, rel=1e-3)
    assert torch.equal(weight != 0, our_weight != 0)


def test_a_hessian_without_factor_is_damped_and_named_not_replaced():
    module, _ = module_and_hessian()
    vector = torch.randn(32) * 1e4
    hessian = torch.outer(vector, vector)
    settings = dict(sparsity=0.5, prune_n=0, prune_m=0, block_size=16, preserve_sparsity_mask=False)
    with use_fwanda_kernels(), pytest.warns(UserWarning, match="needed a damping of"):
        sparsegpt.sparsify_weight(module=module, hessians_dict={module: hessian}, dampening_frac=1e-9, **settings)
    with use_fwanda_kernels(), pytest.raises(UserError, match="has no factor"):
        sparsegpt.sparsify_weight(module=module, hessians_dict={module: -hessian}, dampening_frac=1e-9, **settings)


def test_patches_end_with_the_block():
    before = wanda.sparsify_weight, sparsegpt.sparsify_weight, ours.SparsityModifierBase.on_calibration_start
    with pytest.raises(KeyError), use_fwanda_kernels():
        assert wanda.sparsify_weight is not before[0]
        raise KeyError
    assert before == (wanda.sparsify_weight, sparsegpt.sparsify_weight, ours.SparsityModifierBase.on_calibration_start)


def test_the_example_runs(folder, tmp_path, monkeypatch, capsys):
    script = Path(__file__).parent.parent / "examples" / "llmcompressor_fwanda.py"
    monkeypatch.setattr(sys, "argv", [script.name, str(folder), str(tmp_path / "out")])
    runpy.run_path(str(script))
    assert "50.0% zeros in the blocks" in capsys.readouterr().out


# bad input


def parametrised(model):
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[1].mlp.up_proj)
    return r"layers\.1\.mlp\.up_proj\.weight is already parametrised"


def pruned_by_torch(model):
    torch.nn.utils.prune.l1_unstructured(model.model.layers[0].self_attn.q_proj, "weight", 0.5)
    return r"layers\.0\.self_attn\.q_proj\.weight is under torch\.nn\.utils\.prune"


def quantised(model):
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    return r"layers\.0\.mlp\.down_proj\.weight is quantised or parametrised \(Parameter of torch\.int8\)"


def fixed_by_the_host(model):
    model.model.layers[0].mlp.down_proj.quantization_status = "frozen"
    return r"layers\.0\.mlp\.down_proj is quantised \(Linear\)"


def double(model):
    model.model.layers[0].mlp.down_proj.double()
    return r"down_proj\.weight is torch\.float64"


def not_finite(model):
    model.model.layers[1].mlp.gate_proj.weight.data[2, 3] = float("nan")
    return r"layers\.1\.mlp\.gate_proj\.weight has NaN or inf"


def convolution(model):
    model.model.layers[0].extra = torch.nn.Conv1d(4, 4, 1)
    return r"layers\.0\.extra must be an nn\.Linear, got Conv1d"


@pytest.mark.parametrize(
    "spoil", [parametrised, pruned_by_torch, quantised, fixed_by_the_host, double, not_finite, convolution]
)
def test_weights_that_cannot_be_pruned_are_refused_by_name(folder, spoil):
    model = fresh(folder)
    message = spoil(model)
    with pytest.raises(UserError, match=message):
        run(folder, FWandaModifier(sparsity=0.5, targets=["LlamaDecoderLayer"]), model=model, pipeline="basic")


@pytest.mark.parametrize("modifier", [WandaPruningModifier, SparseGPTModifier])
@pytest.mark.parametrize("spoil", [parametrised, fixed_by_the_host])
def test_stock_modifiers_on_our_kernels_refuse_them_too(folder, modifier, spoil):
    model = fresh(folder)
    message = spoil(model)
    with use_fwanda_kernels(), pytest.raises(UserError, match=message):
        run(folder, modifier(sparsity=0.5), model=model, pipeline="basic")


def test_a_shared_weight_is_refused(folder):
    with pytest.raises(UserError, match="lm_head shares its weight with model.embed_tokens"):
        run(folder, FWandaModifier(sparsity=0.5, ignore=[]))


def test_padded_batches_are_refused(folder):
    ids = tiny.tokens(2, 8)
    samples = [{"input_ids": ids[0], "attention_mask": torch.tensor([1] * 7 + [0])}]
    with pytest.raises(UserError, match="padded"):
        run(folder, FWandaModifier(sparsity=0.5), data=DataLoader(samples))


def test_batches_that_are_not_text_alone_are_refused(folder):
    samples = [{"input_ids": tiny.tokens(1, 8)[0], "pixel_values": torch.zeros(3)}]
    with pytest.raises(UserError, match="input_ids, pixel_values"):
        run(folder, FWandaModifier(sparsity=0.5), data=DataLoader(samples), pipeline="basic")


def test_a_run_without_samples_is_refused(folder):
    with pytest.raises(UserError, match="needs calibration samples"):
        host.oneshot(model=fresh(folder), recipe=FWandaModifier(sparsity=0.5))


def test_an_empty_dataset_is_refused(folder):
    with pytest.raises(UserError, match="empty dataset"):
        run(folder, FWandaModifier(sparsity=0.5), data=DataLoader([]), pipeline="basic")


def test_targets_that_match_nothing_are_refused(folder):
    with pytest.raises(UserError, match="no linear layer matches targets"):
        run(folder, FWandaModifier(sparsity=0.5, targets=["Nothing"]))


@pytest.mark.parametrize(
    "settings",
    [
        {"allocation": "layer"},
        {"allocation": "response"},
        {"allocation": "auto"},
        {"sparsity": 1.5},
        {"sparsity": [0.5, 0.5]},
        {"sparsity": 0.75, "mask_structure": "2:4"},
        {"mask_structure": "5:4"},
        {"power": -1.0},
        {"sparsity": 0.5, "sparsity_profile": "owl", "owl_m": 5, "owl_lmbda": 0.1},
        {"unknown": 1},
    ],
)
def test_bad_settings_are_refused(settings):
    with pytest.raises(ValueError):
        FWandaModifier(**settings)


def reload(monkeypatch):
    """Import the module anew, leaving the one that other tests hold."""
    name = ours.__name__
    monkeypatch.delitem(sys.modules, name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            importlib.import_module(name)
        finally:
            ours.ModifierFactory.register("FWandaModifier", FWandaModifier)
    return [str(w.message) for w in caught if "versions tested" in str(w.message)]


def test_another_version_gives_one_warning_that_names_both(monkeypatch):
    assert reload(monkeypatch) == []
    monkeypatch.setattr(host, "__version__", "0.99.1")
    (message,) = reload(monkeypatch)
    assert "0.99.1" in message and "0.14" in message


def test_a_missing_host_is_an_import_error_that_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "llmcompressor", None)
    with pytest.raises(ImportError, match=r"pip install 'llmcompressor>=0\.14,<0\.15'"):
        reload(monkeypatch)


def test_a_host_with_another_life_cycle_is_an_import_error(monkeypatch):
    for owner in (ours.SparsityModifierBase, Modifier):
        monkeypatch.delattr(owner, "on_calibration_start")
    with pytest.raises(ImportError, match="another life cycle"):
        reload(monkeypatch)
