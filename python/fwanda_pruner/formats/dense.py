"""Files and folders that appear whole or not at all."""

import contextlib
import copy
import errno
import json
import os
import re
import secrets
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import cached_file

from ..config import TEXT_NUMBERS, PruneConfig
from ..errors import UserError
from ..model.load import quiet
from ..model.targets import is_multimodal
from ..report.card import model_card
from ..report.record import FILE_NAME, MatrixRow, Report
from .audit import Part, audit, stored_tensors

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LONGEST_NAME = 200
_PROCESSOR_FILES = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "chat_template.json",
    "chat_template.jinja",
)  # fmt: skip
_FORBIDDEN = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip


@contextlib.contextmanager
def atomic_file(path: str | Path):
    """Yields a path to write; on success it becomes `path` by rename, on any exception it is removed.

    Args:
        path: the final file; an existing file is replaced. Its folder must exist.

    Raises:
        UserError: the disk is full or the folder is not writable.
    """
    path = _resolved(path)
    temporary = _beside(path, "tmp")
    try:
        with user_errors(path):
            yield temporary
            temporary.chmod(0o666 & ~_umask())  # safetensors writes 0600
            _fsync(temporary)
            os.replace(temporary, path)
            _fsync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _resolved(path: str | Path) -> Path:
    try:
        resolved = Path(path).resolve()
        os.path.lexists(resolved)
        too_long = len(os.fsencode(resolved.name)) > _LONGEST_NAME
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"output {str(path)[:200]}: {error}") from error
    if too_long:
        raise UserError(f"output {str(path)[:80]}...: a name of more than {_LONGEST_NAME} bytes; choose a shorter one")
    return resolved


def _beside(path: Path, end: str) -> Path:
    """A hidden name beside path that tells whose it is, so that a later run can clean up after a killed one."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.{end}")


def _clean_leftovers(output: Path) -> None:
    """Remove what killed runs left beside output; a folder that was only moved aside comes back."""
    if not output.parent.is_dir():
        return
    pattern = re.compile(re.escape(f".{output.name}.") + r"(\d+)-[0-9a-f]{8}\.(tmp|old)")
    for path in output.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if not match or _alive(int(match[1])):
            continue
        if match[2] == "old" and not output.exists():
            os.rename(path, output)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def check_output(
    output: str | Path, *, overwrite: bool, needed_bytes: int = 0, inputs: Iterable[str | None] = ()
) -> None:
    """Refuses an output folder that could not be written; writes nothing.

    Args:
        output: the folder to be made. Missing parents are made by `save_pruned`.
        overwrite: accept a folder that is not empty, unless it is or holds the current or the home folder.
        needed_bytes: free space to ask for.
        inputs: names of the model and the text; an output that is or holds one that exists is refused.

    Raises:
        UserError: it is a file, not empty, in a folder that cannot be written, or too large for the disk.
    """
    output = _resolved(output)
    for name in inputs:
        path = Path(name).resolve() if name and os.path.exists(name) else None
        if path is not None and (path == output or output in path.parents):
            raise UserError(f"output {output} is or holds {name}, which this run reads; choose another folder")
    if not output.name or os.path.ismount(output):
        raise UserError(f"output {output} is a mount point and cannot be replaced; choose a folder inside it")
    parent = next(folder for folder in output.parents if os.path.lexists(folder))
    if os.path.lexists(output) and not output.is_dir():
        raise UserError(f"output {output} is a file; expected a folder")
    if not parent.is_dir():
        raise UserError(f"output {output}: {parent} is a file; expected a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"output {output}: {parent} is not writable; choose another folder")
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise UserError(f"output {output} exists and is not empty; choose another folder or pass --overwrite")
        if any(place == output or output in place.parents for place in (Path.cwd(), Path.home())):
            raise UserError(f"output {output} holds the current or the home folder and is never overwritten")
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise UserError(f"output {output} needs {_size(needed_bytes)}, the disk has {_size(free)} free; make room")


def model_bytes(model) -> int:
    """Bytes of a model's parameters and buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def save_pruned(model, tokenizer, report: Report, output: str | Path, *, overwrite: bool = False) -> None:
    """Writes a Hugging Face folder with `README.md` and `fwanda.json`, and audits the zeros in its files.

    All is written to a hidden folder beside `output`, audited, flushed to disk, and renamed. On any failure neither
    remains, and with `overwrite` the old folder is put back.

    Args:
        model: the pruned model; written in its own dtype.
        tokenizer: None writes none.
        report: its pruned `matrices` say how many zeros each file must hold.
        output: the folder to be made, with its parents.
        overwrite: replace a folder that is not empty.

    Raises:
        UserError: see `check_output`; or the disk became full or unwritable meanwhile.
        RuntimeError: a written matrix does not hold the zeros of its row.
    """
    output = _resolved(output)
    _clean_leftovers(output)
    check_output(output, overwrite=overwrite, needed_bytes=model_bytes(model))
    temporary, aside = _beside(output, "tmp"), _beside(output, "old")
    made = [folder for folder in output.parents if not folder.exists()]
    try:
        with user_errors(output):
            temporary.mkdir(parents=True)
            _write(model, tokenizer, report, temporary)
            _check_zeros(model, temporary, report)
            _flush(temporary)
            _swap(temporary, output, aside if overwrite else None)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if output.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            _remove_empty(made)


