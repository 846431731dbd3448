"""`--allocation auto`: the masks are tried in passing, on text that calibration did not read."""

import math
from dataclasses import replace

import pytest
import tiny
import torch

import fwanda_pruner
from fwanda_pruner import PruneConfig, UserError
from fwanda_pruner.allocate import choose, masks
from fwanda_pruner.allocate import response as respond
from fwanda_pruner.config import settings_of
from fwanda_pruner.evaluate import perplexity as evaluate
from fwanda_pruner.measure.statistics import calibrate
from fwanda_pruner.model.targets import find_targets
from fwanda_pruner.text import windows as data

TOKENS, HELD_OUT = tiny.tokens(16, 24), tiny.tokens(5, 24, seed=9)
CONFIG = PruneConfig(method="fwanda", allocation="auto", sparsity=0.6).resolved()


def losses_of(model, configs, tokens=HELD_OUT) -> dict[str, float]:
    targets = find_targets(model)[0]
    statistics = calibrate(model, TOKENS, targets, progress=False)
    return choose.try_masks(model, tokens, targets, statistics, configs, progress=False)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(tiny.text(2000))
    return str(path)


@pytest.mark.parametrize("batch", [1, 24 * 2, 10**6])
@pytest.mark.parametrize("family", ["mistral", "gpt2", "gemma2"])
def test_a_tried_mask_has_the_loss_of_the_pruned_model(family, batch, monkeypatch):
    monkeypatch.setattr(masks, "_BATCH_TOKENS", batch)
    configs = choose.candidates(CONFIG)
    found = losses_of(tiny.build(family), configs)
    for name in ("uniform", "row", "global b=0.75 c=0.5"):
        model = tiny.build(family)
        fwanda_pruner.prune(model, config=configs[name], calibration=TOKENS, progress=False)
        assert found[name] == pytest.approx(math.log(evaluate.perplexity(model, HELD_OUT, progress=False)), rel=1e-5)


