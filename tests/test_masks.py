"""Masks that an allocation selects: as rules, as packed bits, and in force only while a block runs."""

from dataclasses import replace

import oracle
import pytest
import tiny
import torch
from measuring import engine_of

from fwanda_pruner import PruneConfig
from fwanda_pruner.allocate.budgets import ScoreScales, global_scales, keep_total
from fwanda_pruner.allocate.masks import PackedMasks, masks_of, pack
from fwanda_pruner.engine.resident import ResidentEngine
from fwanda_pruner.measure.statistics import Statistics, measure_statistics
from fwanda_pruner.model.targets import find_targets

TOKENS = tiny.tokens(6, 16)
CONFIG = PruneConfig(method="fwanda", allocation="global", sparsity="0.6").resolved()
KINDS = ["rows", "pattern", "packed"]


def prepared(family: str = "mistral"):
    """An engine, the statistics of its model, and scales in which rows and columns differ."""
    engine = engine_of(tiny.build(family))
    statistics = measure_statistics(engine, TOKENS)
    start = global_scales(CONFIG, engine, statistics)
    generator = torch.Generator().manual_seed(1)
    columns = {name: 0.5 + torch.rand(len(column), generator=generator) for name, column in start.columns.items()}
    return engine, statistics, ScoreScales(start.rows, columns)


def masks_of_kind(kind: str, engine, statistics, scales):
    if kind == "pattern":
        return masks_of(replace(CONFIG, sparsity=None, pattern="2:4"), engine, statistics, scales)
    rows = masks_of(CONFIG, engine, statistics, scales)
    return pack(engine, rows) if kind == "packed" else rows


def pruned(engine, masks) -> dict[str, torch.Tensor]:
    """Copies of the weights, pruned block by block."""
    weights: dict[str, torch.Tensor] = {}
    for index in range(engine.block_count):
        block = {target.name: target.weight.clone() for target in engine.targets_of(index)}
        if block:
            masks.prune_(block)
        weights |= block
    return weights


# Selection


@pytest.mark.parametrize("family", ["mistral", "gpt2", "mixtral"])
def test_rows_and_columns_scale_the_scores_and_one_threshold_cuts_them(family):
    engine, statistics, scales = prepared(family)
    weights = [target.weight for target in engine.targets]
    scores = [
        t.weight.double().abs() * (statistics.layer(t.name).norm * scales.columns[t.name]).double()
        for t in engine.targets
    ]
    by_threshold = [s * scales.rows[t.name].double()[:, None] for s, t in zip(scores, engine.targets, strict=True)]
    size = sum(weight.numel() for weight in weights)
    keep = oracle.global_keep(by_threshold, keep_total(size, CONFIG.removed))
    found = pruned(engine, masks_of(CONFIG, engine, statistics, scales))
    unlike = 0
    for target, expected in zip(engine.targets, keep, strict=True):
        mask = found[target.name] != 0
        assert torch.equal(found[target.name][mask], target.weight[mask])
        unlike += int((mask ^ expected).sum())
    assert unlike <= size // 10_000  # scores in fp32 may swap two at the threshold
    assert sum(int((weight != 0).sum()) for weight in found.values()) == keep_total(size, CONFIG.removed)


def test_without_scales_rows_are_ranked_by_wandas_scores():
    engine, statistics, _ = prepared()
    config = replace(CONFIG, allocation="uniform")
    for name, weight in pruned(engine, masks_of(config, engine, statistics)).items():
        dense = next(target.weight for target in engine.targets if target.name == name)
        scores = oracle.wanda_scores(dense, statistics.layer(name).norm.square())
        assert torch.equal(weight == 0, oracle.lowest(scores, oracle.count_of("0.6", dense.shape[1])))


def test_a_pattern_keeps_the_largest_scaled_scores_of_each_group():
    engine, statistics, scales = prepared()
    found = pruned(engine, masks_of_kind("pattern", engine, statistics, scales))
    for target in engine.targets:
        scores = target.weight.abs() * statistics.layer(target.name).norm * scales.columns[target.name]
        groups = scores.unflatten(1, (-1, 4)).flatten(0, 1)
        assert torch.equal((found[target.name] == 0).view_as(groups), oracle.lowest(groups, 2))


