"""`fwanda report --format`: CSV with a row for each run, and JSON with the records."""

import csv
import io
import json

import pytest
from reports import PROTOCOL, domain, make_report

from fwanda_pruner.cli import main


@pytest.fixture
def runs(tmp_path):
    """Paths of two records: of one text, and of two with a comparison."""
    two = [{"dense": 6.0, "pruned": float("inf"), **PROTOCOL, "source": "code"}, *make_report().perplexity]
    config = {"model": 'a, "b"\nc', "method": "fwanda"}
    reports = (
        make_report(),
        make_report(perplexity=two, domains=[domain("c4", wanda=None)], config=config, energy=12.5),
    )
    paths = []
    for name, report in zip("xy", reports, strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "fwanda.json").write_text(json.dumps(report.to_dict()))
        paths.append(str(tmp_path / name))
    return paths


def rows_of(runs, capsys) -> list[dict]:
    assert main(["report", *runs, "--format", "csv"]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


def test_csv_has_a_row_for_each_run_and_the_numbers_of_its_record(runs, capsys):
    first, second = rows_of(runs, capsys)
    assert [first["path"], second["path"]] == runs and second["model"] == 'a, "b"\nc'
    assert float(first["sparsity matrices"]) == 27 / 60 and float(first["seconds"]) == 3.5
    assert (first["perplexity text.txt pruned"], first["perplexity code dense"]) == ("35.25", "")
    assert (second["perplexity code pruned"], second["loss c4 pruned"], second["loss c4 wanda"]) == ("inf", "2.25", "")
    assert (first["joules"], second["joules"], first["warnings"]) == ("", "12.5", "1")


def test_csv_never_puts_two_protocols_in_one_column(runs, capsys, tmp_path):
    other = make_report(perplexity=[{**make_report().perplexity[0], "windows": 9, "pruned": 99.0}])
    (tmp_path / "z.json").write_text(json.dumps(other.to_dict()))
    rows = rows_of([runs[0], str(tmp_path / "z.json")], capsys)
    columns = [name for name in rows[0] if name.startswith("perplexity text.txt") and name.endswith("pruned")]
    assert len(columns) == 2 and [[bool(row[name]) for name in columns] for row in rows] == [
        [True, False],
        [False, True],
    ]


def test_json_has_the_complete_records(runs, capsys):
    assert main(["report", *runs, "--format", "json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [record.pop("path") for record in records] == runs
    for record, path in zip(records, runs, strict=True):
        assert record == json.loads(open(f"{path}/fwanda.json").read())


def test_table_is_the_default(runs, capsys):
    assert main(["report", *runs]) == 0
    plain = capsys.readouterr().out
    assert main(["report", *runs, "--format", "table"]) == 0
    assert capsys.readouterr().out == plain and "20.50 -> 35.25" in plain


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--format", "cvs"], "--format must be one of table, csv, json, got 'cvs'; did you mean csv?"),
        (["--format", "html"], "--format must be one of table, csv, json, got 'html'; for a page: --html FILE.html"),
        (["--format", "csv", "--html", "a.html"], "give only one of them"),
        (["--html", "nowhere/a.html"], "--html must be a .html file in an existing, writable folder"),
        (["--html", "fwanda.json"], "--html must be a .html file"),
    ],
)
def test_a_wrong_format_is_one_line(flags, expected, runs, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *runs, *flags]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err and captured.out == "" and not list(tmp_path.glob("*.html"))


@pytest.mark.fault("names in a page")
def test_no_name_of_a_record_controls_the_terminal_or_breaks_a_row_of_the_table(tmp_path, capsys):
    evil = "a\x1b[31mb\nc\x07\u202ed\u2028e"
    perplexity = [{"dense": 6.0, "pruned": 7.0, **PROTOCOL, "source": evil}]
    config = {"model": evil, "method": evil, "allocation": evil}
    report = make_report(perplexity=perplexity, domains=[domain(evil)], config=config)
    (tmp_path / "fwanda.json").write_text(json.dumps(report.to_dict()))
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert not set("\x1b\x07\u202e\u2028") & set(out) and "\nc" not in out and out.count("\ufffd") >= 6


@pytest.mark.fault("names in a page")
@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_a_number_that_is_no_json_is_refused_wherever_it_stands(number, tmp_path, capsys):
    for config in ({"power": "HERE"}, {}):
        report = make_report(config=config, seconds={"prune": 1.0}, energy=12.5)
        text = json.dumps(report.to_dict()).replace('"HERE"' if config else "12.5", number)
        (tmp_path / "fwanda.json").write_text(text)
        assert main(["report", str(tmp_path), "--format", "json"]) == 2
        assert "cannot be read as JSON" in capsys.readouterr().err