def test_the_model_is_dense_afterwards_also_after_an_error(monkeypatch):
    model = tiny.llama()
    dense = {name: weight.clone() for name, weight in model.state_dict().items()}
    losses_of(model, choose.candidates(CONFIG))
    targets = find_targets(model)[0]
    statistics = calibrate(model, TOKENS, targets, progress=False)
    found = masks.masks_of(choose.candidates(CONFIG)["row"], targets, statistics)
    monkeypatch.setattr(model.model.layers[1].mlp, "forward", None)
    with pytest.raises(TypeError), masks.masked_in_passing(model, targets, found):
        model(TOKENS[:1])
    assert all(torch.equal(weight, dense[name]) for name, weight in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("method", ["fwanda", "fsparsegpt"])
def test_auto_is_the_candidate_with_the_lowest_loss_on_held_out_text(method, text):
    settings = {"method": method, "sparsity": 0.6, "calibration": text, "nsamples": 20, "seqlen": 24, "progress": False}
    model = tiny.llama()
    report = fwanda_pruner.prune(model, tiny.tokenizer(), allocation="auto", **settings)
    chosen = report.config["chosen"]
    assert report.config["allocation"] == "auto" and chosen["name"] == min(chosen["losses"], key=chosen["losses"].get)
    found = choose.candidates(PruneConfig(method=method, allocation="auto"))
    config = found.get(chosen["name"]) or replace(found[chosen["start"]], allocation="response")
    names = ("allocation", "row_exponent", "layer_exponent")
    other = tiny.llama()
    fwanda_pruner.prune(other, tiny.tokenizer(), **{name: getattr(config, name) for name in names}, **settings)
    assert all(
        torch.equal(a.weight, b.weight) for a, b in zip(find_targets(model)[0], find_targets(other)[0], strict=True)
    )


@pytest.mark.parametrize("best", ["uniform", "global b=1 c=0.75"])
def test_auto_takes_another_allocation_where_no_round_is_better(best, monkeypatch):
    losses = dict.fromkeys(choose.candidates(CONFIG), 3.0) | {best: 1.0}
    monkeypatch.setattr(choose, "try_masks", lambda *args, **kwargs: losses)
    monkeypatch.setattr(respond, "masked_loss", lambda *args, **kwargs: 2.0)
    model, other = tiny.llama(), tiny.llama()
    report = fwanda_pruner.prune(model, config=CONFIG, calibration=TOKENS, progress=False)
    assert report.config["chosen"]["name"] == best and report.config["chosen"]["start"].startswith("global")
    fwanda_pruner.prune(other, config=choose.candidates(CONFIG)[best], calibration=TOKENS, progress=False)
    assert all(
        torch.equal(a.weight, b.weight) for a, b in zip(find_targets(model)[0], find_targets(other)[0], strict=True)
    )


def test_held_out_windows_are_none_of_the_calibration(text):
    settings = {"nsamples": 20, "seqlen": 24, "seed": 3, "bos": True}
    drawn = data.calibration_tokens(text, tiny.tokenizer(), **settings)
    held = data.held_out_tokens(text, tiny.tokenizer(), **settings, windows=8)
    more = data.calibration_tokens(text, tiny.tokenizer(), **{**settings, "nsamples": 28})
    assert held.shape == (8, 24) and torch.equal(torch.cat([drawn, held]), more)
    assert not {tuple(row) for row in held.tolist()} & {tuple(row) for row in drawn.tolist()}


def test_no_window_is_held_out_where_calibration_reads_the_whole_text(text):
    settings = {"seqlen": 24, "seed": 0, "bos": False, "windows": 8}
    assert data.held_out_tokens(text, tiny.tokenizer(), nsamples=80, **settings).shape == (3, 24)
    assert data.held_out_tokens(text, tiny.tokenizer(), nsamples=83, **settings) is None


def test_without_held_out_text_the_last_windows_decide_with_a_warning():
    with pytest.warns(UserWarning, match="no calibration text is left to choose on"):
        report = fwanda_pruner.prune(tiny.llama(), config=CONFIG, calibration=TOKENS, progress=False)
    model = tiny.llama()
    losses = losses_of(model, choose.candidates(CONFIG), TOKENS[-choose.HELD_OUT :])
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


def test_an_allocation_without_a_budget_is_not_chosen():
    config = PruneConfig(method="fwanda", allocation="auto", sparsity="0.99").resolved()  # row keeps at least 1 a row
    losses = losses_of(tiny.llama(), choose.candidates(config))
    assert losses["row"] == math.inf and math.isfinite(losses["uniform"])


def test_no_finite_loss_is_one_line():
    with pytest.raises(
        UserError, match="^no allocation gives a finite loss on the held-out text; choose uniform, row or global"
    ):
        choose.best({"uniform": math.inf, "row": math.inf})


def test_under_a_pattern_an_update_of_the_weights_leaves_nothing_to_choose():
    model, other = tiny.llama(), tiny.llama()
    with pytest.warns(UserWarning, match="--allocation auto divides nothing under 2:4"):
        report = fwanda_pruner.prune(
            model, method="fsparsegpt", allocation="auto", pattern="2:4", calibration=TOKENS, progress=False
        )
    fwanda_pruner.prune(other, method="fsparsegpt", pattern="2:4", calibration=TOKENS, progress=False)
    assert report.config["chosen"] is None
    assert all(
        torch.equal(a.weight, b.weight) for a, b in zip(find_targets(model)[0], find_targets(other)[0], strict=True)
    )


def test_auto_takes_uniform_where_nothing_of_the_fisher_information_is_known():
    model = tiny.llama()
    model.model.norm.weight.data.zero_()
    report = fwanda_pruner.prune(model, config=CONFIG, calibration=TOKENS, progress=False)
    assert report.config["chosen"]["name"] == "uniform"
