"""The variants of the Fisher information: labels of the text, labels that the model draws, squared mean gradients."""

from functools import partial

import measuring
import oracle
import pytest
import tiny
import torch
from measuring import measure, out_of_memory

import fwanda_pruner
from fwanda_pruner.cli import main
from fwanda_pruner.errors import UserError
from fwanda_pruner.measure.statistics import Statistics

SAMPLES, LENGTH = 5, 24


def gradients(model, tokens, labels_of=None) -> dict[str, torch.Tensor]:
    """name -> [S L, R] float64 output gradients of the summed loss."""
    return oracle.inputs_and_gradients(model, tokens, labels_of)[1]


def assert_close(statistics, omegas) -> None:
    assert statistics.g2.keys() == omegas.keys()
    for name, omega in omegas.items():
        torch.testing.assert_close(statistics.layer(name).omega, omega, rtol=1e-3, atol=1e-9, msg=name)


def sure(vocabulary: int):
    """A model that is sure of its next tokens: with a large vocabulary, rounding then hardly moves a drawn label."""
    model = tiny.llama(vocab_size=vocabulary, tie_word_embeddings=False)
    model.lm_head.weight.data *= 10
    return model


@pytest.mark.parametrize("build, micro_batch", [(tiny.llama, 1), (partial(sure, 262_144), SAMPLES)], ids=["64", "262k"])
def test_true_equals_a_float64_restatement_with_the_same_labels(build, micro_batch):
    """Over one slice of the head, and over two."""
    tokens = tiny.tokens(SAMPLES, LENGTH)
    found = measure(build(), tokens, "true", seed=7, micro_batch=micro_batch)
    grads = gradients(build(), tokens, oracle.drawn_labels(tokens, 7))
    assert found.fisher == "true"
    assert_close(found, {name: g.square().mean(0) for name, g in grads.items()})


def test_mean_equals_a_float64_restatement():
    tokens = tiny.tokens(SAMPLES, LENGTH)
    model = tiny.llama()
    found = measure(model, tokens, "mean")
    assert not any(module._forward_hooks for module in model.modules())
    assert found.fisher == "mean"
    assert_close(found, {name: g.mean(0).square() for name, g in gradients(tiny.llama(), tokens).items()})


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
@pytest.mark.filterwarnings("ignore:--compile on has no effect")
def test_no_variant_depends_on_how_the_passes_run(fisher, settings, monkeypatch):
    measuring.quick_compile(monkeypatch)
    tokens = tiny.tokens(SAMPLES, LENGTH)
    one = measure(tiny.llama(), tokens, fisher)
    other = measure(tiny.llama(), tokens, fisher, **settings)
    assert other.passes["compiled"] == ("compile" in settings and fisher == "true")
    assert_close(other, {name: one.layer(name).omega for name in one.g2})


@pytest.mark.fault("memory while calibrating")
@pytest.mark.parametrize("fisher", ["true", "mean"])
def test_a_start_from_the_beginning_counts_nothing_twice_and_draws_the_same_labels(fisher):
    tokens, model = tiny.tokens(SAMPLES, LENGTH), tiny.llama()
    one = measure(tiny.llama(), tokens, fisher)
    with (
        measuring.input_sizes(model.get_input_embeddings()) as calls,
        out_of_memory(model.model.norm, lambda _x: calls == [2, 2, 1]),  # two batches are counted, labels drawn
        pytest.warns(UserWarning, match="ran out of memory"),
    ):
        other = measure(model, tokens, fisher, micro_batch=2)
    assert calls == [2, 2, 1] + [1] * SAMPLES
    assert_close(other, {name: one.layer(name).omega for name in one.g2})


def test_mean_says_that_it_does_not_compile():
    with pytest.warns(
        UserWarning, match="^--compile on is ignored here: --fisher mean can only be measured in uncompiled blocks$"
    ) as warned:
        measure(tiny.llama(), tiny.tokens(3, LENGTH), "mean", compile="on")
    assert len(warned) == 1


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
    model = tiny.llama()
    state = torch.random.get_rng_state()
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
