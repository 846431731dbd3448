"""From the name of a text to its documents."""

import argparse
import random
import sys
import sysconfig
from pathlib import Path

import huggingface_hub
import pytest
import tiny
from test_windows import calibrate, plain
from tiny import byte_tokenizer, sentences

from fwanda_pruner.errors import UserError
from fwanda_pruner.text.sources import check_source, load_documents
from fwanda_pruner.text.windows import evaluation_tokens

datasets = pytest.importorskip("datasets")


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def loader(monkeypatch):
    """Takes the place of datasets.load_dataset: serves splits by name and records its calls."""
    calls, splits = [], {}

    def load_dataset(path, split, **options):
        calls.append((path, split, options))
        if split not in splits:
            raise ValueError(f'Unknown split "{split}".\nShould be one of {list(splits)}.')
        rows = splits[split]
        return datasets.Dataset.from_dict(rows) if isinstance(rows, dict) else rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # so that nothing asks the network
    load_dataset.calls, load_dataset.splits = calls, splits
    return load_dataset


def test_txt_is_one_document_as_it_stands(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("  first\r\n\r\nzweite Zeile: ä\n".encode())
    assert load_documents(str(path), purpose="eval") == ["  first\r\n\r\nzweite Zeile: ä\n"]


def test_jsonl_gives_the_text_field_of_each_line_in_order(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "b\\u2028c", "url": 1}\n\n{"text": ""}\n{"text": "a"}', encoding="utf-8")
    assert load_documents(str(path), purpose="calibration") == ["b\u2028c", "", "a"]


@pytest.mark.parametrize("line", ['{"text": ', '{"text": 3}', '["text"]', "3"])
def test_a_bad_jsonl_line_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.jsonl, line 3: ") as error:
        load_documents(str(path), purpose="calibration")
    assert "\n" not in str(error.value)


def test_parquet_gives_the_text_column(tmp_path):
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_dict({"id": [1, 2], "text": ["one", "two"]}).to_parquet(path)
    assert load_documents(str(path), purpose="calibration") == ["one", "two"]


def test_parquet_without_text_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_dict({"body": ["one"]}).to_parquet(path)
    with pytest.raises(UserError, match=r"no column has text: .* the columns are \['body'\]"):
        load_documents(str(path), purpose="calibration")
    path.write_bytes(b"not parquet")
    with pytest.raises(UserError, match="not a parquet file"):
        load_documents(str(path), purpose="calibration")


@pytest.mark.fault("no network")
@pytest.mark.parametrize("name", ["none.txt", "none.jsonl", "none.parquet", "none"])
def test_a_missing_file_is_refused_without_asking_the_network(tmp_path, loader, name):
    with pytest.raises(UserError, match="(?i)no such file"):
        load_documents(str(tmp_path / name), purpose="calibration")
    assert not loader.calls


@pytest.mark.parametrize("content", [b"", b" \n\n"])
@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_an_empty_file_is_refused(tmp_path, content, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(content)
    with pytest.raises(UserError, match="no text"):
        load_documents(str(path), purpose="calibration")


def test_bytes_that_are_not_utf8_and_unknown_kinds_of_file_are_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "a.csv").write_text("text\na")
    (tmp_path / "folder.txt").mkdir()
    for name, message in [("a.txt", "not UTF-8"), ("a.csv", "unknown kind"), ("folder.txt", "cannot be read")]:
        with pytest.raises(UserError, match=message):
            load_documents(str(tmp_path / name), purpose="eval")


def test_the_sample_is_split_into_disjoint_parts_that_cover_it():
    from pydoc_data.topics import topics

    calibration, held_out = (load_documents("sample", purpose=purpose) for purpose in ("calibration", "eval"))
    assert held_out == [topics[name] for name in sorted(topics)[3::4]]
    assert len(calibration) + len(held_out) == len(topics)
    assert not set(calibration) & set(held_out)


def test_the_library_is_split_into_disjoint_files_with_some_megabytes_each():
    calibration, held_out = (list(load_documents("code", purpose=purpose)) for purpose in ("calibration", "eval"))
    assert 0 <= len(calibration) - len(held_out) <= 1
    assert not {text for text in calibration if len(text) > 200} & set(held_out)  # shorter ones are hardly code
    assert min(sum(map(len, part)) for part in (calibration, held_out)) > 2_000_000
    sources = calibration + held_out
    for module in (argparse, random):
        assert Path(module.__file__).read_text(encoding="utf-8") in sources
    assert not any("# Autogenerated by Sphinx on" in text for text in sources)  # pydoc_data: the text of `sample`


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A small standard library."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    names = ["b.py", "a/__init__.py", "c.py", "a/z.py", "a-b.py", "d.py"]
    left_out = ["test/t.py", "a/tests/t.py", "site-packages/p.py", "_sysconfigdata_x.py", "e.txt", "encodings/x.py"]
    for name in names + left_out:
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}")
    return tmp_path / "lib"


