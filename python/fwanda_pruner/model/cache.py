"""Folders that this package keeps for later runs: named by a key, complete or absent, checked whenever they are used.

The cache is the folder FWANDA_CACHE, else XDG_CACHE_HOME/fwanda, else ~/.cache/fwanda. It can be deleted at any time.
"""

import contextlib
import hashlib
import json
import os
import pwd
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import one_line

_SUMS = "sha256.json"  # name of each file in a kept folder -> sha256 of its content
_TEMPORARY = ".tmp-"
_LEFTOVER_SECONDS = 24 * 3600  # nobody writes one folder for longer; what is older was left by a killed process


class NotKept(Exception):
    """The cache cannot keep a folder; the text says why and what to do, in one line."""


def home_folder() -> Path | None:
    """The home folder of the user; None without HOME and without an entry in the list of users."""
    with contextlib.suppress(KeyError):
        home = os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
        if os.path.isabs(home):
            return Path(home)
    return None


def cache_folder() -> Path:
    """The folder of the cache, which need not exist.

    Raises:
        NotKept: there is no home folder, and FWANDA_CACHE is not set.
    """
    if chosen := os.environ.get("FWANDA_CACHE"):
        return Path(os.path.expanduser(chosen)).absolute()
    if os.path.isabs(shared := os.environ.get("XDG_CACHE_HOME", "")):
        return Path(shared, "fwanda")
    if home := home_folder():
        return home / ".cache" / "fwanda"
    raise NotKept("there is no home folder; set FWANDA_CACHE to a folder")


def kept_folder(key: str) -> Path | None:
    """The folder that was kept under a key, if all its files are as they were written; None if there is none.

    Raises:
        NotKept: the folder is there, but broken.
    """
    try:
        folder = cache_folder() / key
        if not os.path.isdir(folder):
            return None
        if json.loads((folder / _SUMS).read_text()) == _sums(folder):
            return folder
    except NotKept:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise NotKept(f"{folder} cannot be read ({error})") from None
    raise NotKept(f"{folder} has changed since it was written")


def keep_folder(key: str, write: Callable[[Path], None], needed_bytes: int) -> Path:
    """Fill a new folder and keep it under a key. A broken folder under the same key is replaced.

    Several processes may keep the same key at once: the first that is ready wins, and all get its folder.

    Args:
        key: a file name that says all that the content depends on.
        write: fills the empty folder that it gets.
        needed_bytes: what it will write, about. At least as much must stay free on the disk.

    Raises:
        NotKept: the cache cannot be written, or the disk is too small.
    """
    root = cache_folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        free = shutil.disk_usage(root).free
        if free < 2 * needed_bytes:
            raise NotKept(f"it needs {size_text(needed_bytes)} in {root}, where {size_text(free)} are free")
        with _temporary(root) as folder:
            write(folder)
            _finish(folder)
            with contextlib.suppress(NotKept):
                if found := kept_folder(key):
                    return found
            if (root / key).exists():
                os.rename(root / key, folder.with_name(f"{folder.name}-old"))
            os.rename(folder, root / key)
    except OSError as error:
        with contextlib.suppress(NotKept):
            if found := kept_folder(key):  # another process was faster
                return found
        reason = error.strerror or one_line(error, 200)
        raise NotKept(f"{root} cannot be written ({reason}); set FWANDA_CACHE to another folder") from None
    return root / key


def remove_folder(key: str) -> None:
    """Remove what is kept under a key, if that is possible."""
    with contextlib.suppress(NotKept):
        shutil.rmtree(cache_folder() / key, ignore_errors=True)


def describe_cache() -> str:
    """Where the cache is, what it holds, and how to clear it."""
    try:
        root = cache_folder()
    except NotKept as error:
        return f"none: {error}"
    parent = next(path for path in (root, *root.parents) if os.path.lexists(path))
    try:
        if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError
        sums = list(root.glob(f"*/{_SUMS}"))
        size = sum(file.stat().st_size for path in sums for file in path.parent.iterdir())
    except OSError:
        return f"{root} cannot be written; set FWANDA_CACHE to another folder to keep converted GGUF models"
    # FWANDA_CACHE may name a folder that holds other things too
    clear = f"the folders in it that hold {_SUMS}" if os.environ.get("FWANDA_CACHE") else "the folder"
    return f"{root} holds {size_text(size)}, converted GGUF models: {len(sums)}; to clear it, delete {clear}"


def size_text(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def file_sha256(path: Path) -> str:
    """SHA-256 of the content of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sums(folder: Path) -> dict[str, str]:
    return {path.name: file_sha256(path) for path in sorted(folder.iterdir()) if path.name != _SUMS}


@contextlib.contextmanager
def _temporary(root: Path) -> Iterator[Path]:
    folder = root / f"{_TEMPORARY}{secrets.token_hex(8)}"
    folder.mkdir()
    try:
        yield folder
    finally:
        for path in root.glob(f"{folder.name}*"):
            shutil.rmtree(path, ignore_errors=True)


def _finish(folder: Path) -> None:
    """Write the sums, and give the files the mode of any new file (safetensors writes 0600)."""
    (folder / _SUMS).write_text(json.dumps(_sums(folder)))
    mode = (folder / _SUMS).stat().st_mode
    for path in folder.iterdir():
        path.chmod(mode)


def _remove_leftovers(root: Path) -> None:
    for path in root.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
