"""What pruning costs on text of several domains: losses of three models, warnings, and the places that tell them."""

import json
import math
import re
from pathlib import Path

import oracle
import pytest
import tiny
import torch

import fwanda_pruner
from fwanda_pruner import PruneConfig, UserError
from fwanda_pruner.cli import main
from fwanda_pruner.run import stages
from fwanda_pruner.text.domains import calibration_part
from fwanda_pruner.text.sources import NAMED, NamedSource
from fwanda_pruner.text.windows import draw_windows, guard_tokens

LENGTH = 24
SETTINGS = {"nsamples": 20, "seqlen": LENGTH, "sparsity": 0.6, "bos": "none"}
COMPARED = [{}, {"allocation": "row"}, {"method": "fsparsegpt"}, {"allocation": "response"}]


@pytest.fixture
def text(tmp_path):
    return tiny.text_file(tmp_path)


@pytest.fixture
def guard(tmp_path):
    """Another text: one document a line."""
    return tiny.guard_file(tmp_path)


def prune(text, guard="none", model=None, **settings):
    model = model or tiny.llama()
    settings = {"calibration": text, "guard": guard, **SETTINGS, **settings}
    return model, fwanda_pruner.prune(model, tiny.tokenizer(), progress=False, **settings)


def by_source(report) -> dict[str, dict]:
    return {domain["source"]: domain for domain in report.domains}


def calibration_windows(text, responds=False):
    """Windows that calibration leaves: those for the report come after those for the choice."""
    choice = 4 if responds else 0
    _, further = draw_windows(text, tiny.tokenizer(), nsamples=20, further=8 + choice, seqlen=LENGTH, seed=0, bos=False)
    return further[choice:]


def guard_windows(guard, responds=False):
    choice = 4 if responds else 0
    return guard_tokens(guard, tiny.tokenizer(), windows=8 + choice, seqlen=LENGTH, bos=False)[choice:]


def loss(model, windows) -> float:
    return math.log(oracle.perplexity(model, windows))


# The losses


@pytest.mark.fault("other text")
@pytest.mark.parametrize("settings", COMPARED, ids=str)
def test_the_losses_are_those_of_the_three_models_on_windows_that_nothing_else_reads(settings, text, guard):
    responds = settings.get("allocation") == "response"
    pruned, report = prune(text, guard, **settings)
    wanda, _ = prune(text, guard, method="wanda")
    windows = {text: calibration_windows(text, responds), guard: guard_windows(guard, responds)}
    assert list(by_source(report)) == list(windows)  # the calibration's sources, then the guards
    for source, domain in by_source(report).items():
        models = {"dense": tiny.llama(), "wanda": wanda, "pruned": pruned}
        expected = {key: loss(model, windows[source]) for key, model in models.items()}
        assert {key: domain[key] for key in models} == pytest.approx(expected, rel=1e-5)
        facts = {"calibrated": source == text, "unread": True, "windows": 8}
        assert {key: domain[key] for key in facts} == facts
    assert report.seconds["check"] > 0


def test_wanda_is_compared_with_itself(text, guard):
    model, report = prune(text, guard, method="wanda")
    for source, windows in ((text, calibration_windows(text)), (guard, guard_windows(guard))):
        domain = by_source(report)[source]
        assert domain["wanda"] == domain["pruned"] == pytest.approx(loss(model, windows), rel=1e-5)
        assert domain["dense"] == pytest.approx(loss(tiny.llama(), windows), rel=1e-5)
    assert not any("worse than Wanda" in line for line in report.warnings)


def test_uniform_fwanda_has_wandas_masks(text, guard):
    uniform, wanda = (prune(text, guard, **s)[1] for s in ({"allocation": "uniform"}, {"method": "wanda"}))
    assert [d["pruned"] for d in uniform.domains] == [d["pruned"] for d in wanda.domains]
    assert all(d["wanda"] == d["pruned"] for d in uniform.domains)


