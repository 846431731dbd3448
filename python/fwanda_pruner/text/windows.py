"""Text into token windows [S, L] int64, and their sha256.

A source is a local file (.txt, .jsonl, .parquet), `sample` (needs no network and no file), `wikitext2`, `c4`, any other
name or folder that the `datasets` package loads, or a tensor of token ids.
"""

import hashlib
import json
import os
import random
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import UserError, one_line

SAMPLE = "sample"
Purpose = Literal["calibration", "eval"]

# Characters. A tokenizer takes some hundred bytes for each: a document over _WHOLE (WikiText-2 has 1.3 M) is tokenised
# in pieces, cut behind a line break, which may change one token at the seam.
_WHOLE = 2_000_000
_PIECE = 200_000
_FEW_SAMPLES = 16
_HELD_OUT_EVERY = 4
_OTHER_SOURCES = f"give a .txt, .jsonl or .parquet file, or '{SAMPLE}'"


def load_documents(source: str, *, purpose: Purpose) -> Sequence[str]:
    """Read the documents of a text source, in file order.

    Args:
        source: PATH.txt (one document, as it stands), PATH.jsonl (field "text" of every line), PATH.parquet (column
            "text"), "sample" (the documentation that comes with Python, every fourth topic held out for evaluation),
            "wikitext2" (rows of the train split; for evaluation those of the test split joined with a blank line), "c4"
            (first shard, calibration only), or what else `datasets` loads with a column "text" (train split; for
            evaluation test, else validation).
        purpose: "calibration" or "eval".

    Returns:
        The documents; those of a `datasets` source stay on disk and are read as they are asked for.

    Raises:
        UserError: the source is missing, unreadable, of an unknown kind or without text. A bad line or row is named.
    """
    if source == SAMPLE:
        return _sample(purpose)
    if source == "c4":
        if purpose == "eval":
            raise UserError("c4 is a calibration source only: evaluate on wikitext2, a local file or 'sample'")
        shard = {"train": "en/c4-train.00000-of-01024.json.gz"}
        return _dataset("allenai/c4", ["train"], data_files=shard)
    if source == "wikitext2":
        split = "train" if purpose == "calibration" else "test"
        rows = _dataset("Salesforce/wikitext", [split], name="wikitext-2-raw-v1")
        return rows if purpose == "calibration" else ["\n\n".join(rows)]
    if not source:
        raise UserError(f"the name of the text is empty: {_OTHER_SOURCES}")
    path = Path(source)
    try:
        exists, is_file = path.exists(), path.is_file()
    except (OSError, ValueError) as error:
        raise UserError(f"{source[:80]}...: cannot be looked up: {one_line(error, 60)}") from error
    if path.suffix.lower() in _READERS or is_file:
        return _read_file(path)
    if (path.is_absolute() or source.startswith(".")) and not exists:
        raise UserError(f"{source}: no such file: {_OTHER_SOURCES}")
    return _dataset(source, ["train"] if purpose == "calibration" else ["test", "validation"])


def calibration_tokens(
    source: str | Tensor, tokenizer: Any, *, nsamples: int, seqlen: int, seed: int, bos: bool
) -> Tensor:
    """Draw calibration windows.

    Documents are tokenised in file order without special tokens, concatenated and cut into windows, of which `nsamples`
    are drawn without replacement. If there are fewer, all are taken from random offsets instead, with a warning. "c4"
    takes, per sample, a random window of a random document longer than the window, with the draws of the Wanda release.
    The global random states are left alone.

    Args:
        source: as for `load_documents`, or integer token ids [S, seqlen], which are used as they stand (all S rows, no
            BOS added).
        tokenizer: a Hugging Face tokenizer; None will do for a tensor.
        nsamples: windows to draw, at least 1; under 16 warns.
        seqlen: tokens per window, BOS included, at least 2.
        seed: of the draw.
        bos: every window is BOS and then seqlen - 1 tokens of text.

    Returns:
        [nsamples, seqlen] int64 on the CPU.

    Raises:
        UserError: a bad number or tensor, a source that cannot be read, a tokenizer without BOS, less text than one
            window.
    """
    _require_at_least(1, nsamples=nsamples)
    _require_at_least(2, seqlen=seqlen)
    if isinstance(source, Tensor):
        tokens = _check_tensor(source, seqlen)
        _warn_if_few(len(tokens))
        return tokens
    prefix = _prefix(tokenizer, bos)
    length = seqlen - len(prefix)
    documents = load_documents(source, purpose="calibration")
    _warn_if_few(nsamples)
    if source == "c4":
        return _with_prefix(prefix, _windows_of_documents(documents, tokenizer, nsamples, length, seed))
    stream = _token_stream(documents, tokenizer)
    _require_one_window(source, stream, length)
    return _with_prefix(prefix, _draw_windows(stream, nsamples, length, seed))


