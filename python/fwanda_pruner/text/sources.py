"""From the name of a text to its documents.

A name is looked up in this order: a key of `NAMED`, a local file (see `files`), and whatever else the `datasets`
package loads under that name. To add a source with a name of its own, write a function from purpose to documents and
enter it in `NAMED`.
"""

import errno
import hashlib
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..errors import UserError, did_you_mean, one_line, show
from ..model.cache import file_sha256
from ..notes import muted
from ..source_shares import OWN_TEXT
from ..terminal import say
from .chat import Conversation, Rendered
from .files import EXPECTED, FIELDS, document_of, kind_of, read_file, warn_of_missing

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
_WAY_OUT = f"give a .txt, .jsonl, .json or .parquet file, or '{SAMPLE}'"
_DATASET_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")
_MANY_FILES, _MOST_FILES = 1000, 10_000  # of a folder
_HUB_SECONDS = 3  # for one answer of the Hugging Face Hub


class NamedSource(NamedTuple):
    """A text source with a name of its own.

    Attributes:
        read: returns the documents for a purpose.
        window_per_document: draw each calibration window from inside one document, as the Wanda release does with C4.
            Otherwise all documents are joined before they are cut into windows.
    """

    read: Callable[[Purpose], Sequence[str]]
    window_per_document: bool = False


