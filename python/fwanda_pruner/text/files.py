"""From a local file to its documents. To add a kind of file, enter its reader in `READERS`."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from ..errors import UserError, one_line, refuse_pipe, show
from ..notes import warn
from . import chat
from .chat import Conversation, conversation_of

FIELDS = ("text", *chat.FIELDS)  # of a row; the first that is there counts
EXPECTED = 'a field "text", or "messages" with a conversation'
# A small compressed file may not fill the memory. It can hold so many bytes, and so many times its size besides; text
# shrinks to about a third, and hardly ever to a tenth.
_ANY_SIZE, _RATIO = 1 << 20, 20
_PARQUET_SIZE, _PARQUET_RATIO = 64 << 20, 100  # dictionaries make some columns much smaller
_PARQUET_ROWS = 1_000_000  # and one for each byte of the file
_PARQUET_BATCH = 256 << 20  # bytes of rows in memory at a time, at most about
_PARQUET_BOMB = "holds far more than text of its size; give the text as a .jsonl file"

Row = tuple[str, Any]  # its place in the file, and a text, an object or None


def kind_of(path: Path) -> str | None:
    """The key of READERS for a path, ".gz" at its end left out; None for an unknown kind."""
    name = path.name.lower()
    suffix = Path(name.removesuffix(".gz")).suffix
    return suffix if suffix in READERS and not (suffix == ".parquet" and name.endswith(".gz")) else None


def read_file(path: Path) -> list[str | Conversation]:
    """The documents of a file, in order. A row that is null or has no text is an empty document, and is counted.

    Raises:
        UserError: the file is missing, unreadable, of an unknown kind or without text. A bad line or row is named.
    """
    kind = kind_of(path)
    if kind is None:
        known = ", ".join(READERS)
        raise UserError(f"{path}: unknown kind of text file '{path.suffix}': expected {known}; .gz may follow a text")
    try:
        refuse_pipe(path, "the text")
        if path.suffix.lower() == ".gz":
            _refuse_bomb(path)
        documents = _documents(path, READERS[kind](path))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text: {one_line(error)}") from error
    except (EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a whole gzip file: {one_line(error)}") from error
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; give a .txt, .jsonl, .json or .parquet file, or 'sample'") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or one_line(error)}") from error
    if all(isinstance(document, str) and (not document or document.isspace()) for document in documents):
        raise UserError(f"{path}: holds no text")
    return documents


def document_of(row: Any, where: str) -> str | Conversation | None:
    """The document of a row; None if it has none.

    Args:
        row: a text, an object with some of FIELDS, or None.
        where: names the row in errors.

    Raises:
        UserError: the row holds something else.
    """
    if isinstance(row, dict):
        field = next((field for field in FIELDS if row.get(field) is not None), None)
        if field in chat.FIELDS:
            return conversation_of(row[field], where) if row[field] != [] else None
        row = None if field is None else row[field]
        if row is not None and not isinstance(row, str):
            raise UserError(f'{where}: "text" must be a string, got {show(row)}')
    if not isinstance(row, (str, type(None))):
        raise UserError(f"{where}: expected an object with {EXPECTED}, got {show(row)}")
    try:
        (row or "").encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: the text holds half of a surrogate pair: {one_line(error)}") from error
    return row


def warn_of_missing(source: str, missing: int, total: int, first: str = "") -> None:
    """Warns that some rows of a text have none."""
    if missing:
        warn(f"{source}: {missing} of {total} rows have no text and are left out{first}")


def _documents(path: Path, rows: Iterable[Row]) -> list[str | Conversation]:
    documents, missing, file = [], 0, str(path)
    place, fields = "", None  # of the first row without text that has other fields, or else of the first
    for here, row in rows:
        document = document_of(row, f"{file}, {here}")
        if document is None:
            missing += 1
            place, fields = (here, row) if not place or (row and not fields) else (place, fields)
        documents.append("" if document is None else document)
    if missing and missing == len(documents):
        raise UserError(f"{path}: no row has text: expected {EXPECTED}; {place} has {_names(fields)}")
    warn_of_missing(file, missing, len(documents), f"; {place} has {_names(fields)}")
    return documents


def _names(row: dict | None) -> str:
    return f"the fields {show(list(row), 200)}" if row else "no field"


def _open(path: Path, newline: str) -> TextIO:
    """Opens a file as text, unpacked if it is a gzip file."""
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline=newline)
    return path.open(encoding="utf-8-sig", newline=newline)


def _refuse_bomb(path: Path) -> None:
    """Refuses a gzip file that holds far more than text of its size."""
    most, size = _ANY_SIZE + _RATIO * path.stat().st_size, 0
    with gzip.open(path) as file:
        while block := file.read(1 << 20):
            size += len(block)
            if size > most:
                raise UserError(
                    f"{path}: holds more than {most >> 20} MiB, far more than text of its size; unpack it first"
                )


def _read_txt(path: Path) -> Iterator[Row]:
    with _open(path, newline="") as file:
        yield "the file", file.read()


def _read_jsonl(path: Path) -> Iterator[Row]:
    name = str(path)
    with _open(path, newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                place = f"line {number}"
                yield place, _json(line, f"{name}, {place}")


def _read_json(path: Path) -> Iterator[Row]:
    """An array of rows, or one row a line."""
    with _open(path, newline="\n") as file:
        start = file.read(1)
        while start.isspace():
            start = file.read(1)
    if start != "[":
        try:
            yield from _read_jsonl(path)
        except UserError as error:
            raise UserError(f"{error}; a .json file holds an array of rows, or one row a line") from error
        return
    with _open(path, newline="\n") as file:
        rows = _json(file.read(), str(path))
    for number, row in enumerate(rows, start=1):
        yield f"row {number}", row


def _json(text: str, where: str) -> Any:
    text = text.rstrip()
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if "\n" in text else ""  # else `where` says the line
        raise UserError(f"{where}: not JSON: {error.msg}: {line}column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {one_line(error)}") from error


def _read_parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: reading parquet needs pyarrow: pip install pyarrow") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [name for name in FIELDS if name in names]
            if not columns:
                raise UserError(f"{path}: no column has text: expected {EXPECTED}; the columns are {show(names, 200)}")
            if twice := next((name for name in columns if names.count(name) > 1), None):
                raise UserError(f"{path}: {names.count(twice)} columns are named {twice!r}; rename all but one")
            batches = file.iter_batches(_parquet_batch(path, file, columns), columns=columns)
            rows = (row for batch in batches for row in batch.to_pylist())
            left = _PARQUET_SIZE + _PARQUET_RATIO * path.stat().st_size
            for number, row in enumerate(rows, start=1):
                left -= sum(len(value) for value in row.values() if isinstance(value, str))
                if left < 0:
                    raise UserError(f"{path}: {_PARQUET_BOMB}")
                yield f"row {number}", row
    except (pyarrow.ArrowException, NotImplementedError) as error:
        raise UserError(f"{path}: not a parquet file: {one_line(error)}") from error


def _parquet_batch(path: Path, file: Any, columns: list[str]) -> int:
    """Rows to read at a time.

    Raises:
        UserError: the file holds far more than text of its size.
    """
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
    sizes = [chunk.total_uncompressed_size for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns]
    unpacked, packed = sum(sizes), path.stat().st_size
    if unpacked > _PARQUET_SIZE + _PARQUET_RATIO * packed or file.metadata.num_rows > _PARQUET_ROWS + packed:
        raise UserError(f"{path}: {_PARQUET_BOMB}")
    return max(8, min(1024, _PARQUET_BATCH // max(1, *sizes, 1)))


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
