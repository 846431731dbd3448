"""`--allocation response`: what the loss of the pruned model says, and the factors that follow it."""

import copy
import math
from dataclasses import replace

import pytest
import tiny
import torch

import fwanda_pruner
from fwanda_pruner import PruneConfig
from fwanda_pruner.allocate import response as respond
from fwanda_pruner.allocate.budgets import Factors, global_factors, keep_total
from fwanda_pruner.allocate.masks import kept_as_bits, masks_of
from fwanda_pruner.engine.loop import PassFacts, PassSettings
from fwanda_pruner.measure.statistics import Statistics, calibrate
from fwanda_pruner.model.targets import find_targets

TOKENS, HELD_OUT = tiny.tokens(12, 16), tiny.tokens(4, 16, seed=9)
CONFIG = PruneConfig(method="fwanda", allocation="response", sparsity="0.6").resolved()


def prepared(family: str = "mistral"):
    """A model, its targets and statistics, and factors in which columns differ too."""
    model = tiny.build(family)
    targets = find_targets(model)[0]
    statistics = calibrate(model, TOKENS, targets, progress=False)
    start = global_factors(CONFIG, targets, statistics)
    generator = torch.Generator().manual_seed(1)
    columns = {name: 0.5 + torch.rand(len(column), generator=generator) for name, column in start.columns.items()}
    return model, targets, statistics, Factors(start.rows, columns)


def response(model, targets, statistics, *, loss=math.inf, held_out=HELD_OUT, settings=None):
    settings = settings or PassSettings()
    return respond.respond(
        model, TOKENS, held_out, targets, statistics, CONFIG, loss, settings=settings, progress=False
    )


def autograd_sums(model, targets, masks) -> dict[str, torch.Tensor]:
    """name -> [R, C] fp64: -dL/dW' W where W was removed, 0 elsewhere, of the pruned model in fp64."""
    pruned = copy.deepcopy(model)
    copies = {t.name: t for t in find_targets(pruned)[0]}
    pruned.double()
    dense = {name: t.weight.clone() for name, t in copies.items()}
    for name, target in copies.items():
        target.weight.mul_(masks[name]())
        target.module.weight.requires_grad_(True)
    logits = pruned(TOKENS).logits[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, TOKENS[:, 1:].flatten(), reduction="sum").backward()
    slopes = {n: t.module.weight.grad for n, t in copies.items()}
    slopes |= {n: slopes[n].T for n, t in copies.items() if not isinstance(t.module, torch.nn.Linear)}
    return {name: -(slopes[name] * dense[name]).masked_fill(masks[name](), 0) for name in copies}


@pytest.mark.parametrize("settings", [PassSettings(1), PassSettings(5), PassSettings(3, checkpointing="on")])
@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_the_sums_are_the_derivatives_of_the_pruned_model(family, settings):
    model, targets, statistics, factors = prepared(family)
    masks = masks_of(CONFIG, targets, statistics, factors)
    dense = {t.name: t.weight.clone() for t in targets}
    sums = respond._sums_of_removed(targets, statistics, factors, masks)
    respond._measure(model, TOKENS, targets, masks, sums, settings)
    expected = autograd_sums(model, targets, masks)
    for target in targets:
        rows, columns = sums[target.name]
        found = expected[target.name]
        size = found.abs().sum()
        assert torch.allclose(rows.found, found.sum(1), atol=float(1e-4 * size))
        assert torch.allclose(columns.found, found.sum(0), atol=float(1e-4 * size))
        assert rows.passes == columns.passes == math.ceil(len(TOKENS) / settings.micro_batch)
        scores = target.weight.abs() * statistics.layer(target.name).norm * factors.columns[target.name]
        squares = (scores * factors.rows[target.name][:, None]).double().square().masked_fill(masks[target.name](), 0)
        assert torch.allclose(rows.predicted, squares.sum(1)) and torch.allclose(columns.predicted, squares.sum(0))
        assert torch.equal(target.weight, dense[target.name])
        assert "forward" not in vars(target.module)


