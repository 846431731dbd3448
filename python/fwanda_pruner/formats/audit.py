"""Where a saved model keeps its matrices, and how many zeros the files hold."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import UserError, one_line, show

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Part(NamedTuple):
    """A tensor in the files, or one slice of it: a whole matrix, or a part of one.

    Attributes:
        tensor: name of the tensor.
        index: the part is `tensor[index]`, such as one expert or some rows; None is the whole tensor.
    """

    tensor: str
    index: int | slice | None = None


class ZeroCount(NamedTuple):
    """Zeros of a matrix (-0.0 is a zero), and the number of its weights."""

    zeros: int
    weights: int


class WrongFiles(RuntimeError):
    """The files of a folder do not hold what they should."""


class WrongZeros(WrongFiles):
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
    counts = {name: ZeroCount(0, 0) for name in names}
    for name, values in read_parts(folder, {name: (parts or {}).get(name, [Part(f"{name}.weight")]) for name in names}):
        zeros, weights = counts[name]
        zeros += values.numel() - int(torch.count_nonzero(values))
        counts[name] = ZeroCount(zeros, weights + values.numel())
    return counts


def read_parts(folder: str | Path, parts: Mapping[str, Sequence[Part]]) -> Iterator[tuple[str, Tensor]]:
    """Yields the parts of matrices with their names, one file after the other. Errors as audit()."""
    files, by_file = stored_tensors(folder), defaultdict(list)
    for name, part in ((name, part) for name, some in parts.items() for part in some):
        if part.tensor not in files:
            raise UserError(f"{folder}: no tensor {part.tensor} in the saved files")
        by_file[files[part.tensor]].append((name, part))
    for file, owned in by_file.items():
        for (name, _), values in zip(owned, _read(file, [part for _, part in owned]), strict=True):
            yield name, values


def _read(file: Path, parts: Iterable[Part]) -> Iterator[Tensor]:
    """The values of parts of a file, one after the other."""
    try:
        with safe_open(file, framework="pt") as tensors:
            for tensor, index in parts:
                values = tensors.get_tensor(tensor) if index is None else tensors.get_slice(tensor)[index]
                if not values.is_floating_point() or values.dtype.itemsize < 2:
                    raise UserError(
                        f"{file}: {tensor} must be floats of 16 bits or more, got "
                        f"{str(values.dtype).removeprefix('torch.')}; write the folder again"
                    )
                yield values
    except (OSError, SafetensorError, IndexError) as error:
        raise UserError(f"{file}: cannot be read: {one_line(error)}") from error


def stored_tensors(folder: str | Path) -> dict[str, Path]:
    """List the tensors of a saved model: name -> the file that holds it.

    Raises:
        UserError: the folder has no list of tensors, the list is unreadable, or a file or tensor of it is missing.
    """
    folder = Path(folder)
    single, index = folder / _SINGLE, folder / _INDEX
    if not single.is_file() and not index.is_file():
        raise UserError(f"{folder} holds no {_SINGLE} and no {_INDEX}; give the folder of a saved model")
    try:
        if single.is_file():
            return dict.fromkeys(_keys(single), single)
        return _indexed(index)
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise UserError(f"{folder}: its list of tensors cannot be read: {one_line(error)}") from error


def _indexed(index: Path) -> dict[str, Path]:
    """The tensors that an index lists, and their files.

    Raises:
        ValueError: it is no index, or lists what is not there.
    """
    listed = json.loads(index.read_text(encoding="utf-8"))
    files = listed.get("weight_map") if isinstance(listed, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ValueError(f"{index.name} has no weight_map from each tensor to its file")
    held = {}
    for name, file in files.items():
        path = index.parent / file
        if file not in held:
            if not path.is_file():
                raise ValueError(f"{index.name} lists {show(file)}, which is not there")
            held[file] = _keys(path)
        if name not in held[file]:
            raise ValueError(f"{index.name} lists {show(name)} in {show(file)}, which does not hold it")
    return {name: index.parent / file for name, file in files.items()}


def _keys(file: Path) -> set[str]:
    with safe_open(file, framework="pt") as tensors:
        return set(tensors.keys())
