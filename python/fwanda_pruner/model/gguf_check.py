"""A check of a GGUF file before a library reads it.

The libraries trust the lengths and counts in a file. In a truncated or damaged file these can make them run for ever or
take all memory.
"""

import math
from pathlib import Path
from typing import BinaryIO, NamedTuple

_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # by type of value
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS, _MOST_NESTING = 4, 3
_WEIGHTS_IN_A_BYTE = 8  # more than any type holds: the smallest takes 1.6 bits a weight


class GgufShape(NamedTuple):
    """What a file holds.

    Attributes:
        tensors: number of tensors.
        largest: the largest dimension of all tensors.
        weights: number of weights in all tensors.
    """

    tensors: int
    largest: int
    weights: int

    def fits(self, config) -> bool:
        """Whether each size and count in a model's configuration is small enough for the tensors of the file."""
        most = max(self.tensors, self.largest)
        sizes = [
            value
            for key, value in config.get_text_config().to_dict().items()
            if isinstance(value, int) and (key.startswith(("num_", "n_")) or key.endswith(("_size", "_dim", "_layers")))
        ]
        return all(size <= most for size in sizes)


def read_shape(file: Path) -> GgufShape:
    """Read all metadata and tensor descriptions of a GGUF file, but no weights.

    Raises:
        ValueError: the file is not GGUF of version 2 or 3, it is truncated, or a length or count in it is too large.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = stream.read(4)
        order = "little" if version[2:] == b"\0\0" else "big"
        if int.from_bytes(version, order) not in (2, 3):
            raise ValueError(f"version {int.from_bytes(version, order)} is unknown")
        reader = _Reader(stream, size, order)
        tensors, entries = reader.number(8), reader.number(8)
        for _ in range(reader.check_count(entries)):
            reader.skip_string()
            reader.skip_value(reader.number(4))
        shapes = [reader.tensor_shape() for _ in range(reader.check_count(tensors))]
    weights = sum(map(math.prod, shapes))
    if weights > _WEIGHTS_IN_A_BYTE * size:
        raise ValueError(f"{size} bytes cannot hold its {weights} weights")
    return GgufShape(tensors, max((max(shape, default=0) for shape in shapes), default=0), weights)


class _Reader:
    """Reads a file of `size` bytes from front to back, with numbers in one byte order."""

    def __init__(self, stream: BinaryIO, size: int, order: str):
        self._stream, self._size, self._order = stream, size, order

    def number(self, count: int) -> int:
        """An unsigned integer of `count` bytes."""
        return int.from_bytes(self._take(count), self._order)

    def check_count(self, count: int) -> int:
        """A count of things that take at least a byte each, if the file is large enough for them."""
        if count > self._size:
            raise ValueError(f"a count of {count} in it is larger than the file")
        return count

    def skip_string(self) -> None:
        self._take(self.number(8))

    def skip_value(self, kind: int, nesting: int = 0) -> None:
        if kind in _SCALAR_BYTES:
            self._take(_SCALAR_BYTES[kind])
        elif kind == _STRING:
            self.skip_string()
        elif kind == _ARRAY and nesting < _MOST_NESTING:
            inner, count = self.number(4), self.check_count(self.number(8))
            if inner in _SCALAR_BYTES:
                self._take(count * _SCALAR_BYTES[inner])
            else:
                for _ in range(count):
                    self.skip_value(inner, nesting + 1)
        else:
            raise ValueError(f"a value of type {kind} is unknown")

    def tensor_shape(self) -> list[int]:
        """Dimensions of the next tensor description."""
        self.skip_string()  # name
        dimensions = self.number(4)
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor has {dimensions} dimensions, expected at most {_MOST_DIMENSIONS}")
        shape = [self.number(8) for _ in range(dimensions)]
        self._take(4 + 8)  # type and offset
        return shape

    def _take(self, count: int) -> bytes:
        if count > self._size:
            raise ValueError(f"a length of {count} bytes in it is larger than the file")
        taken = self._stream.read(count)
        if len(taken) < count:
            raise ValueError("it is truncated")
        return taken
