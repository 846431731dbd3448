"""`--allocation response`: what the loss of the pruned model says, and the scales that follow it."""

import itertools
import math
from dataclasses import replace

import oracle
import pytest
import tiny
import torch

import fwanda_pruner
from fwanda_pruner import PruneConfig
from fwanda_pruner.allocate import response as response_module
from fwanda_pruner.allocate.budgets import ScoreScales, global_scales, keep_total
from fwanda_pruner.allocate.judge import Judge
from fwanda_pruner.allocate.masks import masks_of, pack
from fwanda_pruner.allocate.response import Round, respond, round_count
from fwanda_pruner.allocate.search import wanda_config
from fwanda_pruner.engine.loop import PassRecord, PassSettings
from fwanda_pruner.engine.resident import ResidentEngine
from fwanda_pruner.engine.resume import NoSteps
from fwanda_pruner.measure.removed import RemovedWeightSums
from fwanda_pruner.measure.statistics import measure_statistics
from fwanda_pruner.model.targets import find_targets
from fwanda_pruner.text.domains import Domain

TOKENS, HELD_OUT = tiny.tokens(12, 16), tiny.tokens(4, 16, seed=9)
CONFIG = PruneConfig(method="fwanda", allocation="response", sparsity="0.6").resolved()


class Recorder(ResidentEngine):
    """Notes the windows and the settings of each measurement, which only uses the first 8 of those windows.

    Attributes:
        measures: whether it really measures; otherwise the sums stay empty.
        record: how it says that the windows ran, instead of how they did.
    """

    measures, record = True, None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.windows: list[torch.Tensor] = []
        self.asked: list[PassSettings] = []

    def measure(self, tokens, sums, *, settings=None, **arguments):
        self.windows.append(tokens)
        self.asked.append(settings)
        record = super().measure(tokens[:8], sums, settings=settings, **arguments) if self.measures else PassRecord()
        return self.record or record


class Kept:
    """Steps in memory; an interruption comes after step `last`."""

    def __init__(self, *states: Round, last: int | None = None):
        self.states, self._last = dict(enumerate(states)), last

    def load(self, index):
        return self.states.get(index)

    def save(self, index, state):
        self.states[index] = state
        if index == self._last:
            raise KeyboardInterrupt


def prepared(family: str = "mistral", settings: PassSettings | None = None, kind=ResidentEngine):
    """An engine, the statistics of its model, and scales in which columns differ too."""
    model = tiny.build(family)
    targets = find_targets(model)[0]
    statistics = measure_statistics(ResidentEngine(model, targets, progress=False), TOKENS)
    engine = kind(model, targets, settings, progress=False)
    start = global_scales(CONFIG, engine, statistics)
    generator = torch.Generator().manual_seed(1)
    columns = {name: 0.5 + torch.rand(len(column), generator=generator) for name, column in start.columns.items()}
    return engine, statistics, ScoreScales(start.rows, columns)


def judge_of(engine, statistics, **windows) -> Judge:
    """A judge on windows by the name of their domain; the default is one domain. None of them is a guard."""
    domains = [Domain(name, True, False, True, ids[:0], ids) for name, ids in (windows or {"text": HELD_OUT}).items()]
    return Judge(engine, domains, masks_of(wanda_config(CONFIG), engine, statistics))


def response(engine, statistics, *, tokens=TOKENS, loss=math.inf, rounds=None, config=CONFIG):
    judge = judge_of(engine, statistics)
    return respond(engine, tokens, judge, statistics, config, {"text": loss}, rounds=rounds or NoSteps())


def kept(engine, masks) -> dict[str, torch.Tensor]:
    """name -> [R, C] bool: the masks of the dense weights."""
    return {t.name: oracle.unpacked(pack(engine, masks).packed[t.name], t.shape[1]) for t in engine.targets}


def removed_sums(engine, masks, settings=None) -> dict[str, torch.Tensor]:
    """What the loss of the pruned model says of TOKENS."""
    sums = RemovedWeightSums(engine.targets, pack(engine, masks).packed)
    engine.measure(TOKENS, sums, backward=True, settings=settings)
    return sums.tensors()


