"""The model card: metadata that the Hub accepts, what was done, and nothing of this machine."""

import json
import re
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from reports import domain, perplexity, record

from fwanda_pruner.report.card import model_card


def metadata(card: str) -> dict:
    """The YAML of a card, as huggingface_hub reads it."""
    loaded = ModelCard(card).data.to_dict()
    assert loaded == yaml.safe_load(card.split("---\n")[1])
    return loaded


def of_model(name, **changes) -> str:
    return model_card(record(config=record().config | {"model": str(name)}, **changes))


@pytest.fixture
def source(tmp_path) -> Path:
    """A model folder whose card says where it comes from."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    facts = "license: other\nlicense_name: llama3\nlicense_link: LICENSE\nlanguage: [en, de]\nbase_model: org/base\n"
    (folder / "README.md").write_text(f"---\n{facts}tags: [chat]\npipeline_tag: text-ranking\n---\n# Mine\n")
    return folder


def test_metadata_of_a_model_of_the_hub():
    found = metadata(model_card(record()))
    assert found["base_model"] == "org/model-7b"
    assert found["library_name"] == "transformers" and found["pipeline_tag"] == "text-generation"
    assert found["tags"] == ["pruned", "sparse", "fwanda"] and found["datasets"] == ["allenai/c4"]
    (index,) = found["model-index"]
    assert [r["metrics"][0]["value"] for r in index["results"]] == [30.0, 7.5]
    assert index["results"][0]["dataset"]["type"] == "Salesforce/wikitext"
    assert "license" not in found  # not known, so not said


def test_a_multimodal_model_has_another_task_and_class():
    card = model_card(record(), multimodal=True)
    assert metadata(card)["pipeline_tag"] == "image-text-to-text"
    assert "AutoModelForImageTextToText.from_pretrained" in card


def test_the_licence_and_the_base_model_come_from_the_card_of_the_source(source):
    found = metadata(of_model(source))
    assert {key: found[key] for key in ("base_model", "license", "license_name", "license_link", "language")} == {
        "base_model": "org/base", "license": "other", "license_name": "llama3", "license_link": "LICENSE",
        "language": ["en", "de"],
    }  # fmt: skip
    assert found["tags"] == ["pruned", "sparse", "fwanda"] and found["pipeline_tag"] == "text-generation"


def test_the_licence_of_the_config_counts_where_the_card_has_none(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"license": "mit"}))
    found = metadata(of_model(tmp_path))
    assert found["license"] == "mit" and "base_model" not in found


@pytest.mark.parametrize(
    "content", ["", "---\n- a\n---\n", "---\n{{{\n---\n", "---\nlicense: {a: 1}\n---\n", b"\xff\xfe\x00"]
)
def test_a_card_that_cannot_be_read_says_nothing(tmp_path, content):
    (tmp_path / "config.json").write_text("[")
    (tmp_path / "README.md").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert not {"license", "base_model"} & metadata(of_model(tmp_path)).keys()


def test_a_folder_in_the_cache_of_the_hub_has_the_name_of_its_model(tmp_path):
    folder = tmp_path / "models--org--name" / "snapshots" / "0123"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    found = metadata(of_model(folder))
    assert (found["base_model"], found["license"]) == ("org/name", "apache-2.0")


def test_the_demo_model_names_its_origin():
    found = metadata(of_model("smollm2"))
    assert (found["base_model"], found["license"]) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")


def test_a_gguf_file_has_no_base_model(tmp_path):
    (tmp_path / "a.gguf").touch()
    for name in (tmp_path / "a.gguf", "models/a.gguf"):
        assert "base_model" not in metadata(of_model(name))


def test_the_card_says_what_was_done_and_what_it_cost():
    card = model_card(record())
    assert card.splitlines()[card.splitlines().index("---", 1) + 2] == "# org/model-7b, pruned by F-Wanda"
    for row in (
        "| allocation | auto |", "| chosen by the search | round 2 |", "| zeros in the pruned matrices | 0.6750 |",
        "| zeros in the whole model | 0.4720 |", "| calibration | c4 (16 windows of 64 tokens) |",
        "| wikitext2 | 20.00 | 30.00 | 3 windows of 64 tokens, each after BOS (SHA-256 abababababab) |",
        "| c4 | 2.000 | 2.250 | yes |", "| code | 2.000 | not finite | no |",
    ):  # fmt: skip
        assert row in card.splitlines()
    assert "F-Wanda (auto) set 67.5 % of the weights in 16 matrices of org/model-7b to zero" in card
    assert 'AutoModelForCausalLM.from_pretrained("path/to/this/folder"' in card


def test_what_was_not_measured_has_no_table():
    card = model_card(record(perplexity=[], domains=[domain("x", dense=None)]))
    assert "## Perplexity" not in card and "## Mean loss" not in card and "model-index" not in metadata(card)


def test_a_perplexity_that_is_not_finite_is_in_the_table_alone():
    card = model_card(record(perplexity=[perplexity("code", 6.0, float("inf"))]))
    assert "| code | 6.00 | not finite |" in card and "model-index" not in metadata(card)


def test_no_path_of_this_machine_is_published(source):
    text = str(source / "texts" / "my.jsonl")
    config = record().config | {"model": str(source), "calibration": [f"{text}:2", "c4"]}
    card = model_card(record(config=config, perplexity=[perplexity(text)], domains=[domain(text)]))
    assert str(source.parent) not in card
    assert "| base model | my-model |" in card and "| calibration | my.jsonl, c4 (16 windows of 64 tokens) |" in card
    assert metadata(card)["datasets"] == ["allenai/c4"]


@pytest.mark.fault("names in a page")
def test_no_name_becomes_markup():
    evil = "<script>x</script>|`a`\n---\n# b [c](d) *e* $f$ \x00 \u202e"
    config = {"model": evil, "method": evil, "allocation": evil, "calibration": [evil], "seed": evil}
    card = model_card(record(config=config, perplexity=[perplexity(evil)], domains=[domain(evil)]))
    metadata(card)
    body = card.split("\n---\n", 1)[1].replace('from_pretrained("path/to/this/folder"', "")
    assert not re.search(r"(?<!\\)[<>|*$](?<![| ]\|)(?=[a-z/])", body)
    assert "\n---\n" not in body and not {"\x00", "\u202e"} & set(card)


@pytest.mark.parametrize("calibration", [None, "c4", [], [3], ["c4", "c4"], ["c4:-1"], {"a": 1}])
def test_settings_that_no_run_writes_are_left_out(calibration):
    card = model_card(record(config={"model": "org/m", "calibration": calibration}))
    assert ("| calibration | c4 |" in card) == (calibration == "c4")
