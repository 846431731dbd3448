"""The demo: its table, its sentences, its progress, and the folders that it may replace. A tiny model stands in."""

import json
import re

import pytest
import tiny

from fwanda_pruner import demo
from fwanda_pruner.cli import main
from fwanda_pruner.model.load import LoadedModel


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder."""

    def load(name, **_options):
        model = tiny.llama(max_position_embeddings=1024)
        model.config.name_or_path = name
        return LoadedModel(model, tiny.tokenizer())

    monkeypatch.setattr(demo, "load_model", load)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_quick_demo_has_a_folder_of_its_own_and_prints_what_each_method_pays(here, capsys):
    assert main(["demo", "--quick"]) == 0
    assert [path.name for path in here.iterdir()] == ["smollm2-pruned-quick"]
    out, error = capsys.readouterr()
    assert re.findall(r"stage (\d of \d): ", error) == [f"{i} of 5" for i in range(1, 6)]
    lines = out.splitlines()
    table = [line.split("  ")[0] for line in lines[lines.index("") :]]
    order = (
        "dense model", "calibration for wanda: forward", "wanda uniform",
        "calibration for fwanda: forward, backward", "fwanda global",
    )  # fmt: skip
    places = [table.index(name) for name in order]
    assert places == list(range(places[0], places[0] + 5))
    best = next(line for line in lines if line.startswith("Saved")).split(", ")[1]
    assert [line.split(": ")[0] for line in lines if ":  " in line or line.startswith(f"{best}: ")][-2:] == [
        "dense model",
        best,
    ]


def test_a_demo_replaces_a_demo_of_its_size_alone(here, capsys):
    for _ in range(2):
        assert main(["demo", "--quick", "--output", "out"]) == 0
    record = here / "out" / "fwanda.json"
    for changes in ({"nsamples": 16, "seqlen": 256}, {"model": "mine"}):
        report = json.loads(record.read_text())
        report["config"] |= changes
        record.write_text(json.dumps(report))
        before = record.read_bytes()
        assert main(["demo", "--quick", "--output", "out"]) == 2
        assert "out exists and is not of this demo" in capsys.readouterr().err
        assert record.read_bytes() == before
