"""The record of a run: stable keys, three denominators, loading; and its tables and summary."""

import json
import sys

import pytest
from reports import PROTOCOL, compared, domain, make_report, record

from fwanda_pruner.errors import UserError
from fwanda_pruner.report.record import MatrixRow, Report, versions
from fwanda_pruner.report.summary import next_commands, summary, table

# derived, or younger than the first records
OPTIONAL = {"sparsity", "coverage", "row_histogram", "refit", "backends", "engine", "ranks", "segment", "bytes_loaded"}


@pytest.mark.fault("denominators")
def test_sparsity_uses_three_denominators_and_leaves_skipped_rows_out():
    shares = make_report().to_dict()["sparsity"]
    assert shares == {"asked": 25 / 60, "matrices": (20 + 2 + 5) / 60, "model": 30 / 200}


def test_each_matrix_row_counts_removed_and_kept_zeros():
    rows = make_report().to_dict()["matrices"]
    assert list(rows[0]) == [
        "name", "shape", "asked", "kept", "kept_zero", "skipped", "tensor", "index", "wanda_disagreement",
        "zeros_before", "sparsity",
    ]  # fmt: skip
    assert [row["sparsity"] for row in rows] == [22 / 40, 5 / 20, 1 / 50]
    assert [row["skipped"] for row in rows] == [None, None, "tied"]


def test_nothing_pruned_is_zero_sparsity_not_a_division_error():
    assert make_report(matrices=[]).sparsity["matrices"] == 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"perplexity": [], "energy": 12.5, "bos": None, "tokens_sha256": None, "omega_floored_rows": None},
        {"perplexity": [{"dense": 20.5, "pruned": float("inf"), **PROTOCOL}]},
        {"perplexity": [{"dense": 20.5, "pruned": 21.0, **PROTOCOL, "source": source} for source in ("code", "b.txt")]},
        {"row_histogram": None},
        {"refit": {"blocks": 4, "kept": 3}},
        {"backends": {"nm_mask": "cuda"}},
        {"domains": [domain("c4", calibrated=True), domain("code", wanda=None, pruned=None)]},
    ],
)
def test_round_trip_through_strict_json(changes):
    report = make_report(**changes)
    text = json.dumps(report.to_dict(), allow_nan=False)
    assert Report.from_dict(json.loads(text)) == report


def test_the_file_has_one_matrix_a_line(tmp_path):
    report = make_report(perplexity=[{"dense": 20.5, "pruned": float("nan"), **PROTOCOL}])
    text = report.to_json()
    (tmp_path / "fwanda.json").write_text(text)
    lines = text.splitlines()
    assert text.endswith("}\n") and json.loads(text) == report.to_dict()
    rows = [json.loads(line.rstrip(",")) for line in lines if line.startswith('  {"name"')]
    assert rows == report.to_dict()["matrices"]
    assert [line for line in lines if "row_histogram" in line] == [
        f' "row_histogram": {json.dumps(report.row_histogram)},'
    ]
    assert ' "seconds": {' in lines and '  "calibrate": 1.5,' in lines and '   "pruned": "nan",' in lines
    assert json.loads(Report.load(tmp_path).to_json()) == json.loads(text)


def test_a_file_without_matrices_is_json_too():
    report = make_report(matrices=[], row_histogram=None)
    assert json.loads(report.to_json()) == report.to_dict()


def test_a_number_that_strict_json_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="JSON"):
        make_report(matrices=[MatrixRow("a", (4, 10), 20, 20, 0, wanda_disagreement=float("nan"))]).to_json()


def test_stable_keys():
    assert set(make_report().to_dict()) == {
        "perplexity", "sparsity", "matrices", "seconds", "peak_memory_bytes", "energy", "versions", "config",
        "tokens_sha256", "bos", "warnings", "omega_floored_rows", "passes", "energy_details", "domains",
        "block_parameters", "model_parameters", "model_zeros", "coverage", "row_histogram", "refit", "backends",
        "engine", "ranks", "segment", "bytes_loaded",
    }  # fmt: skip