def test_columns_left_over_by_a_pattern_stay():
    model = tiny.build("mistral")
    target = find_targets(model)[0][0]
    rows, cols = target.weight.shape
    target.module.weight = torch.nn.Parameter(torch.randn(rows, cols - 2), requires_grad=False)
    statistics = Statistics(x2={target.name: torch.rand(cols - 2)}, n_tokens={target.name: 5})
    config = PruneConfig(method="wanda", pattern="2:4", nm_tail="dense").resolved()
    engine = ResidentEngine(model, [target])
    masks = masks_of(config, engine, statistics)
    for kind in (masks, pack(engine, masks)):
        mask = pruned(engine, kind)[target.name] != 0
        assert bool(mask[:, -2:].all()) and bool((mask[:, :-2].unflatten(1, (-1, 4)).sum(2) == 2).all())


# Packed


@pytest.mark.parametrize("kind", ["rows", "pattern"])
@pytest.mark.parametrize("family", ["mistral", "gpt2", "mixtral"])
def test_masks_packed_as_bits_are_the_selected_masks(family, kind):
    engine, statistics, scales = prepared(family)
    masks = masks_of_kind(kind, engine, statistics, scales)
    expected, packed = pruned(engine, masks), pack(engine, masks)
    assert packed.packed.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(oracle.unpacked(packed.packed[name], weight.shape[1]), weight != 0)
    found = pruned(engine, packed)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_packed_masks_are_those_of_the_weights_when_they_were_packed():
    engine, statistics, scales = prepared()
    masks = masks_of(CONFIG, engine, statistics, scales)
    expected, packed = pruned(engine, masks), pack(engine, masks)
    for target in engine.targets:
        target.weight.copy_(torch.randn_like(target.weight))
    for name, weight in pruned(engine, packed).items():
        assert torch.equal(weight != 0, expected[name] != 0)


def test_a_weight_that_is_zero_is_packed_as_removed():
    engine, _, _ = prepared()
    target = engine.targets[0]
    target.weight[3, 5] = 0
    everything = PackedMasks({t.name: oracle.packed(torch.ones(t.shape, dtype=torch.bool)) for t in engine.targets})
    bits = oracle.unpacked(pack(engine, everything).packed[target.name], target.shape[1])
    assert not bits[3, 5] and int((~bits).sum()) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_packing_leaves_the_weights_alone(kind):
    engine, statistics, scales = prepared()
    dense = {target.name: target.weight.clone() for target in engine.targets}
    pack(engine, masks_of_kind(kind, engine, statistics, scales))
    assert all(torch.equal(target.weight, dense[target.name]) for target in engine.targets)


# While a block runs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["mistral", "gpt2", "mixtral"])
def test_a_masked_pass_has_the_losses_of_the_pruned_model(family, kind):
    engine, statistics, scales = prepared(family)
    masks = masks_of_kind(kind, engine, statistics, scales)
    found, weights = engine.window_losses(TOKENS, masks), pruned(engine, masks)
    for target in engine.targets:
        target.weight.copy_(weights[target.name])
    torch.testing.assert_close(found, oracle.losses(engine.model, TOKENS).mean(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["first", "last", "head"])
@pytest.mark.parametrize("family", ["mistral", "mixtral"])
def test_a_masked_pass_leaves_every_bit_of_the_weights_also_after_an_error(family, where, kind):
    engine, statistics, scales = prepared(family)
    masks = masks_of_kind(kind, engine, statistics, scales)
    model = engine.model
    dense = {name: weight.clone() for name, weight in model.state_dict().items()}
    blocks = model.model.layers
    module = {"first": blocks[0].mlp, "last": blocks[-1].mlp, "head": model.get_output_embeddings()}[where]

    def fail(*_):
        raise RuntimeError("broken")

    engine.window_losses(TOKENS, masks)
    handle = module.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        engine.window_losses(TOKENS, masks)
    handle.remove()
    assert all(torch.equal(weight, dense[name]) for name, weight in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
