"""Files and folders that appear whole or not at all, whatever interrupts the process that writes them."""

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import UserError, has_control, one_line, show, shown_path
from ..model.cache import home_folder, size_text

_LONGEST_NAME = 200  # bytes; a file system takes 255, and temporary names are longer than the final one
_LONGEST_PART = 255  # bytes of the name of a folder above it
_made: set[str] = set()  # temporary names of this process
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NOT_WRITABLE = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path to write; it is renamed to `path` on success and removed on any exception.

    It has the name of `path` in a hidden folder beside it, where a library may write temporary files of its own. What
    killed processes left there is removed.

    Args:
        path: the final file. An existing file is replaced. The folder must exist.

    Raises:
        UserError: the path is a folder, the disk is full, or the folder is not writable.
    """
    path = resolved_output(path)
    if path.is_dir():
        raise UserError(f"output {shown_path(path)} is a folder; give the name of a file in it")
    folder = _hidden_name(path, "tmp")
    try:
        with user_errors(path):
            remove_leftovers(path)
            folder.mkdir()
            temporary = folder / path.name
            yield temporary
            _finish_file(temporary)
            os.replace(temporary, path)
            _fsync(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def atomic_folder(output: str | Path, *, overwrite: bool = False, needed_bytes: int = 0) -> Iterator[Path]:
    """Yields a new hidden folder to fill; it is renamed to `output` on success and removed on any exception.

    The folder lies beside `output`, and all in it is flushed to disk before the rename. With `overwrite`, a failure
    brings the old folder back. Parents that this function made and that stay empty are removed again.

    Args:
        output: the final folder. Missing parents are made.
        overwrite: replace a folder that is not empty.
        needed_bytes: free space that the disk must have.

    Raises:
        UserError: see check_output(); or the disk becomes full or not writable later.
    """
    output = resolved_output(output)
    with user_errors(output):
        remove_leftovers(output)
    check_output(output, overwrite=overwrite, needed_bytes=needed_bytes)
    temporary, aside = _hidden_name(output, "tmp"), _hidden_name(output, "old")
    made = [folder for folder in output.parents if not folder.exists()]
    try:
        with user_errors(output), _named(temporary, output):
            temporary.mkdir(parents=True)
            yield temporary
            _finish_folder(temporary)
            _swap(temporary, output, aside if overwrite else None)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if output.exists():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            _remove_empty(made)


@contextlib.contextmanager
def trial_folder(output: str | Path) -> Iterator[Path]:
    """Yields a hidden folder beside `output`, as atomic_folder() does; at the end it and all that was made are gone.

    Raises:
        UserError: no folder can be made there, or the disk is full or not writable.
    """
    output = resolved_output(output)
    made = [folder for folder in output.parents if not folder.exists()]
    temporary = _hidden_name(output, "tmp")
    try:
        try:
            temporary.mkdir(parents=True)
        except OSError as error:
            raise UserError(f"output {output}: cannot be made ({error.strerror}); choose another folder") from error
        with user_errors(output), _named(temporary, output):
            yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        _remove_empty(made)


def check_output(
    output: str | Path, *, overwrite: bool, needed_bytes: int = 0, inputs: Iterable[str | None] = ()
) -> None:
    """Refuses an output folder that could not be written. Writes nothing.

    Args:
        output: the folder to be made. Its parents may be missing.
        overwrite: accept a folder that is not empty, unless it is or contains the current or the home folder.
        needed_bytes: free space that the disk must have.
        inputs: paths or names of what the run reads. An output that is or contains one of them, or a file to which a
            link in one of them points, is refused.

    Raises:
        UserError: `output` is a file, a mount point, not empty, in a folder that is not writable, or the disk is too
            small.
    """
    output = resolved_output(output)
    with user_errors(output):
        _check_output(output, overwrite, needed_bytes, inputs)


def _check_output(output: Path, overwrite: bool, needed_bytes: int, inputs: Iterable[str | None]) -> None:
    for name in inputs:
        path = Path(name).resolve() if name and os.path.exists(name) else None
        if path is not None and (path == output or output in path.parents):
            raise UserError(f"output {output} is or contains {name}, which this run reads; choose another folder")
        if path is not None and output.is_dir() and (link := _link_into(path, output)):
            raise UserError(f"output {output} holds what {link} links to, which this run reads; choose another folder")
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
        if any(place == output or output in place.parents for place in _protected_folders()):
            raise UserError(
                f"output {output} is or contains the current or the home folder, which is never overwritten; choose "
                f"another folder"
            )
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise UserError(
            f"output {output} needs {size_text(needed_bytes)}, the disk has {size_text(free)} free; make room"
        )


def _link_into(folder: Path, output: Path) -> Path | None:
    """The first link in a folder, or in one below it but not in `output`, that points to `output` or into it."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if Path(place, name) != output]
        for path in (Path(place, name) for name in (*folders, *files)):
            if path.is_symlink():
                with contextlib.suppress(OSError, RuntimeError):  # a loop of links
                    target = path.resolve()
                    if target == output or output in target.parents:
                        return path
    return None


def _protected_folders() -> list[Path]:
    """The current and the home folder; a process may be without either."""
    folders = [home_folder()]
    with contextlib.suppress(OSError):
        folders.append(Path.cwd())
    return [folder.resolve() for folder in folders if folder is not None]