def test_sparsegpt_is_compared_with_the_dense_model_alone(text, guard):
    _, report = prune(text, guard, method="sparsegpt")
    assert [(d["source"], d["wanda"], d["calibrated"]) for d in report.domains] == [
        (text, None, True), (guard, None, False),
    ]  # fmt: skip
    assert all(math.isfinite(d["dense"]) and math.isfinite(d["pruned"]) for d in report.domains)


def test_magnitude_which_reads_no_text_is_measured_on_the_guards(text, guard):
    model, report = prune(text, guard, method="magnitude")
    (domain,) = report.domains
    assert (domain["source"], domain["calibrated"], domain["wanda"]) == (guard, False, None)
    assert domain["pruned"] == pytest.approx(loss(model, guard_windows(guard)), rel=1e-5)


def test_for_magnitude_a_text_that_the_settings_calibrate_on_is_a_guard_like_others(text):
    """It reads no text, so no window of that text is calibrated on."""
    _, report = prune(text, text, method="magnitude")
    assert [(d["source"], d["calibrated"], d["unread"]) for d in report.domains] == [(text, False, True)]


def test_with_given_statistics_the_domains_are_those_of_the_run_that_measured(text, guard):
    config = PruneConfig(calibration=text, **{**SETTINGS, "sparsity": "0.6"})
    statistics = fwanda_pruner.collect(tiny.llama(), tiny.tokenizer(), config=config, progress=False)
    for settings in ({}, {"allocation": "response"}):
        one, other = (prune(text, guard, statistics=given, **settings)[1].domains for given in (None, statistics))
        assert one == other and len(one) == 2


def test_wanda_with_given_statistics_has_the_domains_of_the_run_that_measured(text, guard):
    config = PruneConfig(calibration=text, **SETTINGS)
    statistics = fwanda_pruner.collect(tiny.llama(), tiny.tokenizer(), config=config, progress=False)
    one, other = (prune(text, guard, method="wanda", statistics=given)[1].domains for given in (None, statistics))
    assert one == other and [(d["source"], d["calibrated"]) for d in one] == [(text, True), (guard, False)]


def test_with_a_pattern_too(text, guard):
    _, report = prune(text, guard, pattern="2:4", sparsity=None, allocation="response")
    assert all(math.isfinite(d[key]) for d in report.domains for key in ("dense", "wanda", "pruned"))
    _, same = prune(text, guard, pattern="2:4", sparsity=None)
    assert all(d["wanda"] == d["pruned"] for d in same.domains)  # fwanda under a pattern is Wanda


@pytest.mark.parametrize("settings", [{"method": "wanda"}, {"method": "fwanda", "allocation": "uniform"}], ids=str)
@pytest.mark.parametrize("order", ["sequential", "true-sequential"])
def test_a_loss_of_wanda_that_was_not_measured_is_null(order, settings, text, guard):
    _, report = prune(text, guard, order=order, **settings)
    assert report.domains and all(d["wanda"] is None and d["pruned"] for d in report.domains)


@pytest.mark.parametrize("method", ["fwanda", "wanda", "magnitude", "sparsegpt"])
def test_no_check_compares_nothing(method, text, guard):
    _, report = prune(text, guard, method=method, no_check=True)
    assert report.domains == [] and "check" not in report.seconds


def test_no_check_leaves_the_domains_of_a_choice_to_the_choice(text, guard):
    _, report = prune(text, guard, allocation="response", no_check=True)
    assert report.domains == [] and set(report.config["chosen"]["losses"]["wanda"]) == {text, guard}


def test_a_loss_that_is_not_finite_is_null(text, guard, monkeypatch):
    measured = stages.domain_losses

    def broken(engine, windows, masks=None):
        return {name: math.inf if masks else value for name, value in measured(engine, windows, masks).items()}

    monkeypatch.setattr(stages, "domain_losses", broken)
    _, report = prune(text, guard)
    assert [d["wanda"] for d in report.domains] == [None, None]
    assert not any("worse than Wanda" in line for line in report.warnings)
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize("more, said", [(0.0009, False), (0.0011, True)])
def test_a_difference_that_no_table_shows_gives_no_warning(more, said, text, guard, monkeypatch):
    measured = stages.domain_losses

    def close(engine, windows, masks=None):
        losses = measured(engine, windows)
        return {name: 4.0 if masks else 4.0 + more for name in losses}

    monkeypatch.setattr(stages, "domain_losses", close)
    _, report = prune(text, guard)
    assert any("worse than Wanda" in line for line in report.warnings) == said