def test_masks_kept_as_bits_are_the_same_masks():
    for shape in ((1, 1), (3, 5), (4, 16)):
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < 0.5
        kept = kept_as_bits({"matrix": lambda mask=mask: mask})["matrix"]
        assert torch.equal(kept(), mask) and kept().dtype == torch.bool


def sums_of(predicted, *found) -> respond._Sums:
    sums = respond._Sums.of(torch.tensor(predicted, dtype=torch.float64))
    for values in found:
        sums.add(torch.tensor(values, dtype=torch.float64))
    return sums


def test_ratios_without_noise_are_those_measured():
    sums = sums_of([1.0, 2.0, 4.0, 0.0], [1.0, 4.0, 2.0, 0.0], [1.0, 4.0, 2.0, 0.0])
    assert sums.ratios(torch.tensor(2.0)).tolist() == pytest.approx([1.0, 2.0, 0.5, 1.0])


def test_ratios_of_noise_alone_are_1():
    sums = sums_of([1.0, 1.0, 1.0], [9.0, -8.0, 9.0], [-8.0, 9.0, -7.0], [2.0, 1.5, 1.0])
    assert sums.ratios(torch.tensor(3.0)).tolist() == [1.0, 1.0, 1.0]


def test_ratios_are_drawn_by_their_noise():
    """By hand: noise .16 and 0, spread 1.84 / 18, so a signal of .92 each."""
    sums = sums_of([1.0, 1.0], [2.2, 1.0], [1.8, 1.0])
    assert sums.ratios(torch.tensor(3.0)).tolist() == pytest.approx([1 + 0.92 / 1.08 / 3, 2 / 3])


def test_a_single_pass_tells_no_noise_and_moves_no_line():
    assert sums_of([1.0, 1.0], [0.0, 2.0]).ratios(torch.tensor(1.0)).tolist() == [1.0, 1.0]


def test_ratios_are_bounded():
    sums = sums_of([1.0] * 40, [0.0] * 39 + [400.0], [0.0] * 39 + [400.0])
    assert sums.ratios(torch.tensor(2.0)).min() == pytest.approx(0.1)
    assert sums.ratios(torch.tensor(2.0)).max() == pytest.approx(10.0)


def test_factors_follow_the_ratio_of_their_matrix():
    names = ["low", "right", "high", "negative", "unseen"]
    predicted, found = [1.0, 3.0], {"low": 8.0, "right": 2.0, "high": 0.5, "negative": -1.0}
    sums = {name: (respond._Sums.of(torch.tensor(predicted).double()),) * 2 for name in names}
    for name, ratio in found.items():
        sums[name] = tuple(sums_of(predicted, [ratio, 3 * ratio], [ratio, 3 * ratio]) for _ in range(2))
    start = Factors({name: torch.ones(2) for name in names}, {name: torch.ones(2) for name in names})
    moved = respond._moved(start, sums)
    steps = {name: float(moved.rows[name].log().mean()) / 0.15 for name in names}  # the middle ratio is 4
    assert steps["right"] == pytest.approx(0) and steps["low"] == pytest.approx(math.log(4), rel=1e-5)
    assert steps["high"] == pytest.approx(math.log(1 / 4), rel=1e-5)
    assert steps["negative"] == pytest.approx(math.log(1 / 5), rel=1e-5)
    assert steps["unseen"] == 0
    assert all(torch.allclose(column, torch.ones(2)) for column in moved.columns.values())


def test_rows_and_columns_move_apart_by_their_ratios():
    sums = {"matrix": (sums_of([1.0, 1.0], [1.0, 3.0], [1.0, 3.0]), sums_of([1.0, 1.0], [3.0, 1.0], [3.0, 1.0]))}
    ones = {"matrix": torch.ones(2)}
    moved = respond._moved(Factors(ones, ones), sums)
    apart = [0.5**0.05, 1.5**0.05]
    assert moved.rows["matrix"].tolist() == pytest.approx(apart)
    assert moved.columns["matrix"].tolist() == pytest.approx(apart[::-1])