def test_a_record_of_an_older_version_has_no_histogram_and_no_disagreement():
    data = make_report().to_dict()
    del data["row_histogram"]
    for row in data["matrices"]:
        del row["wanda_disagreement"]
    report = Report.from_dict(data)
    assert report.row_histogram is None
    assert [row.wanda_disagreement for row in report.matrices] == [None, None, None]


@pytest.mark.parametrize("key", sorted(set(make_report().to_dict()) - OPTIONAL))
def test_a_missing_key_is_named(key, tmp_path):
    data = make_report().to_dict()
    del data[key]
    (tmp_path / "fwanda.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=f"fwanda.json.*'{key}'"):
        Report.load(tmp_path)


@pytest.mark.parametrize(
    ("where", "edit"),
    [
        (r"matrices\[1\].kept'", lambda d: d["matrices"][1].pop("kept")),
        (r"matrices\[0\].shape", lambda d: d["matrices"][0].update(shape=["x"])),
        (r"matrices\[0\]", lambda d: d["matrices"].__setitem__(0, 3)),
        (r"perplexity\[0\].pruned", lambda d: d["perplexity"][0].pop("pruned")),
        (r"perplexity\[0\].dense", lambda d: d["perplexity"][0].update(dense="much")),
        (r"perplexity\[0\].dense", lambda d: d["perplexity"][0].update(dense=True)),
        (r"perplexity\[0\].source", lambda d: d["perplexity"][0].update(source=3)),
        (r"perplexity\[1\].source", lambda d: d["perplexity"].append("code")),
        ("'perplexity'", lambda d: d.update(perplexity=d["perplexity"][0])),
        (r"domains\[1\].source", lambda d: d["domains"][1].pop("source")),
        (r"domains\[1\].calibrated", lambda d: d["domains"][1].update(calibrated="yes")),
        (r"domains\[0\].windows", lambda d: d["domains"][0].update(windows=2.5)),
        (r"domains\[0\].pruned", lambda d: d["domains"][0].update(pruned="inf")),
        (r"domains\[0\].wanda", lambda d: d["domains"][0].update(wanda=float("nan"))),
        (r"domains\[0\].dense", lambda d: d["domains"][0].update(dense=True)),
        (r"domains\[0\].windows", lambda d: d["domains"][0].update(windows=True)),
        (r"domains\[0\].windows", lambda d: d["domains"][0].update(windows=-3)),
        (r"domains\[2\]", lambda d: d["domains"].append("code")),
        ("'domains'", lambda d: d.update(domains=d["domains"][0])),
        (r"backends", lambda d: d.update(backends=["cuda"])),
        (r"backends.nm_mask", lambda d: d.update(backends={"nm_mask": 3})),
        (r"config.method", lambda d: d["config"].update(method=["wanda"])),
        (r"config.chosen.name", lambda d: d["config"].update(chosen={"start": "a", "losses": {}})),
        (
            r"config.chosen.losses.a'",
            lambda d: d["config"].update(chosen={"name": "a", "start": "a", "losses": {"a": 3}}),
        ),
        (
            r"config.chosen.losses.a.c4",
            lambda d: d["config"].update(chosen={"name": "a", "start": "a", "losses": {"a": {"c4": "low"}}}),
        ),
        (r"config.chosen", lambda d: d["config"].update(chosen="round 2")),
        (r"energy_details.phases'", lambda d: d.update(energy_details={"phases": "no"})),
        (r"energy_details.total.gross_joules", lambda d: d["energy_details"].update(total={})),
        (
            r"energy_details.phases.prune.flag",
            lambda d: d["energy_details"]["phases"].update(prune={"gross_joules": 1.0, "net_joules": None, "flag": 3}),
        ),
        (
            r"energy_details.total.net_joules",
            lambda d: d["energy_details"].update(total={"gross_joules": 1.0, "net_joules": float("nan"), "flag": None}),
        ),
        (r"versions.torch", lambda d: d["versions"].update(torch=2.13)),
        (r"warnings.0", lambda d: d.update(warnings=[3])),
        (r"'refit.kept'", lambda d: d.update(refit={"blocks": 3})),
        (r"'refit.blocks'", lambda d: d.update(refit={"blocks": "all", "kept": 3})),
        (r"'refit.blocks'", lambda d: d.update(refit=[3])),
        (r"'refit.blocks'", lambda d: d.update(refit={"blocks": True, "kept": 1})),
        (r"'refit.kept'", lambda d: d.update(refit={"blocks": 2, "kept": 5})),
        ("'seconds'", lambda d: d.update(seconds=3)),
        ("'row_histogram'", lambda d: d.update(row_histogram=3)),
        ("'row_histogram'", lambda d: d["row_histogram"].pop()),
        ("'row_histogram'", lambda d: d["row_histogram"].__setitem__(7, -1)),
        (r"matrices\[1\].wanda_disagreement'", lambda d: d["matrices"][1].update(wanda_disagreement=1.5)),
        (r"matrices\[1\].wanda_disagreement'", lambda d: d["matrices"][1].update(wanda_disagreement="much")),
    ],
)
def test_a_broken_value_is_named(where, edit):
    data = make_report(domains=[domain("c4"), domain("code")]).to_dict()
    edit(data)
    with pytest.raises(UserError, match=where):
        Report.from_dict(data)


@pytest.mark.parametrize("content", [None, "", "{", "[]", "\x00", '"text"'])
def test_a_bad_file_is_one_line_of_user_error(content, tmp_path):
    file = tmp_path / "fwanda.json"
    if content is not None:
        file.write_text(content)
    for path in (file, tmp_path):
        with pytest.raises(UserError) as error:
            Report.load(path)
        assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


@pytest.mark.fault("protocol")
def test_table_never_puts_two_protocols_in_one_column():
    same = make_report()
    changes = {"seqlen": 128, "windows": 4, "tokens_sha256": "ff", "bos": False, "tokenizer": "x"}
    others = [make_report(perplexity=[{**same.perplexity[0], key: value}]) for key, value in changes.items()]
    blocks = table([("first", same), *((f"other{i}", r) for i, r in enumerate(others)), ("last", same)]).split("\n\n")
    assert len(blocks) == 6
    assert "first" in blocks[0] and "last" in blocks[0] and "other" not in blocks[0]
    assert len({block.splitlines()[0] for block in blocks}) == 6


def test_table_is_aligned_and_tells_method_sparsity_perplexity_and_time():
    lines = table([("m", make_report()), ("a longer label", make_report(perplexity=[]))]).splitlines()
    header, row = lines[1], lines[2]
    for name, value in [("method", "wanda"), ("allocation", "uniform"), ("sparsity", "45.00 %"),
                        ("perplexity text.txt", "20.50 -> 35.25"), ("seconds", "3.5")]:  # fmt: skip
        assert row[header.index(name) :].startswith(value)
    assert "perplexity not measured" in lines


def two_texts() -> Report:
    perplexities = {"text.txt": (20.5, 35.25), "code": (6.0, 9.5)}
    return make_report(
        perplexity=[PROTOCOL | {"source": s, "dense": d, "pruned": p} for s, (d, p) in perplexities.items()]
    )


def test_each_text_has_a_column_of_the_table_and_a_line_of_the_summary():
    lines = table([("m", two_texts()), ("n", two_texts())]).splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["text.txt", "code"]
    header, *rows = lines[2:]
    for row in rows:
        assert row[header.index("perplexity text.txt") :].startswith("20.50 -> 35.25")
        assert row[header.index("perplexity code") :].startswith("6.00 -> 9.50")
    told = [line for line in summary(two_texts()).splitlines() if line.startswith("perplexity")]
    assert [line.split("  (")[0] for line in told] == [
        "perplexity  20.50 -> 35.25 on text.txt", "perplexity  6.00 -> 9.50 on code",
    ]  # fmt: skip


def test_reports_with_other_texts_stand_in_another_table():
    blocks = table([("one", make_report()), ("two", two_texts())]).split("\n\n")
    assert ["one" in block for block in blocks] == [True, False] and len(blocks) == 2


def test_each_domain_has_a_line_of_the_summary():
    lines = summary(compared()).splitlines()
    first = lines.index("losses      mean in nats: dense -> pruned, and with Wanda's masks")
    assert lines[first + 1 : first + 4] == [
        "  c4      2.000 -> 2.250  Wanda 2.500  8 held-out windows",
        "  tokens  2.000 -> 2.250  Wanda 2.500  8 calibration windows",
        "  code    0.500 -> 1.125  Wanda -  6 windows of other text",
    ]
    assert "losses" not in summary(make_report())


def test_the_summary_says_how_many_windows_each_source_got():
    sources = {"calibration": ["c4:3", "code"], "nsamples": 16, "seqlen": 64}
    mixed = summary(make_report(config=sources))
    assert "text        16 windows of 64 tokens: c4 12, code 4" in mixed.splitlines()
    alone = summary(make_report(config={**sources, "calibration": ["c4"]}))
    assert "text        16 windows of 64 tokens from c4" in alone.splitlines()
    assert "windows of 64 tokens from" not in summary(make_report(config=sources, tokens_sha256=None))


def test_the_summary_fits_a_screen_and_shows_no_hash_and_no_class():
    many = [domain(f"folder/of/many/texts/{i}.jsonl", calibrated=True) for i in range(30)]
    texts = [{"dense": 20.5, "pruned": 35.25, **PROTOCOL, "source": name} for name in ("a.txt", "b" * 200, *"cdefg")]
    skipped = [MatrixRow(f"layer.{i}", (4, 10), 40, 40, 0, skipped=f"reason {i}") for i in range(40)]
    stages = ("load", "sample", "text", "eval_dense", "calibrate", "choose", "budgets", "check", "prune", "eval_pruned")
    report = make_report(
        matrices=[*make_report().matrices, *skipped],
        perplexity=texts,
        domains=many,
        warnings=[f"{i} is {'long ' * 100}" for i in range(9)],
        refit={"blocks": 4, "kept": 3},
        seconds={stage: 1234.5 for stage in stages},
        config={"calibration": [d["source"] for d in many[:20]], "nsamples": 20, "seqlen": 2048},
    )
    text = summary(report)
    assert len(text.splitlines()) <= 50 and max(map(len, text.splitlines())) <= 80
    assert "and 22 more in fwanda.json" in text and "and 3 more in fwanda.json" in text
    usual = summary(compared())
    assert len(usual.splitlines()) <= 16
    for hidden in ("abab", "cdcd", PROTOCOL["tokenizer"]):
        assert hidden not in usual + text


def test_the_next_commands_leave_out_the_page_that_cannot_be_made(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not any("--html" in command for command in next_commands(make_report(), "out"))


def test_the_next_commands_can_be_copied():
    report = make_report(config={"eval_seqlen": 64, "eval_windows": 3})
    assert next_commands(report, "my model/") == [
        "fwanda report 'my model/'",
        "fwanda report 'my model/' --html 'my model.html'",
        "fwanda eval 'my model/' --eval text.txt --eval-seqlen 64 --eval-windows 3",
    ]
    assert next_commands(make_report(), "out")[-1] == "fwanda eval out --eval text.txt"  # all windows, as in the record


def test_the_next_evaluation_after_a_run_without_one_has_a_size_of_its_own():
    """The windows of a tiny run would measure nothing."""
    report = make_report(perplexity=[], domains=compared().domains, config={"eval_seqlen": 16, "seqlen": 16})
    assert next_commands(report, "out")[-1] == "fwanda eval out --eval sample --eval-seqlen 256 --eval-windows 8"


def test_the_summary_and_the_table_say_what_the_search_chose():
    report = record()
    assert "allocation  auto chose round 2 of response" in summary(report).splitlines()
    assert "auto (round 2 of response)" in table([("m", report)])
    config = report.config | {"chosen": report.config["chosen"] | {"name": "global b=1 c=0.5"}}
    assert "allocation  auto chose global b=1 c=0.5" in summary(record(config=config)).splitlines()
    assert "chose" not in summary(make_report())


def test_the_summary_shows_the_first_warnings_and_counts_the_others():
    lines = [line for line in summary(make_report(warnings=list("abcde"))).splitlines() if "warnings" in line]
    assert lines == [*(f"warnings    {text}" for text in "abc"), "warnings    and 2 more in fwanda.json"]


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        ({"sparsity": "0.4"}, 0.4),
        ({"sparsity": "1/3"}, 1 / 3),
        ({"pattern": "2:4"}, 0.5),
        ({}, 25 / 60),
        ({"sparsity": "1e-99999999"}, 25 / 60),
        ({"sparsity": ["x"]}, 25 / 60),
    ],
)
def test_what_was_asked_is_what_the_settings_say(config, asked):
    report = make_report(config=config)
    assert report.asked == asked and report.sparsity["asked"] == 25 / 60