def load_documents(source: str, *, purpose: Purpose, tokenizer: Any = None) -> Sequence[str]:
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
            - PATH.jsonl: one document a line.
            - PATH.json: one document for each row of an array, or a line.
            - PATH.txt.gz, PATH.jsonl.gz, PATH.json.gz: the same, packed by gzip.
            - PATH.parquet: one document a row.
            - any other name or folder that `datasets` loads. Calibration reads the train split; evaluation reads the
              test split, or validation if there is no test split.
            A row has a string in the field "text", or a conversation in the field "messages" ("role" and "content" of
            each message) or "conversations" ("from" and "value"). A row that is null or without these is an empty
            document, and a warning counts such rows.
        purpose: "calibration" or "eval".
        tokenizer: turns conversations into text by its chat template; None: a conversation is refused.

    Returns:
        The documents. Those of "code" and of a `datasets` source stay on disk until they are asked for; a conversation
        becomes text when it is asked for.

    Raises:
        UserError: the source is missing, unreadable, of an unknown kind or without text. A bad line or row is named.
            The message begins with the name of the source.
    """
    documents = _find(source, purpose)
    if isinstance(documents, list) and all(isinstance(document, str) for document in documents):
        return documents
    return Rendered(documents, tokenizer)


def check_source(source: str, flag: str, *, purpose: Purpose, local: bool = False) -> None:
    """Reads a text before the model is loaded, so that a mistake shows at once.

    Args:
        source: as load_documents(), or "self".
        flag: that named the source.
        purpose: as load_documents().
        local: leave out data sets, which may have to be downloaded.

    Raises:
        UserError: as load_documents(), naming the flag.
    """
    if source in (OWN_TEXT, SAMPLE, CODE):  # come with the model or with Python; the last two are default guards
        return
    if local and (source in NAMED or (_DATASET_NAME.fullmatch(source) and kind_of(Path(source)) is None)):
        return
    with naming(flag), muted():  # the run repeats the warnings
        _find(source, purpose)


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """Puts the name of a flag before the errors of the text that it names; those of the tokenizer stay as they are."""
    try:
        yield
    except UserError as error:
        if str(error).startswith("the tokenizer"):
            raise
        raise UserError(f"{flag} {error}") from error


def _find(source: str, purpose: Purpose) -> Sequence[str | Conversation]:
    if source in NAMED:
        return NAMED[source].read(purpose)
    if not source:
        raise UserError(f"the name of the text is empty: {_WAY_OUT}")
    path, exists, is_file = Path(source), False, False
    try:
        exists, is_file = path.exists(), path.is_file()
    except ValueError:
        pass  # a null byte: no file has that name
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise UserError(f"{show(source)}: cannot be looked up: {one_line(error, 60)}") from error
    if not exists and (reason := _misread(source)):
        raise UserError(f"{show(source)}: {reason}")
    if is_file or (kind_of(path) is not None and source.isprintable()):
        return read_file(path)
    if (path.is_absolute() or source.startswith(".")) and not exists:
        raise UserError(f"{show(source)}: no such file: {_WAY_OUT}")
    if not exists and not _DATASET_NAME.fullmatch(source):
        raise UserError(
            f"{show(source)}: neither a file nor the name of a data set; if it is the text itself, write it to a .txt "
            "file (or to a .jsonl file, with one document a line), and name that file"
        )
    return _read_dataset(source, ["train"] if purpose == "calibration" else ["test", "validation"])


def _misread(name: str) -> str | None:
    """What to write instead of a name with a share, or of several names in one; None for other names."""
    beginning, _, share = name.rpartition(":")
    if beginning and re.fullmatch(r"[\d./e+-]*", share):
        return f"only calibration texts take a share; write {show(beginning)}"
    if "," in name and not re.search(r"\s", name):
        return "no such file; to name several texts, repeat the flag (in Python, give a list)"
    return None


def local_sha256(name: str | None) -> str | None:
    """sha256 of a local file, or of all files of a local folder, in hex; None for other names."""
    if not name or name in NAMED:
        return None
    if os.path.isdir(name):
        digest = hashlib.sha256()
        for path in sorted(path for path in Path(name).rglob("*") if path.is_file()):
            digest.update(f"{path.relative_to(name)} {file_sha256(path)}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()
    return file_sha256(Path(name)) if os.path.isfile(name) else None


def _sample(purpose: Purpose) -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(
            f"{SAMPLE} needs Python's module pydoc_data, which is not installed: give a text file"
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
        raise UserError(f"{CODE} needs the source files of Python's library, {library} has none: give a text file")
    held_out = purpose == "eval"
    paths = [library / name for name in sorted(names, key=Path.as_posix)]
    last = _CODE_HELD_OUT_EVERY - 1
    return _Files([path for i, path in enumerate(paths) if (i % _CODE_HELD_OUT_EVERY == last) == held_out])


def _c4(purpose: Purpose) -> Sequence[str]:
    if purpose == "eval":
        raise UserError("c4 is a calibration source only: evaluate on wikitext2, a local file or 'sample'")
    shard = {"train": "en/c4-train.00000-of-01024.json.gz"}
    return _read_dataset("c4", ["train"], path="allenai/c4", data_files=shard)


def _wikitext2(purpose: Purpose) -> Sequence[str]:
    split = "train" if purpose == "calibration" else "test"
    rows = _read_dataset("wikitext2", [split], path="Salesforce/wikitext", name="wikitext-2-raw-v1")
    return rows if purpose == "calibration" else ["\n\n".join(rows)]


NAMED: dict[str, NamedSource] = {
    SAMPLE: NamedSource(_sample),
    CODE: NamedSource(_code),
    "wikitext2": NamedSource(_wikitext2),
    "c4": NamedSource(_c4, window_per_document=True),
}


class _DatasetRows(Sequence):
    """One column of a dataset, read row by row. A row without text is an empty document."""

    def __init__(self, source: str, dataset: Any, column: str):
        self._source, self._rows = source, dataset.select_columns(column)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> str | Conversation:
        return document_of(self._rows[index], f"{self._source}, row {index + 1}") or ""

    def __iter__(self) -> Iterator[str | Conversation]:
        for number, row in enumerate(self._rows, start=1):
            yield document_of(row, f"{self._source}, row {number}") or ""


def _read_dataset(source: str, splits: list[str], *, path: str | None = None, **options: Any) -> _DatasetRows:
    """The text of the first of `splits` that the dataset has.

    Args:
        source: names the text in errors.
        splits: names.
        path: of the dataset: its name on the hub, or a folder; None: the name of the source.
        options: for datasets.load_dataset().
    """
    if path is None and os.path.isdir(source):
        _check_folder(source)
    try:
        import datasets
    except ImportError:
        missing = "" if path else "no such file, and "
        if missing and os.path.isdir(source):
            missing = "a folder must hold the files of a data set (.parquet, .jsonl, .json, .csv or .txt); "
        raise UserError(
            f"{source}: {missing}loading a data set needs the datasets package: pip install datasets, or "
            f"{_WAY_OUT}{_like(source)}"
        ) from None
    what = f"the data set {path} cannot be loaded" if path else "no such file, and no data set that can be loaded"
    what = "the folder cannot be loaded" if os.path.isdir(source) else what
    for split in splits:
        try:
            with _no_retries(path or source) as answered:
                dataset = datasets.load_dataset(path or source, split=split, **options)
            break
        except Exception as error:  # datasets raises errors of the network, the hub, its cache and every file format
            if split != splits[-1] and "split" in str(error):
                continue
            missing = not answered and isinstance(error, OSError)
            reason = "the Hugging Face Hub does not answer, and no copy is cached" if missing else one_line(error)
            if os.path.isdir(source) and "Unknown split" in reason:
                reason = f"it has no files whose names begin with {' or '.join(splits)}"
            raise UserError(f"{source}: {what}: {reason}; {_WAY_OUT}{_like(source)}") from error
    if not os.path.isdir(path or source) and any(_is_of_folder(file["filename"]) for file in dataset.cache_files):
        raise UserError(
            f"{source}: no such folder, and `datasets` keeps a copy of another one of this name; {_WAY_OUT}"
        )
    names = dataset.column_names
    column = next((name for name in FIELDS if name in names), None)
    if column is None:
        raise UserError(f"{source}: no column has text: expected {EXPECTED}; the columns are {show(names, 200)}")
    if column == "text" and getattr(dataset.features["text"], "dtype", None) not in ("string", "large_string"):
        raise UserError(f'{source}: the column "text" must hold strings, got {show(dataset.features["text"])}')
    warn_of_missing(source, dataset.data.column(column).null_count, len(dataset))
    return _DatasetRows(source, dataset, column)


def _is_of_folder(file: str) -> bool:
    """Whether a file in the cache of `datasets` was made from a local folder, whose hash is shorter than a commit."""
    return re.fullmatch("[0-9a-f]{16}", Path(file).parent.name) is not None


def _check_folder(source: str) -> None:
    """Refuses a folder with so many files that `datasets` would look through it for minutes; says so of a large one."""
    if os.path.isfile(os.path.join(source, "config.json")) and any(Path(source).glob("*.safetensors")):
        raise UserError(f"{source}: the folder of a model, which holds no text; {_WAY_OUT}")
    count = 0
    for _, _, files in os.walk(source):
        count += len(files)
        if count > _MOST_FILES:
            raise UserError(
                f"{source}: holds more than {_MOST_FILES} files; join the texts into one .jsonl or .parquet file, or "
                f"name a folder below it"
            )
    if count > _MANY_FILES:
        say(f"looking through the {count} files of {source}")


def _like(source: str) -> str:
    return "" if source in NAMED or os.path.isdir(source) else did_you_mean(source, [*NAMED, OWN_TEXT])


@contextmanager
def _no_retries(path: str) -> Iterator[bool]:
    """Asks the hub once. If it does not answer, `datasets` reads its cache alone inside the block.

    By itself, `datasets` would ask again and again for half a minute. Yields False if an answer was needed and none
    came.
    """
    answered = os.path.isdir(path) or _hub_answers(path)
    if answered:
        yield True
        return
    import datasets
    import huggingface_hub

    places = (datasets.config, huggingface_hub.constants)
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        for place in places:
            place.HF_HUB_OFFLINE = True
        yield False
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


def _hub_answers(path: str) -> bool:
    """Whether the hub answers a question about a data set; "there is none" is an answer too."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        huggingface_hub.HfApi().dataset_info(path, timeout=_HUB_SECONDS)
    except HfHubHTTPError:
        return True
    except Exception:  # the error of whichever package sends the question
        return False
    return True
