"""`--allocation auto`: the masks are tried in passing, on text of all domains that calibration did not read."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

import oracle
import pytest
import tiny
import torch
from measuring import engine_of, out_of_memory

import fwanda_pruner
from fwanda_pruner import PruneConfig, UserError
from fwanda_pruner.allocate.judge import Judge
from fwanda_pruner.allocate.masks import masks_of
from fwanda_pruner.allocate.search import Choice, candidates, choose, try_masks, wanda_config
from fwanda_pruner.config import settings_of
from fwanda_pruner.engine.resident import ResidentEngine
from fwanda_pruner.measure.statistics import measure_statistics
from fwanda_pruner.model.targets import find_targets
from fwanda_pruner.run import stages
from fwanda_pruner.run.pipeline import run_prune
from fwanda_pruner.text.domains import Domain
from fwanda_pruner.text.windows import draw_windows, guard_tokens

TOKENS, HELD_OUT, OTHER = tiny.tokens(16, 24), tiny.tokens(5, 24, seed=9), tiny.tokens(3, 24, seed=8)
CONFIG = PruneConfig(method="fwanda", allocation="auto", sparsity=0.6).resolved()
GLOBALS = [name for name in candidates(CONFIG) if name.startswith("global")]


def measured(model, kind=ResidentEngine):
    """An engine of a model, and its statistics."""
    engine = kind(model, find_targets(model)[0], progress=False)
    return engine, measure_statistics(engine, TOKENS)


def judge_of(engine, statistics, **windows) -> Judge:
    """A judge on windows by the name of their domain; the default is one domain. None of them is a guard."""
    domains = [Domain(name, True, False, True, ids[:0], ids) for name, ids in (windows or {"text": HELD_OUT}).items()]
    return Judge(engine, domains, masks_of(wanda_config(CONFIG), engine, statistics))


def losses_of(model, configs, **windows) -> dict[str, dict[str, float]]:
    engine, statistics = measured(model)
    return try_masks(engine, judge_of(engine, statistics, **windows), statistics, configs)


def same_weights(one, other) -> bool:
    pairs = zip(find_targets(one)[0], find_targets(other)[0], strict=True)
    return all(torch.equal(a.weight, b.weight) for a, b in pairs)


@pytest.fixture
def text(tmp_path):
    return tiny.text_file(tmp_path)


@pytest.fixture
def guard(tmp_path):
    return tiny.guard_file(tmp_path)


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
    losses = try_masks(engine, judge_of(engine, statistics, one=HELD_OUT, two=OTHER), statistics, configs)
    for name in ("uniform", "row", "global b=0.75 c=0.5"):
        model = tiny.build(family)
        fwanda_pruner.prune(model, config=configs[name], calibration=TOKENS, progress=False)
        expected = {name: math.log(oracle.perplexity(model, ids)) for name, ids in (("one", HELD_OUT), ("two", OTHER))}
        assert losses[name] == pytest.approx(expected, rel=1e-5)


def test_the_model_is_dense_afterwards_also_after_an_error(monkeypatch):
    model = tiny.llama()
    dense = {name: weight.clone() for name, weight in model.state_dict().items()}
    engine, statistics = measured(model)
    try_masks(engine, judge_of(engine, statistics), statistics, candidates(CONFIG))
    masks = masks_of(candidates(CONFIG)["row"], engine, statistics)
    monkeypatch.setattr(model.model.layers[1].mlp, "forward", None)
    with pytest.raises(TypeError):
        engine.window_losses(TOKENS[:1], masks)
    assert all(torch.equal(weight, dense[name]) for name, weight in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_allocation_without_a_budget_is_not_chosen():
    config = PruneConfig(method="fwanda", allocation="auto", sparsity="0.99").resolved()  # row keeps at least 1 a row
    losses = losses_of(tiny.llama(), candidates(config))
    assert losses["row"]["text"] == math.inf and math.isfinite(losses["uniform"]["text"])


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

    class Nothing:
        """Masks that keep no weight."""

        def prune_(self, weights):
            seen.extend(bool((weight == 0).any()) for weight in weights.values())
            for weight in weights.values():
                weight.zero_()

    calls = iter([True, True])
    with out_of_memory(model.model.layers[0].mlp.down_proj, lambda _x: next(calls, False)):
        with pytest.warns(UserWarning, match="ran out of memory"):
            engine.window_losses(tiny.tokens(4, 24), Nothing())
    assert seen and not any(seen)
    assert all(torch.equal(weight, dense[name]) for name, weight in model.state_dict().items())


# What is chosen


def chosen_by(rank, losses: dict[str, dict[str, float]]) -> str:
    """The name with the smallest rank, which is a function of a candidate's losses."""
    return min((name for name in losses if name not in ("dense", "wanda")), key=lambda name: rank(losses[name]))


