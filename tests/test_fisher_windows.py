"""--fisher-samples: the backward pass on some of the windows, the forward pass on all."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import measuring
import oracle
import pytest
import tiny
import torch
from interrupt import InterruptedState, interrupted_after
from measuring import engine_of
from safetensors.torch import save_file
from test_prune import idle_experts

import fwanda_pruner
from fwanda_pruner import PruneConfig, Statistics, UserError
from fwanda_pruner.cli import main
from fwanda_pruner.measure.statistics import measure_statistics
from fwanda_pruner.run import stage
from fwanda_pruner.run.stage import Stages
from fwanda_pruner.stage_names import StageName
from fwanda_pruner.text.domains import spread_evenly

TOKENS = tiny.tokens(9, 24)
CHOSEN = torch.tensor([1, 4, 7])


def measured(model=None, fisher="empirical", windows=CHOSEN, **settings) -> Statistics:
    engine = engine_of(model or tiny.llama(), **settings)
    return measure_statistics(engine, TOKENS, fisher=fisher, fisher_windows=windows, seed=3)


def collected(**settings) -> Statistics:
    config = PruneConfig(**settings)
    return fwanda_pruner.collect(tiny.llama(), config=config, calibration=tiny.tokens(40, 24), progress=False)


# Which windows


@pytest.mark.parametrize(
    "count, total", [(1, 1), (1, 9), (3, 9), (4, 9), (8, 9), (9, 9), (32, 128), (96, 128), (32, 100)]
)
def test_windows_of_one_source_are_spread_evenly(count, total):
    chosen = spread_evenly(torch.zeros(total, dtype=torch.int64), count)
    assert chosen.tolist() == sorted(set(chosen.tolist())) and len(chosen) == count
    assert 0 <= chosen.min() and chosen.max() < total
    ends = torch.cat([torch.tensor([-1]), chosen, torch.tensor([total])])
    gaps = ends.diff()
    assert gaps[1:-1].numel() == 0 or gaps[1:-1].max() - gaps[1:-1].min() <= 1
    assert gaps.max() <= total / count + 1


def test_each_source_gets_its_share_and_its_windows_are_spread_within_it():
    labels = torch.tensor([0, 1, 0, 0, 1, 0] * 8)  # 32 of one source, 16 of another
    chosen = spread_evenly(labels, 6)
    assert torch.equal(chosen, chosen.sort().values)
    for label, count in ((0, 4), (1, 2)):
        own = torch.nonzero(labels == label).flatten()
        places = torch.searchsorted(own, chosen[labels[chosen] == label])
        assert len(places) == count
        assert (places.diff() == len(own) // count).all()


def test_largest_remainders_share_what_is_left():
    labels = torch.tensor([0] * 5 + [1] * 3 + [2] * 2)
    counts = [torch.bincount(labels[spread_evenly(labels, n)], minlength=3).tolist() for n in (1, 2, 3, 10)]
    assert counts == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [5, 3, 2]]


@pytest.mark.parametrize(
    "setting, nsamples, windows",
    [("32", 128, 32), ("96", 128, 96), ("32", 20, 20), ("all", 128, 128), ("1", 5, 1), (8, 128, 8)],
)
def test_the_setting_is_a_number_or_all(setting, nsamples, windows):
    assert PruneConfig(fisher_samples=setting, nsamples=nsamples).fisher_count == windows


@pytest.mark.parametrize("setting", ["0", "-1", "none", "", "3.5", "1e3", 2.5, "1" * 7])
def test_another_setting_is_one_line(setting):
    with pytest.raises(UserError, match=r"--fisher-samples must be all or a number of windows in \[1, 999999\], got "):
        PruneConfig(fisher_samples=setting)


# What is measured


@pytest.mark.parametrize("fisher", ["empirical", "true", "mean"])
def test_all_windows_give_the_bits_of_one_pass(fisher):
    one, other = (measured(fisher=fisher, windows=w) for w in (None, torch.arange(len(TOKENS))))
    assert one.n_tokens == other.n_tokens and one.fisher_tokens == other.fisher_tokens == {}
    for name in one.x2:
        assert torch.equal(one.x2[name], other.x2[name]) and torch.equal(one.g2[name], other.g2[name])


@pytest.mark.parametrize("fisher", ["empirical", "true", "mean"])
def test_inputs_are_of_all_windows_and_omega_of_the_chosen_ones_alone(fisher):
    found, whole = measured(fisher=fisher), measured(fisher=fisher, windows=None)
    alone = measure_statistics(engine_of(tiny.llama()), TOKENS[CHOSEN], fisher=fisher, seed=3)
    for name in whole.x2:
        assert found.n_tokens[name] == TOKENS.numel() and found.fisher_tokens[name] == TOKENS[CHOSEN].numel()
        torch.testing.assert_close(found.x2[name], whole.x2[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.layer(name).norm, whole.layer(name).norm, rtol=1e-5, atol=1e-6)
        assert torch.equal(found.layer(name).omega, alone.layer(name).omega)
        assert not torch.allclose(found.layer(name).omega, whole.layer(name).omega, rtol=1e-3)


def test_omega_equals_a_restatement():
    found, grads = measured(), oracle.inputs_and_gradients(tiny.llama(), TOKENS[CHOSEN])[1]
    for name, g in grads.items():
        torch.testing.assert_close(found.layer(name).omega, g.square().mean(0), rtol=1e-3, atol=1e-9)


def test_gradients_are_formed_for_the_chosen_windows_alone():
    model = tiny.llama()
    forward, backward = [], []
    module = model.model.layers[0].mlp.down_proj
    module.register_forward_hook(lambda *_: forward.append(torch.is_grad_enabled()))
    module.register_full_backward_hook(lambda *_: backward.append(True))
    measured(model)
    assert len(forward) == len(TOKENS) and len(backward) == len(CHOSEN)


@pytest.mark.parametrize("settings", [{"micro_batch": 2}, {"micro_batch": 100}, {"checkpointing": "on"}], ids=str)
def test_how_the_passes_run_changes_nothing(settings):
    one, other = measured(), measured(**settings)
    for name in one.x2:
        torch.testing.assert_close(one.layer(name).omega, other.layer(name).omega, rtol=1e-3, atol=1e-9)
        torch.testing.assert_close(one.x2[name], other.x2[name], rtol=1e-4, atol=1e-6)


def test_a_forward_pass_alone_reads_all_windows_at_once():
    with measuring.input_sizes((model := tiny.llama()).get_input_embeddings()) as sizes:
        found = measured(model, fisher=None)
    assert sizes == [1] * len(TOKENS) and found.fisher_tokens == {} and found.g2 == {}


# An expert that no Fisher window reached


def routed(model, windows):
    """An idle expert that gets its tokens in some windows of TOKENS alone, and passes gradients there."""
    layer = model.model.layers[0]
    firsts = {tuple(row.tolist()) for row in TOKENS[windows]}
    seen = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _m, args: seen.append(args[0]))

    def route(_module, _args, output):
        reached = torch.tensor([tuple(row.tolist()) in firsts for row in seen[-1]])
        if reached.any():
            output = output.clone()
            output[reached] = output[reached] + layer.down(layer.up(output[reached]))
        return output

    layer.mlp.register_forward_hook(route)
    return model


@pytest.mark.fault("unrouted expert")
@pytest.mark.parametrize("allocation", ["row", "global", "response", "auto"])
def test_an_expert_that_no_fisher_window_reached_is_pruned_uniformly(allocation):
    others = [i for i in range(len(TOKENS)) if i not in CHOSEN.tolist()]
    model = routed(idle_experts(tiny.llama()), others[:4])
    statistics = measured(model)
    name = "model.layers.0.up"
    assert statistics.n_tokens[name] == 4 * 24 and statistics.fisher_tokens[name] == 0
    dense = model.model.layers[0].up.weight.detach().clone()
    report = fwanda_pruner.prune(
        model, method="fwanda", allocation=allocation, fisher_samples="3", statistics=statistics, calibration=TOKENS,
        progress=False,
    )  # fmt: skip
    row = next(row for row in report.matrices if row.name == name)
    kept = model.model.layers[0].up.weight != 0
    assert kept.sum(1).tolist() == [16] * 40 and row.kept == 640
    if report.config["chosen"] is None:  # a response also measures its columns, on all windows
        scores = dense.abs() * statistics.layer(name).norm
        assert torch.equal(kept, scores >= scores.kthvalue(17, dim=1, keepdim=True).values)
    assert report.sparsity["asked"] == pytest.approx(0.5, abs=1e-3)
    assert not any("layers.0.up saw no calibration token" in line for line in report.warnings)


class Selector(torch.nn.Module):
    """Adds what two layers say to the largest half of the outputs alone: no gradient reaches them."""

    def __init__(self, size):
        super().__init__()
        self.query, self.key = (torch.nn.Linear(size, 8, bias=False) for _ in "qk")

    def forward(self, x):
        chosen = (self.query(x) * self.key(x)).sum(-1, keepdim=True)
        return x * (chosen > chosen.median())


@pytest.mark.fault("no gradient")
@pytest.mark.parametrize("allocation", ["global", "auto", "response", "row"])
def test_layers_without_a_gradient_keep_the_same_share_of_each_row_and_are_named(allocation):
    model = tiny.llama()
    for block in model.model.layers:
        block.mlp = torch.nn.Sequential(Selector(32), block.mlp)
    with pytest.warns(
        UserWarning, match=r"^the gradient at the outputs of 4 matrices \(model.layers.0.mlp.0.query, .* is 0, for "
    ):
        report = fwanda_pruner.prune(
            model, method="fwanda", allocation=allocation, calibration=TOKENS, nsamples=len(TOKENS), progress=False
        )
    for block in model.model.layers:
        for layer in (block.mlp[0].query, block.mlp[0].key):
            assert (layer.weight != 0).sum(1).tolist() == [16] * 8
    assert report.sparsity["matrices"] == pytest.approx(0.5, abs=1e-3)


# Settings, files, records


def test_the_default_is_96_windows():
    found = fwanda_pruner.collect(tiny.llama(), calibration=tiny.tokens(100, 24), progress=False)
    assert found.fisher_samples == PruneConfig().fisher_samples == "96"
    assert set(found.fisher_tokens.values()) == {96 * 24}


def test_statistics_record_the_setting_and_the_tokens_of_its_windows():
    few, every = collected(fisher_samples="32"), collected(fisher_samples="all")
    assert (few.fisher_samples, every.fisher_samples) == ("32", "all")
    assert set(few.fisher_tokens.values()) == {32 * 24} and every.fisher_tokens == {}
    assert few.tokens_sha256 == every.tokens_sha256


def test_where_there_are_no_more_windows_than_that_one_pass_is_enough():
    tokens, found = tiny.tokens(20, 24), []
    for setting in ("32", "all"):
        config = PruneConfig(fisher_samples=setting)
        found.append(fwanda_pruner.collect(tiny.llama(), config=config, calibration=tokens, progress=False))
    assert found[0].fingerprint() == found[1].fingerprint() and found[0].fisher_tokens == {}


def test_a_file_of_statistics_keeps_the_windows_and_brings_them_to_the_record(tmp_path):
    statistics = collected(fisher_samples="8")
    statistics.save(tmp_path / "s.safetensors")
    loaded = Statistics.load(tmp_path / "s.safetensors")
    assert loaded.fisher_tokens == statistics.fisher_tokens and loaded.fisher_samples == "8"
    for name in statistics.x2:
        assert torch.equal(loaded.layer(name).omega, statistics.layer(name).omega)
    models = tiny.llama(), tiny.llama()
    tokens = tiny.tokens(40, 24)
    given = fwanda_pruner.prune(models[0], statistics=loaded, calibration=tokens, progress=False)
    direct = fwanda_pruner.prune(models[1], fisher_samples="8", calibration=tokens, progress=False)
    assert given.config["fisher_samples"] == direct.config["fisher_samples"] == "8"
    assert given.matrices == direct.matrices
    assert all(torch.equal(a, b) for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True))


def write(statistics: Statistics, path: Path) -> None:
    """A file of statistics that save() would refuse."""
    tensors, values = statistics.to_parts()
    save_file(tensors, path, metadata={"fwanda": json.dumps(values)})


@pytest.mark.fault("statistics file")
@pytest.mark.parametrize(
    "change", [lambda n: n.popitem(), lambda n: n.update(other=1), lambda n: n.update({min(n): 10**6})]
)
def test_a_file_whose_counts_fit_no_backward_pass_is_refused(change, tmp_path):
    statistics = collected(fisher_samples="8")
    change(statistics.fisher_tokens)
    write(statistics, tmp_path / "s.safetensors")
    with pytest.raises(UserError, match="is not a statistics file of `fwanda calibrate`"):
        Statistics.load(tmp_path / "s.safetensors")


@pytest.mark.fault("statistics file")
@pytest.mark.parametrize(
    "change", [{"bos": 1}, {"fisher": "other"}, {"fisher_samples": "few"}, {"text": {"nsamples": -1}}], ids=str
)
def test_a_file_with_settings_that_no_run_has_is_refused(change, tmp_path):
    write(replace(collected(fisher_samples="8"), **change), tmp_path / "s.safetensors")
    with pytest.raises(UserError, match="is not a statistics file of `fwanda calibrate`"):
        Statistics.load(tmp_path / "s.safetensors")


@pytest.mark.parametrize("method", ["fwanda", "fsparsegpt"])
def test_given_statistics_decide_about_the_windows_and_say_so(method):
    statistics, tokens = collected(fisher_samples="8"), tiny.tokens(40, 24)
    settings = {"method": method, "fisher_samples": "16", "statistics": statistics, "calibration": tokens}
    report = fwanda_pruner.prune(tiny.llama(), progress=False, **settings)
    assert report.config["fisher_samples"] == "8"
    assert "--fisher-samples 16 has no effect: the statistics are of --fisher-samples 8" in report.warnings


# Interruptions


@pytest.mark.fault("long run dies")
@pytest.mark.parametrize("fisher", ["empirical", "true", "mean"])
@pytest.mark.parametrize("saves, left", [(1, 7), (2, 6), (5, 3), (6, 1)])  # nothing is saved after the first of a part
def test_either_part_goes_on_with_the_same_bits(saves, left, fisher, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "SAVE_SECONDS", 0)
    expected = measured(fisher=fisher)
    state = InterruptedState(tmp_path / "out")
    state.saves_left = saves
    unfinished = partial(Stages(state, torch.device("cpu")).unfinished, StageName.CALIBRATE)
    measure = partial(measure_statistics, fisher=fisher, fisher_windows=CHOSEN, seed=3, unfinished=unfinished)
    with pytest.raises(KeyboardInterrupt):
        measure(engine_of(tiny.llama()), TOKENS)
    model = tiny.llama()
    with measuring.input_sizes(model.get_input_embeddings()) as sizes:
        found = measure(engine_of(model), TOKENS)
    assert sizes == [1] * left
    assert found.n_tokens == expected.n_tokens and found.fisher_tokens == expected.fisher_tokens
    for name in expected.x2:
        assert torch.equal(found.x2[name], expected.x2[name]) and torch.equal(found.g2[name], expected.g2[name])


@pytest.mark.fault("long run dies")
def test_an_interrupted_part_belongs_to_its_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stage, "SAVE_SECONDS", 0)
    tiny.llama().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(tiny.text(800))
    argv = [
        "prune", str(tmp_path / "model"), "--calibration", str(tmp_path / "text.txt"), "--nsamples", "16", "--seqlen",
        "24", "--output", str(tmp_path / "out"), "--fisher-samples",
    ]  # fmt: skip
    with interrupted_after("calibrate-forward"):
        assert main([*argv, "4"]) == 130
    capsys.readouterr()
    assert main([*argv, "5", "--resume"]) == 2
    assert 'the interrupted run had fisher_samples "4", this one has "5"' in capsys.readouterr().err
    assert main([*argv, "4", "--resume"]) == 0
