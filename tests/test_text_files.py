"""Files of text: kinds, packed files, rows without text, conversations, and files made to hurt."""

import gzip
import json
import os

import pytest
import tiny

from fwanda_pruner.errors import UserError
from fwanda_pruner.text.sources import load_documents
from fwanda_pruner.text.windows import calibration_tokens, evaluation_tokens, guard_tokens

datasets = pytest.importorskip("datasets")

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}"
)
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
RENDERED = "[user] Hi\n[assistant] Ho\n"


@pytest.fixture
def tokenizer():
    """One with a chat template."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write(path, content: str | bytes) -> str:
    content = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)


def lines(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def read(path, content, tokenizer=None) -> list[str]:
    return list(load_documents(write(path, content), purpose="calibration", tokenizer=tokenizer))


def refusal(path, content, tokenizer=None) -> str:
    with pytest.raises(UserError) as error:
        read(path, content, tokenizer)
    assert "\n" not in str(error.value)
    return str(error.value).replace(str(path), path.name)


# Kinds of file


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.txt.gz", "one\r\ntwo"),
        ("a.TXT", "one\r\ntwo"),
    ],
)
def test_a_text_is_one_document_packed_or_not(name, content, tmp_path):
    assert read(tmp_path / name, content) == [content]


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize(
    "suffix, content",
    [
        (".jsonl", lines({"text": "ü"}, {"text": "b"})),
        (".json", lines({"text": "ü"}, {"text": "b"})),
        (".json", "\n [" + json.dumps({"text": "ü"}) + ',\n{"text": "b"}]'),
        (".json", '\ufeff["ü", "b"]'),
    ],
)
def test_rows_are_documents_in_lines_and_in_arrays(suffix, content, packed, tmp_path):
    assert read(tmp_path / f"a{suffix}{packed}", content) == ["ü", "b"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.gz", "a", "a.gz: unknown kind of text file '.gz': expected .txt, .jsonl, .json, .parquet"),
        ("a.parquet.gz", "a", "unknown kind"),
        ("a.json", '{\n"text": "a"\n}', "a.json, line 1: not JSON"),
        ("a.json", '["a", 3]', 'a.json, row 2: expected an object with a field "text"'),
        (
            "a.jsonl",
            '{"text": "a"}\n{"text": "b',
            "a.jsonl, line 2: not JSON: Unterminated string starting at: column 10",
        ),
        ("a.json", '[\n"a",\n', "a.json: not JSON: Expecting value: line 2 column 5"),
        ("a.json", "[" * 5000, "a.json: not JSON"),
        ("a.json", "[]", "a.json: holds no text"),
    ],
)
def test_other_files_are_refused(name, content, message, tmp_path):
    assert message in refusal(tmp_path / name, content)


@pytest.mark.parametrize("content", [b"plain", gzip.compress(b"text" * 100)[:-9], b""], ids=["plain", "cut", "empty"])
def test_a_broken_gzip_file_is_refused(content, tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.txt\.gz: ") as error:
        load_documents(str(tmp_path / "a.txt.gz"), purpose="eval")
    assert "\n" not in str(error.value)


@pytest.mark.fault("packed bomb")
@pytest.mark.parametrize("unit", ["a", "{}\n", '["a"],'], ids=["txt", "jsonl", "json"])
def test_a_small_packed_file_that_would_fill_the_memory_is_refused(unit, tmp_path):
    content = (unit * (8_000_000 // len(unit))).encode()
    for name in ("a.txt.gz", "a.jsonl.gz", "a.json.gz"):
        assert "far more than text of its size; unpack it first" in refusal(tmp_path / name, content)


@pytest.mark.fault("packed bomb")
@pytest.mark.parametrize("repeats", [(10**6, 400), (3 * 10**6, 1)], ids=["long rows", "many rows"])
def test_a_small_parquet_file_that_would_fill_the_memory_is_refused(repeats, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    length, rows = repeats if repeats[1] > 1 else (1, repeats[0])
    indices = pyarrow.array([0] * rows, pyarrow.int32())
    column = pyarrow.DictionaryArray.from_arrays(indices, pyarrow.array(["x" * length]))
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(UserError, match="far more than text of its size"):
        load_documents(str(tmp_path / "a.parquet"), purpose="eval")


# Rows without text


WITHOUT = [None, {"text": None}, {"id": 3}, {}]


@pytest.mark.fault("null row")
@pytest.mark.parametrize("row", WITHOUT, ids=str)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz"])
def test_a_row_without_text_is_left_out_and_counted(suffix, row, tmp_path):
    with pytest.warns(UserWarning, match=r"1 of 3 rows have no text and are left out; line 2 has ") as caught:
        assert read(tmp_path / f"a{suffix}", lines({"text": "a"}, row, {"text": "b"})) == ["a", "", "b"]
    assert len(caught) == 1


@pytest.mark.fault("null row")
def test_one_rule_holds_for_files_and_data_sets(tmp_path, tokenizer, monkeypatch):
    rows = [tiny.text(40, seed=i) if i % 3 else None for i in range(30)]
    dataset = datasets.Dataset.from_dict({"text": rows})
    dataset.to_parquet(tmp_path / "a.parquet")
    write(tmp_path / "a.jsonl", lines(*({"text": row} for row in rows)))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_args, **_options: dataset)
    found = []
    for source in (str(tmp_path / "a.parquet"), str(tmp_path / "a.jsonl"), "some/set"):
        with pytest.warns(UserWarning, match=f"{source}: 10 of 30 rows have no text and are left out"):
            found.append(calibration_tokens(source, tokenizer, nsamples=20, seqlen=12, seed=0, bos=False).tolist())
        with pytest.warns(UserWarning, match="10 of 30"):
            found[-1] += guard_tokens(source, tokenizer, windows=8, seqlen=12, bos=False).tolist()
    assert found[0] == found[1] == found[2] and len(found[0]) == 28


@pytest.mark.fault("null row")
def test_an_empty_text_is_no_row_without_text(tmp_path, recwarn):
    assert read(tmp_path / "a.jsonl", lines({"text": ""}, {"text": "a"})) == ["", "a"] and not recwarn


@pytest.mark.fault("null row")
def test_rows_without_any_text_are_refused_with_the_fields_that_were_found(tmp_path):
    said = refusal(tmp_path / "a.jsonl", lines(None, {"content": "a", "id": 3}, {"id": 4}))
    expected = 'expected a field "text", or "messages" with a conversation'
    assert said == f"a.jsonl: no row has text: {expected}; line 2 has the fields ['content', 'id']"
    assert refusal(tmp_path / "b.jsonl", "null\n").endswith("; line 1 has no field")


# Conversations


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"conversations": CHAT},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, CHAT[1]]},
        {"text": None, "messages": CHAT},
    ],
    ids=["messages", "conversations", "from and value", "parts", "null text"],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz"])
def test_the_chat_template_turns_a_conversation_into_text(name, row, tokenizer, tmp_path):
    assert read(tmp_path / name, lines(row, {"text": "plain"}), tokenizer) == [RENDERED, "plain"]


def test_conversations_of_parquet_files_and_data_sets_are_read_too(tokenizer, tmp_path, monkeypatch):
    dataset = datasets.Dataset.from_list([{"messages": CHAT}, {"messages": None}])
    dataset.to_parquet(tmp_path / "a.parquet")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_args, **_options: dataset)
    for source in (str(tmp_path / "a.parquet"), "some/set"):
        with pytest.warns(UserWarning, match="1 of 2 rows have no text"):
            found = list(load_documents(source, purpose="calibration", tokenizer=tokenizer))
        assert found == [RENDERED, ""]


@pytest.mark.fault("null row")
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_row_whose_text_is_null_may_be_a_conversation(suffix, tokenizer, tmp_path):
    conversation = [{"role": "user", "content": "a b"}]
    rows = [{"text": "c d", "messages": None}, {"text": None, "messages": conversation}]
    dataset = datasets.Dataset.from_list(rows)
    path = tmp_path / f"a.{suffix}"
    dataset.to_parquet(path) if suffix == "parquet" else path.write_text(lines(*rows))
    found = load_documents(str(path), purpose="calibration", tokenizer=tokenizer)
    assert found[0] == "c d" and "a b" in found[1]


def test_windows_for_every_purpose_come_from_conversations(tokenizer, tmp_path):
    chat = [{"messages": [{"role": "user", "content": tiny.text(30, seed=i)}]} for i in range(20)]
    file = write(tmp_path / "a.jsonl", lines(*chat))
    text = write(tmp_path / "b.jsonl", lines(*({"text": f"[user] {row['messages'][0]['content']}\n"} for row in chat)))
    for windows in (
        lambda source: calibration_tokens(source, tokenizer, nsamples=16, seqlen=12, seed=1, bos=True),
        lambda source: evaluation_tokens(source, tokenizer, seqlen=12, bos=False),
        lambda source: guard_tokens(source, tokenizer, windows=8, seqlen=12, bos=False),
    ):
        assert windows(file).tolist() == windows(text).tolist()


@pytest.mark.fault("conversation")
@pytest.mark.parametrize(
    "messages, message",
    [
        ("Hi", "line 1: the messages must be a list of objects, got 'Hi'"),
        (["Hi"], 'line 1, message 1: expected an object with "role" and "content", got \'Hi\''),
        ([{"role": "user"}], 'message 1: expected the fields "role" and "content", got [\'role\']'),
        ([{"speaker": "x", "text": "y"}], 'message 1: expected the fields "role" and "content", got [\'speaker\''),
        ([*CHAT, {"role": "bananas", "content": ""}], "message 3: the role must be one of system, developer, user"),
        ([{"role": ["user"], "content": ""}], "message 1: the role must be one of"),
        ([{"role": "user", "content": 3}], "message 1: the content must be text, got 3"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 1: the content must be text, got [{"),
        ([{"role": "tool", "content": ""}], "line 1: the chat template refuses the conversation: no tools here"),
        ([{"role": "user", "content": "\ud800"}], "line 1: the chat template refuses the conversation"),
    ],
    ids=str,
)
def test_a_bad_conversation_is_one_line_that_names_it(messages, message, tokenizer, tmp_path):
    assert message in refusal(tmp_path / "a.jsonl", lines({"messages": messages}), tokenizer)


@pytest.mark.fault("conversation")
def test_a_conversation_without_a_chat_template_is_refused(tmp_path):
    for tokenizer in (tiny.tokenizer(), None):
        said = refusal(tmp_path / "a.jsonl", lines({"messages": CHAT}), tokenizer)
        assert "line 1: a conversation needs a tokenizer with a chat template" in said


# what is no regular file


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.txt.gz", "a.parquet"])
@pytest.mark.fault("pipe")
def test_a_pipe_or_a_device_is_refused_instead_of_waiting_for_its_end(name, tmp_path):
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / name)
    (tmp_path / name).symlink_to("/dev/zero")
    for path in (tmp_path / "pipe" / name, tmp_path / name):
        with pytest.raises(UserError, match="is a pipe or a device; write the text to a file first"):
            load_documents(str(path), purpose="calibration")


def test_two_columns_of_one_name_are_refused(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = pyarrow.array(["a b"])
    parquet.write_table(pyarrow.table([column, column], names=["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="2 columns are named 'text'; rename all but one"):
        load_documents(str(tmp_path / "a.parquet"), purpose="calibration")