def test_auto_is_the_candidate_with_the_smallest_mean_increase_over_the_domains(text, guard):
    settings = {"sparsity": 0.6, "calibration": text, "guard": guard, "nsamples": 20, "seqlen": 24, "progress": False}
    model = tiny.llama()
    report = fwanda_pruner.prune(model, tiny.tokenizer(), allocation="auto", **settings)
    chosen = report.config["chosen"]
    losses = chosen["losses"]
    dense, wanda = losses["dense"], losses["wanda"]
    assert dense.keys() == {text, guard} and report.config["allocation"] == "auto"

    def rank(found):
        return found[guard] > wanda[guard], sum(found[name] - dense[name] for name in dense) / 2

    assert chosen["name"] == chosen_by(rank, losses)
    configs = candidates(PruneConfig(allocation="auto"))
    config = configs.get(chosen["name"]) or replace(configs[chosen["start"]], allocation="response")
    names = ("allocation", "row_exponent", "layer_exponent")
    other = tiny.llama()
    fwanda_pruner.prune(other, tiny.tokenizer(), **{name: getattr(config, name) for name in names}, **settings)
    assert same_weights(model, other)


@pytest.mark.parametrize("method", ["fwanda", "fsparsegpt"])
def test_the_windows_of_a_choice_are_those_before_the_reported_ones(method, text, guard):
    settings = {"nsamples": 20, "seqlen": 24, "bos": "none"}
    report = fwanda_pruner.prune(
        tiny.llama(), tiny.tokenizer(), method=method, allocation="response", calibration=text, guard=guard,
        progress=False, **settings,
    )  # fmt: skip
    _, further = draw_windows(text, tiny.tokenizer(), nsamples=20, further=12, seqlen=24, seed=0, bos=False)
    windows = {text: further[:4], guard: guard_tokens(guard, tiny.tokenizer(), windows=12, seqlen=24, bos=False)[:4]}
    expected = {name: math.log(oracle.perplexity(tiny.llama(), ids)) for name, ids in windows.items()}
    assert report.config["chosen"]["losses"]["dense"] == pytest.approx(expected, rel=1e-5)


def scripted(losses: Iterable[tuple[float, ...]]):
    """A kind of engine whose masks lose what it is told, one number for each window, in the order of the calls."""
    left = iter(losses)

    class Scripted(ResidentEngine):
        def window_losses(self, tokens, masks=None, **_options):
            return torch.tensor(next(left), dtype=torch.float64)

    return Scripted


def scripted_choice(losses: dict[str, tuple[float, ...]], rounds=(2.5, 2.5), config=CONFIG) -> Choice:
    """A choice for two domains of one window, of which the second is a guard.

    The dense model loses 1 on both, Wanda's masks 3, candidates that are not named 4, and every round the same.
    """
    tried = [losses.get(name, (4.0, 4.0)) for name in candidates(config) if name != "uniform"]
    script = itertools.chain([(1.0, 1.0), (3.0, 3.0), *tried], itertools.repeat(rounds))
    engine, statistics = measured(tiny.llama(), scripted(script))
    domains = [Domain(name, True, name == "guard", True, TOKENS[:0], TOKENS[:1]) for name in ("text", "guard")]
    judge = Judge(engine, domains, masks_of(wanda_config(config), engine, statistics))
    return choose(engine, TOKENS, judge, statistics, config)


@pytest.mark.parametrize("best", ["row", GLOBALS[1]])
def test_auto_takes_another_allocation_where_no_round_is_better(best):
    choice = scripted_choice({best: (2.0, 2.0)})
    assert choice.name == best and choice.start in GLOBALS and choice.scales is None
    model, other = tiny.llama(), tiny.llama()
    report, same = run_prune(model, None, config=CONFIG, calibration=TOKENS, choice=choice, progress=False)
    assert same is choice and report.config["chosen"] == choice.to_dict()
    fwanda_pruner.prune(other, config=candidates(CONFIG)[best], calibration=TOKENS, progress=False)
    assert same_weights(model, other)


