"""Cubins on disk for later processes.

The folder is `kernels` in FWANDA_CACHE, else in XDG_CACHE_HOME/fwanda, else in ~/.cache/fwanda. It can be deleted at
any time. Processes that start at the same time may all compile; each file appears complete or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import time
from pathlib import Path

from . import compile as compiling

_LEFTOVER_SECONDS = 24 * 3600  # no process writes for so long: an older file was left by a killed one


def folder() -> Path | None:
    """The folder, which need not exist; None if there is no home folder."""
    if chosen := os.environ.get("FWANDA_CACHE"):
        return Path(os.path.expanduser(chosen)).absolute() / "kernels"
    if os.path.isabs(shared := os.environ.get("XDG_CACHE_HOME", "")):
        return Path(shared, "fwanda", "kernels")
    with contextlib.suppress(KeyError):
        home = os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
        if os.path.isabs(home):
            return Path(home, ".cache", "fwanda", "kernels")
    return None


def load(family: str, variant: str, arch: int, by: str) -> compiling.Cubin | None:
    """The cubin of a module by this compiler, if the cache holds it unharmed."""
    place = folder()
    return place and compiling.read(place / _name(family, variant, arch, by), _key(family, variant, arch, by))


def store(family: str, variant: str, arch: int, cubin: compiling.Cubin) -> str | None:
    """Keep a cubin. Returns None, or a few words that say why it cannot be kept."""
    place = folder()
    if place is None:
        return "there is no home folder; set FWANDA_CACHE to a folder"
    try:
        place.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(place)
        key = _key(family, variant, arch, cubin.by)
        compiling.write(place / _name(family, variant, arch, cubin.by), cubin, key)
    except OSError as error:
        return f"{place} cannot be written: {error.strerror or error}; set FWANDA_CACHE to another folder"
    return None


def _key(family: str, variant: str, arch: int, by: str) -> str:
    return hashlib.sha256(f"{compiling.digest(family, variant, arch)} {by}".encode()).hexdigest()


def _name(family: str, variant: str, arch: int, by: str) -> str:
    return f"{family}-{variant}-sm_{arch}-{_key(family, variant, arch, by)[:16]}.cubin"


def _remove_leftovers(place: Path) -> None:
    for path in place.glob(f"{compiling.TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _LEFTOVER_SECONDS:
                path.unlink()
