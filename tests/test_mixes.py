"""Calibration text of several sources, and the guards beside it: which windows are read, and in which order."""

import json

import pytest
import tiny
import torch
from interrupt import interrupted_after
from measuring import engine_of

import fwanda_pruner
from fwanda_pruner import PruneConfig, Statistics, UserError
from fwanda_pruner.cli import main
from fwanda_pruner.run import read_texts as reading
from fwanda_pruner.run.read_texts import read_texts
from fwanda_pruner.run.texts import Texts, sources_of, with_sources
from fwanda_pruner.source_shares import counts_of, interleaved
from fwanda_pruner.text.windows import calibration_tokens, draw_windows, guard_tokens, tokens_sha256

LENGTH = 12


@pytest.fixture
def files(tmp_path) -> list[str]:
    """Three texts of different words: those of each file tell where a window is from."""
    paths = [tmp_path / f"{name}.txt" for name in "abc"]
    for number, path in enumerate(paths):
        words = tiny.text(900, seed=number).split()
        path.write_text(" ".join(f"w{3 + 20 * number + int(word[1:]) % 20}" for word in words))
    return [str(path) for path in paths]


def read(calibration, *, domains=True, own=None, bos="none", model=None, eval=None, **settings) -> Texts:
    """What a run reads."""
    settings = {"nsamples": 20, "seqlen": LENGTH, "guard": "none", "bos": bos, **settings}
    config = with_sources(PruneConfig(calibration=calibration, **settings), None, eval, None)
    sources, engine = sources_of(config, None, eval, None), engine_of(model or tiny.llama())
    return read_texts(config, engine, tiny.tokenizer(), sources, own, calibration=True, domains=domains)


def origin(tokens) -> list[int]:
    """The number of the file that each window is from."""
    found = (tokens - 3) // 20
    assert bool((found == found[:, :1]).all())
    return found[:, 0].tolist()


def rows(tokens) -> set[tuple[int, ...]]:
    return {tuple(row) for row in tokens.tolist()}


# Windows of a mix


@pytest.mark.parametrize("shares", [("", ""), (":3", ":1"), (":0.2", ":0.5")], ids=str)
def test_each_source_gets_its_exact_count_in_the_fixed_order(shares, files):
    given = tuple(file + share for file, share in zip(files, shares, strict=False))
    found = read(given)
    counts = counts_of(PruneConfig(calibration=given).sources, 20)
    assert sum(counts) == 20 == len(found.calibration)
    assert origin(found.calibration) == interleaved(counts) == found.labels.tolist()


def test_the_windows_of_each_source_are_those_of_the_source_alone(files):
    found = read((f"{files[0]}:2", files[1], files[2]), seed=5)
    for label, (file, count) in enumerate(zip(files, (10, 5, 5), strict=True)):
        alone = calibration_tokens(file, tiny.tokenizer(), nsamples=count, seqlen=LENGTH, seed=5, bos=False)
        assert torch.equal(found.calibration[found.labels == label], alone)


def test_one_source_is_read_as_before(files):
    found = read(files[0], seed=2)
    alone = calibration_tokens(files[0], tiny.tokenizer(), nsamples=20, seqlen=LENGTH, seed=2, bos=False)
    assert torch.equal(found.calibration, alone) and found.labels.tolist() == [0] * 20


def test_windows_for_comparisons_are_none_of_the_calibration(files):
    found = read(tuple(files), allocation="response")
    read_for = [rows(found.calibration)]
    for label, domain in enumerate(found.domains):
        assert domain.source == files[label] and domain.calibrated and domain.unread
        assert set(origin(domain.reported)) == set(origin(domain.choice)) == {label}
        assert (len(domain.reported), len(domain.choice)) == (8, 4)  # of three domains four windows each
        read_for += [rows(domain.reported), rows(domain.choice)]
    assert sum(map(len, read_for)) == 20 + 3 * 12 == len(set().union(*read_for))


@pytest.mark.parametrize("names, choice", [(1, 8), (2, 4), (3, 4)])
def test_a_choice_reads_at_least_eight_windows_and_four_of_each_domain(names, choice, files):
    found = read(tuple(files[:names]), allocation="auto")
    assert [len(domain.choice) for domain in found.domains] == [choice] * names
    assert [len(domain.reported) for domain in found.domains] == [8] * names
    assert all(len(domain.choice) == 0 for domain in read(tuple(files[:names])).domains)  # nothing is chosen


def test_more_windows_for_comparisons_do_not_change_those_of_the_calibration(files):
    one = read(tuple(files))
    for other in (read(tuple(files), allocation="auto"), read(tuple(files), domains=False)):
        assert torch.equal(one.calibration, other.calibration)