@pytest.mark.fault("damage")
@pytest.mark.parametrize("settings", [{"eval": True}, {"eval": False}, {"eval": False, "no_check": True}], ids=str)
def test_a_run_that_damages_the_model_says_so_by_its_perplexity_else_by_its_domains(settings):
    windows, evaluated = tiny.tokens(16, LENGTH), settings.pop("eval")
    for sparsity, damaged in ((0.9, "no_check" not in settings), (0.1, False)):
        model = tiny.trained(tiny.llama(), windows)
        report = fwanda_pruner.prune(
            model, calibration=windows, eval=windows if evaluated else None, method="wanda", sparsity=sparsity,
            progress=False, **settings,
        )  # fmt: skip
        said = [line for line in report.warnings if line.startswith("pruning has damaged the model: perplexity")]
        assert len(said) == damaged and all(" on tokens, " in line for line in said)


# Text that is short or missing


def test_without_further_text_the_last_windows_of_the_calibration_serve():
    model, tokens = tiny.llama(), tiny.tokens(16, LENGTH)
    report = fwanda_pruner.prune(model, calibration=tokens, progress=False)
    (domain,) = report.domains
    assert (domain["source"], domain["calibrated"], domain["unread"], domain["windows"]) == ("tokens", True, False, 8)
    assert domain["pruned"] == pytest.approx(loss(model, tokens[-8:]), rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"allocation": "response"}, {"no_check": True}, {"nsamples": 16}], ids=str)
def test_losses_on_windows_that_calibration_reads_give_a_warning(settings, tmp_path):
    (tmp_path / "short.txt").write_text(tiny.text(20 * LENGTH))
    _, report = prune(str(tmp_path / "short.txt"), **settings)
    said = [line for line in report.warnings if line.startswith("calibration reads all windows of ")]
    assert len(said) == (settings in ({}, {"allocation": "response"}))
    assert all("short.txt, so " in line and "the losses are measured on the last of them" in line for line in said)
    assert all(("the allocation is chosen" in line) == ("allocation" in settings) for line in said)


def test_the_default_text_overlaps_without_a_warning_unless_its_windows_were_asked_for(monkeypatch):
    monkeypatch.setitem(NAMED, "sample", NamedSource(lambda _purpose: [tiny.text(800)]))
    for asked, warned in (({}, False), ({"nsamples": 127}, True)):
        settings = {"method": "wanda", "seqlen": LENGTH, "guard": "none", "progress": False, **asked}
        report = fwanda_pruner.prune(tiny.llama(), tiny.tokenizer(), **settings)
        assert any("overlap" in line for line in report.warnings) == warned
        assert any("calibration reads all windows of sample" in line for line in report.warnings)


@pytest.mark.parametrize("windows, read", [(128, 112), (40, 24), (32, 16), (31, 16), (16, 8), (3, 2), (1, 1)])
def test_a_calibration_on_part_of_a_text_leaves_windows_for_the_report(windows, read):
    assert calibration_part(windows) == read


def test_without_the_text_of_its_statistics_the_run_goes_on_with_a_warning(text, guard, tmp_path):
    config = PruneConfig(calibration=text, nsamples=20, seqlen=LENGTH, bos="none")
    statistics = fwanda_pruner.collect(tiny.llama(), tiny.tokenizer(), config=config, progress=False)
    (tmp_path / "text.txt").unlink()
    _, report = prune(None, guard, statistics=statistics, sparsity=0.5, calibration=None)
    assert list(by_source(report)) == [guard] and report.sparsity["matrices"] == 0.5
    said = [line for line in report.warnings if "the losses on the calibration text are not measured: " in line]
    assert len(said) == 1 and "text.txt" in said[0]


