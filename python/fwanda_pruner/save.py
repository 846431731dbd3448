"""Files and folders that appear whole or not at all."""

import contextlib
import copy
import errno
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from .errors import UserError
from .evaluate import audit
from .load import quiet
from .report import FILE_NAME, Report

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LONGEST_NAME = 200
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


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
        with _user_errors(path):
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
        with _user_errors(output):
            temporary.mkdir(parents=True)
            _write(model, tokenizer, report, temporary)
            _check_zeros(temporary, report)
            _flush(temporary)
            _swap(temporary, output, aside if overwrite else None)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if output.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            _remove_empty(made)


def _write(model, tokenizer, report: Report, folder: Path) -> None:
    start = time.perf_counter()
    with quiet(), _savable_generation_config(model):
        model.save_pretrained(folder, max_shard_size="5GB")
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    report.seconds["save"] = round(time.perf_counter() - start, 3)
    (folder / "README.md").write_text(_model_card(report), encoding="utf-8")
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


def _check_zeros(folder: Path, report: Report) -> None:
    rows = [row for row in report.matrices if row.skipped is None]
    found = audit(folder, [row.name for row in rows])
    for row in rows:
        expected = (row.numel - row.asked + row.kept_zero, row.numel)
        if found[row.name] != expected:
            raise RuntimeError(f"{row.name}: (zeros, weights) in the file are {found[row.name]}, expected {expected}")


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
def _user_errors(output: Path):
    """Says in one line what the disk refused: OSError has a number, safetensors only a text."""
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


def _model_card(report: Report) -> str:
    config, share = report.config, report.sparsity
    facts = [f"- {key}: {config[key]}" for key in ("model", "method", "allocation", "pattern") if config.get(key)]
    facts.append(f"- sparsity: {share['matrices']:.4f} of the pruned matrices, {share['model']:.4f} of the model")
    if report.perplexity is not None:
        facts.append(
            "- perplexity: {dense:.2f} dense, {pruned:.2f} pruned ({windows} windows of {seqlen} tokens)".format_map(
                report.perplexity
            )
        )
    return _CARD.format(facts="\n".join(facts), file=FILE_NAME)


_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [pruned, sparse]
---
# Pruned with fwanda

{facts}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder", dtype="auto")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

Removed weights are stored as zeros: the files are as large as before, and ordinary dense kernels run no faster.
Pruning changes what the model says; measure it on your task. The original model's licence and limits still apply.
The full record of the run is in `{file}`.
"""
