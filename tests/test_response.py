"""`--allocation response`: what the loss of the pruned model says, and the scales that follow it."""

import math
from dataclasses import replace

import oracle
import pytest
import tiny
import torch

import fwanda_pruner
from fwanda_pruner import PruneConfig
from fwanda_pruner.allocate.budgets import ScoreScales, global_scales, keep_total
from fwanda_pruner.allocate.masks import MaskBits, masks_of, select_once
from fwanda_pruner.allocate.response import LineSums, Round, move_scales, respond
from fwanda_pruner.engine.loop import PassRecord, PassSettings
from fwanda_pruner.engine.resident import ResidentEngine
from fwanda_pruner.engine.resume import NoSteps
from fwanda_pruner.measure.removed import RemovedWeightSums
from fwanda_pruner.measure.statistics import Statistics, measure_statistics
from fwanda_pruner.model.targets import find_targets

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
    """Steps in memory."""

    def __init__(self, *states: Round):
        self.states = dict(enumerate(states))

    def load(self, index):
        return self.states.get(index)

    def save(self, index, state):
        self.states[index] = state


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


def response(engine, statistics, *, tokens=TOKENS, held_out=HELD_OUT, loss=math.inf, rounds=None):
    return respond(engine, tokens, held_out, statistics, CONFIG, loss, rounds=rounds or NoSteps())


def removed_sums(engine, masks, settings=None) -> dict[str, torch.Tensor]:
    """What the loss of the pruned model says of TOKENS."""
    sums = RemovedWeightSums(engine.targets, masks)
    engine.measure(TOKENS, sums, backward=True, settings=settings)
    return sums.tensors()


def equal(one: ScoreScales, other: ScoreScales) -> bool:
    pairs = zip(one.tensors().items(), other.tensors().items(), strict=True)
    return all(name == same and torch.equal(a, b) for (name, a), (same, b) in pairs)


# What is measured