def check_file(path: str | Path, suffix: str, *, flag: str = "--output") -> Path:
    """Refuses an output file that could not be written. Writes nothing.

    Args:
        path: the file to be made; an existing one is accepted.
        suffix: which its name must have, with the dot.
        flag: that named the file.

    Returns:
        The path.

    Raises:
        UserError: the name is too long or has another suffix, or the folder is missing or not writable.
    """
    resolved = resolved_output(path)
    folder = resolved.parent
    if resolved.suffix != suffix or not folder.is_dir() or not os.access(folder, os.W_OK) or resolved.is_dir():
        raise UserError(f"{flag} must be a {suffix} file in an existing, writable folder, got {show(str(path))}")
    return Path(path)


def remove_leftovers(output: str | Path) -> None:
    """Removes what killed processes left beside `output`. A folder that one had only moved aside comes back.

    Temporary names hold the id of their process, so what living processes write stays.
    """
    output = resolved_output(output)
    if not output.parent.is_dir():
        return
    pattern = re.compile(re.escape(f".{output.name}.") + r"(\d+)-[0-9a-f]{8}\.(tmp|old)")
    for path in output.parent.iterdir():
        match = pattern.fullmatch(path.name)
        if not match or _is_in_use(path.name, int(match[1])):
            continue
        if match[2] == "old" and not output.exists():
            os.rename(path, output)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def user_errors(output: Path) -> Iterator[None]:
    """Turns what the file system refuses into a UserError of one line that names `output`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        number = system_error(error)
        if number in _DISK_FULL:
            free = shutil.disk_usage(next(folder for folder in output.parents if folder.exists())).free
            raise UserError(
                f"output {output}: no space left on the disk ({size_text(free)} free); make room"
            ) from error
        if number in TOO_MANY_FILES:
            raise UserError(
                f"output {output}: too many files are open; close some, or raise the limit (ulimit -n)"
            ) from error
        if number == errno.EFBIG:
            raise UserError(
                f"output {output}: a file would be larger than the limit of this process (ulimit -f) or of the file "
                f"system; raise the limit, or choose another folder"
            ) from error
        if number in _NOT_WRITABLE:
            raise UserError(f"output {output}: not writable ({os.strerror(number)}); choose another folder") from error
        if number == errno.ENOENT and output.parent.is_dir():  # as /proc says where no file can be made
            raise UserError(
                f"output {output}: cannot write to {output.parent}, or another process writes the same output; choose "
                f"another folder"
            ) from error
        if number == errno.ENOENT:
            raise UserError(f"output {output}: {output.parent} is gone; run again") from error
        if number == errno.ENOTEMPTY:
            raise UserError(
                f"output {output}: another process filled it meanwhile; choose another folder or pass --overwrite"
            ) from error
        raise


@contextlib.contextmanager
def _named(temporary: Path, output: Path) -> Iterator[None]:
    """Puts the name of the output into messages of UserError that name the temporary folder."""
    try:
        yield
    except UserError as error:
        error.args = tuple(str(part).replace(str(temporary), str(output)) for part in error.args)
        raise


def system_error(error: BaseException | None) -> int:
    """The number (errno) of an error of the system; 0 for another error."""
    # safetensors and tokenizers give the number only in their text
    return getattr(error, "errno", None) or int((re.findall(r"os error (\d+)", str(error)) or [0])[0])


def resolved_output(path: str | Path) -> Path:
    """The absolute path, links followed; refuses names that the file system could not take."""
    try:
        resolved = Path(path).resolve()
        too_long = len(os.fsencode(resolved.name)) > _LONGEST_NAME
        if not too_long:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(resolved)
            if any(len(os.fsencode(part)) > _LONGEST_PART for part in resolved.parts):
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UserError(f"output {show(str(path), 200)} is not a usable path: {reason}") from error
    if has_control(str(resolved)):
        raise UserError(f"output {show(str(resolved))} holds an unprintable character; choose another name")
    if too_long:
        raise UserError(
            f"output {str(path)[:80]}...: its name has more than {_LONGEST_NAME} bytes; choose a shorter one"
        )
    if resolved.exists() and not (resolved.is_file() or resolved.is_dir()):
        raise UserError(f"output {resolved} is a device, a pipe or a socket; choose another name")
    return resolved


def _hidden_name(path: Path, ending: str) -> Path:
    """A new hidden name beside `path` that holds the id of this process; see remove_leftovers()."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.{ending}")
    _made.add(hidden.name)
    return hidden


def _is_in_use(name: str, pid: int) -> bool:
    """Whether a living process made a temporary name. In containers, one after the other may have the same id."""
    if pid == os.getpid():
        return name in _made
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _finish_file(path: Path) -> None:
    """Gives a file the mode of any new file (safetensors writes 0600), and flushes it to disk."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
    _fsync(path)


def _finish_folder(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            _finish_file(path)
        else:
            _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(temporary: Path, output: Path, aside: Path | None) -> None:
    """Renames `temporary` to `output`. What was there goes to `aside` first and comes back on failure."""
    try:
        if aside is not None and output.exists():
            os.rename(output, aside)
        os.rename(temporary, output)
    except BaseException:
        if aside is not None and aside.exists() and not output.exists():
            os.rename(aside, output)
        raise
    _fsync(output.parent)