def test_every_second_file_of_the_library_is_held_out(library):
    assert list(load_documents("code", purpose="calibration")) == ["# a-b.py", "# a/z.py", "# c.py"]
    assert list(load_documents("code", purpose="eval")) == ["# a/__init__.py", "# b.py", "# d.py"]


def test_files_of_the_library_are_read_when_they_are_asked_for(library):
    documents = load_documents("code", purpose="eval")
    (library / "b.py").write_text("changed")
    (library / "d.py").write_bytes(b"caf\xe9")
    assert (documents[1], documents[2]) == ("changed", "")
    (library / "b.py").unlink()
    with pytest.raises(UserError, match="b.py: cannot be read"):
        documents[1]


def test_a_few_windows_of_the_library_need_its_first_files_alone(library, tokenizer):
    (library / "a/__init__.py").write_text("x = 1\n" * 40_000)
    (library / "d.py").unlink()
    (library / "d.py").symlink_to("nowhere")
    settings = {"seqlen": 8, "bos": False}
    assert evaluation_tokens("code", tokenizer, windows=2, **settings).shape == (2, 8)
    with pytest.raises(UserError, match="d.py: cannot be read"):
        evaluation_tokens("code", tokenizer, **settings)


def test_a_library_without_sources_is_one_line(library, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library.parent / "python.zip"))
    with pytest.raises(UserError, match="code needs the source files of Python's library, .* has none"):
        load_documents("code", purpose="calibration")


@pytest.mark.fault("protocol")
def test_wikitext2_is_train_rows_for_calibration_and_joined_test_rows_for_eval(loader):
    loader.splits.update(train={"text": ["", " a \n", " b \n"]}, test={"text": [" c \n", "", " d \n"]})
    assert list(load_documents("wikitext2", purpose="calibration")) == ["", " a \n", " b \n"]
    assert load_documents("wikitext2", purpose="eval") == [" c \n\n\n\n\n d \n"]
    name = {"name": "wikitext-2-raw-v1"}
    assert loader.calls == [("Salesforce/wikitext", "train", name), ("Salesforce/wikitext", "test", name)]


def test_c4_is_its_first_shard_and_refused_for_eval(loader):
    loader.splits.update(train={"text": ["a"]})
    assert list(load_documents("c4", purpose="calibration")) == ["a"]
    assert loader.calls == [
        ("allenai/c4", "train", {"data_files": {"train": "en/c4-train.00000-of-01024.json.gz"}}),
    ]
    with pytest.raises(UserError, match="calibration source only"):
        load_documents("c4", purpose="eval")


def test_another_dataset_is_evaluated_on_validation_where_it_has_no_test_split(loader):
    loader.splits.update(train={"text": ["a", None]}, validation={"text": ["b"]})
    assert list(load_documents("some/set", purpose="calibration")) == ["a", ""]
    assert list(load_documents("some/set", purpose="eval")) == ["b"]


def test_a_dataset_without_text_column_is_refused(loader):
    loader.splits.update(train={"text": [1], "body": ["a"]}, test={"body": ["a"]})
    with pytest.raises(UserError, match='some/set: the column "text" must hold strings, got .*int64'):
        load_documents("some/set", purpose="calibration")
    with pytest.raises(UserError, match=r"some/set: no column has text: .* the columns are \['body'\]"):
        load_documents("some/set", purpose="eval")


