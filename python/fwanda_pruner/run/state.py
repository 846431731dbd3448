"""The finished stages of a run, kept on disk until it ends, so that --resume can continue an interrupted run."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from ..engine.ranks import Ranks
from ..errors import UserError, one_line
from ..formats.files import atomic_file, resolved_output, user_errors
from ..setting_checks import expect_flags, expect_path

_FACTS, _SHA256 = "fwanda", "sha256"  # keys in the metadata of a stage file
_OWN_FILES = re.compile(r"lock|[a-z_]+(-[a-z]+|-\d+)?\.safetensors")  # that a run writes here
_OWN_FOLDERS = re.compile(r"\..+\.tmp")  # of files that were being written
_RUN = "run"  # a stage without tensors, whose facts identify the run


class RunState:
    """Keeps the finished stages of a run on disk, and gives them back to a run that resumes it.

    Each stage is one file, which appears whole or not at all. The files lie in the hidden folder `.NAME.resume` beside
    the output NAME. Only one process at a time may use this folder: where several ranks share a run, the first keeps
    stages, and this class does nothing on the others.

    A stage has tensors and facts. Facts are any JSON value.

    Args:
        output: the folder that the run will write. None keeps nothing.
        resume: go on with the stages of an interrupted run.
        overwrite: without `resume`, remove the stages of an interrupted run.

    Attributes:
        notes: the warnings of the run so far. Each stage keeps them, and brings them back.
        resumed: whether the folder held stages of an interrupted run.
        output: the folder that the run will write, or None.
        removed: number of finished stages of an interrupted run that were removed.

    Raises:
        UserError: another process writes the same output, or the folder cannot be written; or there are finished
            stages, and neither `resume` nor `overwrite` says what becomes of them.
    """

    def __init__(self, output: str | Path | None = None, *, resume: bool = False, overwrite: bool = False):
        self.notes: list[str] = []
        self.output: Path | None = None
        self.folder: Path | None = None
        self.resumed = False
        self.removed = 0
        expect_flags(resume=resume, overwrite=overwrite)
        if output is not None:
            expect_path("output", output)
        if output is None or not Ranks.current().first:
            return
        self.output = output = resolved_output(output)
        if not output.name:
            raise UserError(f"output {output} cannot be replaced; choose a folder inside it")
        self.folder = output.with_name(f".{output.name}.resume")
        with user_errors(output):
            paths = _own_files(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                self._lock = open(self.folder / "lock", "w")  # noqa: SIM115  stays open until the end
            except OSError:
                with suppress(OSError):  # it holds files of an interrupted run
                    self.folder.rmdir()
                raise
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"another process is writing {output}; wait for it, or choose another --output"
                ) from error
            for path in paths:
                if path.is_dir():  # a killed run was writing a file
                    shutil.rmtree(path, ignore_errors=True)
            paths = [path for path in paths if path.exists()]
            if not resume:
                self._start_over(paths, overwrite)
            self.resumed = resume and bool(paths)

    def _start_over(self, paths: list[Path], overwrite: bool) -> None:
        """Removes the files that an earlier run left, unless they hold finished work that nobody gave up."""
        self.removed = sum(path.suffix == ".safetensors" and path != self._path(_RUN) for path in paths)
        if self.removed and not overwrite:
            self._lock.close()
            raise UserError(
                f"an interrupted run left finished work in {self.folder}; go on with it by --resume, or start over by "
                f"--overwrite, which removes it"
            )
        for path in paths:
            path.unlink(missing_ok=True)

    def __enter__(self) -> RunState:
        return self

    def __exit__(self, _kind, error: BaseException | None, *_) -> None:
        """Leaves the finished stages for --resume, and removes a folder that has none. Others may then write it."""
        if self.folder is None:
            return
        saved = any(path != self._path(_RUN) for path in self.folder.glob("*.safetensors"))
        if saved:
            self._lock.close()
        else:
            self.remove()
        if isinstance(error, KeyboardInterrupt):
            error.args = ("continue with the same command and --resume" if saved else "no stage was finished yet",)

    def identify(self, facts: dict) -> None:
        """Records which run this is, or checks that it is the interrupted one. Call it before recall().

        Args:
            facts: all that the results depend on, as JSON values by name.

        Raises:
            UserError: the interrupted run had other facts; the message names one that differs.
        """
        facts = json.loads(json.dumps(facts))
        interrupted = self.recall(_RUN)
        if interrupted is None:
            return self.keep(_RUN, {}, facts)
        _, before = interrupted
        for key in facts.keys() | before.keys():
            if facts.get(key) != before.get(key):
                raise UserError(
                    f"the interrupted run had {key} {_short(before.get(key))}, this one has {_short(facts.get(key))}; "
                    f"give the same command, or start over by --overwrite"
                )

    def recall(self, stage: str) -> tuple[dict[str, Tensor], dict] | None:
        """Reads a stage: its tensors, on the CPU, and its facts. None if it was not kept.

        Raises:
            UserError: the file of the stage is broken.
        """
        if self.folder is None or not (path := self._path(stage)).is_file():
            return None
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                text, sha256 = ((file.metadata() or {})[key] for key in (_FACTS, _SHA256))
                tensors = {key: file.get_tensor(key) for key in file.keys()}
            if sha256 != _hash(tensors, text):
                raise ValueError("its checksum differs")
            facts = json.loads(text)
            if facts["stage"] != stage:
                raise ValueError(f"it holds the stage {facts['stage']}")
            self.notes += [note for note in facts["notes"] if note not in self.notes]
            return tensors, facts["facts"]
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{path} is broken ({one_line(error)}); start over by --overwrite") from error

    def keep(self, stage: str, tensors: Mapping[str, Tensor], facts: object = None) -> None:
        """Writes a stage. An existing stage of that name is replaced.

        Raises:
            UserError: the disk is full, or the folder is gone or not writable.
        """
        if self.folder is None:
            return
        from safetensors.torch import save_file

        # a tensor that views another one is written whole: safetensors refuses shared memory
        on_cpu = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        text = json.dumps({"stage": stage, "facts": facts, "notes": self.notes})
        with atomic_file(self._path(stage)) as temporary:
            save_file(on_cpu, temporary, metadata={_FACTS: text, _SHA256: _hash(on_cpu, text)})

    def forget_parts(self, stage: str) -> None:
        """Removes the parts of a stage, named `stage-...`, which the stage itself replaces."""
        if self.folder is not None:
            for path in self.folder.glob(f"{stage}-*.safetensors"):
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes all stages and the folder. Call it when the run is finished."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.close()
            self.folder = None

    def _path(self, stage: str) -> Path:
        return self.folder / f"{stage}.safetensors"


def _hash(tensors: Mapping[str, Tensor], facts: str) -> str:
    """sha256 of the names, dtypes, shapes and bytes of the tensors, and of the text of the facts."""
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _own_files(folder: Path) -> list[Path]:
    """The files and folders that earlier runs left in a folder, without the lock; none if there is no such folder.

    Raises:
        UserError: the folder is a link or a file, or holds files that no run writes. Nothing in it is changed.
    """
    if not os.path.lexists(folder):
        return []
    if folder.is_symlink() or not folder.is_dir():
        raise UserError(f"{folder} is not a folder of an interrupted run; move it away, or choose another --output")
    paths = list(folder.iterdir())
    for path in paths:
        own = _OWN_FILES.fullmatch(path.name) and path.is_file() or _OWN_FOLDERS.fullmatch(path.name) and path.is_dir()
        if not own or path.is_symlink():
            raise UserError(f"{path} was not written by an interrupted run; move it away, or choose another --output")
    return [path for path in paths if path.name != "lock"]


def _short(value) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
