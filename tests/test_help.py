"""The help of the command line: grouped flags, common ones first, readable in 80 columns."""

import re
from dataclasses import fields

import pytest

from fwanda_pruner.cli import main
from fwanda_pruner.config import PruneConfig


@pytest.fixture
def shown(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def shown(*argv) -> str:
        assert main([*argv, "--help"]) == 0
        return capsys.readouterr().out

    return shown


def sections(text: str) -> dict[str, list[str]]:
    """Heading -> its flags."""
    parts = re.split(r"^(\w[\w ]*):\n", text, flags=re.MULTILINE)
    return {
        title: re.findall(r"^  (?:-h, )?--([a-z-]+)", body, re.MULTILINE)
        for title, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_the_flags_of_prune_stand_in_groups_with_the_common_ones_first(shown):
    found = sections(shown("prune"))
    wanted = ["what", "how much", "text", "run", "output", "fine tuning of methods"]
    assert [title for title in found if title in wanted] == wanted
    firsts = {title: flags[0] for title, flags in found.items() if title in wanted}
    assert firsts == {
        "what": "method", "how much": "sparsity", "text": "calibration", "run": "device", "output": "output",
        "fine tuning of methods": "power",
    }  # fmt: skip
    assert found["options"] == ["help"]


def test_prune_has_one_flag_for_every_setting(shown):
    flags = [flag for group in sections(shown("prune")).values() for flag in group]
    assert len(flags) == len(set(flags))
    assert {f.name.replace("_", "-") for f in fields(PruneConfig)} < set(flags)


@pytest.mark.parametrize(
    "command",
    [[], ["prune"], ["calibrate"], ["sample"], ["eval"], ["sweep"], ["report"], ["pack"], ["unpack"], ["bench"]],
)
def test_help_fits_80_columns_and_begins_with_a_short_usage(command, shown):
    lines = shown(*command).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("usage: fwanda") and lines[1] == ""


def test_eval_says_where_its_defaults_come_from(shown):
    about = " ".join(shown("eval").partition("--eval-windows")[2].split())
    assert about.startswith("N evaluate only the first N windows of each text (default: as in the report beside")


def test_resume_and_overwrite_say_what_they_do_together(shown):
    for command in ("prune", "sample"):
        text = " ".join(shown(command).split())
        assert "run again with --overwrite" in text and "unless --resume is given" in text


def test_the_examples_of_prune_are_commands_that_parse(shown):
    from fwanda_pruner.arguments import build_parser

    examples = re.findall(r"^    fwanda (.*)$", shown("prune"), re.MULTILINE)
    assert len(examples) == 3
    for example in examples:
        assert build_parser()[0].parse_args(example.split()).output


@pytest.mark.parametrize(
    "argv", [["prune", "m", "--outptu", "x"], ["eval", "m", "--outptu"], ["report", "a", "--fomat"]]
)
def test_a_bad_flag_points_to_the_help_of_its_command(argv, capsys):
    assert main(argv) == 2
    assert f"see fwanda {argv[0]} --help" in capsys.readouterr().err