@pytest.mark.parametrize("settings", [PassSettings(1), PassSettings(5), PassSettings(3, checkpointing="on")])
@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_the_sums_are_the_derivatives_of_the_pruned_model(family, settings):
    engine, statistics, scales = prepared(family)
    masks = masks_of(CONFIG, engine, statistics, scales)
    dense = {t.name: t.weight.clone() for t in engine.targets}
    sums = removed_sums(engine, masks, settings)
    expected = oracle.gains(engine.model, TOKENS, {name: masks[name](weight) for name, weight in dense.items()})
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
    keep = {t.name: masks[t.name](t.weight) for t in engine.targets}
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


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (4, 16)])
def test_masks_as_bits_are_the_same_masks(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < 0.5
    found = MaskBits(mask)()
    assert torch.equal(found, mask) and found.dtype == torch.bool


def test_masks_selected_once_are_those_of_the_weights_then():
    engine, statistics, scales = prepared()
    masks = masks_of(CONFIG, engine, statistics, scales)
    expected = {t.name: masks[t.name](t.weight) for t in engine.targets}
    selected = select_once(engine, masks)
    for target in engine.targets:
        target.weight.zero_()
        assert torch.equal(selected[target.name](target.weight), expected[target.name])


def test_columns_left_over_by_a_pattern_stay():
    model = tiny.build("mistral")
    target = find_targets(model)[0][0]
    rows, cols = target.weight.shape
    target.module.weight = torch.nn.Parameter(torch.randn(rows, cols - 2), requires_grad=False)
    statistics = Statistics(x2={target.name: torch.rand(cols - 2)}, n_tokens={target.name: 5})
    config = PruneConfig(method="wanda", pattern="2:4", nm_tail="dense").resolved()
    mask = masks_of(config, ResidentEngine(model, [target]), statistics)[target.name](target.weight)
    assert bool(mask[:, -2:].all()) and bool((mask[:, :-2].unflatten(1, (-1, 4)).sum(2) == 2).all())


# Rounds


def expected_scales(engine, statistics, scales) -> ScoreScales:
    """A round restated: the squared scores of the removed weights, what the loss says of them, and a step."""
    masks = masks_of(CONFIG, engine, statistics, scales)
    sums = removed_sums(engine, masks, PassSettings(1, compile="off"))
    found = {}
    for target in engine.targets:
        name = target.name
        scores = target.weight.abs() * statistics.layer(name).norm * scales.columns[name] * scales.rows[name][:, None]
        squares = scores.square().masked_fill(masks[name](target.weight), 0).double()
        found[name] = tuple(
            LineSums(squares.sum(axis), sums[f"{name}.{line}s"], sums[f"{name}.{line}_squares"], len(TOKENS))
            for line, axis in (("row", 1), ("column", 0))
        )
    return move_scales(scales, found)


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_a_round_compares_the_squared_scores_of_removed_weights_with_what_the_loss_says(family):
    engine, statistics, scales = prepared(family)
    rounds = Kept(Round(scales, 3.0, 1, "auto"))
    response(engine, statistics, rounds=rounds)
    expected = expected_scales(engine, statistics, scales).tensors()
    found, before = rounds.states[1].scales.tensors(), scales.tensors()
    for name in expected:
        assert torch.allclose(found[name], expected[name], rtol=1e-5), name
    assert sum(not torch.equal(found[name], before[name]) for name in found) > len(found) / 2


def test_the_loss_of_a_round_is_that_of_its_masks_on_held_out_text():
    engine, statistics, _ = prepared()
    rounds = Kept()
    _, losses = response(engine, statistics, rounds=rounds)
    for index, (name, loss) in enumerate(losses.items()):
        masks = masks_of(CONFIG, engine, statistics, rounds.states[index].scales)
        assert name == f"round {index + 1}" and loss == engine.mean_loss(HELD_OUT, masks)
    assert len(losses) == 2


def test_the_best_round_on_held_out_text_is_taken():
    class Scripted(ResidentEngine):
        losses = iter([1.0, 2.0])

        def mean_loss(self, tokens, masks=None):
            return next(self.losses)

    engine, statistics, _ = prepared(kind=Scripted)
    rounds = Kept()
    scales, losses = response(engine, statistics, loss=3.0, rounds=rounds)
    assert losses == {"round 1": 1.0, "round 2": 2.0}
    assert equal(scales, rounds.states[0].scales) and not equal(scales, rounds.states[1].scales)
    start = global_scales(CONFIG, engine, statistics)
    assert equal(scales, expected_scales(engine, statistics, start))


def test_rounds_that_are_all_worse_than_the_start_give_no_scales():
    engine, statistics, _ = prepared()
    scales, losses = response(engine, statistics, loss=0.0)
    assert scales is None and list(losses) == ["round 1", "round 2"]


def test_finished_rounds_are_not_measured_again():
    engine, statistics, _ = prepared()
    rounds = Kept()
    scales, losses = response(engine, statistics, rounds=rounds)
    again, _, _ = prepared(kind=Recorder)
    for count, measured in ((2, 0), (1, 1)):
        first = [replace(rounds.states[index], masks=None) for index in range(count)]  # as a file gives it back
        again.windows.clear()
        found, same = response(again, statistics, rounds=Kept(*first))
        assert len(again.windows) == measured and (count == 1 or (same == losses and equal(found, scales)))


def test_an_interrupted_search_finds_the_same_scales():
    engine, statistics, _ = prepared()
    rounds = Kept()
    scales, losses = response(engine, statistics, rounds=rounds)
    found, same = response(engine, statistics, rounds=Kept(replace(rounds.states[0], masks=None)))
    assert same == losses and equal(found, scales)


def test_each_round_takes_the_next_windows():
    """32,768 tokens are 2,048 windows of 16."""
    engine, statistics, _ = prepared(kind=Recorder)
    tokens = tiny.tokens(3000, 16)
    response(engine, statistics, tokens=tokens)
    first, second = engine.windows
    assert torch.equal(first, tokens[:2048])
    assert torch.equal(second, torch.cat([tokens[2048:], tokens[: 2 * 2048 - 3000]]))


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
def test_the_mask_of_a_run_is_that_of_its_scales(method):
    model, (engine, statistics, _) = tiny.build("mistral"), prepared()
    config = replace(CONFIG, method=method)
    report = fwanda_pruner.prune(model, config=config, calibration=TOKENS, statistics=statistics, progress=False)
    assert report.omega_floored_rows is None  # the scales are not omega
    scales, _ = response(engine, statistics, held_out=TOKENS[-8:])
    masks = masks_of(CONFIG, engine, statistics, scales)
    for target, pruned in zip(engine.targets, find_targets(model)[0], strict=True):
        assert torch.equal(pruned.weight != 0, masks[target.name](target.weight))


@pytest.mark.parametrize("allocation", ["response", "auto"])
def test_works_under_inference_mode(allocation):
    models = tiny.llama(), tiny.llama()
    settings = {"method": "fwanda", "allocation": allocation, "calibration": TOKENS, "progress": False}
    with torch.inference_mode():
        fwanda_pruner.prune(models[0], **settings)
    fwanda_pruner.prune(models[1], **settings)
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))
