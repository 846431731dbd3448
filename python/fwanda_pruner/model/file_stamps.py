"""Notices weight files that change during a run: transformers maps them, and reads a weight when it is first used."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from torch import nn

from ..errors import UserError

_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


class FileStamps:
    """Sizes and times of the weight files of a model, as they are now.

    Only a file that was written in place counts as changed. Most programs replace a file by a new one, which does no
    harm, because the old one stays mapped.

    Args:
        name: as in load_model(). Files of a model of the hub are not watched.
    """

    def __init__(self, name: str | Path):
        path, self._stamps = Path(name), {}
        with suppress(OSError, ValueError):  # what cannot be looked up is refused elsewhere
            files = [path] if path.is_file() else [file for pattern in _WEIGHTS for file in path.glob(pattern)]
            self._stamps = {file: os.stat(file) for file in files}

    def check(self, model: nn.Module | None = None) -> None:
        """Refuses files that were written since.

        Args:
            model: what was read from them; if all of it is on a GPU, nothing is refused.

        Raises:
            UserError: naming the first such file.
        """
        if model is not None and all(parameter.device.type != "cpu" for parameter in model.parameters()):
            return
        for file, before in self._stamps.items():
            try:
                now = os.stat(file)
            except OSError:  # it is gone; what was mapped stays
                continue
            same_file = (now.st_dev, now.st_ino) == (before.st_dev, before.st_ino)
            if same_file and (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
                raise UserError(f"{file} was changed while it was read; wait until it is complete, and run again")