def test_a_report_that_is_not_there_says_so(tmp_path):
    with pytest.raises(UserError, match="nothing: no such file or folder; give a fwanda.json, or the folder that"):
        Report.load(tmp_path / "nothing")
    with pytest.raises(UserError, match="the folder has no fwanda.json"):
        Report.load(tmp_path)


def test_a_table_tells_hashes_only_where_they_tell_two_protocols_apart():
    one, other = (make_report(perplexity=[{**make_report().perplexity[0], "tokens_sha256": c * 64}]) for c in "12")
    assert "text.txt: 3 windows of 64 tokens, BOS in each\n" in table([("m", one)])
    assert "1111" not in table([("m", one)]) and "1" * 12 in table([("m", one), ("n", other)])


def test_the_summary_says_how_many_updates_were_kept():
    line = "refit       updates kept in 3 of 4 blocks, where the held-out loss fell"
    assert line in summary(make_report(refit={"blocks": 4, "kept": 3})).splitlines()
    assert "refit" not in summary(make_report())


def test_the_table_has_a_last_block_with_a_row_for_each_domain_of_each_run():
    text = table([("m", compared()), ("without", make_report()), ("n", compared())])
    *_, block = text.split("\n\n")
    title, header, *rows = block.splitlines()
    assert title == "mean loss in nats on text of several domains, before and after pruning"
    columns = [header.index(name) for name in ("model", "text", "dense", "Wanda's masks", "pruned", "windows")]
    cells = [[row[column:].split(maxsplit=1)[0] for column in columns[1:]] for row in rows]
    once = [["c4", "2.000", "2.500", "2.250", "8"], ["tokens", "2.000", "2.500", "2.250", "8"],
            ["code", "0.500", "-", "1.125", "6"]]  # fmt: skip
    assert cells == once * 2
    assert [row[: columns[1]].strip() for row in rows] == ["m", "", "", "n", "", ""]
    assert [row.split("  ")[-1].strip() for row in rows[:3]] == [
        "calibrated on other windows", "calibrated on these windows", "not calibrated on",
    ]  # fmt: skip