def held_out_tokens(
    source: str, tokenizer: Any, *, nsamples: int, seqlen: int, seed: int, bos: bool, windows: int
) -> Tensor | None:
    """Windows of the calibration text that calibration_tokens() with the same arguments does not draw.

    Args:
        source, tokenizer, nsamples, seqlen, seed, bos: as for `calibration_tokens`.
        windows: how many at most.

    Returns:
        [windows or fewer, seqlen] int64 on the CPU; None where calibration reads the whole text.

    Raises:
        UserError: as for `calibration_tokens`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the calibration were shown
        documents, prefix = load_documents(source, purpose="calibration"), _prefix(tokenizer, bos)
        length = seqlen - len(prefix)
        if source == "c4":
            drawn = _windows_of_documents(documents, tokenizer, nsamples + windows, length, seed)
        else:
            stream = _token_stream(documents, tokenizer)
            count = min(nsamples + windows, stream.numel() // length)
            if count <= nsamples:
                return None
            drawn = _draw_windows(stream, count, length, seed)
    return _with_prefix(prefix, drawn[nsamples:])


def evaluation_tokens(
    source: str | Tensor, tokenizer: Any, *, seqlen: int, bos: bool, windows: int | None = None
) -> Tensor:
    """Cut a text into consecutive windows that do not overlap; what is left at the end is dropped.

    Args:
        source: as for `load_documents`, or integer token ids [S, seqlen], which are used as they stand (no BOS added).
        tokenizer: a Hugging Face tokenizer; None will do for a tensor.
        seqlen: tokens per window, BOS included, at least 2.
        bos: every window is BOS and then seqlen - 1 tokens of text.
        windows: keep at most this many, the first ones; None keeps all.

    Returns:
        [S, seqlen] int64 on the CPU.

    Raises:
        UserError: as for `calibration_tokens`.
    """
    _require_at_least(2, seqlen=seqlen)
    if windows is not None:
        _require_at_least(1, windows=windows)
    if isinstance(source, Tensor):
        return _check_tensor(source, seqlen)[:windows]
    prefix = _prefix(tokenizer, bos)
    length = seqlen - len(prefix)
    documents = load_documents(source, purpose="eval")
    stream = _token_stream(documents, tokenizer, enough=None if windows is None else windows * length)
    _require_one_window(source, stream, length)
    count = stream.numel() // length
    return _with_prefix(prefix, stream[: count * length].view(count, length)[:windows])


def file_sha256(name: str | None) -> str | None:
    """sha256 of a local file; None for any other name."""
    if not name or not os.path.isfile(name):
        return None
    digest = hashlib.sha256()
    with open(name, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def tokens_sha256(tokens: Tensor) -> str:
    """Hash integer token ids: sha256, in hex, of their int64 little-endian bytes in row-major order."""
    ids = tokens.detach().to("cpu", torch.int64).contiguous()
    return hashlib.sha256(ids.numpy().astype("<i8", copy=False)).hexdigest()


def _sample(purpose: Purpose) -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(
            f"'{SAMPLE}' needs Python's module pydoc_data, which is not installed: give a text file"
        ) from None
    held_out = purpose == "eval"
    names = sorted(topics)
    return [topics[name] for i, name in enumerate(names) if (i % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1) == held_out]


def _read_file(path: Path) -> list[str]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path}: unknown kind of text file '{path.suffix}': expected {', '.join(_READERS)}")
    try:
        documents = reader(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or one_line(error)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {one_line(error)}") from error
    if all(not document or document.isspace() for document in documents):
        raise UserError(f"{path}: holds no text")
    return documents


def _read_txt(path: Path) -> list[str]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return [file.read()]


def _read_jsonl(path: Path) -> list[str]:
    documents = []
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, line {number}: not JSON: {one_line(error)}") from error
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                raise UserError(f'{path}, line {number}: expected an object with a string field "text"')
            try:
                row["text"].encode()
            except UnicodeEncodeError as error:
                raise UserError(f"{path}, line {number}: text with half a surrogate pair: {one_line(error)}") from error
            documents.append(row["text"])
    return documents


def _read_parquet(path: Path) -> list[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            documents = file.read(columns=["text"]).column("text").to_pylist() if "text" in columns else None
    except (pyarrow.ArrowException, NotImplementedError) as error:
        raise UserError(f"{path}: not a parquet file: {one_line(error)}") from error
    if documents is None:
        raise UserError(f'{path}: no column "text": got {columns}')
    for number, document in enumerate(documents, start=1):
        if not isinstance(document, str):
            raise UserError(f'{path}, row {number}: "text" must be a string, got {type(document).__name__}')
    return documents


_READERS: dict[str, Callable[[Path], list[str]]] = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


class _TextColumn(Sequence):
    """The column "text" of a dataset, read row by row."""

    def __init__(self, dataset: Any):
        self._rows = dataset.select_columns("text")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> str:
        return self._rows[index]["text"] or ""

    def __iter__(self) -> Iterator[str]:
        return (row["text"] or "" for row in self._rows)


def _dataset(path: str, splits: list[str], **options: Any) -> _TextColumn:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"loading '{path}' needs the datasets package: pip install datasets, or {_OTHER_SOURCES}"
        ) from None
    for split in splits:
        try:
            dataset = datasets.load_dataset(path, split=split, **options)
            break
        except Exception as error:  # any network, hub, cache or format error of `datasets` and what it is built on
            if split != splits[-1] and "split" in str(error):
                continue
            raise UserError(f"cannot load the dataset '{path}': {one_line(error)}: {_OTHER_SOURCES}") from error
    feature = dataset.features.get("text") if dataset.features else None
    if getattr(feature, "dtype", None) not in ("string", "large_string"):
        raise UserError(f"the dataset '{path}' has no text column \"text\": got {dataset.column_names}")
    return _TextColumn(dataset)


def _pieces(documents: Iterable[str]) -> Iterator[str]:
    for document in documents:
        if len(document) <= _WHOLE:
            yield document
            continue
        start = 0
        while len(document) - start > _PIECE:
            end = document.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
            yield document[start:end]
            start = end
        yield document[start:]


def _batches(pieces: Iterable[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for piece in pieces:
        if batch and size + len(piece) > _PIECE:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += len(piece)
    if batch:
        yield batch


def _encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _token_stream(documents: Iterable[str], tokenizer: Any, enough: int | None = None) -> Tensor:
    """Tokens of all documents [n] int64; stops early once there are `enough`."""
    stream = array("q")
    for batch in _batches(_pieces(documents)):
        for ids in _encode(tokenizer, batch):
            stream.extend(ids)
        if enough is not None and len(stream) >= enough:
            break
    return torch.frombuffer(stream, dtype=torch.int64) if stream else torch.empty(0, dtype=torch.int64)


def _draw_windows(stream: Tensor, nsamples: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    windows = stream.numel() // length
    if nsamples <= windows:
        starts = torch.randperm(windows, generator=generator)[:nsamples] * length
    else:
        warnings.warn(
            f"the text has {windows} windows of {length} tokens, nsamples is {nsamples}: drawing from random offsets",
            stacklevel=3,
        )
        starts = torch.randint(stream.numel() - length + 1, (nsamples,), generator=generator)
    return stream.unfold(0, length, 1)[starts]


def _windows_of_documents(documents: Sequence[str], tokenizer: Any, nsamples: int, length: int, seed: int) -> Tensor:
    """One random window of a random document longer than it, nsamples times: [nsamples, length]."""
    draw = random.Random(seed)
    windows, short = [], set()
    while len(windows) < nsamples:
        if len(short) == len(documents):
            raise UserError(
                f"c4: none of {len(documents)} documents is longer than {length} tokens: use a smaller seqlen"
            )
        index = draw.randrange(len(documents))
        if index in short:
            continue
        text = documents[index]
        # A token stands for at least one byte: most short documents need no tokenizer.
        ids = _encode(tokenizer, [text])[0] if len(text.encode()) > length else []
        if len(ids) <= length:
            short.add(index)
            continue
        start = draw.randrange(len(ids) - length)
        windows.append(ids[start : start + length])
    return torch.tensor(windows, dtype=torch.int64)


def _prefix(tokenizer: Any, bos: bool) -> list[int]:
    if tokenizer is None:
        raise UserError("a text source needs a tokenizer: pass one, or token ids [S, seqlen] instead of text")
    if not bos:
        return []
    if tokenizer.bos_token_id is None:
        raise UserError("bos was asked for, but the tokenizer has no BOS token: use bos none")
    return [tokenizer.bos_token_id]


def _with_prefix(prefix: list[int], windows: Tensor) -> Tensor:
    if not prefix:
        return windows.clone()
    return torch.cat([torch.tensor(prefix).expand(len(windows), -1), windows], dim=1)


def _check_tensor(tokens: Tensor, seqlen: int) -> Tensor:
    floating = tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
    if floating or tokens.dim() != 2 or tokens.shape[0] < 1 or tokens.shape[1] != seqlen:
        got = f"{list(tokens.shape)} {str(tokens.dtype).removeprefix('torch.')}"
        raise UserError(f"tokens must be integer [S, seqlen] = [S >= 1, {seqlen}], got {got}")
    if tokens.min() < 0:
        raise UserError(f"tokens must not be negative, got {int(tokens.min())}")
    return tokens.detach().to("cpu", torch.int64)


def _require_at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise UserError(f"{name} must be an integer of at least {least}, got {number!r}")


def _require_one_window(source: str, stream: Tensor, length: int) -> None:
    if stream.numel() < length:
        raise UserError(
            f"{source} has {stream.numel()} tokens, one sequence needs {length}: give more text or a smaller seqlen"
        )


def _warn_if_few(nsamples: int) -> None:
    if nsamples < _FEW_SAMPLES:
        warnings.warn(f"{nsamples} calibration samples are few: use at least {_FEW_SAMPLES}", stacklevel=3)
