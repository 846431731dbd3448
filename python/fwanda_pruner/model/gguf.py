"""A look at a GGUF file before a library reads it: cut off or with numbers out of bounds, it could take for ever."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # kind -> bytes
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS, _MOST_NESTING = 4, 3
_WEIGHTS_IN_A_BYTE = 8  # the smallest types take 1.6 bits


class GgufShape(NamedTuple):
    """How much a file holds.

    Attributes:
        tensors: number of tensors.
        largest: their largest dimension.
        weights: their elements in all.
    """

    tensors: int
    largest: int
    weights: int

    def fits(self, config) -> bool:
        """Whether no size or number in a model's configuration is beyond what the file could fill."""
        most = max(self.tensors, self.largest)
        sizes = [
            value
            for key, value in config.get_text_config().to_dict().items()
            if isinstance(value, int) and (key.startswith(("num_", "n_")) or key.endswith(("_size", "_dim", "_layers")))
        ]
        return all(size <= most for size in sizes)


def read_shape(file: Path) -> GgufShape:
    """Walk over all metadata and tensor descriptions of a GGUF file.

    Raises:
        ValueError: it is no GGUF file of version 2 or 3, it is cut off, or a length in it is beyond its end.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = stream.read(4)
        order = "little" if version[2:] == b"\0\0" else "big"
        if int.from_bytes(version, order) not in (2, 3):
            raise ValueError(f"version {int.from_bytes(version, order)} is unknown")

        def number(bytes_: int) -> int:
            return int.from_bytes(_take(stream, bytes_, size), order)

        tensors, entries = number(8), number(8)
        for _ in range(_bounded(entries, size)):
            _take(stream, number(8), size)
            _skip_value(stream, number, number(4), size, nesting=0)
        shapes = [_tensor_shape(stream, number, size) for _ in range(_bounded(tensors, size))]
    weights = sum(map(math.prod, shapes))
    if weights > _WEIGHTS_IN_A_BYTE * size:
        raise ValueError(f"{size} bytes cannot hold its {weights} weights")
    return GgufShape(tensors, max((max(shape, default=0) for shape in shapes), default=0), weights)


def _take(stream: BinaryIO, count: int, size: int) -> bytes:
    if count > size:
        raise ValueError("a length in it is beyond its end")
    taken = stream.read(count)
    if len(taken) < count:
        raise ValueError("it is cut off")
    return taken


def _bounded(count: int, size: int) -> int:
    if count > size:
        raise ValueError("a count in it is beyond its size")
    return count


def _skip_value(stream: BinaryIO, number: Callable[[int], int], kind: int, size: int, *, nesting: int) -> None:
    if kind in _SCALARS:
        _take(stream, _SCALARS[kind], size)
    elif kind == _STRING:
        _take(stream, number(8), size)
    elif kind == _ARRAY and nesting < _MOST_NESTING:
        inner, count = number(4), _bounded(number(8), size)
        if inner in _SCALARS:
            _take(stream, count * _SCALARS[inner], size)
        else:
            for _ in range(count):
                _skip_value(stream, number, inner, size, nesting=nesting + 1)
    else:
        raise ValueError(f"a value of kind {kind} is unknown")


def _tensor_shape(stream: BinaryIO, number: Callable[[int], int], size: int) -> list[int]:
    _take(stream, number(8), size)
    dimensions = number(4)
    if dimensions > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor of {dimensions} dimensions is unknown")
    shape = [number(8) for _ in range(dimensions)]
    number(4), number(8)  # its type and offset
    return shape