def verify_finished(output: str | Path, config: PruneConfig, *, model: str, statistics: str | None) -> None:
    """Check that a folder is the result of these settings, and that its files hold the zeros of its report.

    Args:
        output: a folder of save_pruned().
        config: resolved.
        model, statistics: what the command names.

    Raises:
        UserError: it is of other settings, or its files are not as they were written.

    Matrices that the files hold under other names (split experts) are not counted.
    """
    _clean_leftovers(_resolved(output))
    report = Report.load(output)
    asked = {**config.to_dict(), "model": model, "statistics": statistics}
    for key in ("device", "dtype"):  # the report has what "auto" became
        if asked[key] in (None, "auto"):
            del asked[key]
    if statistics is not None:  # the text was theirs
        asked = {key: value for key, value in asked.items() if key not in ("calibration", *TEXT_NUMBERS, "fisher")}
    for key, value in asked.items():
        if report.config.get(key) != value:
            raise UserError(
                f"{output} is finished with {key} {report.config.get(key)!r}, this command has {value!r}; choose "
                f"another folder or pass --overwrite"
            )
    stored = stored_tensors(Path(output))
    rows = [row for row in report.matrices if row.skipped is None and f"{row.name}.weight" in stored]
    for row, (zeros, numel) in zip(rows, audit(Path(output), [row.name for row in rows]).values(), strict=True):
        if (zeros, numel) != (row.zeros, row.numel):
            raise UserError(
                f"{output} is not as it was written: {row.name} holds {zeros} zeros, its report says {row.zeros}; pass "
                f"--overwrite to write it anew"
            )