def test_default_guards_that_cannot_be_read_are_left_out_with_a_warning(text, monkeypatch):
    monkeypatch.setattr("fwanda_pruner.text.sources.sysconfig.get_path", lambda _name: "/nowhere")
    _, report = prune(text, None)
    assert list(by_source(report)) == [text, "sample"]
    said = [line for line in report.warnings if line.startswith("the guard ")]
    assert len(said) == 1 and said[0].startswith("the guard code is left out: code needs the source files")


def test_a_guard_that_was_asked_for_and_cannot_be_read_is_an_error(text, tmp_path):
    model = tiny.llama()
    with pytest.raises(UserError, match="missing.txt: no such file") as error:
        prune(text, str(tmp_path / "missing.txt"), model)
    assert "\n" not in str(error.value)
    assert all(int((weight == 0).sum()) == 0 for weight in model.parameters() if weight.dim() == 2)
    with pytest.raises(UserError, match="short.txt has 3 tokens, one sequence needs 24"):
        (tmp_path / "short.txt").write_text(tiny.text(3))
        prune(text, str(tmp_path / "short.txt"))


def test_without_a_tokenizer_default_guards_are_silently_left_out_and_others_are_an_error(guard):
    settings = {"calibration": tiny.tokens(16, LENGTH), "progress": False}
    report = fwanda_pruner.prune(tiny.llama(), **settings)
    assert list(by_source(report)) == ["tokens"] and not any("guard" in line for line in report.warnings)
    with pytest.raises(UserError, match="needs a tokenizer"):
        fwanda_pruner.prune(tiny.llama(), guard=guard, **settings)


# Which guards


def test_guards_are_sample_and_code_unless_others_are_named(text, guard):
    assert list(by_source(prune(text, None)[1])) == [text, "sample", "code"]
    assert list(by_source(prune(text, guard)[1])) == [text, guard]
    assert list(by_source(prune(text, "none")[1])) == [text]


def test_none_is_given_alone():
    assert PruneConfig(guard="none").guards == ()
    with pytest.raises(
        UserError, match="--guard none turns all guards off, got none, code; leave none or the others out"
    ):
        PruneConfig(guard=("none", "code"))


def test_a_guard_that_is_calibrated_too_is_one_domain(text, guard):
    _, report = prune(text, (guard, text))
    assert [(d["source"], d["calibrated"]) for d in report.domains] == [(text, True), (guard, False)]
    _, default = prune("sample", None)
    assert [(d["source"], d["calibrated"]) for d in default.domains] == [("sample", True), ("code", False)]


def test_every_source_of_a_mix_is_a_domain(text, guard):
    _, report = prune((f"{text}:3", guard), None)
    assert [(d["source"], d["calibrated"]) for d in report.domains] == [
        (text, True), (guard, True), ("sample", False), ("code", False),
    ]  # fmt: skip


# Warnings


def forced(monkeypatch, wanda: float) -> None:
    """Wanda's masks have this loss on every domain."""
    measured = stages.domain_losses

    def losses(engine, windows, masks=None):
        return dict.fromkeys(windows, wanda) if masks else measured(engine, windows, masks)

    monkeypatch.setattr(stages, "domain_losses", losses)


def warnings_of(report) -> list[str]:
    return [line for line in report.warnings if line.startswith("worse than Wanda")]


@pytest.mark.fault("other text")
@pytest.mark.parametrize("wanda", [0.0, 1e9])
def test_a_warning_names_each_domain_where_wanda_is_better_and_the_flag_that_helps(wanda, text, guard, monkeypatch):
    forced(monkeypatch, wanda)
    _, report = prune(text, guard)
    if wanda:
        assert warnings_of(report) == []
        return
    calibrated, other = (
        (re.escape(d["source"]), rf"the loss is {d['pruned']:.3f}, with Wanda's masks 0\.000") for d in report.domains
    )
    lines = warnings_of(report)
    assert len(lines) == 2
    assert re.fullmatch(rf"worse than Wanda on {calibrated[0]}: {calibrated[1]}; try --allocation auto", lines[0])
    advice = f"add that text to the calibration: --calibration {other[0]}"
    assert re.fullmatch(rf"worse than Wanda on {other[0]}: {other[1]}; {advice}", lines[1])