@pytest.mark.fault("no network")
def test_a_dataset_that_cannot_be_reached_is_one_line_with_a_way_out(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("the cache\nis broken")

    monkeypatch.setattr(datasets, "load_dataset", broken)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for source in ("c4", "wikitext2", "some/set"):
        with pytest.raises(UserError, match=rf"{source}: .*: the cache is broken; .*'sample'") as error:
            load_documents(source, purpose="calibration")
        assert "\n" not in str(error.value)


@pytest.mark.fault("no network")
@pytest.mark.parametrize("answer, offline", [(None, True), (404, False), (200, False)], ids=str)
def test_the_hub_is_asked_once_and_without_an_answer_the_cache_alone_is_searched(answer, offline, monkeypatch):
    asked, modes = [], []

    class NotFound(huggingface_hub.errors.HfHubHTTPError):
        def __init__(self, message):
            Exception.__init__(self, message)

    def dataset_info(_self, name, *, timeout):
        asked.append((name, timeout))
        if answer is None:
            raise TimeoutError("no route")
        if answer == 404:
            raise NotFound("none")

    def load_dataset(*_args, **_options):
        modes.append((datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE))
        raise ConnectionError("Couldn't reach it")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    message = "the Hugging Face Hub does not answer, and no copy is cached" if offline else "Couldn't reach it"
    with pytest.raises(UserError, match=f"c4: the data set allenai/c4 cannot be loaded: {message}; give a .txt"):
        load_documents("c4", purpose="calibration")
    assert len(asked) == 1 and asked[0][0] == "allenai/c4" and asked[0][1] <= 5
    assert modes == [(True, True) if offline else before]
    assert (datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE) == before


@pytest.mark.fault("name of a text")
@pytest.mark.parametrize(
    "name, message",
    [
        ("code:2", "'code:2': only calibration texts take a share; write 'code'"),
        ("org/set:1/3", "write 'org/set'"),
        ("sample,code", "'sample,code': no such file; to name several texts, repeat the flag (in Python, give a list)"),
        ("a.txt,b.txt", "'a.txt,b.txt': no such file; to name several texts, repeat the flag"),
        ("/none/a.txt:2", "write '/none/a.txt'"),
        ("The quick brown fox, and so on.", "if it is the text itself, write it to a .txt file"),
        ("x" * 5000, "if it is the text itself, write it to a .txt file"),
        ("a\0b", "neither a file nor the name of a data set"),
        ("./none", "no such file: give a .txt"),
    ],
    ids=range(9),
)
def test_a_name_of_no_text_is_refused_with_its_flag_and_without_the_network(name, message, loader):
    with pytest.raises(UserError) as error:
        check_source(name, "--guard", purpose="calibration")
    text = str(error.value)
    assert text.startswith("--guard '") and message in text and "\n" not in text and len(text) < 400
    assert not loader.calls


def test_a_missing_datasets_package_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        load_documents("wikitext2", purpose="calibration")
    with pytest.raises(UserError, match="^NOTES.md: no such file, and loading a data set needs the datasets package"):
        load_documents("NOTES.md", purpose="calibration")
    with pytest.raises(
        UserError, match=f"^{tmp_path}: a folder must hold the files of a data set .*pip install datasets"
    ):
        load_documents(str(tmp_path), purpose="calibration")


def test_c4_takes_windows_of_single_documents_longer_than_the_window(loader, tokenizer):
    texts = sentences(5, words=2) + sentences(5, words=20) + sentences(5, words=30)
    length = len(plain(tokenizer, texts[6:7]))
    loader.splits.update(train={"text": texts})
    tokens = calibrate("c4", tokenizer, nsamples=40, seqlen=length, seed=3)

    generator, expected = random.Random(3), []
    while len(expected) < 40:
        while True:
            ids = plain(tokenizer, [texts[generator.randint(0, len(texts) - 1)]])
            if len(ids) > length:
                break
        start = generator.randint(0, len(ids) - length - 1)
        expected.append(ids[start : start + length])
    assert tokens.tolist() == expected


@pytest.mark.fault("short documents")
def test_c4_without_a_long_document_ends_with_an_error(loader, tokenizer):
    loader.splits.update(train={"text": sentences(20)})
    with pytest.raises(UserError, match="none of 20 documents is longer than 500 tokens"):
        calibrate("c4", tokenizer, seqlen=500)


def test_each_document_of_a_dataset_is_read_once(loader, tokenizer):
    rows, read = sentences(10), []
    column = datasets.Dataset.from_dict({"text": rows}).with_transform(
        lambda batch: read.extend(batch["text"]) or batch
    )
    loader.splits.update(train=column)
    tokens = calibrate("some/set", tokenizer, nsamples=1, seqlen=len(plain(tokenizer, rows)))
    assert tokens.flatten().tolist() == plain(tokenizer, rows) and read == rows


@pytest.mark.fault("no network")
def test_a_folder_that_is_gone_is_not_read_from_a_copy_of_another_folder_of_its_name(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("texts").mkdir()
    Path("texts", "train.txt").write_text(tiny.text(50))
    assert len(load_documents("texts", purpose="calibration")) > 0
    Path("texts").rename("moved")
    with pytest.raises(UserError, match="^texts: no such f"):
        load_documents("texts", purpose="calibration")
