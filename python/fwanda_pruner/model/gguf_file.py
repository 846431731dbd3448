"""One pass over a GGUF file: checks its lengths and counts, and keeps its metadata and tensors.

transformers asks the package gguf for a reader of the same file up to four times, and that reader takes seconds for a
vocabulary. `read_gguf()` reads a file once, and `served()` hands the result to transformers instead. Lengths and counts
are checked against the size of the file, so that a damaged file can neither run for ever nor take all memory.
"""

import contextlib
import functools
import math
import mmap
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quant_shape_to_byte_shape

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # type -> struct
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_PLAIN = {"F64": "f8", "F32": "f4", "F16": "f2", "I8": "i1", "I16": "i2", "I32": "i4", "I64": "i8"}  # others are blocks
_SERVING = threading.Lock()


class Field(NamedTuple):
    """One entry of the metadata, as in the package gguf.

    Attributes:
        parts: the values: bytes for a string, else a tuple of one number.
        data: indices of the values in `parts`.
        types: [type of the value], or [9, type of the elements] for an array that is not empty.
    """

    parts: list
    data: range
    types: list[int]


class GgufTensor(NamedTuple):
    """One tensor, as in the package gguf: `data` are its numbers, or the bytes of its blocks if it is quantised."""

    name: str
    tensor_type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: numpy.ndarray


class GgufFile(NamedTuple):
    """What a file holds.

    Attributes:
        path: of the file.
        fields: key -> entry of the metadata.
        tensors: all tensors; their data are a map of the file, read only when used.
    """

    path: Path
    fields: dict[str, Field]
    tensors: list[GgufTensor]

    @property
    def weights(self) -> int:
        """Number of weights in all tensors."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    def fits(self, config) -> bool:
        """Whether each size and count in a model's configuration is small enough for the tensors of the file."""
        most = max(len(self.tensors), *(size for tensor in self.tensors for size in tensor.shape), 0)
        sizes = [
            value
            for key, value in config.get_text_config().to_dict().items()
            if isinstance(value, int) and (key.startswith(("num_", "n_")) or key.endswith(("_size", "_dim", "_layers")))
        ]
        return all(size <= most for size in sizes)


def read_gguf(path: Path) -> GgufFile:
    """Read all metadata and tensor descriptions of a GGUF file; its weights are mapped.

    Raises:
        ValueError: the file is not little-endian GGUF of version 2 or 3, it is truncated, or a length, count or type in
            it is wrong.
    """
    with path.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    reader = _Reader(content)
    version, tensors, entries = reader.numbers("IQQ")
    if version not in (2, 3):
        raise ValueError("it is big-endian" if version & 0xFFFF == 0 else f"version {version} is unknown")
    fields: dict[str, Field] = {}
    for _ in range(reader.check_count(entries)):
        key = reader.string().decode()
        if key in fields:
            raise ValueError(f"it holds {key} twice")
        fields[key] = reader.field(*reader.numbers("I"))
    described = [reader.tensor() for _ in range(reader.check_count(tensors))]
    if len({name for name, *_ in described}) < tensors:
        raise ValueError("two tensors have the same name")
    alignment = fields["general.alignment"].parts[0][0] if "general.alignment" in fields else 32
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"alignment must be a power of two, got {alignment}")
    start = -(-reader.at // alignment) * alignment
    return GgufFile(path, fields, [_mapped(content, start, *described_tensor) for described_tensor in described])


@contextlib.contextmanager
def served(file: GgufFile) -> Iterator[None]:
    """Inside the block, the package gguf answers for this file with what was read, and computes each name map once."""
    original, name_map = gguf.GGUFReader, gguf.get_tensor_name_map

    def reader(path, *args, **kwargs):
        return file if os.path.samefile(path, file.path) else original(path, *args, **kwargs)

    with _SERVING:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, functools.cache(name_map)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = original, name_map


def _mapped(content: mmap.mmap, start: int, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
    """The tensor whose data begin `offset` bytes behind `start`."""
    kind = GGMLQuantizationType(kind)
    block, size = GGML_QUANT_SIZES[kind]
    dtype = _PLAIN.get(kind.name, "u1")
    stored = shape if kind.name in _PLAIN else quant_shape_to_byte_shape(shape, kind)
    if start + offset + math.prod(shape) // block * size > len(content):
        raise ValueError("it is truncated")
    data = numpy.frombuffer(content, f"<{dtype}", math.prod(stored), start + offset) if math.prod(stored) else []
    return GgufTensor(name, kind, shape, numpy.asarray(data, f"<{dtype}").reshape(stored))


class _Reader:
    """Reads the front of a file. Its position is `at`; the first four bytes are known."""

    def __init__(self, content: mmap.mmap):
        self._content, self.at = content, 4

    def numbers(self, form: str) -> tuple:
        """Numbers by their letters in the module struct."""
        size = struct.calcsize(f"<{form}")
        return struct.unpack(f"<{form}", self._take(size))

    def check_count(self, count: int) -> int:
        """A count of things that take at least a byte each, if the file is large enough for them."""
        if count > len(self._content):
            raise ValueError(f"a count of {count} in it is larger than the file")
        return count

    def string(self) -> bytes:
        return self._take(*self.numbers("Q"))

    def field(self, kind: int) -> Field:
        """The value of an entry of the metadata."""
        if kind == _ARRAY:
            inner, count = self.numbers("IQ")
            parts = self._values(inner, self.check_count(count))
            return Field(parts, range(count), [kind, inner] if count else [kind])
        return Field(self._values(kind, 1), range(1), [kind])

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape in the order of torch, type and offset of the next tensor description."""
        name, (dimensions,) = self.string().decode(), self.numbers("I")
        if dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor has {dimensions} dimensions, expected at most {_MOST_DIMENSIONS}")
        shape = tuple(reversed(self.numbers(f"{dimensions}Q")))
        return name, shape, *self.numbers("IQ")

    def _values(self, kind: int, count: int) -> list:
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind in _SCALARS:
            return [(value,) for value in self.numbers(f"{count}{_SCALARS[kind]}")]
        raise ValueError(
            "arrays of arrays are not supported" if kind == _ARRAY else f"a value of type {kind} is unknown"
        )

    def _take(self, count: int) -> bytes:
        if count > len(self._content):
            raise ValueError(f"a length of {count} bytes in it is larger than the file")
        taken = self._content[self.at : self.at + count]
        if len(taken) < count:
            raise ValueError("it is truncated")
        self.at += count
        return taken