def test_each_round_takes_the_next_windows(monkeypatch):
    model, targets, statistics, _ = prepared()
    seen = []

    def measure(model, tokens, *args):
        seen.append(tokens)
        return passes(model, tokens, *args)

    passes = respond._measure
    monkeypatch.setattr(respond, "_measure", measure)
    monkeypatch.setattr(respond, "_ROUND_TOKENS", 7 * 16)
    response(model, targets, statistics)
    assert torch.equal(torch.cat(seen), TOKENS[[*range(12), 0, 1]])


@pytest.mark.parametrize(("asked", "found"), [(None, 2), (1, 1), (4, 2)])
def test_passes_are_small_and_no_larger_than_asked(asked, found, monkeypatch):
    model, targets, statistics, _ = prepared()
    monkeypatch.setattr(respond, "_CALLS", 6)
    settings = []
    monkeypatch.setattr(respond, "_measure", lambda *args: settings.append(args[-1]) or PassFacts(1, False, True))
    with pytest.warns(UserWarning, match="the loss misses the removed weights of no matrix: the response ends after 0"):
        response(model, targets, statistics, settings=PassSettings(asked))
    assert settings[0].micro_batch == found and settings[0].compile == "off"


def test_memory_that_one_round_found_short_is_spared_in_the_next(monkeypatch):
    model, targets, statistics, _ = prepared()
    settings, measure = [], respond._measure

    def short(*args):
        settings.append(args[-1])
        measure(*args)
        return PassFacts(1, False, True)

    monkeypatch.setattr(respond, "_measure", short)
    monkeypatch.setattr(respond, "_CALLS", 3)
    response(model, targets, statistics)
    assert [(s.micro_batch, s.checkpointing) for s in settings] == [(4, "auto"), (1, "on")]


def test_calibration_with_checkpointing_makes_the_rounds_do_so(monkeypatch):
    model, targets, statistics, _ = prepared()
    statistics.passes["checkpointing"] = True
    settings = []
    monkeypatch.setattr(respond, "_measure", lambda *args: settings.append(args[-1]) or PassFacts(1, False, True))
    with pytest.warns(UserWarning, match="the response ends after 0 rounds"):
        response(model, targets, statistics)
    assert settings[0].checkpointing == "on"


def test_sums_begin_anew_when_passes_do():
    model, targets, statistics, factors = prepared()
    masks = masks_of(CONFIG, targets, statistics, factors)
    sums = respond._sums_of_removed(targets, statistics, factors, masks)
    for _ in range(2):
        respond._measure(model, TOKENS, targets, masks, sums, PassSettings(4))
        rows, _ = sums[targets[0].name]
        found = rows.found.clone()
        assert rows.passes == 3
    again = respond._sums_of_removed(targets, statistics, factors, masks)
    respond._measure(model, TOKENS, targets, masks, again, PassSettings(4))
    assert torch.equal(found, again[targets[0].name][0].found)


def test_compile_on_is_said_to_be_without_effect():
    model, targets, statistics, _ = prepared()
    with pytest.warns(UserWarning, match="without compiled blocks, in spite of --compile on"):
        response(model, targets, statistics, settings=PassSettings(1, compile="on"))


def test_columns_left_over_by_a_pattern_stay():
    model = tiny.build("mistral")
    target = find_targets(model)[0][0]
    rows, cols = target.weight.shape
    target.module.weight = torch.nn.Parameter(torch.randn(rows, cols - 2), requires_grad=False)
    statistics = Statistics(x2={target.name: torch.rand(cols - 2)}, n_tokens={target.name: 5})
    config = PruneConfig(method="wanda", pattern="2:4", nm_tail="dense").resolved()
    mask = masks_of(config, [target], statistics)[target.name]()
    assert bool(mask[:, -2:].all()) and bool((mask[:, :-2].unflatten(1, (-1, 4)).sum(2) == 2).all())


