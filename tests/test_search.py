"""`--allocation auto`: the masks are tried in passing, on text that calibration did not read."""

import math
from dataclasses import replace

import oracle
import pytest
import tiny
import torch
from measuring import engine_of, out_of_memory

import fwanda_pruner
from fwanda_pruner import PruneConfig, UserError
from fwanda_pruner.allocate.masks import masks_of
from fwanda_pruner.allocate.search import HELD_OUT as HELD_OUT_WINDOWS
from fwanda_pruner.allocate.search import Choice, candidates, choose, lowest, try_masks
from fwanda_pruner.config import settings_of
from fwanda_pruner.engine.resident import ResidentEngine
from fwanda_pruner.engine.resume import NoSteps
from fwanda_pruner.measure.statistics import measure_statistics
from fwanda_pruner.model.targets import find_targets
from fwanda_pruner.run.pipeline import run_prune
from fwanda_pruner.text import windows

TOKENS, HELD_OUT = tiny.tokens(16, 24), tiny.tokens(5, 24, seed=9)
CONFIG = PruneConfig(method="fwanda", allocation="auto", sparsity=0.6).resolved()


def measured(model, kind=ResidentEngine):
    """An engine of a model, and its statistics."""
    engine = kind(model, find_targets(model)[0], progress=False)
    return engine, measure_statistics(engine, TOKENS)


def losses_of(model, configs, tokens=HELD_OUT) -> dict[str, float]:
    engine, statistics = measured(model)
    return try_masks(engine, tokens, statistics, configs)


def same_weights(one, other) -> bool:
    pairs = zip(find_targets(one)[0], find_targets(other)[0], strict=True)
    return all(torch.equal(a.weight, b.weight) for a, b in pairs)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(tiny.text(2000))
    return str(path)


# Trying masks


@pytest.mark.parametrize("largest", [1, 2, 5])
@pytest.mark.parametrize("family", ["mistral", "gpt2", "gemma2"])
def test_a_tried_mask_has_the_loss_of_the_pruned_model(family, largest):
    """Also where memory runs out in the middle of a masked block: more than `largest` windows do not fit."""
    engine, statistics = measured(tiny.build(family))

    def run_out(_module, args):
        if len(args[0]) > largest:
            raise torch.OutOfMemoryError("CUDA out of memory")

    configs = candidates(CONFIG)
    engine.targets[-1].module.register_forward_pre_hook(run_out)
    losses = try_masks(engine, HELD_OUT, statistics, configs)
    for name in ("uniform", "row", "global b=0.75 c=0.5"):
        model = tiny.build(family)
        fwanda_pruner.prune(model, config=configs[name], calibration=TOKENS, progress=False)
        assert losses[name] == pytest.approx(math.log(oracle.perplexity(model, HELD_OUT)), rel=1e-5)