def _write(model, tokenizer, report: Report, folder: Path) -> None:
    start = time.perf_counter()
    with quiet(), _savable_generation_config(model):
        model.save_pretrained(folder, max_shard_size="5GB")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if is_multimodal(model):
            _copy_processor(model.config.name_or_path, folder)
    report.seconds["save"] = round(time.perf_counter() - start, 3)
    (folder / "README.md").write_text(model_card(model, report), encoding="utf-8")
    (folder / FILE_NAME).write_text(json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    for file in folder.glob("*.safetensors"):
        file.chmod(0o666 & ~_umask())  # safetensors writes 0600


@contextlib.contextmanager
def _savable_generation_config(model):
    """Some checkpoints carry sampling flags without `do_sample`, which load but refuse to be saved."""
    original = getattr(model, "generation_config", None)
    if original is not None:
        try:
            original.validate(strict=True)
        except ValueError:
            model.generation_config = copy.deepcopy(original)
            model.generation_config.do_sample = True
    try:
        yield
    finally:
        if original is not None:
            model.generation_config = original


def _copy_processor(name: str, folder: Path) -> None:
    """The settings of the image processor as they stand, where there are any."""
    for file in _PROCESSOR_FILES:
        with contextlib.suppress(OSError, ValueError):
            found = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
            if found is not None and not (folder / file).exists():
                shutil.copyfile(found, folder / file)


def _check_zeros(model, folder: Path, report: Report) -> None:
    rows = [row for row in report.matrices if row.skipped is None]
    pieces = _pieces(model, rows, folder)
    if unknown := [name for name, found in pieces.items() if not found]:
        warnings.warn(
            f"the zeros of {len(unknown)} matrices were not counted in the files, where {unknown[0]} and others have "
            f"names that could not be traced",
            stacklevel=2,
        )
    rows = [row for row in rows if pieces.get(row.name) != []]
    found = audit(folder, [row.name for row in rows], parts=pieces)
    for row in rows:
        expected = (row.numel - row.asked + row.kept_zero, row.numel)
        if found[row.name] != expected:
            raise RuntimeError(f"{row.name}: (zeros, weights) in the file are {found[row.name]}, expected {expected}")


def _pieces(model, rows: list[MatrixRow], folder: Path) -> dict[str, list[Part]]:
    """Where the files hold the matrices that they do not hold by name; [] where that cannot be told.

    transformers may rename tensors and split fused experts on saving. What becomes of each is seen by saving small
    tensors that hold the number of their row in place of the weights.
    """
    files = stored_tensors(folder)
    sought = {i: row for i, row in enumerate(rows) if row.tensor or f"{row.name}.weight" not in files}
    tags: dict[str, Tensor] = {}
    for i, row in sought.items():
        if row.tensor is None:
            tags[f"{row.name}.weight"] = torch.full((2, 2), i)
        else:
            experts = len(model.get_parameter(row.tensor))
            tags.setdefault(row.tensor, torch.full((experts, 2, 2), -1))[row.index] = i
    pieces: dict[str, list[Part]] = {row.name: [] for row in sought.values()}
    if not tags:
        return pieces
    with tempfile.TemporaryDirectory(dir=folder) as place, contextlib.suppress(IndexError, RuntimeError, ValueError):
        with quiet(), _savable_generation_config(model):
            model.save_pretrained(place, state_dict=tags)
        for name, tag in load_file(Path(place, "model.safetensors")).items():
            slices = [(None, tag)] if tag.dim() < 3 else list(enumerate(tag))
            for index, part in slices:
                numbers = part.unique().tolist()
                if len(numbers) == 1 and numbers[0] in sought and name in files:
                    pieces[sought[numbers[0]].name].append(Part(name, index))
    return pieces


def _swap(temporary: Path, output: Path, aside: Path | None) -> None:
    """Renames `temporary` to `output`; what was there goes to `aside` first and comes back on failure."""
    try:
        if aside is not None and output.exists():
            os.rename(output, aside)
        os.rename(temporary, output)
    except BaseException:
        if aside is not None and aside.exists() and not output.exists():
            os.rename(aside, output)
        raise
    _fsync(output.parent)


@contextlib.contextmanager
def user_errors(output: Path):
    """Turns what the disk refuses into a UserError of one line that names `output`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # safetensors and tokenizers have the error of the system in their text only
        number = getattr(error, "errno", None) or int((re.findall(r"os error (\d+)", str(error)) or [0])[0])
        if number in _FULL:
            free = shutil.disk_usage(next(folder for folder in output.parents if folder.exists())).free
            raise UserError(f"output {output}: no space left on the disk ({_size(free)} free); make room") from error
        if number in _FORBIDDEN:
            raise UserError(f"output {output}: not writable ({os.strerror(number)}); choose another folder") from error
        if number == errno.ENOENT:
            raise UserError(f"output {output}: {output.parent} is gone; run again") from error
        if number == errno.ENOTEMPTY:
            raise UserError(f"output {output} was filled meanwhile; choose another folder") from error
        raise


def _flush(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