def test_the_best_round_on_held_out_text_is_taken(monkeypatch):
    model, targets, statistics, _ = prepared()
    losses = iter([1.0, 2.0])
    monkeypatch.setattr(respond, "masked_loss", lambda *args: next(losses))
    factors, found = response(model, targets, statistics, loss=3.0)
    assert found == {"round 1": 1.0, "round 2": 2.0}
    start = global_factors(CONFIG, targets, statistics)
    settings = PassSettings(1, compile="off")
    masks = masks_of(CONFIG, targets, statistics, start)
    sums = respond._sums_of_removed(targets, statistics, start, masks)
    respond._measure(model, TOKENS, targets, masks, sums, settings)
    first = respond._moved(start, sums)
    assert all(torch.equal(factors.rows[t.name], first.rows[t.name]) for t in targets)
    assert all(torch.equal(factors.columns[t.name], first.columns[t.name]) for t in targets)


@pytest.mark.parametrize("method", ["fwanda", "fsparsegpt"])
@pytest.mark.parametrize("family", ["mistral", "gpt2", "mixtral"])
def test_counts_are_exact(family, method):
    model = tiny.build(family)
    report = fwanda_pruner.prune(
        model,
        config=PruneConfig(method=method, allocation="response", sparsity="0.6"),
        calibration=TOKENS,
        progress=False,
    )
    weights = [t.weight for t in find_targets(model)[0]]
    size = sum(w.numel() for w in weights)
    assert sum(int((w != 0).sum()) for w in weights) == keep_total(size, CONFIG.removed)
    losses = report.config["chosen"]["losses"]
    assert losses[report.config["chosen"]["name"]] == min(losses.values()) and "round 2" in losses


def test_under_a_pattern_the_columns_decide():
    model, other = tiny.llama(), tiny.llama()
    settings = {"pattern": "2:4", "calibration": TOKENS, "progress": False}
    report = fwanda_pruner.prune(model, method="fwanda", allocation="response", **settings)
    fwanda_pruner.prune(other, method="wanda", **settings)
    pairs = list(zip(find_targets(model)[0], find_targets(other)[0], strict=True))
    assert all(bool(((a.weight != 0).unflatten(1, (-1, 4)).sum(2) == 2).all()) for a, _ in pairs)
    assert report.config["chosen"]["name"].startswith("round")
    assert not all(torch.equal(a.weight, b.weight) for a, b in pairs)


@pytest.mark.parametrize("method", ["fwanda", "fsparsegpt"])
def test_the_mask_of_a_run_is_that_of_its_factors(method):
    model, (dense, targets, statistics, _) = tiny.build("mistral"), prepared()
    config = replace(CONFIG, method=method)
    report = fwanda_pruner.prune(model, config=config, calibration=TOKENS, statistics=statistics, progress=False)
    assert report.omega_floored_rows is None  # the factors are not omega
    factors, _ = response(dense, targets, statistics, held_out=TOKENS[-8:])
    masks = masks_of(CONFIG, targets, statistics, factors)
    for target, pruned in zip(targets, find_targets(model)[0], strict=True):
        assert torch.equal(pruned.weight != 0, masks[target.name]())


def test_gradients_that_overflow_end_the_rounds_with_a_warning(monkeypatch):
    model, targets, statistics, _ = prepared()

    def overflow(self, found):
        self.squares[0] = torch.inf
        self.passes += 1

    monkeypatch.setattr(respond._Sums, "add", overflow)
    with pytest.warns(UserWarning, match="overflow: the response ends after 0 rounds"):
        assert response(model, targets, statistics) == (None, {})


@pytest.mark.parametrize("allocation", ["response", "auto"])
def test_works_under_inference_mode(allocation):
    models = tiny.llama(), tiny.llama()
    settings = {"method": "fwanda", "allocation": allocation, "calibration": TOKENS, "progress": False}
    with torch.inference_mode():
        fwanda_pruner.prune(models[0], **settings)
    fwanda_pruner.prune(models[1], **settings)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