def equal(one: ScoreScales, other: ScoreScales) -> bool:
    pairs = zip(one.tensors().items(), other.tensors().items(), strict=True)
    return all(name == same and torch.equal(a, b) for (name, a), (same, b) in pairs)


@pytest.fixture
def all_rounds(monkeypatch):
    """As many rounds as in use; the other tests run two."""
    monkeypatch.setattr(response_module, "round_count", round_count)


class Scripted(ResidentEngine):
    """Gives the losses of a script, one for each call: of the dense model, of Wanda's masks, of each judged round.

    Attributes:
        script: how the losses are found.
        judged: the masks of each call.
    """

    script = itertools.count()

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.judged: list = []

    def window_losses(self, tokens, masks=None, **_):
        self.judged.append(masks)
        return torch.full((len(tokens),), float(next(self.script)), dtype=torch.float64)


# What is measured


@pytest.mark.parametrize("settings", [PassSettings(1), PassSettings(5), PassSettings(3, checkpointing="on")])
@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_the_sums_are_the_derivatives_of_the_pruned_model(family, settings):
    engine, statistics, scales = prepared(family)
    masks = masks_of(CONFIG, engine, statistics, scales)
    dense = {t.name: t.weight.clone() for t in engine.targets}
    sums = removed_sums(engine, masks, settings)
    expected = oracle.gains(engine.model, TOKENS, kept(engine, masks))
    for target in engine.targets:
        name, gains = target.name, expected[target.name]
        size = float(gains.abs().sum())
        assert torch.allclose(sums[f"{name}.rows"], gains.sum(1), atol=1e-4 * size)
        assert torch.allclose(sums[f"{name}.columns"], gains.sum(0), atol=1e-4 * size)
        assert sums[f"{name}.passes"] == math.ceil(len(TOKENS) / settings.micro_batch)
        assert torch.equal(target.weight, dense[name])
        assert "forward" not in vars(target.module)


def test_the_squares_are_those_of_each_pass():
    engine, statistics, scales = prepared()
    masks = masks_of(CONFIG, engine, statistics, scales)
    sums = removed_sums(engine, masks, PassSettings(6))
    keep = kept(engine, masks)
    passes = [oracle.gains(engine.model, windows, keep) for windows in TOKENS.split(6)]
    for name in keep:
        for key, axis in (("row_squares", 1), ("column_squares", 0)):
            expected = sum(gains[name].sum(axis).square() for gains in passes)
            assert torch.allclose(sums[f"{name}.{key}"], expected, rtol=1e-2, atol=1e-4 * float(expected.max()))


def test_sums_begin_anew_where_memory_runs_out():
    engine, statistics, scales = prepared()
    masks = masks_of(CONFIG, engine, statistics, scales)
    calls = []

    def run_out(_module, args):
        calls.append(len(args[0]))
        if calls == [4, 4]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    handle = engine.targets[-1].module.register_forward_pre_hook(run_out)
    with pytest.warns(UserWarning, match="ran out of memory: starting again with 2 windows at a time"):
        sums = removed_sums(engine, masks, PassSettings(4))
    handle.remove()
    expected = removed_sums(engine, masks, PassSettings(2))
    assert sums.keys() == expected.keys() and all(torch.equal(sums[name], expected[name]) for name in sums)


def test_the_model_is_dense_after_an_error_in_a_backward_pass():
    engine, statistics, scales = prepared()
    masks = masks_of(CONFIG, engine, statistics, scales)
    dense = {name: weight.clone() for name, weight in engine.model.state_dict().items()}

    def fail(*_):
        raise RuntimeError("broken")

    handle = engine.targets[0].module.register_full_backward_hook(fail)
    with pytest.raises(RuntimeError, match="broken"):
        removed_sums(engine, masks)
    handle.remove()
    assert all(torch.equal(weight, dense[name]) for name, weight in engine.model.state_dict().items())
    assert all("forward" not in vars(target.module) for target in engine.targets)


# Rounds


