"""Where a saved model keeps its matrices, and how many zeros the files hold."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import UserError, one_line

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Part(NamedTuple):
    """A tensor in the files, or one slice of it: a whole matrix, or a part of one.

    Attributes:
        tensor: name of the tensor.
        index: the part is `tensor[index]`; None is the whole tensor.
    """

    tensor: str
    index: int | None = None


class ZeroCount(NamedTuple):
    """Zeros of a matrix (-0.0 is a zero), and the number of its weights."""

    zeros: int
    weights: int


class WrongZeros(RuntimeError):
    """A matrix in the files does not hold the zeros that it should.

    Args:
        name: module that owns the matrix.
        count: what the files hold.
        expected: what they should hold.
    """

    def __init__(self, name: str, count: ZeroCount, expected: ZeroCount):
        super().__init__(
            f"{name} holds {count.zeros} zeros in {count.weights} weights, expected {expected.zeros} in "
            f"{expected.weights}"
        )


def audit(
    folder: str | Path, names: Sequence[str], *, parts: Mapping[str, Sequence[Part]] | None = None
) -> dict[str, ZeroCount]:
    """Count the zeros of matrices in the safetensors files of a saved model, in one file or in shards.

    Args:
        folder: a Hugging Face model folder.
        names: modules that own the matrices. The matrix of a module is the tensor `name + ".weight"`.
        parts: name -> the parts of a matrix that the files hold in another way.

    Returns:
        name -> count, in the order of `names`.

    Raises:
        UserError: a file is missing or unreadable, or no file holds one of the tensors.
    """
    files, by_file = stored_tensors(folder), defaultdict(list)
    for name in names:
        for part in (parts or {}).get(name, [Part(f"{name}.weight")]):
            if part.tensor not in files:
                raise UserError(f"{folder}: no tensor {part.tensor} in the saved files")
            by_file[files[part.tensor]].append((name, part))
    counts = {name: ZeroCount(0, 0) for name in names}
    for file, owned in by_file.items():
        for (name, _), values in zip(owned, _read(file, [part for _, part in owned]), strict=True):
            zeros, weights = counts[name]
            zeros += values.numel() - int(torch.count_nonzero(values))
            counts[name] = ZeroCount(zeros, weights + values.numel())
    return counts


def _read(file: Path, parts: Iterable[Part]) -> Iterator[Tensor]:
    """The values of parts of a file, one after the other."""
    try:
        with safe_open(file, framework="pt") as tensors:
            for tensor, index in parts:
                yield tensors.get_tensor(tensor) if index is None else tensors.get_slice(tensor)[index]
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read: {one_line(error)}") from error


def stored_tensors(folder: str | Path) -> dict[str, Path]:
    """List the tensors of a saved model: name -> the file that holds it.

    Raises:
        UserError: the folder has no list of tensors, or the list is unreadable.
    """
    folder = Path(folder)
    single, index = folder / _SINGLE, folder / _INDEX
    try:
        if single.is_file():
            with safe_open(single, framework="pt") as tensors:
                files = dict.fromkeys(tensors.keys(), single.name)
        elif index.is_file():
            files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        else:
            raise UserError(f"{folder} holds no {_SINGLE} and no {_INDEX}; give the folder of a saved model")
    except (OSError, SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise UserError(f"{folder}: its list of tensors cannot be read: {one_line(error)}") from error
    return {name: folder / file for name, file in files.items()}
