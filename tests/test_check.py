"""The result is compared with Wanda's masks on held-out calibration text, unless that is Wanda's result itself."""

import math

import oracle
import pytest
import tiny

import fwanda_pruner
from fwanda_pruner import PruneConfig
from fwanda_pruner.engine.resident import ResidentEngine
from fwanda_pruner.text.windows import held_out_tokens


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(tiny.text(2000))
    return str(path)


def prune(text, model=None, **settings):
    settings = {"calibration": text, "nsamples": 20, "seqlen": 24, "sparsity": 0.6, "bos": "none", **settings}
    model = model or tiny.llama()
    return model, fwanda_pruner.prune(model, tiny.tokenizer(), progress=False, **settings)


@pytest.mark.parametrize("settings", [{}, {"allocation": "row"}, {"method": "fsparsegpt"}, {"allocation": "response"}])
def test_the_losses_are_those_of_the_two_models(settings, text):
    pruned, report = prune(text, **settings)
    wanda, other = prune(text, method="wanda")
    held_out = held_out_tokens(text, tiny.tokenizer(), nsamples=20, seqlen=24, seed=0, bos=False, windows=8)
    losses = [math.log(oracle.perplexity(model, held_out)) for model in (pruned, wanda)]
    assert [report.check["pruned"], report.check["wanda"]] == pytest.approx(losses, rel=1e-5)
    assert report.check["held_out"] and other.check is None
    said = any(line.startswith("worse than Wanda on held-out calibration text") for line in report.warnings)
    assert said == (report.check["pruned"] > report.check["wanda"])
    assert report.seconds["check"] > 0


@pytest.mark.parametrize("wanda", [0.0, 1e9, math.inf])
def test_a_warning_says_when_wanda_is_better(wanda, text, monkeypatch):
    mean_loss = ResidentEngine.mean_loss

    def loss(self, tokens, masks=None):
        return mean_loss(self, tokens) if masks is None else wanda

    monkeypatch.setattr(ResidentEngine, "mean_loss", loss)
    _, report = prune(text)
    said = [line for line in report.warnings if "worse than Wanda" in line]
    assert len(said) == (wanda == 0) and all("0.000; try --allocation auto" in line for line in said)
    assert report.check["wanda"] == (None if wanda == math.inf else wanda)


@pytest.mark.parametrize(
    "settings",
    [
        {"no_check": True},
        {"method": "wanda"},
        {"method": "sparsegpt"},
        {"method": "magnitude"},
        {"allocation": "uniform"},
        {"pattern": "2:4", "sparsity": None},
    ],
)
def test_no_check_where_there_is_nothing_to_compare(settings, text):
    assert prune(text, **settings)[1].check is None


def test_without_text_the_run_goes_on_with_a_warning(text, tmp_path):
    config = PruneConfig(calibration=text, nsamples=20, seqlen=24)
    statistics = fwanda_pruner.collect(tiny.llama(), tiny.tokenizer(), config=config, progress=False)
    (tmp_path / "text.txt").unlink()
    report = fwanda_pruner.prune(tiny.llama(), tiny.tokenizer(), statistics=statistics, progress=False)
    assert report.check is None and report.sparsity["matrices"] == 0.5
    assert any(line.startswith("the result was not compared with Wanda's: ") for line in report.warnings)


def test_without_held_out_text_the_last_windows_serve():
    report = fwanda_pruner.prune(tiny.llama(), calibration=tiny.tokens(16, 24), progress=False)
    assert report.check["held_out"] is False and math.isfinite(report.check["wanda"])