def restated_round(engine, statistics, scales, step: float) -> dict[str, torch.Tensor]:
    """A round in float64, from weight gradients that are formed as a whole, one for each window."""
    keep, squares = kept(engine, masks_of(CONFIG, engine, statistics, scales)), {}
    for target in engine.targets:
        name = target.name
        scores = target.weight.double().abs() * statistics.layer(name).norm * scales.columns[name]
        squares[name] = (scores * scales.rows[name][:, None]).square().masked_fill(keep[name], 0)
    passes = [oracle.gains(engine.model, window[None], keep) for window in TOKENS]
    rows, columns = oracle.moved_scales(scales.rows, scales.columns, squares, passes, step)
    return ScoreScales(rows, columns).tensors()


def assert_scales(found: ScoreScales, expected: dict[str, torch.Tensor], before: ScoreScales, step: float):
    """Compares what a round multiplied the scales by, in the logarithm and in steps of the first round."""
    moved = 0.0
    for name, tensor in found.tensors().items():
        start = before.tensors()[name].double()
        ways = [torch.log(scales.double() / start) / step for scales in (tensor, expected[name])]
        torch.testing.assert_close(*ways, rtol=0, atol=2e-4, msg=name)
        moved = max(moved, float(ways[1].abs().max()))
    assert moved > 0.05


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_a_round_compares_the_squared_scores_of_removed_weights_with_what_the_loss_says(family):
    engine, statistics, scales = prepared(family)
    rounds = Kept(Round(scales, None, 1, "auto"))
    response(engine, statistics, rounds=rounds)
    assert_scales(rounds.states[1].scales, restated_round(engine, statistics, scales, 0.3), scales, 0.3)


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"sparsity": "0.3"}, 8),
        ({"sparsity": "0.5"}, 8),
        ({"sparsity": "0.51"}, 16),
        ({"sparsity": "0.7"}, 16),
        ({"sparsity": None, "pattern": "2:4"}, 16),
        ({"sparsity": None, "pattern": "3:4"}, 16),
    ],
    ids=str,
)
def test_more_rounds_run_where_more_is_removed_and_under_a_pattern(settings, count, all_rounds):
    engine, statistics, scales = prepared(kind=Scripted)
    rounds = Kept(*[Round(scales, None, 1, "auto")] * (count - 1))
    response(engine, statistics, rounds=rounds, config=replace(CONFIG, **settings))
    assert sorted(rounds.states) == list(range(count))


