"""Files of any content are read or refused in one line: random bytes, truncated and changed files, values of any type.

FWANDA_FUZZ=10000 tries that many files of each kind instead of a few dozen.
"""

import gzip
import json
import os
import resource
from functools import partial

import huggingface_hub
import pytest
import tiny
import torch
import yaml
from reports import compared
from safetensors.torch import save_file
from test_gguf import write_tiny_gguf
from transformers import AutoConfig

from fwanda_pruner import PruneConfig, Report, Statistics, UserError, prune
from fwanda_pruner.model.load import load_model
from fwanda_pruner.model.targets import find_targets
from fwanda_pruner.report.summary import table
from fwanda_pruner.text.sources import load_documents

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

EXAMPLES = int(os.environ.get("FWANDA_FUZZ", 40))
MOST_MEMORY = 1 << 30  # bytes that reading a few kilobytes may take at most
MODEL = tiny.llama(blocks=1)
TARGETS = find_targets(MODEL)[0]


def fuzz(examples: int = EXAMPLES):
    return hypothesis.settings(
        max_examples=examples,
        deadline=5000,
        derandomize="FWANDA_FUZZ" not in os.environ,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


@pytest.fixture(scope="module", autouse=True)
def little_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_MEMORY


def check(read, *arguments) -> None:
    """The call returns, or raises a UserError of one short line."""
    try:
        read(*arguments)
    except UserError as error:
        text = str(error)
        assert text and len(text) < 1000 and "\n" not in text


def changed(valid: bytes):
    """Strategy: random bytes, a part of a valid file, or one with bits flipped or a few bytes replaced."""
    place = st.integers(0, max(0, len(valid) - 1))
    extreme = st.sampled_from([b"\0" * 8, b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\0\0\0\x80", b"9" * 5000, b"[" * 3000])

    def flip(bits):
        flipped = bytearray(valid)
        for at, bit in bits:
            flipped[at] ^= 1 << bit
        return bytes(flipped)

    return st.one_of(
        st.binary(max_size=200),
        place.map(lambda end: valid[:end]),
        st.lists(st.tuples(place, st.integers(0, 7)), min_size=1, max_size=8).map(flip),
        st.tuples(place, st.integers(0, 8), st.one_of(st.binary(max_size=8), extreme)).map(
            lambda cut: valid[: cut[0]] + cut[2] + valid[cut[0] + cut[1] :]
        ),
    )


TEXT = st.text(st.characters(codec=None, categories=["L", "N", "P", "Z", "Cs", "Cc"]), max_size=20)
NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([10**400, -(10**400), 2**63, 1e308, float("nan"), float("inf")]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=6,
)


def paths_of(value, path=()):
    """Paths of all values inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path] if path else []
    for key, inner in items:
        found += paths_of(inner, (*path, key))
    return found


def replaced(value, path, new):
    """A copy of a JSON value with another one at a path."""
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = new if len(path) == 1 else replaced(value[path[0]], path[1:], new)
    return copy


JSONL = "".join(json.dumps({"text": f"line {i} ü"}, ensure_ascii=i % 2 == 0) + "\n" for i in range(5)).encode()


JSON = json.dumps([json.loads(line) for line in JSONL.splitlines()]).encode()


@pytest.mark.fault("fuzz", trials=6 * EXAMPLES)
@pytest.mark.parametrize("suffix, valid", [(".txt", JSONL), (".jsonl", JSONL), (".json", JSON)])
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_text_of_any_bytes_is_read_or_refused(suffix, valid, packed, tmp_path):
    @fuzz()
    @hypothesis.given(changed(gzip.compress(valid) if packed else valid))
    def run(content):
        file = tmp_path / f"a{suffix}{packed}"
        file.write_bytes(content)
        check(lambda: [text.encode() for text in load_documents(str(file), purpose="eval")])

    run()


MESSAGES = st.lists(
    st.one_of(VALUES, st.fixed_dictionaries({"role": st.one_of(st.just("user"), VALUES), "content": VALUES})),
    max_size=3,
)


@pytest.mark.fault("fuzz", trials=2 * EXAMPLES)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_rows_of_any_values_are_read_or_refused(suffix, tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message | tojson }}{% endfor %}"
    rows = [VALUES, *(st.fixed_dictionaries({field: v}) for field, v in (("text", VALUES), ("messages", MESSAGES)))]

    @fuzz()
    @hypothesis.given(st.lists(st.one_of(*rows), min_size=1, max_size=3))
    def run(rows):
        file = tmp_path / f"a{suffix}"
        try:
            file.write_text("\n".join(json.dumps(row) for row in rows) if suffix == ".jsonl" else json.dumps(rows))
        except ValueError:
            return  # an integer of too many digits
        documents = partial(load_documents, str(file), purpose="eval", tokenizer=tokenizer)
        check(lambda: [text.encode() for text in documents()])

    run()


@pytest.mark.fault("fuzz", trials=3 * EXAMPLES)
@pytest.mark.parametrize("compression", ["none", "snappy", "gzip"])
def test_parquet_of_any_bytes_is_read_or_refused(compression, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = pyarrow.table({"id": list(range(40)), "text": [f"row {i} " * 5 for i in range(40)]})
    parquet.write_table(rows, tmp_path / "valid.parquet", compression=compression)

    @fuzz()
    @hypothesis.given(changed((tmp_path / "valid.parquet").read_bytes()))
    def run(content):
        file = tmp_path / "a.parquet"
        file.write_bytes(content)
        check(lambda: [text.encode() for text in load_documents(str(file), purpose="eval")])

    run()


def statistics_file(folder) -> bytes:
    named = {target.name: target.weight.shape for target in TARGETS}
    x2, g2 = ({name: torch.ones(shape[axis]) for name, shape in named.items()} for axis in (1, 0))
    counts = dict.fromkeys(named, 9)
    text = {"calibration": "sample", "nsamples": 3, "seqlen": 3, "seed": 0}
    Statistics(x2, g2, counts, tokens_sha256="0", bos=False, fisher="empirical", text=text).save(folder / "valid")
    return (folder / "valid").read_bytes()


def use_statistics(file) -> None:
    prune(MODEL, statistics=Statistics.load(file), method="fwanda", sparsity=0, progress=False)


@pytest.mark.fault("fuzz", trials=EXAMPLES)
def test_statistics_of_any_bytes_are_read_or_refused(tmp_path):
    @fuzz()
    @hypothesis.given(changed(statistics_file(tmp_path)))
    def run(content):
        (tmp_path / "a").write_bytes(content)
        check(use_statistics, tmp_path / "a")

    run()


@pytest.mark.fault("fuzz", trials=EXAMPLES)
def test_statistics_of_any_facts_and_shapes_are_read_or_refused(tmp_path):
    valid = statistics_file(tmp_path)
    header = json.loads(valid[8 : 8 + int.from_bytes(valid[:8], "little")])
    facts = json.loads(header["__metadata__"]["fwanda"])
    tensors = {
        f"{t.name}.{kind}": torch.ones(t.weight.shape[axis]) for t in TARGETS for kind, axis in (("x2", 1), ("g2", 0))
    }
    dtypes = st.sampled_from([torch.float32, torch.float16, torch.int64, torch.bool, torch.float8_e4m3fn])

    @fuzz()
    @hypothesis.given(
        st.sampled_from(paths_of(facts)),
        VALUES,
        st.sampled_from(sorted(tensors)),
        dtypes,
        st.lists(st.integers(0, 3), max_size=3),
    )
    def run(path, value, name, dtype, shape):
        odd = tensors if path[0] == "n_tokens" else {**tensors, name: torch.zeros(shape).to(dtype)}
        try:
            text = json.dumps(replaced(facts, path, value))
        except ValueError:
            return
        save_file(odd, tmp_path / "a", metadata={"fwanda": text})
        check(use_statistics, tmp_path / "a")

    run()


def show_report(file) -> None:
    table([("a", Report.load(file))]).encode()


@pytest.mark.fault("fuzz", trials=EXAMPLES)
def test_a_report_of_any_bytes_is_read_or_refused(tmp_path):
    @fuzz()
    @hypothesis.given(changed(json.dumps(compared().to_dict()).encode()))
    def run(content):
        (tmp_path / "a.json").write_bytes(content)
        check(show_report, tmp_path / "a.json")

    run()


@pytest.mark.fault("fuzz", trials=3 * EXAMPLES)
def test_a_report_of_any_values_is_read_or_refused(tmp_path):
    valid = compared().to_dict()

    @fuzz(3 * EXAMPLES)
    @hypothesis.given(st.sampled_from(paths_of(valid)), VALUES)
    def run(path, value):
        try:
            (tmp_path / "a.json").write_text(json.dumps(replaced(valid, path, value)))
        except ValueError:
            return
        check(show_report, tmp_path / "a.json")

    run()


TEXTS = {"calibration": ("c4:3", "code"), "guard": ("a",)}
SETTINGS = PruneConfig(include=("*.mlp.*",), pattern="2:4", max_memory="16GiB", **TEXTS).resolved().to_dict()


@pytest.mark.fault("fuzz", trials=EXAMPLES)
def test_settings_of_any_bytes_are_read_or_refused(tmp_path):
    @fuzz()
    @hypothesis.given(changed(yaml.safe_dump(SETTINGS).encode()))
    def run(content):
        (tmp_path / "a.yaml").write_bytes(content)
        check(PruneConfig.load, tmp_path / "a.yaml")

    run()


@pytest.mark.fault("fuzz", trials=3 * EXAMPLES)
def test_settings_of_any_values_are_read_or_refused(tmp_path):
    @fuzz(3 * EXAMPLES)
    @hypothesis.given(st.sampled_from(sorted(SETTINGS)), VALUES)
    def run(key, value):
        check(PruneConfig.from_dict, {**SETTINGS, key: value})

    run()


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.fault("fuzz")
@pytest.mark.parametrize(
    "text",
    [
        LAUGHS + "method: *i\n", LAUGHS + "include: *i\n", "include: &a [*a]", "seed: 0x" + "f" * 20000,
        "sparsity: 0x" + "f" * 20000, "0x" + "f" * 20000 + ": 1", "[" * 20000, "{a: " * 20000, "seed: 2001-99-99",
        "seed: " + "9" * 20000, "power: .nan", "sparsity: .inf",
        "? [a]\n: 1", "!!python/name:os.system a",
        "seed: !!binary aa", "method: \ud800".encode("utf-8", "surrogatepass"), "\0", "method: \"\\uD800\"",
    ],
    ids=range(18),
)  # fmt: skip
def test_settings_made_to_hurt_are_refused(text, tmp_path):
    (tmp_path / "a.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError):
        PruneConfig.load(tmp_path / "a.yaml")
    check(PruneConfig.load, tmp_path / "a.yaml")


@pytest.mark.fault("fuzz", trials=EXAMPLES)
def test_safetensors_headers_of_any_bytes_are_read_or_refused(tmp_path):
    small = {"vocab_size": 4, "hidden_size": 4, "intermediate_size": 4, "tie_word_embeddings": True}
    tiny.llama(blocks=1, **small, num_attention_heads=1, num_key_value_heads=1).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"

    @fuzz()
    @hypothesis.given(changed(weights.read_bytes()))
    def run(content):
        weights.write_bytes(content)
        check(load_model, str(tmp_path))

    run()


@pytest.mark.fault("fuzz", trials=EXAMPLES // 2)
def test_gguf_of_any_bytes_is_read_or_refused(tmp_path):
    pytest.importorskip("accelerate")
    write_tiny_gguf(tmp_path / "valid")

    @fuzz(EXAMPLES // 2)
    @hypothesis.given(changed((tmp_path / "valid").read_bytes()))
    def run(content):
        (tmp_path / "a.gguf").write_bytes(content)
        check(load_model, str(tmp_path / "a.gguf"))

    run()


@pytest.mark.fault("fuzz", trials=3 * EXAMPLES)
@pytest.mark.parametrize("read", [load_model, lambda name: load_documents(name, purpose="eval"), Report.load])
def test_names_of_any_characters_are_read_or_refused(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for owner, name in ((datasets, "load_dataset"), (AutoConfig, "from_pretrained")):  # both ask the network
        monkeypatch.setattr(owner, name, lambda *_args, **_options: 1 / 0)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    names = TEXT.filter(lambda text: "\n" not in text)  # which the command line prints as a space

    @fuzz()
    @hypothesis.given(st.one_of(names, names.map("./{}".format), names.map("{}.gguf".format), st.just("x" * 5000)))
    def run(text):
        check(read, text)

    run()
