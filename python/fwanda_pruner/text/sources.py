"""From the name of a text to its documents.

A name is looked up in this order: a key of `NAMED`, a local file whose suffix is a key of `READERS`, and whatever else
the `datasets` package loads under that name. To add a source with a name of its own, write a function from purpose to
documents and enter it in `NAMED`; to add a kind of file, enter its reader in `READERS`.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..errors import UserError, one_line

SAMPLE = "sample"
CODE = "code"
Purpose = Literal["calibration", "eval"]

_HELD_OUT_EVERY = 4  # topics of `sample`
_CODE_HELD_OUT_EVERY = 2  # files of `code`
# Folders of the standard library that `code` leaves out: tests, other packages, tables of characters, the text of
# `sample`, and parts that not every Python has.
_NOT_CODE = frozenset(
    ("__pycache__", "dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests")
)
_WAY_OUT = f"give a .txt, .jsonl or .parquet file, or '{SAMPLE}'"


class NamedSource(NamedTuple):
    """A text source with a name of its own.

    Attributes:
        read: returns the documents for a purpose.
        window_per_document: draw each calibration window from inside one document, as the Wanda release does with C4.
            Otherwise all documents are joined before they are cut into windows.
    """

    read: Callable[[Purpose], Sequence[str]]
    window_per_document: bool = False


def load_documents(source: str, *, purpose: Purpose) -> Sequence[str]:
    """Read the documents of a text source, in file order.

    Args:
        source: one of
            - "sample": documentation that comes with Python. Every fourth topic is for evaluation, the others are for
              calibration.
            - "code": Python's own standard library, one document a file, in the order of their names. Every second file
              is for evaluation, the others are for calibration.
            - "wikitext2": rows of the train split; for evaluation, the rows of the test split joined by blank lines.
            - "c4": its first shard, for calibration only.
            - PATH.txt: one document, unchanged.
            - PATH.jsonl: one document a line, in the field "text".
            - PATH.parquet: one document a row, in the column "text".
            - any other name or folder that `datasets` loads and that has a column "text". Calibration reads the train
              split; evaluation reads the test split, or validation if there is no test split.
        purpose: "calibration" or "eval".

    Returns:
        The documents. Those of "code" and of a `datasets` source stay on disk until they are asked for.

    Raises:
        UserError: the source is missing, unreadable, of an unknown kind or without text. A bad line or row is named.
    """
    if source in NAMED:
        return NAMED[source].read(purpose)
    if not source:
        raise UserError(f"the name of the text is empty: {_WAY_OUT}")
    path = Path(source)
    try:
        exists, is_file = path.exists(), path.is_file()
    except (OSError, ValueError) as error:
        raise UserError(f"{source[:80]}...: cannot be looked up: {one_line(error, 60)}") from error
    if path.suffix.lower() in READERS or is_file:
        return _read_file(path)
    if (path.is_absolute() or source.startswith(".")) and not exists:
        raise UserError(f"{source}: no such file: {_WAY_OUT}")
    return _read_dataset(source, ["train"] if purpose == "calibration" else ["test", "validation"])


def file_sha256(name: str | None) -> str | None:
    """sha256 of a local file, in hex; None if the name is not that of a local file."""
    if not name or not os.path.isfile(name):
        return None
    digest = hashlib.sha256()
    with open(name, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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


class _Files(Sequence):
    """Text files, read one by one. A file that is not UTF-8 is an empty document."""

    def __init__(self, paths: list[Path]):
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> str:
        path = self._paths[index]
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return ""
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror or one_line(error)}") from error


def _code(purpose: Purpose) -> _Files:
    library = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, subfolders, files in os.walk(library):
        subfolders[:] = [name for name in subfolders if name not in _NOT_CODE]
        inside = Path(folder).relative_to(library)
        # _sysconfigdata_*.py holds the settings of one build
        names += [inside / name for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata")]
    if len(names) < _CODE_HELD_OUT_EVERY:
        raise UserError(f"'{CODE}' needs the source files of Python's library, {library} has none: give a text file")
    held_out = purpose == "eval"
    paths = [library / name for name in sorted(names, key=Path.as_posix)]
    last = _CODE_HELD_OUT_EVERY - 1
    return _Files([path for i, path in enumerate(paths) if (i % _CODE_HELD_OUT_EVERY == last) == held_out])


def _c4(purpose: Purpose) -> Sequence[str]:
    if purpose == "eval":
        raise UserError("c4 is a calibration source only: evaluate on wikitext2, a local file or 'sample'")
    shard = {"train": "en/c4-train.00000-of-01024.json.gz"}
    return _read_dataset("allenai/c4", ["train"], data_files=shard)


def _wikitext2(purpose: Purpose) -> Sequence[str]:
    split = "train" if purpose == "calibration" else "test"
    rows = _read_dataset("Salesforce/wikitext", [split], name="wikitext-2-raw-v1")
    return rows if purpose == "calibration" else ["\n\n".join(rows)]


NAMED: dict[str, NamedSource] = {
    SAMPLE: NamedSource(_sample),
    CODE: NamedSource(_code),
    "wikitext2": NamedSource(_wikitext2),
    "c4": NamedSource(_c4, window_per_document=True),
}


def _read_file(path: Path) -> list[str]:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path}: unknown kind of text file '{path.suffix}': expected {', '.join(READERS)}")
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
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        return [
            _json_text(line, f"{path}, line {number}")
            for number, line in enumerate(file, start=1)
            if not line.isspace()
        ]


def _json_text(line: str, where: str) -> str:
    """Field "text" of a line of JSON; `where` names the line in errors."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {one_line(error)}") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise UserError(f'{where}: expected an object with a string field "text"')
    try:
        row["text"].encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: the text holds half of a surrogate pair: {one_line(error)}") from error
    return row["text"]


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


READERS: dict[str, Callable[[Path], list[str]]] = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


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


def _read_dataset(path: str, splits: list[str], **options: Any) -> _TextColumn:
    """Column "text" of the first of `splits` that the dataset has."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"loading '{path}' needs the datasets package: pip install datasets, or {_WAY_OUT}") from None
    for split in splits:
        try:
            dataset = datasets.load_dataset(path, split=split, **options)
            break
        except Exception as error:  # datasets raises errors of the network, the hub, its cache and every file format
            if split != splits[-1] and "split" in str(error):
                continue
            raise UserError(f"cannot load the dataset '{path}': {one_line(error)}: {_WAY_OUT}") from error
    feature = dataset.features.get("text") if dataset.features else None
    if getattr(feature, "dtype", None) not in ("string", "large_string"):
        raise UserError(f"the dataset '{path}' has no text column \"text\": got {dataset.column_names}")
    return _TextColumn(dataset)