def test_a_report_is_one_short_line_at_the_prompt():
    assert repr(make_report(config={"method": "wanda"})) == "<Report: wanda, 0.4500 zeros in 2 matrices>"


def test_the_table_says_which_losses_of_domains_can_be_compared():
    line = "Compare runs with the same dense loss: the others read other windows."
    other = compared()
    other.domains[0]["dense"] = 1.5
    assert table([("m", compared()), ("n", other)]).splitlines()[-1] == line
    assert line not in table([("m", compared()), ("n", compared())])


def test_losses_with_wandas_masks_are_left_out_where_the_result_has_the_same():
    report = compared()
    for row in report.domains:
        row["wanda"] = row["pruned"]
    assert "Wanda" not in summary(report) + table([("m", report)])


def test_without_domains_the_table_has_no_block_for_them():
    assert "loss" not in table([("m", make_report())])


def test_summary_names_skipped_matrices_and_unmeasured_energy():
    text = summary(make_report())
    for fact in (
        "45.00 %", "asked 50 %", "15.00 %", "20.50 -> 35.25", "head (50 weights): tied", "40.00 % of the blocks",
        "not measured: device is cpu", "3.5",
    ):  # fmt: skip
        assert fact in text
    assert "-> " not in summary(make_report(perplexity=[]))


def test_versions_are_json_and_name_the_device_of_the_run():
    found = versions("cpu")
    assert set(found) == {"fwanda_kernels", "torch", "transformers", "triton", "python", "device"}
    assert found["torch"] and found["device"].startswith("cpu")
    json.dumps(found)
