"""From documents to token windows."""

import hashlib
import json
import random
import warnings
from pathlib import Path

import pytest
import tiny
import torch
from tiny import byte_tokenizer, sentences

import fwanda_pruner
from fwanda_pruner.errors import UserError
from fwanda_pruner.text.windows import calibration_tokens, evaluation_tokens, tokens_sha256


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in sentences(200)), encoding="utf-8")
    return str(path)


def plain(tokenizer, texts):
    """All tokens of the texts without special tokens, one list."""
    return [i for text in texts for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


def calibrate(source, tokenizer, **changes):
    arguments = {"nsamples": 16, "seqlen": 8, "seed": 0, "bos": False} | changes
    return calibration_tokens(source, tokenizer, **arguments)


# Calibration windows


def test_windows_are_cut_from_the_concatenated_documents_and_drawn_without_replacement(jsonl, tokenizer):
    stream = plain(tokenizer, sentences(200))
    cut = [tuple(stream[i : i + 8]) for i in range(0, len(stream) - 7, 8)]
    tokens = calibrate(jsonl, tokenizer, nsamples=len(cut))
    assert tokens.dtype == torch.int64
    assert sorted(map(tuple, tokens.tolist())) == sorted(cut)
    assert list(map(tuple, tokens.tolist())) != cut


def test_every_window_with_bos_is_bos_and_then_text(jsonl, tokenizer):
    stream = plain(tokenizer, sentences(200))
    cut = [(0, *stream[i : i + 7]) for i in range(0, len(stream) - 6, 7)]
    tokens = calibrate(jsonl, tokenizer, nsamples=len(cut), bos=True)
    assert sorted(map(tuple, tokens.tolist())) == sorted(cut)


def test_the_draw_depends_on_the_seed_alone_and_leaves_global_random_states(jsonl, tokenizer):
    before = torch.get_rng_state(), random.getstate()
    first = calibrate(jsonl, tokenizer, seed=5)
    torch.manual_seed(99)
    middle = torch.get_rng_state()
    assert torch.equal(first, calibrate(jsonl, tokenizer, seed=5))
    assert torch.equal(middle, torch.get_rng_state())
    assert random.getstate() == before[1]
    assert not torch.equal(first, calibrate(jsonl, tokenizer, seed=6))


def test_more_samples_than_windows_come_from_random_offsets_with_one_warning(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    text = "".join(sentences(3))
    path.write_text(text, encoding="utf-8")
    stream = plain(tokenizer, [text])
    with pytest.warns(UserWarning, match="random offsets") as caught:
        tokens = calibrate(str(path), tokenizer, nsamples=300)
    assert len(caught) == 1 and tokens.shape == (300, 8)
    said = str(caught[0].message)
    assert said.startswith(f"{path} has ") and "use a smaller --nsamples or --seqlen, or a longer text" in said
    inside = {tuple(stream[i : i + 8]) for i in range(len(stream) - 7)}
    assert set(map(tuple, tokens.tolist())) == inside, "every offset, the last included, is drawn"


@pytest.mark.fault("nsamples")
@pytest.mark.parametrize(("nsamples", "count"), [(1, 1), (7, 1), (15, 1), (16, 0), (100, 0)])
def test_fewer_than_16_samples_work_with_one_warning(jsonl, tokenizer, nsamples, count):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(calibrate(jsonl, tokenizer, nsamples=nsamples)) == nsamples
    assert [("are few" in str(w.message)) for w in caught] == [True] * count


def test_text_of_exactly_one_window_is_enough_and_a_token_less_is_refused(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_text("the quick brown fox 1 2 3", encoding="utf-8")
    count = len(plain(tokenizer, [path.read_text()]))
    assert evaluation_tokens(str(path), tokenizer, seqlen=count, bos=False).shape == (1, count)
    assert evaluation_tokens(str(path), tokenizer, seqlen=count + 1, bos=True).shape == (1, count + 1)
    for use in (evaluation_tokens, lambda *a, **k: calibration_tokens(*a, **k, nsamples=16, seed=0)):
        with pytest.raises(UserError, match=f"{count} tokens, one sequence needs {count + 1}"):
            use(str(path), tokenizer, seqlen=count + 1, bos=False)


# Evaluation windows


def test_evaluation_windows_are_consecutive_and_the_tail_is_dropped(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    text = "".join(sentences(20))
    path.write_text(text, encoding="utf-8")
    stream = plain(tokenizer, [text])
    tokens = evaluation_tokens(str(path), tokenizer, seqlen=11, bos=False)
    assert len(stream) % 11 and tokens.flatten().tolist() == stream[: len(stream) // 11 * 11]
    with_bos = evaluation_tokens(str(path), tokenizer, seqlen=12, bos=True)
    assert torch.equal(with_bos[:, 1:], tokens) and (with_bos[:, 0] == 0).all()


class Characters:
    """A tokenizer with one token a character, which remembers the texts of each call."""

    bos_token_id = 0

    def __init__(self):
        self.calls = []

    def __call__(self, texts, **_settings):
        self.calls.append(texts)
        return {"input_ids": [[ord(character) for character in text] for text in texts]}

    @property
    def texts(self):
        return [text for call in self.calls for text in call]


def test_the_first_windows_are_kept_and_no_more_text_is_tokenised_than_they_need(tmp_path):
    path, rows = tmp_path / "text.jsonl", sentences(10_000)
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    whole, some = Characters(), Characters()
    tokens = evaluation_tokens(str(path), whole, seqlen=8, bos=False)
    assert whole.texts == rows and tokens.flatten().tolist() == list(map(ord, "".join(rows)))[: tokens.numel()]
    assert torch.equal(evaluation_tokens(str(path), some, seqlen=8, bos=False, windows=3), tokens[:3])
    assert 0 < len(some.texts) < len(rows) / 2
    assert torch.equal(evaluation_tokens(str(path), some, seqlen=8, bos=False, windows=10**6), tokens)


@pytest.mark.parametrize("line", [b"a line of text with nothing to say\n", b"x"], ids=["lines", "one word"])
def test_a_long_document_is_tokenised_in_bounded_pieces_with_nothing_lost(tmp_path, line):
    path, tokenizer = tmp_path / "a.txt", Characters()
    path.write_bytes(line * (2_100_000 // len(line)))
    tokens = evaluation_tokens(str(path), tokenizer, seqlen=path.stat().st_size, bos=False)
    assert bytes(tokens[0].to(torch.uint8).tolist()) == path.read_bytes()
    assert max(sum(map(len, call)) for call in tokenizer.calls) < 0.1 * path.stat().st_size
    assert line == b"x" or all(text.endswith("\n") for text in tokenizer.texts)


# Token tensors, numbers, hashes


def test_a_tensor_is_used_as_it_stands():
    tokens = torch.arange(160, dtype=torch.int32).view(20, 8)
    for bos in (False, True):
        got = calibrate(tokens, None, nsamples=3, bos=bos)
        assert got.dtype == torch.int64 and torch.equal(got, tokens.long())
        assert torch.equal(evaluation_tokens(tokens, None, seqlen=8, bos=bos, windows=5), tokens[:5].long())


@pytest.mark.parametrize(
    "tokens",
    [
        torch.zeros(2, 7).long(),
        torch.zeros(8).long(),
        torch.zeros(2, 8),
        torch.zeros(2, 8).bool(),
        torch.zeros(0, 8).int(),
    ],
    ids=["length", "1-D", "float", "bool", "empty"],
)
def test_a_tensor_of_another_shape_or_dtype_is_refused(tokens):
    for use in (calibrate, lambda *a: evaluation_tokens(*a, seqlen=8, bos=False)):
        with pytest.raises(UserError, match="tokens must be integer"):
            use(tokens, None)


def test_negative_ids_are_refused():
    with pytest.raises(UserError, match="negative, got -1"):
        calibrate(torch.full((16, 8), -1), None)


@pytest.mark.parametrize("changes", [{"nsamples": 0}, {"seqlen": 1}, {"seqlen": 8.0}, {"nsamples": True}])
def test_bad_numbers_are_refused_before_the_source_is_read(changes, tokenizer):
    with pytest.raises(UserError, match=f"{next(iter(changes))} must be an integer"):
        calibrate("missing.txt", tokenizer, **changes)


def test_bos_without_a_bos_token_and_text_without_a_tokenizer_are_refused(jsonl, tokenizer):
    class NoBos:
        bos_token_id = None

    with pytest.raises(UserError, match="--bos window needs a BOS token, and the tokenizer has none"):
        calibrate(jsonl, NoBos(), bos=True)
    with pytest.raises(UserError, match="needs a tokenizer"):
        calibrate(jsonl, None)


def test_the_hash_is_that_of_little_endian_int64_rows_whatever_dtype_and_strides():
    tokens = torch.tensor([[1, 2], [3, 258]])
    expected = hashlib.sha256(b"".join(i.to_bytes(8, "little") for i in (1, 2, 3, 258))).hexdigest()
    assert tokens_sha256(tokens) == tokens_sha256(tokens.int()) == tokens_sha256(tokens.T.contiguous().T) == expected
    assert tokens_sha256(tokens.T) != expected


@pytest.mark.fault("untruncated text")
def test_a_tokenizer_with_a_length_limit_neither_truncates_nor_warns(tmp_path, caplog):
    tokenizer = byte_tokenizer()
    path = Path(tmp_path / "a.txt")
    path.write_text("".join(sentences(50)), encoding="utf-8")
    full = len(plain(tokenizer, [path.read_text()]))
    limit, tokenizer.model_max_length = tokenizer.model_max_length, 16
    try:
        tokens = evaluation_tokens(str(path), tokenizer, seqlen=full, bos=False)
    finally:
        tokenizer.model_max_length = limit
    assert tokens.shape == (1, full) and "longer than" not in caplog.text


class OddTokenizer:
    """Gives any value as the token ids of a list of texts."""

    bos_token_id = None

    def __init__(self, found):
        self.found = found

    def __call__(self, texts, **_):
        return {"input_ids": self.found}


@pytest.mark.fault("odd calls")
@pytest.mark.parametrize(
    "found",
    [[3, 4, 5] * 999, torch.full((999,), 5), [["a"] * 99], [[1.5] * 99], [[2**70] * 99], [], None],
    ids=list("abcdefg"),
)
def test_a_tokenizer_that_gives_no_lists_of_ids_is_one_line(found, tmp_path):
    settings = {"method": "wanda", "calibration": tiny.text_file(tmp_path), "nsamples": 4, "seqlen": 8}
    with pytest.raises(UserError, match="^the tokenizer must give one list of token ids for each text") as error:
        fwanda_pruner.prune(tiny.llama(), OddTokenizer(found), guard="none", progress=False, **settings)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
