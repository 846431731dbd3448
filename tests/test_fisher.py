"""The variants of the Fisher information: labels of the text, labels that the model draws, squared mean gradients."""

from functools import partial

import pytest
import tiny
import torch
from torch import nn

import fwanda_pruner
from fwanda_pruner.cli import main
from fwanda_pruner.engine.loop import PassSettings
from fwanda_pruner.engine.losses import sample_labels
from fwanda_pruner.errors import UserError
from fwanda_pruner.measure.statistics import Statistics, calibrate
from fwanda_pruner.model.targets import find_targets

SAMPLES, LENGTH = 5, 24


def measure(model, tokens, fisher, *, seed=0, **settings):
    targets = find_targets(model)[0]
    settings = PassSettings(**settings)
    return calibrate(model, tokens, targets, fisher=fisher, seed=seed, settings=settings, progress=False)


def gradients(model, tokens, labels_of) -> dict[str, torch.Tensor]:
    """name -> [S L, R] float64 output gradients of the summed loss against labels_of(window, logits [L - 1, V])."""
    found = {target.name: [] for target in find_targets(model)[0]}
    outputs = {}
    handles = [
        target.module.register_forward_hook(lambda _m, _a, out, name=target.name: outputs.__setitem__(name, out))
        for target in find_targets(model)[0]
    ]
    model.double()
    for window, ids in enumerate(tokens):
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        loss = nn.functional.cross_entropy(logits, labels_of(window, logits.detach()), reduction="sum")
        for name, grad in zip(outputs, torch.autograd.grad(loss, list(outputs.values())), strict=True):
            found[name].append(grad[0])
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


def drawn(tokens, seed):
    """The labels of "true": the first one whose cumulative probability exceeds the position's number in [0, 1)."""
    draws = torch.rand(
        len(tokens), tokens.shape[1] - 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    return lambda window, logits: (logits.softmax(-1).cumsum(-1) <= draws[window, :, None]).sum(-1)


def assert_close(statistics, omegas) -> None:
    assert statistics.g2.keys() == omegas.keys()
    for name, omega in omegas.items():
        torch.testing.assert_close(statistics.layer(name).omega, omega, rtol=1e-3, atol=1e-9, msg=name)


def test_true_equals_a_float64_restatement_with_the_same_labels(monkeypatch):
    monkeypatch.setattr("fwanda_pruner.engine.losses._LOGITS", 64 * 5)  # several slices of the head
    tokens = tiny.tokens(SAMPLES, LENGTH)
    found = measure(tiny.llama(), tokens, "true", seed=7)
    grads = gradients(tiny.llama(), tokens, drawn(tokens, 7))
    assert found.fisher == "true"
    assert_close(found, {name: g.square().mean(0) for name, g in grads.items()})


def test_mean_equals_a_float64_restatement():
    tokens = tiny.tokens(SAMPLES, LENGTH)
    model = tiny.llama()
    found = measure(model, tokens, "mean")
    assert not any(module._forward_hooks for module in model.modules())
    grads = gradients(tiny.llama(), tokens, lambda window, _logits: tokens[window, 1:])
    assert found.fisher == "mean"
    assert_close(found, {name: g.mean(0).square() for name, g in grads.items()})


def test_inputs_are_the_same_under_every_variant():
    tokens = tiny.tokens(SAMPLES, LENGTH)
    one, *others = (measure(tiny.llama(), tokens, fisher) for fisher in ("empirical", "true", "mean"))
    for other in others:
        assert other.n_tokens == one.n_tokens
        assert all(torch.equal(other.x2[name], x2) for name, x2 in one.x2.items())
        assert not any(torch.equal(other.g2[name], g2) for name, g2 in one.g2.items())


@pytest.mark.parametrize(
    "settings",
    [{"micro_batch": 2}, {"micro_batch": 100}, {"micro_batch": 2, "checkpointing": "on"}, {"compile": "on"}],
    ids=str,
)
@pytest.mark.parametrize("fisher", ["true", "mean"])
@pytest.mark.filterwarnings("ignore:--fisher mean")
def test_no_variant_depends_on_how_the_passes_run(fisher, settings, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    tokens = tiny.tokens(SAMPLES, LENGTH)
    one = measure(tiny.llama(), tokens, fisher)
    other = measure(tiny.llama(), tokens, fisher, **settings)
    assert other.passes["compiled"] == ("compile" in settings and fisher == "true")
    assert_close(other, {name: one.layer(name).omega for name in one.g2})


@pytest.mark.fault("memory while calibrating")
@pytest.mark.parametrize("fisher", ["true", "mean"])
def test_a_start_from_the_beginning_counts_nothing_twice_and_draws_the_same_labels(fisher, monkeypatch):
    from fwanda_pruner.engine import loop as passes

    tokens = tiny.tokens(SAMPLES, LENGTH)
    one = measure(tiny.llama(), tokens, fisher)
    plain, calls = passes.Passes._pass, []

    def run(self, start, size):
        calls.append(plain(self, start, size))
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return calls[-1]

    monkeypatch.setattr(passes.Passes, "_pass", run)
    with pytest.warns(UserWarning, match="ran out of memory"):
        other = measure(tiny.llama(), tokens, fisher, micro_batch=2)
    assert calls == [2, 2, 1, 1, 1, 1, 1]
    assert_close(other, {name: one.layer(name).omega for name in one.g2})


def test_mean_says_that_it_does_not_compile():
    with pytest.warns(UserWarning, match="^--fisher mean is measured without compiled blocks") as warned:
        measure(tiny.llama(), tiny.tokens(3, LENGTH), "mean", compile="on")
    assert len(warned) == 1


def test_labels_are_drawn_with_the_probabilities_of_the_model(monkeypatch):
    """Evenly spaced numbers in place of random ones: each label must come up in its share of them."""
    count = 100_000
    monkeypatch.setattr(torch, "rand", lambda n, *_, **__: (torch.arange(n).double()[:, None] + 0.5) / n)
    logits = torch.tensor([1.0, -2.0, -torch.inf, 3.0, 0.0, -torch.inf])
    labels = sample_labels(logits.softmax(-1).expand(count, -1), torch.Generator())
    shares = torch.bincount(labels, minlength=6).double() / count
    torch.testing.assert_close(shares, logits.double().softmax(-1), rtol=0, atol=2 / count)


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53])
def test_no_draw_leaves_the_vocabulary_or_meets_an_impossible_label(draw, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda n, *_, **__: torch.full((n, 1), draw, dtype=torch.float64))
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, 2.0]])
    assert sample_labels(logits.softmax(-1), torch.Generator()).item() == (1 if draw == 0 else 3)