def test_the_model_is_dense_afterwards_also_after_an_error(monkeypatch):
    model = tiny.llama()
    dense = {name: weight.clone() for name, weight in model.state_dict().items()}
    engine, statistics = measured(model)
    try_masks(engine, HELD_OUT, statistics, candidates(CONFIG))
    masks = masks_of(candidates(CONFIG)["row"], engine, statistics)
    monkeypatch.setattr(model.model.layers[1].mlp, "forward", None)
    with pytest.raises(TypeError):
        engine.mean_loss(TOKENS[:1], masks)
    assert all(torch.equal(weight, dense[name]) for name, weight in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_allocation_without_a_budget_is_not_chosen():
    config = PruneConfig(method="fwanda", allocation="auto", sparsity="0.99").resolved()  # row keeps at least 1 a row
    losses = losses_of(tiny.llama(), candidates(config))
    assert losses["row"] == math.inf and math.isfinite(losses["uniform"])


@pytest.mark.filterwarnings("ignore:.*ran out of memory")
def test_memory_that_is_short_for_a_candidate_ends_the_search():
    """It says nothing about the candidate, so no other may win in its place."""
    model, fits = tiny.llama(), iter([True] * 3)
    with out_of_memory(model.model.layers[0].mlp, lambda _x: not next(fits, False)):
        with pytest.raises(UserError, match="does not fit the memory of cpu"):
            losses_of(model, candidates(CONFIG))


def test_a_pass_that_fails_under_masks_leaves_the_block_dense():
    """The next attempt must not hold the copies of the last, nor select masks on masked weights."""
    model = tiny.llama()
    engine = engine_of(model)
    dense = {name: weight.clone() for name, weight in model.state_dict().items()}
    seen = []

    def mask(weight):
        seen.append(bool((weight == 0).any()))
        return torch.zeros_like(weight, dtype=torch.bool)

    calls = iter([True, True])
    masks = {target.name: mask for target in engine.targets}
    with out_of_memory(model.model.layers[0].mlp.down_proj, lambda _x: next(calls, False)):
        with pytest.warns(UserWarning, match="ran out of memory"):
            engine.mean_loss(tiny.tokens(4, 24), masks)
    assert not any(seen)
    assert all(torch.equal(weight, dense[name]) for name, weight in model.state_dict().items())


def test_no_finite_loss_is_one_line():
    message = "^no allocation gives a finite loss on the held-out text; choose --allocation uniform, row or global$"
    with pytest.raises(UserError, match=message):
        lowest({"uniform": math.inf, "row": math.inf})


# What is chosen


@pytest.mark.parametrize("method", ["fwanda", "fsparsegpt"])
def test_auto_is_the_candidate_with_the_lowest_loss_on_held_out_text(method, text):
    settings = {"method": method, "sparsity": 0.6, "calibration": text, "nsamples": 20, "seqlen": 24, "progress": False}
    model = tiny.llama()
    report = fwanda_pruner.prune(model, tiny.tokenizer(), allocation="auto", **settings)
    chosen = report.config["chosen"]
    assert report.config["allocation"] == "auto" and chosen["name"] == min(chosen["losses"], key=chosen["losses"].get)
    configs = candidates(PruneConfig(method=method, allocation="auto"))
    config = configs.get(chosen["name"]) or replace(configs[chosen["start"]], allocation="response")
    names = ("allocation", "row_exponent", "layer_exponent")
    other = tiny.llama()
    fwanda_pruner.prune(other, tiny.tokenizer(), **{name: getattr(config, name) for name in names}, **settings)
    assert same_weights(model, other)


@pytest.mark.parametrize("best", ["uniform", "global b=1 c=0.75"])
def test_auto_takes_another_allocation_where_no_round_is_better(best):
    class Scripted(ResidentEngine):
        losses = iter([1.0 if name == best else 3.0 for name in candidates(CONFIG)] + [2.0, 2.0])

        def mean_loss(self, tokens, masks=None):
            return next(self.losses)

    engine, statistics = measured(tiny.llama(), Scripted)
    choice = choose(engine, TOKENS, HELD_OUT, statistics, CONFIG, rounds=NoSteps())
    assert choice.name == best and choice.start.startswith("global") and choice.scales is None
    model, other = tiny.llama(), tiny.llama()
    report, same = run_prune(model, None, config=CONFIG, calibration=TOKENS, choice=choice, progress=False)
    assert same is choice and report.config["chosen"] == choice.to_dict()
    fwanda_pruner.prune(other, config=candidates(CONFIG)[best], calibration=TOKENS, progress=False)
    assert same_weights(model, other)


def test_a_round_is_chosen_with_its_scales_where_it_is_best():
    class Scripted(ResidentEngine):
        losses = iter([3.0] * len(candidates(CONFIG)) + [2.0, 1.0])

        def mean_loss(self, tokens, masks=None):
            return next(self.losses)

    engine, statistics = measured(tiny.llama(), Scripted)
    choice = choose(engine, TOKENS, HELD_OUT, statistics, CONFIG, rounds=NoSteps())
    assert choice.name == "round 2" and choice.scales.rows.keys() == {target.name for target in engine.targets}
    assert choice.losses[choice.start] == 3.0 and choice.apply(CONFIG).allocation == "response"


def test_auto_takes_uniform_where_nothing_of_the_fisher_information_is_known():
    model = tiny.llama()
    model.model.norm.weight.data.zero_()
    report = fwanda_pruner.prune(model, config=CONFIG, calibration=TOKENS, progress=False)
    assert report.config["chosen"]["name"] == "uniform"


def test_under_a_pattern_an_update_of_the_weights_leaves_nothing_to_choose():
    model, other = tiny.llama(), tiny.llama()
    with pytest.warns(UserWarning, match="--allocation auto has no effect with --pattern 2:4"):
        report = fwanda_pruner.prune(
            model, method="fsparsegpt", allocation="auto", pattern="2:4", calibration=TOKENS, progress=False
        )
    fwanda_pruner.prune(other, method="fsparsegpt", pattern="2:4", calibration=TOKENS, progress=False)
    assert report.config["chosen"] is None and same_weights(model, other)


# A choice that is given


@pytest.mark.parametrize("allocation", ["response", "auto"])
@pytest.mark.parametrize("method", ["fwanda", "fsparsegpt"])
def test_a_given_choice_gives_the_masks_and_the_record_of_the_run_that_searched(method, allocation):
    config = PruneConfig(method=method, allocation=allocation, sparsity="0.6")
    models = tiny.llama(), tiny.llama()
    searched, choice = run_prune(models[0], None, config=config, calibration=TOKENS, progress=False)
    given, same = run_prune(models[1], None, config=config, calibration=TOKENS, choice=choice, progress=False)
    assert isinstance(choice, Choice) and same is choice and same_weights(*models)
    assert "choose" in searched.seconds and "choose" not in given.seconds
    records = [report.to_dict() for report in (searched, given)]
    for record in records:  # what depends on the search itself
        record["warnings"] = [line for line in record["warnings"] if "no calibration text is left" not in line]
        for key in ("seconds", "peak_memory_bytes", "energy_details"):
            del record[key]
    assert records[0] == records[1]


def test_without_a_search_there_is_no_choice():
    config = PruneConfig(method="fwanda", allocation="global")
    report, choice = run_prune(tiny.llama(), None, config=config, calibration=TOKENS, progress=False)
    assert choice is None and report.config["chosen"] is None and "choose" not in report.seconds


# On which text


def test_held_out_windows_are_none_of_the_calibration(text):
    settings = {"nsamples": 20, "seqlen": 24, "seed": 3, "bos": True}
    drawn = windows.calibration_tokens(text, tiny.tokenizer(), **settings)
    held = windows.held_out_tokens(text, tiny.tokenizer(), **settings, windows=8)
    more = windows.calibration_tokens(text, tiny.tokenizer(), **{**settings, "nsamples": 28})
    assert held.shape == (8, 24) and torch.equal(torch.cat([drawn, held]), more)
    assert not {tuple(row) for row in held.tolist()} & {tuple(row) for row in drawn.tolist()}


def test_no_window_is_held_out_where_calibration_reads_the_whole_text(text):
    settings = {"seqlen": 24, "seed": 0, "bos": False, "windows": 8}
    assert windows.held_out_tokens(text, tiny.tokenizer(), nsamples=80, **settings).shape == (3, 24)
    assert windows.held_out_tokens(text, tiny.tokenizer(), nsamples=83, **settings) is None


def test_without_held_out_text_the_last_windows_decide_with_a_warning():
    with pytest.warns(UserWarning, match="no calibration text is left to choose on"):
        report = fwanda_pruner.prune(tiny.llama(), config=CONFIG, calibration=TOKENS, progress=False)
    losses = losses_of(tiny.llama(), candidates(CONFIG), TOKENS[-HELD_OUT_WINDOWS:])
    assert {name: report.config["chosen"]["losses"][name] for name in losses} == pytest.approx(losses)


def test_auto_reads_the_text_of_given_statistics(text):
    settings = {"sparsity": 0.6, "calibration": text, "nsamples": 20, "seqlen": 24}
    config = PruneConfig(method="fwanda", allocation="auto", **settings)
    statistics = fwanda_pruner.collect(tiny.llama(), tiny.tokenizer(), config=config, progress=False)
    assert set(statistics.text) == set(settings_of("text"))
    one, other = (
        fwanda_pruner.prune(tiny.llama(), tiny.tokenizer(), config=config, statistics=given, progress=False)
        for given in (None, statistics)
    )
    assert one.config["chosen"] == other.config["chosen"]
