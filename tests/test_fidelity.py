"""The pruner against direct restatements of the methods on tiny models."""

import copy
from fractions import Fraction

import pytest
import tiny
import torch

import fwanda_pruner
from fwanda_pruner.allocate.budgets import keep_budgets
from fwanda_pruner.config import PruneConfig
from fwanda_pruner.errors import UserError
from fwanda_pruner.measure.statistics import Statistics, calibrate
from fwanda_pruner.methods.prune import Job, prune_targets
from fwanda_pruner.model.targets import find_targets

TOKENS = tiny.tokens(6, 24)


def linears(block):
    return {n: m for n, m in block.named_modules() if isinstance(m, torch.nn.Linear)}


def lowest_mask(score, count):
    """True at the `count` lowest of each row, lowest column first among ties."""
    order = torch.sort(score, dim=1, stable=True).indices[:, :count]
    return torch.zeros_like(score, dtype=torch.bool).scatter_(1, order, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequential_wanda_equals_its_block_loop(dtype):
    model = tiny.llama(dtype=dtype)
    expected = copy.deepcopy(model)
    fwanda_pruner.prune(model, method="wanda", order="sequential", sparsity=0.6, calibration=TOKENS, progress=False)

    # restatement: hidden states of all windows, block by block
    inner = expected.model
    with torch.no_grad():
        hidden = [inner.embed_tokens(window[None]) for window in TOKENS]
        positions = torch.arange(TOKENS.shape[1])[None]
        rotary = inner.rotary_emb(hidden[0], positions)
        # no mask argument: the attention is causal on its own for a full window
        for block in inner.layers:
            sums = {name: 0.0 for name in linears(block)}

            def hook(name, sums=sums):
                return lambda _m, i, _o: sums.__setitem__(name, sums[name] + i[0].double().square().sum((0, 1)))

            handles = [m.register_forward_hook(hook(n)) for n, m in linears(block).items()]
            run = lambda x, block=block: block(x, position_embeddings=rotary, position_ids=positions)  # noqa: E731
            for x in hidden:
                run(x)
            for handle in handles:
                handle.remove()
            for name, module in linears(block).items():
                score = module.weight.float().abs() * sums[name].float().sqrt()
                module.weight.data[lowest_mask(score, int(Fraction("0.6") * score.shape[1]))] = 0
            outputs = [run(x) for x in hidden]
            hidden = [y[0] if isinstance(y, tuple) else y for y in outputs]
    for (name, mine), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_onepass_wanda_uses_the_dense_model_s_inputs():
    model = tiny.llama()
    sums = {}

    def hook(name):
        return lambda _m, i, _o: sums.__setitem__(name, sums.get(name, 0) + i[0].double().square().sum((0, 1)))

    targets, _ = find_targets(model)
    handles = [t.module.register_forward_hook(hook(t.name)) for t in targets]
    with torch.no_grad():
        for window in TOKENS:
            model(window[None])
    for handle in handles:
        handle.remove()
    expected = {}
    for target in targets:
        score = target.weight.abs() * sums[target.name].float().sqrt()
        expected[target.name] = target.weight.masked_fill(lowest_mask(score, target.weight.shape[1] // 2), 0)
    fwanda_pruner.prune(model, method="wanda", sparsity=0.5, calibration=TOKENS, progress=False)
    for target in targets:
        assert torch.equal(target.weight, expected[target.name]), target.name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_statistics_equal_retained_gradients_of_the_summed_loss(checkpointing):
    model = tiny.llama()
    targets, _ = find_targets(model)
    inputs, outputs = {}, {}
    handles = []
    for target in targets:

        def hook(_m, i, o, name=target.name):
            inputs[name] = i[0].detach()
            o.retain_grad()
            outputs[name] = o

        handles.append(target.module.register_forward_hook(hook))
    x2 = {t.name: 0.0 for t in targets}
    g2 = dict(x2)
    for window in TOKENS:
        logits = model(window[None]).logits[0]
        torch.nn.functional.cross_entropy(logits[:-1], window[1:], reduction="sum").backward()
        for name in x2:
            x2[name] = x2[name] + inputs[name].double().square().sum((0, 1))
            g2[name] = g2[name] + outputs[name].grad.double().square().sum((0, 1))
    for handle in handles:
        handle.remove()
    model.zero_grad()
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    statistics = calibrate(model, TOKENS, targets, progress=False)
    for target in targets:
        assert statistics.n_tokens[target.name] == TOKENS.numel()
        torch.testing.assert_close(statistics.x2[target.name].double(), x2[target.name], rtol=1e-5, atol=0)
        torch.testing.assert_close(statistics.g2[target.name].double(), g2[target.name], rtol=1e-4, atol=1e-12)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def random_statistics(model, seed=0):
    targets, _ = find_targets(model)
    torch.manual_seed(seed)
    statistics = Statistics(fisher="empirical", bos=False)
    for target in targets:
        rows, cols = target.weight.shape
        statistics.x2[target.name] = torch.rand(cols) + 0.1
        statistics.g2[target.name] = torch.randn(rows).exp() ** 2
        statistics.n_tokens[target.name] = 100
    return targets, statistics


@pytest.mark.parametrize(
    ("allocation", "exponent"),
    # the published rule has a floor, which small omegas meet
    [("global", -40), ("global", -7), ("global", 13), ("global", 40), ("row", 13), ("row", 40)],
)
def test_budgets_do_not_depend_on_the_scale_of_omega(allocation, exponent):
    targets, statistics = random_statistics(tiny.llama())
    scaled = Statistics(**vars(statistics))
    scaled.g2 = {k: v * 2.0**exponent for k, v in statistics.g2.items()}
    config = PruneConfig(method="fwanda", allocation=allocation, sparsity="0.5").resolved()
    mine, theirs = keep_budgets(config, targets, statistics), keep_budgets(config, targets, scaled)
    assert all(torch.equal(mine[t.name], theirs[t.name]) for t in targets)


def test_global_budgets_equal_a_sort_of_all_scores():
    model = tiny.llama()
    targets, statistics = random_statistics(model)
    config = PruneConfig(allocation="global", sparsity="0.7", row_exponent=0.75, layer_exponent=0.5).resolved()
    mean = torch.cat([statistics.layer(t.name).omega for t in targets]).mean()
    scores = []
    for target in targets:
        norm = statistics.layer(target.name).norm
        omega = statistics.layer(target.name).omega / mean
        m = (target.weight.double().abs() * norm.double()).mean(1)
        a = omega**0.375 * m**-0.25 / (omega**0.375 * m**0.75).mean() ** 0.5
        scores.append(target.weight.abs() * norm * a.float()[:, None])
    flat = torch.cat([s.flatten() for s in scores])
    total = flat.numel() - int(Fraction("0.7") * flat.numel())
    kept = torch.zeros_like(flat, dtype=torch.bool)
    kept[torch.sort(flat, stable=True).indices[-total:]] = True
    budgets = keep_budgets(config, targets, statistics)
    for target, part in zip(targets, kept.split([s.numel() for s in scores]), strict=True):
        expected = part.view(target.weight.shape).sum(1)
        # the scale is computed in another order: rows at the threshold may differ by one
        assert (budgets[target.name] - expected).abs().max() <= 1, target.name
    assert sum(int(k.sum()) for k in budgets.values()) == total


def test_a_global_budget_without_fisher_information_is_the_users_error():
    targets, statistics = random_statistics(tiny.llama())
    statistics.g2 = {name: torch.zeros_like(g2) for name, g2 in statistics.g2.items()}
    config = PruneConfig(allocation="global", sparsity="0.5").resolved()
    with pytest.raises(UserError, match="the Fisher information is 0 everywhere"):
        keep_budgets(config, targets, statistics)


def test_a_bad_value_that_only_the_selection_meets_is_named():
    model = tiny.llama()
    targets, statistics = random_statistics(model)
    targets[3].module.weight.data[2, 1] = torch.inf
    config = PruneConfig(method="wanda", sparsity="0.5").resolved()
    with pytest.raises(UserError, match=f"{targets[3].name}: weight has NaN or inf values"):
        budgets = keep_budgets(config, targets, statistics)
        prune_targets(Job(config, model, targets, None, statistics, budgets, progress=False))


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_row_budgets_are_proportional_to_the_power_of_omega(power):
    targets, statistics = random_statistics(tiny.llama())
    config = PruneConfig(allocation="row", sparsity="0.5", power=power).resolved()
    budgets = keep_budgets(config, targets, statistics)
    for target in targets:
        rows, cols = target.weight.shape
        keep = budgets[target.name].double()
        assert int(keep.sum()) == rows * cols - rows * cols // 2
        free = (keep > 1) & (keep < cols)
        # k_i = lambda * omega_i^p up to rounding by less than one: one lambda must fit all rows
        shares = statistics.layer(target.name).omega[free] ** power
        assert free.sum() > 2 and ((keep[free] - 1) / shares).max() < ((keep[free] + 1) / shares).min()


def test_rows_that_meet_the_floor_are_counted():
    model = tiny.llama()
    report = fwanda_pruner.prune(model, method="fwanda", sparsity=0.5, calibration=TOKENS, progress=False)
    assert report.omega_floored_rows == 0
    _, statistics = random_statistics(tiny.llama())
    for g2 in statistics.g2.values():
        g2.fill_(1.0)  # omega = 0.01
        g2[:3] = 0.99e-6  # below 1e-8
    report = fwanda_pruner.prune(tiny.llama(), statistics=statistics, method="fwanda", sparsity=0.5, progress=False)
    assert report.omega_floored_rows == 3 * 14