def test_the_true_fisher_is_the_exact_expectation_over_labels():
    """Two labels that are drawn independently: the gradients of each label give the expectation over all pairs."""
    window, count, vocabulary = torch.tensor([[5, 9, 7]]), 4096, tiny.VOCABULARY
    p = tiny.llama()(input_ids=window).logits[0, :2].double().softmax(-1).detach()
    first, second = (  # -100: no loss at this position
        gradients(tiny.llama(), window.expand(vocabulary, -1), labels_of)
        for labels_of in (lambda y, _: torch.tensor([y, -100]), lambda y, _: torch.tensor([-100, y]))
    )
    found = measure(tiny.llama(), window.expand(count, -1), "true", micro_batch=256)
    for name in found.g2:
        g = torch.stack([grads[name].view(vocabulary, 3, -1) for grads in (first, second)])  # [2, V, T, R]
        mean, square = torch.einsum("sv,svtr->str", p, g), torch.einsum("sv,svtr->tr", p, g.square())
        omega = (square + 2 * mean[0] * mean[1]).mean(0)
        assert omega.norm() > 0
        assert (found.layer(name).omega - omega).norm() < 0.1 * omega.norm(), name


def test_the_seed_decides_the_labels_and_the_global_generator_is_left_alone():
    tokens = tiny.tokens(SAMPLES, LENGTH)
    state = torch.random.get_rng_state()
    model = tiny.llama()
    torch.random.set_rng_state(state)
    a, b, other = (measure(model, tokens, "true", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, g2 in a.g2.items():
        assert torch.equal(b.g2[name], g2) and not torch.equal(other.g2[name], g2)


@pytest.mark.parametrize("fisher", ["true", "mean"])
def test_pruning_by_a_variant_equals_pruning_by_its_statistics(fisher):
    tokens = tiny.tokens(SAMPLES, LENGTH)
    settings = {"method": "fwanda", "allocation": "global", "calibration": tokens, "progress": False}
    direct, given, empirical = tiny.llama(), tiny.llama(), tiny.llama()
    report = fwanda_pruner.prune(direct, fisher=fisher, **settings)
    statistics = measure(given, tokens, fisher)
    again = fwanda_pruner.prune(given, statistics=statistics, **settings)
    fwanda_pruner.prune(empirical, **settings)
    assert report.config["fisher"] == again.config["fisher"] == fisher
    pairs = list(zip(direct.parameters(), given.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not all(torch.equal(a, b) for a, b in zip(direct.parameters(), empirical.parameters(), strict=True))


def test_statistics_of_another_variant_are_refused_where_one_is_asked_for():
    tokens = tiny.tokens(SAMPLES, LENGTH)
    model = tiny.llama()
    statistics = measure(model, tokens, "mean")
    prune = partial(fwanda_pruner.prune, model, statistics=statistics, progress=False)
    for fisher in ("empirical", "true"):
        with pytest.raises(
            UserError, match=f"^--fisher {fisher} contradicts the statistics, which are of --fisher mean"
        ):
            prune(method="fwanda", fisher=fisher)
    assert prune(method="fwanda", fisher="mean").config["fisher"] == "mean"


def test_an_unknown_variant_is_one_line():
    with pytest.raises(UserError, match="^--fisher must be one of empirical, true, mean, got 'exact'$"):
        fwanda_pruner.PruneConfig(fisher="exact")


def test_the_command_measures_and_records_the_variant(tmp_path, capsys):
    tiny.llama().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(tiny.text(800))
    model, file = str(tmp_path / "model"), tmp_path / "s.safetensors"
    text = ["--calibration", str(tmp_path / "text.txt"), "--nsamples", "16", "--seqlen", "24"]
    assert main(["calibrate", model, *text, "--fisher", "true", "--seed", "3", "--output", str(file)]) == 0
    statistics = Statistics.load(file)
    assert statistics.fisher == "true" and statistics.text["seed"] == 3
    prune = ["prune", model, "--statistics", str(file), "--output", str(tmp_path / "out")]
    assert main([*prune, "--fisher", "empirical"]) == 2
    assert "--fisher empirical contradicts the statistics" in capsys.readouterr().err
    assert main(prune) == 0