def test_a_short_source_leaves_what_it_has(files, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text(tiny.text(13 * LENGTH))
    with_three, with_none = (read((files[0], str(short)), nsamples=n, allocation="auto").domains[1] for n in (20, 26))
    assert with_three.unread and len(with_three.choice) == 1 and len(with_three.reported) == 2
    assert not with_none.unread and len(with_none.reported) > 0  # its last windows, which calibration reads


def test_one_window_alone_serves_the_choice_and_the_report(files, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text(tiny.text(11 * LENGTH))
    domain = read((files[0], str(short)), allocation="auto").domains[1]
    assert domain.unread and torch.equal(domain.choice, domain.reported) and len(domain.choice) == 1


def test_a_source_that_cannot_be_read_is_named(files):
    with pytest.raises(UserError, match=r"missing\.txt: no such file"):
        read((files[0], "missing.txt"))


@pytest.mark.parametrize("nsamples, warned", [(15, True), (16, False)])
def test_few_windows_are_those_of_all_sources_together(nsamples, warned, files, recwarn):
    read((files[0], files[1]), nsamples=nsamples)
    assert [str(w.message) for w in recwarn] == [f"{nsamples} calibration samples are few: use at least 16"] * warned


# BOS


@pytest.mark.parametrize("lowers", [True, False])
def test_the_first_text_decides_about_bos_once_for_all(lowers, files, monkeypatch):
    asked = []

    def choose(_engine, _tokenizer, window):
        asked.append(window)
        return lowers

    monkeypatch.setattr(reading, "choose_bos", choose)
    found = read(tuple(files[:2]), bos="auto", guard=files[2], eval=[files[2]])
    assert len(asked) == 1 and found.bos == lowers
    windows = [found.calibration, *found.evaluation.values(), *(domain.reported for domain in found.domains)]
    assert len(windows) == 5
    assert all(bool((part[:, 0] == 1).all()) == lowers for part in windows)
    assert all(part.shape[1] == LENGTH for part in windows)


def test_where_the_settings_decide_nothing_is_asked(files, monkeypatch):
    monkeypatch.setattr(reading, "choose_bos", None)
    assert read(files[0], bos="window", guard=files[1]).bos is True
    assert read(files[0], bos="none", guard=files[1]).bos is False


def test_with_bos_the_windows_hold_one_token_of_text_less(files):
    found = read(tuple(files[:2]), bos="window")
    assert bool((found.calibration[:, 0] == 1).all())
    assert origin(found.calibration[:, 1:]) == found.labels.tolist()


def test_a_guard_that_is_a_source_by_another_path_is_one_domain(files, tmp_path):
    (tmp_path / "link.txt").symlink_to(files[0])
    found = read(files[0], guard=(str(tmp_path / "link.txt"), files[1]))
    assert [(d.source, d.calibrated, d.guard) for d in found.domains] == [
        (files[0], True, True),
        (files[1], False, True),
    ]


# The model's own text among the sources


def test_own_text_is_taken_in_order_and_the_rest_is_left_for_comparisons(files):
    own = tiny.tokens(40, LENGTH)
    found = read((files[0], "self"), own=own, allocation="auto")
    assert torch.equal(found.calibration[found.labels == 1], own[:10])
    (domain,) = [domain for domain in found.domains if domain.source == "self"]
    assert torch.equal(torch.cat([domain.choice, domain.reported]), own[10:22])


def test_own_text_as_a_guard_alone(files):
    own = tiny.tokens(8, LENGTH)
    found = read(files[0], guard="self", own=own)
    assert torch.equal(found.domains[1].reported, own) and not found.domains[1].calibrated


def test_own_text_gets_bos_where_the_others_have_it(files):
    own = tiny.tokens(40, LENGTH)
    found = read((files[0], "self"), own=own, bos="window")
    part = found.calibration[found.labels == 1]
    assert bool((part[:, 0] == 1).all()) and torch.equal(part[:, 1:], own[:10, :-1])


@pytest.mark.parametrize(
    "settings, reads, windows",
    [
        ({"calibration": ("self",)}, (True, True), 20 + 16),
        ({"calibration": ("self",)}, (True, False), 20 + 16),
        ({"calibration": ("self",), "allocation": "auto"}, (True, True), 20 + 16),
        ({"calibration": ("c4", "self")}, (True, True), 10 + 16),
        ({"calibration": ("self",)}, (False, True), 20 + 16),  # Wanda's masks are compared on that text
        ({"calibration": ("self",), "method": "magnitude"}, (False, True), 0),
        ({"calibration": ("self",), "method": "wanda"}, (False, True), 0),
        ({"calibration": ("self",)}, (False, False), 0),
        ({"guard": "self"}, (True, True), 8),
        ({"guard": "self", "allocation": "auto"}, (True, True), 12),
        ({"guard": "self"}, (True, False), 0),
        ({}, (True, True), 0),
    ],
    ids=str,
)
def test_a_model_writes_as_many_windows_as_are_read(settings, reads, windows):
    config = PruneConfig(nsamples=20, **settings).resolved()
    assert reading.own_windows(config, calibration=reads[0], domains=reads[1]) == windows


# Guards


def test_guards_are_windows_of_many_documents_which_calibration_text_does_not_decide(files, tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": tiny.text(30, seed=i)}) + "\n" for i in range(40)))
    found = read(files[0], guard=str(path), seed=1).domains[1]
    assert torch.equal(found.reported, guard_tokens(str(path), tiny.tokenizer(), windows=8, seqlen=LENGTH, bos=False))
    documents = [tiny.text(30, seed=i) for i in range(40)]
    origins = []
    for window in found.reported.tolist():
        words = " ".join(f"w{token}" for token in window)
        origins += [i for i, document in enumerate(documents) if document.startswith(words)]
    assert len(set(origins)) == 8
    assert torch.equal(found.reported, read(files[1], guard=str(path), seed=2).domains[1].reported)


def test_a_guard_that_calibration_reads_is_a_domain_of_the_calibration(files):
    found = read((files[0], files[1]), guard=(files[1], files[2]))
    assert [(d.source, d.calibrated, d.guard) for d in found.domains] == [
        (files[0], True, False), (files[1], True, True), (files[2], False, True),
    ]  # fmt: skip
    _, further = draw_windows(files[1], tiny.tokenizer(), nsamples=10, further=8, seqlen=LENGTH, seed=0, bos=False)
    assert torch.equal(found.domains[1].reported, further)


# What the record and statistics say


def test_the_record_says_what_came_from_where(files):
    given = (f"{files[0]}:3", files[1])
    report = fwanda_pruner.prune(
        tiny.llama(), tiny.tokenizer(), calibration=given, nsamples=20, seqlen=LENGTH, bos="none", guard=files[2],
        progress=False,
    )  # fmt: skip
    assert (report.config["calibration"], report.config["guard"]) == (list(given), [files[2]])
    assert report.tokens_sha256 == tokens_sha256(read(given).calibration)


def test_statistics_say_what_came_from_where_and_bring_it_to_the_run(files, tmp_path, capsys):
    tiny.llama().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    file, settings = str(tmp_path / "s.safetensors"), ["--nsamples", "20", "--seqlen", str(LENGTH), "--bos", "none"]
    sources = ["--calibration", f"{files[0]}:3", "--calibration", files[1]]
    model = str(tmp_path / "model")
    assert main(["calibrate", model, *sources, *settings, "--output", file]) == 0
    statistics = Statistics.load(file)
    assert statistics.text == {
        "calibration": [f"{files[0]}:3", files[1]], "start_token": None, "nsamples": 20, "seqlen": LENGTH, "seed": 0,
    }  # fmt: skip
    assert statistics.tokens_sha256 == tokens_sha256(read((f"{files[0]}:3", files[1])).calibration)
    out = tmp_path / "out"
    assert main(["prune", model, "--statistics", file, "--allocation", "auto", "--output", str(out)]) == 0
    record = json.loads((out / "fwanda.json").read_text())
    assert record["config"]["calibration"] == statistics.text["calibration"]
    assert record["tokens_sha256"] == statistics.tokens_sha256
    assert [d["source"] for d in record["domains"]] == [files[0], files[1], "sample", "code"]
    assert not any("another text" in line for line in record["warnings"])


def test_a_config_file_lists_sources(files, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(f"calibration: ['{files[0]}:3', {files[1]}]\nguard: none\n")
    config = PruneConfig.load(path)
    assert [(source.name, source.share) for source in config.sources] == [(files[0], 3), (files[1], 1)]
    assert config.guards == () and PruneConfig.from_dict(config.to_dict()) == config


@pytest.mark.fault("changed state")
def test_a_run_does_not_go_on_where_a_guard_has_changed(files, tmp_path, capsys):
    tiny.llama().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    argv = [
        "prune", str(tmp_path / "model"), "--calibration", files[0], "--guard", files[1], "--nsamples", "16",
        "--seqlen", str(LENGTH), "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    with interrupted_after("calibrate"):
        assert main(argv) == 130
    with open(files[1], "a") as file:
        file.write(" w5")
    assert main([*argv, "--resume"]) == 2
    assert "the interrupted run had guard_sha256" in capsys.readouterr().err


def test_a_guard_of_one_document_gives_as_many_windows_as_its_text_has(files, tmp_path):
    alone = guard_tokens(files[0], tiny.tokenizer(), windows=8, seqlen=LENGTH, bos=False)
    assert alone.flatten().tolist() == tiny.tokenizer()(open(files[0]).read())["input_ids"][: 8 * LENGTH]
    short = tmp_path / "short.txt"
    short.write_text(tiny.text(5 * LENGTH + 3))
    assert len(guard_tokens(str(short), tiny.tokenizer(), windows=8, seqlen=LENGTH, bos=False)) == 5