def test_a_search_that_is_worse_on_a_calibrated_text_gets_other_advice(text, monkeypatch):
    forced(monkeypatch, 0.0)
    (line,) = warnings_of(prune(text, allocation="response")[1])
    assert line.endswith("; give it a larger share of the calibration, or take --method wanda")


def test_a_warning_says_where_calibration_read_the_windows(monkeypatch):
    forced(monkeypatch, 0.0)
    report = fwanda_pruner.prune(tiny.llama(), calibration=tiny.tokens(16, LENGTH), progress=False)
    (line,) = warnings_of(report)
    assert line.startswith("worse than Wanda on tokens (windows of the calibration): ")


def test_a_warning_is_there_exactly_where_the_record_shows_it(text, guard):
    for settings in COMPARED:
        _, report = prune(text, guard, **settings)
        worse = [d["source"] for d in report.domains if d["pruned"] > d["wanda"]]
        assert [line.split(" on ")[1].split(": ")[0] for line in warnings_of(report)] == worse


# On the command line


@pytest.fixture
def folder(tmp_path):
    tiny.llama().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path


def command(folder, text, *extra) -> list[str]:
    return [
        "prune", str(folder / "model"), "--calibration", text, "--nsamples", "16", "--seqlen", str(LENGTH),
        "--output", str(folder / "out"), *extra,
    ]  # fmt: skip


def test_the_record_the_summary_the_report_and_the_card_show_the_domains(folder, text, guard, capsys):
    assert main(command(folder, text, "--guard", guard)) == 0
    shown = capsys.readouterr().out
    domains = json.loads((folder / "out" / "fwanda.json").read_text())["domains"]
    assert [set(d) for d in domains] == 2 * [{"source", "calibrated", "unread", "windows", "dense", "wanda", "pruned"}]
    assert [d["source"] for d in domains] == [text, guard]
    lines = [line for line in shown.splitlines() if "  Wanda " in line]
    assert main(["report", str(folder / "out")]) == 0
    block = capsys.readouterr().out.split("\n\n")[-1].splitlines()[2:]
    card = (folder / "out" / "README.md").read_text().split("## Mean loss by domain")[1].splitlines()[4:6]
    for place in (lines, block, card):
        assert len(place) == 2
        for line, domain in zip(place, domains, strict=True):
            assert Path(domain["source"]).name in line
            assert all(f"{domain[key]:.3f}" in line for key in ("dense", "pruned"))


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--guard", "missing.txt"], "missing.txt: no such file"),
        (["--guard", ""], "--guard has an empty name"),
        (["--guard", "code", "--guard", "code"], "--guard names code twice"),
        (["--guard", "none", "--guard", "code"], "--guard none turns all guards off"),
    ],
)
def test_a_mistake_is_one_line_before_the_model_is_read(flags, message, folder, text, capsys):
    (folder / "model" / "model.safetensors").unlink()
    assert main(command(folder, text, *flags)) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and message in error[0]
    assert not (folder / "out").exists()


def test_an_output_that_holds_a_guard_is_refused(folder, text, capsys):
    (folder / "out").mkdir()
    (folder / "out" / "guard.txt").write_text(tiny.text(400))
    assert main(command(folder, text, "--guard", str(folder / "out" / "guard.txt"), "--overwrite")) == 2
    assert (folder / "out" / "guard.txt").exists() and "guard.txt" in capsys.readouterr().err


def test_the_windows_of_the_report_do_not_depend_on_the_global_generators(text, guard):
    torch.manual_seed(1)
    one = prune(text, guard)[1].domains
    torch.manual_seed(2)
    assert prune(text, guard)[1].domains == one