@pytest.mark.parametrize(("sparsity", "count"), [("0.5", 8), ("0.6", 16)])
def test_steps_shrink_linearly_to_three_tenths_of_the_first(sparsity, count, all_rounds):
    """All rounds that are compared go on from the same scales and read the same windows."""
    config, ways = replace(CONFIG, sparsity=sparsity), []
    for index in (0, 1, count - 1):
        engine, statistics, _ = prepared(kind=Scripted)
        start = global_scales(config, engine, statistics)
        rounds = Kept(*[Round(start, None, 1, "auto")] * index, last=index)
        with pytest.raises(KeyboardInterrupt):
            response(engine, statistics, rounds=rounds, config=config)
        pairs = zip(rounds.states[index].scales.tensors().values(), start.tensors().values(), strict=True)
        ways.append(torch.cat([torch.log(moved / before) for moved, before in pairs]))
    assert float(ways[0].abs().max()) > 0.01
    torch.testing.assert_close(ways[1], ways[0] * (1 - 0.7 / (count - 1)), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(ways[2], ways[0] * 0.3, rtol=1e-3, atol=1e-6)


def test_the_loss_of_a_round_is_that_of_its_masks_in_each_domain():
    engine, statistics, _ = prepared()
    domains = {"prose": HELD_OUT, "code": tiny.tokens(2, 16, seed=8)}
    rounds = Kept()
    judge = judge_of(engine, statistics, **domains)
    _, losses = respond(engine, TOKENS, judge, statistics, CONFIG, dict.fromkeys(domains, math.inf), rounds=rounds)
    masks = masks_of(CONFIG, engine, statistics, rounds.states[1].scales)
    means = {name: float(engine.window_losses(ids, masks).mean()) for name, ids in domains.items()}
    assert losses == {"round 2": pytest.approx(means)} and rounds.states[1].losses == losses["round 2"]


def test_the_last_round_and_the_one_two_before_are_judged_and_the_best_is_taken(all_rounds):
    engine, statistics, _ = prepared(kind=Scripted)
    engine.script = iter([0.5, 9.0, 1.0, 1.5])
    rounds = Kept()
    scales, losses = response(engine, statistics, loss=3.5, rounds=rounds, config=replace(CONFIG, sparsity="0.5"))
    assert losses == {"round 6": {"text": 1.0}, "round 8": {"text": 1.5}}
    assert [i + 1 for i, state in rounds.states.items() if state.losses is not None] == [6, 8]
    assert equal(scales, rounds.states[5].scales)
    assert not any(equal(scales, rounds.states[i].scales) for i in rounds.states if i != 5)
    judged = [rounds.states[i].masks for i in (5, 7)]
    assert all(a is b for a, b in zip(engine.judged[2:], judged, strict=True))


def test_rounds_that_are_all_worse_than_the_start_give_no_scales():
    engine, statistics, _ = prepared()
    scales, losses = response(engine, statistics, loss=0.0)
    assert scales is None and list(losses) == ["round 2"]


def test_a_round_that_is_as_good_as_the_start_is_not_taken():
    engine, statistics, _ = prepared(kind=Scripted)
    engine.script = iter([0.5, 9.0, 2.0])
    assert response(engine, statistics, loss=2.0)[0] is None


def from_file(states: dict[int, Round], count: int) -> list[Round]:
    """The first rounds as a file gives them back: without masks."""
    return [replace(states[index], masks=None) for index in range(count)]


@pytest.mark.fault("long run dies")
@pytest.mark.parametrize("count", range(9))
def test_an_unfinished_search_goes_on_with_the_same_scales(count, all_rounds):
    engine, statistics, _ = prepared(kind=Recorder)
    config = replace(CONFIG, sparsity="0.5")
    rounds, half = Kept(), tiny.tokens(18, 16)
    scales, losses = response(engine, statistics, tokens=half, rounds=rounds, config=config)
    again, _, _ = prepared(kind=Recorder)
    resumed = Kept(*from_file(rounds.states, count))
    found, same = response(again, statistics, tokens=half, rounds=resumed, config=config)
    assert len(again.windows) == 8 - count and same == losses and equal(found, scales)
    for index, state in rounds.states.items():
        assert equal(resumed.states[index].scales, state.scales) and resumed.states[index].losses == state.losses


def test_each_round_takes_the_next_windows():
    """16,384 tokens are 1,024 windows of 16."""
    engine, statistics, _ = prepared(kind=Recorder)
    tokens = tiny.tokens(1500, 16)
    response(engine, statistics, tokens=tokens)
    first, second = engine.windows
    assert torch.equal(first, tokens[:1024])
    assert torch.equal(second, torch.cat([tokens[1024:], tokens[: 2 * 1024 - 1500]]))


@pytest.mark.parametrize(("length", "windows"), [(16384, 1), (16385, 1), (10000, 2), (20, 820)])
def test_a_round_has_at_least_16384_tokens_where_there_are_as_many(length, windows):
    engine, statistics, _ = prepared(kind=Recorder)
    engine.measures = False
    tokens = torch.full((1, 1), 5).expand(900, length)
    with pytest.warns(UserWarning, match="the response ends after 0 rounds"):
        response(engine, statistics, tokens=tokens)
    assert engine.windows[0].shape == (windows, length)


# How the windows of a round run


@pytest.mark.parametrize(("asked", "found"), [(None, 2), (1, 1), (4, 2)])
def test_passes_are_small_and_no_larger_than_asked(asked, found):
    """At least 8 passes a round, since their differences tell the noise."""
    engine, statistics, _ = prepared(settings=PassSettings(asked), kind=Recorder)
    engine.measures = False
    with pytest.warns(UserWarning, match="lower the loss in no matrix: the response ends after 0"):
        assert response(engine, statistics, tokens=tiny.tokens(16, 16)) == (None, {})
    assert engine.asked == [PassSettings(found)]


def test_memory_that_one_round_found_short_is_spared_in_the_next():
    engine, statistics, _ = prepared(kind=Recorder)
    engine.record = PassRecord(1, False, True)
    response(engine, statistics, tokens=tiny.tokens(32, 16))
    assert [(s.micro_batch, s.checkpointing) for s in engine.asked] == [(4, "auto"), (1, "on")]


def test_calibration_with_checkpointing_makes_the_rounds_do_so():
    engine, statistics, _ = prepared(kind=Recorder)
    statistics.passes["checkpointing"] = True
    response(engine, statistics)
    assert [settings.checkpointing for settings in engine.asked] == ["on", "on"]


def test_compile_on_is_said_to_be_without_effect():
    engine, statistics, _ = prepared(settings=PassSettings(1, compile="on"))
    with pytest.warns(UserWarning, match="--compile on is ignored here: the pruned model can only be measured"):
        response(engine, statistics)


@pytest.mark.parametrize("sums", ["row_squares", "column_squares"])
def test_gradients_that_overflow_end_the_rounds_with_a_warning(sums):
    class Overflowing(ResidentEngine):
        def measure(self, tokens, found, **arguments):
            record = super().measure(tokens, found, **arguments)
            name = f"{self.targets[3].name}.{sums}"
            found.merge({name: torch.full_like(found.tensors()[name], torch.inf)})
            return record

    engine, statistics, _ = prepared(kind=Overflowing)
    with pytest.warns(UserWarning, match="gradients of the pruned model overflow: the response ends after 0 rounds"):
        assert response(engine, statistics) == (None, {})


def test_a_search_that_ends_early_judges_its_last_round(all_rounds):
    class OverflowingLater(Scripted):
        passes = 0

        def measure(self, tokens, found, **arguments):
            record = super().measure(tokens, found, **arguments)
            self.passes += 1
            if self.passes == 4:
                found.merge({f"{self.targets[3].name}.row_squares": torch.tensor(torch.inf)})
            return record

    engine, statistics, _ = prepared(kind=OverflowingLater)
    engine.script = iter([0.5, 9.0, 1.0])
    rounds = Kept()
    with pytest.warns(UserWarning, match="the response ends after 3 rounds"):
        scales, losses = response(engine, statistics, loss=3.5, rounds=rounds)
    assert losses == {"round 3": {"text": 1.0}} and equal(scales, rounds.states[2].scales)


# Whole runs


@pytest.mark.parametrize("method", ["fwanda", "fsparsegpt"])
@pytest.mark.parametrize("family", ["mistral", "gpt2", "mixtral"])
def test_counts_are_exact(family, method):
    model = tiny.build(family)
    config = PruneConfig(method=method, allocation="response", sparsity="0.6")
    report = fwanda_pruner.prune(model, config=config, calibration=TOKENS, progress=False)
    weights = [t.weight for t in find_targets(model)[0]]
    size = sum(w.numel() for w in weights)
    assert sum(int((w != 0).sum()) for w in weights) == keep_total(size, CONFIG.removed)
    chosen = report.config["chosen"]
    tried = {name: losses["tokens"] for name, losses in chosen["losses"].items() if name not in ("dense", "wanda")}
    assert chosen["name"] == min(tried, key=tried.get) and tried.keys() == {chosen["start"], "round 2"}


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
def test_the_mask_of_a_run_is_that_of_its_scales(method):
    model, (engine, statistics, _) = tiny.build("mistral"), prepared()
    config = replace(CONFIG, method=method)
    report = fwanda_pruner.prune(model, config=config, calibration=TOKENS, statistics=statistics, progress=False)
    assert report.omega_floored_rows is None  # the scales are not omega
    assert report.config["chosen"]["name"] == "round 2"
    scales, _ = response(engine, statistics)
    keep = kept(engine, masks_of(CONFIG, engine, statistics, scales))
    for target in find_targets(model)[0]:
        assert torch.equal(target.weight != 0, keep[target.name])


@pytest.mark.parametrize("allocation", ["response", "auto"])
def test_works_under_inference_mode(allocation):
    models = tiny.llama(), tiny.llama()
    settings = {"method": "fwanda", "allocation": allocation, "calibration": TOKENS, "progress": False}
    with torch.inference_mode():
        fwanda_pruner.prune(models[0], **settings)
    fwanda_pruner.prune(models[1], **settings)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
