"""What an interrupted run has finished, beside its output, so that the same command can go on with --resume."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UserError, one_line
from ..formats.dense import atomic_file, user_errors

_FACTS, _SHA256 = "fwanda", "sha256"  # the entries of a file's metadata
_OWN = re.compile(r"lock|[a-z]+(-\d+)?\.safetensors|\..+\.tmp")  # names of what a run writes
_RUN = "run"  # the stage that says which run it is


class RunState:
    """The finished stages of a run, each a file that appears whole or not at all.

    They lie in the hidden folder `.NAME.resume` beside the output NAME, which one process at a time may use. Without a
    folder nothing is kept.

    Args:
        output: the folder that the run will write; None keeps nothing.
        resume: go on with what is there; otherwise it is removed.

    Attributes:
        notes: the warnings so far; kept with each stage, and brought back with it.
        resumed: whether anything was there to go on with.

    Raises:
        UserError: another process writes the same output, or the folder cannot be written.
    """

    def __init__(self, output: str | Path | None = None, *, resume: bool = False):
        self.notes: list[str] = []
        self.folder: Path | None = None
        self.resumed = False
        if output is None:
            return
        output = Path(output).resolve()
        self.folder = output.with_name(f".{output.name}.resume")
        found = _own_files(self.folder)
        with user_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.folder / "lock", "w")  # noqa: SIM115  held until the process ends
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"another process is writing {output}; wait for it, or choose another --output"
                ) from error
            if not resume:
                for path in found:
                    path.unlink(missing_ok=True)
            self.resumed = resume and bool(found)

    def __enter__(self) -> RunState:
        return self

    def __exit__(self, _kind, error: BaseException | None, *_) -> None:
        """Leave the finished stages for --resume; a folder without any goes."""
        if self.folder is None:
            return
        if all(path == self._path(_RUN) for path in self.folder.glob("*.safetensors")):
            self.remove()
        elif isinstance(error, KeyboardInterrupt):
            error.args = ("the same command with --resume goes on",)

    def identify(self, facts: dict) -> None:
        """Say which run this is, before anything is recalled.

        Args:
            facts: JSON values that must be the same for the results to be.

        Raises:
            UserError: the folder is of a run with other facts, naming the first that differs.
        """
        facts = json.loads(json.dumps(facts))
        kept = self.recall(_RUN)
        if kept is None:
            return self.keep(_RUN, {}, facts)
        for key in facts.keys() | kept[1].keys():
            if facts.get(key) != kept[1].get(key):
                raise UserError(
                    f"the interrupted run had {key} {_short(kept[1].get(key))}, this one has {_short(facts.get(key))}; "
                    f"give the same command, or leave --resume out to start afresh"
                )

    def recall(self, stage: str) -> tuple[dict[str, Tensor], dict] | None:
        """Tensors and facts of a stage that was kept, on the CPU; None if it was not.

        Raises:
            UserError: its file is broken.
        """
        if self.folder is None or not (path := self._path(stage)).is_file():
            return None
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                text, sha256 = ((file.metadata() or {})[key] for key in (_FACTS, _SHA256))
                tensors = {key: file.get_tensor(key) for key in file.keys()}
            if sha256 != _hash(tensors, text):
                raise ValueError("it is not as it was written")
            facts = json.loads(text)
            if facts["stage"] != stage:
                raise ValueError(f"it is of the stage {facts['stage']}")
            self.notes += [note for note in facts["notes"] if note not in self.notes]
            return tensors, facts["facts"]
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{path} is broken ({one_line(error)}); leave --resume out to start afresh") from error

    def keep(self, stage: str, tensors: Mapping[str, Tensor], facts: object = None) -> None:
        """Keep a stage: its tensors, and facts that JSON can hold.

        Raises:
            UserError: the disk is full, or the folder is gone or cannot be written.
        """
        if self.folder is None:
            return
        from safetensors.torch import save_file

        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        text = json.dumps({"stage": stage, "facts": facts, "notes": self.notes})
        with atomic_file(self._path(stage)) as temporary:
            save_file(whole, temporary, metadata={_FACTS: text, _SHA256: _hash(whole, text)})

    def forget(self, stage: str) -> None:
        """Remove a stage that a later one replaces."""
        if self.folder is not None:
            self._path(stage).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder: the run is finished."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.close()
            self.folder = None

    def _path(self, stage: str) -> Path:
        return self.folder / f"{stage}.safetensors"


def _hash(tensors: Mapping[str, Tensor], facts: str) -> str:
    """sha256 of a stage: names, dtypes, shapes and bytes of the tensors, and the facts."""
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _own_files(folder: Path) -> list[Path]:
    """What runs left in a state folder, but for the lock; nothing if there is no such folder.

    Raises:
        UserError: it is a link or a file, or holds what no run wrote: nothing in it is touched then.
    """
    if not os.path.lexists(folder):
        return []
    if folder.is_symlink() or not folder.is_dir():
        raise UserError(f"{folder} is not the folder of an interrupted run; move it away, or choose another --output")
    paths = list(folder.iterdir())
    for path in paths:
        if not _OWN.fullmatch(path.name) or path.is_symlink() or not path.is_file():
            raise UserError(f"{path} is not of an interrupted run; move it away, or choose another --output")
    return [path for path in paths if path.name != "lock"]


def _short(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