def test_a_round_is_chosen_with_its_scales_where_it_is_best():
    choice = scripted_choice({GLOBALS[1]: (2.75, 2.75)}, rounds=(1.5, 1.5))
    assert choice.name.startswith("round ") and choice.start == GLOBALS[1]
    assert choice.scales.rows.keys() == {target.name for target in find_targets(tiny.llama())[0]}
    assert choice.losses[choice.name] == {"text": 1.5, "guard": 1.5}
    assert choice.apply(CONFIG).allocation == "response"


def test_the_rounds_begin_with_a_global_candidate_that_harms_no_guard():
    harmful, harmless = GLOBALS[1:3]
    assert scripted_choice({harmful: (1.1, 3.5), harmless: (2.9, 2.9)}).start == harmless
    assert scripted_choice({harmful: (1.1, 2.9), harmless: (2.9, 2.9)}).start == harmful


@pytest.mark.fault("other text")
def test_a_round_that_harms_a_guard_is_not_taken():
    assert scripted_choice({GLOBALS[0]: (2.9, 2.9)}, rounds=(1.1, 3.1)).name == GLOBALS[0]


@pytest.mark.fault("other text")
def test_where_every_other_candidate_harms_a_guard_wandas_masks_remain():
    harmful = (1.1, 3.1)
    choice = scripted_choice(dict.fromkeys(candidates(CONFIG), harmful), rounds=harmful)
    assert choice.name == "uniform" and choice.losses["uniform"] == choice.losses["wanda"]


def test_a_response_of_which_all_masks_harm_a_guard_takes_the_best_of_them():
    config = replace(CONFIG, allocation="response")
    (start,) = candidates(config)
    assert scripted_choice({start: (3.5, 3.5)}, (3.25, 3.25), config).name.startswith("round ")
    assert scripted_choice({start: (3.25, 3.25)}, (3.5, 3.5), config).name == start


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
def test_a_given_choice_gives_the_masks_and_the_record_of_the_run_that_searched(method, allocation, monkeypatch):
    config = PruneConfig(method=method, allocation=allocation, sparsity="0.6")
    models = tiny.llama(), tiny.llama()
    searched, choice = run_prune(models[0], None, config=config, calibration=TOKENS, progress=False)
    monkeypatch.setattr(stages, "choose", None)
    given, same = run_prune(models[1], None, config=config, calibration=TOKENS, choice=choice, progress=False)
    assert isinstance(choice, Choice) and same is choice and same_weights(*models)
    assert "choose" in searched.seconds
    records = [report.to_dict() for report in (searched, given)]
    for record in records:  # what depends on the search itself
        record["warnings"] = [line for line in record["warnings"] if "the allocation is chosen on" not in line]
        for key in ("seconds", "peak_memory_bytes", "energy_details"):
            del record[key]
    assert records[0] == records[1]


def test_without_a_search_there_is_no_choice():
    config = PruneConfig(method="fwanda", allocation="global")
    report, choice = run_prune(tiny.llama(), None, config=config, calibration=TOKENS, progress=False)
    assert choice is None and report.config["chosen"] is None and "choose" not in report.seconds


# On which text


def test_without_further_text_the_last_windows_decide_with_a_warning():
    said = (
        "calibration reads all windows of tokens, so the allocation is chosen and the losses are measured on the last"
    )
    with pytest.warns(UserWarning, match=said):
        report = fwanda_pruner.prune(tiny.llama(), config=CONFIG, calibration=TOKENS, progress=False)
    losses = losses_of(tiny.llama(), candidates(CONFIG), tokens=TOKENS[:8])  # the report reads the last eight
    found = report.config["chosen"]["losses"]
    assert all(found[name] == pytest.approx(losses[name]) for name in losses)


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
    assert one.config["chosen"]["losses"]["dense"].keys() == {text, "sample", "code"}


@pytest.mark.parametrize("guard_flag, names", [("none", 1), (None, 3)])
def test_guards_take_part_in_the_choice(guard_flag, names, text):
    report = fwanda_pruner.prune(
        tiny.llama(), tiny.tokenizer(), allocation="response", calibration=text, nsamples=20, seqlen=24,
        guard=guard_flag, progress=False,
    )  # fmt: skip
    assert all(len(losses) == names for losses in report.config["chosen"]["losses"].values())
