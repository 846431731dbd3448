"""Packed weights: one bit for each weight and the values of the kept ones, in one buffer with a header.

docs/packed.md has the layout. In short: a header; the row order; one offset for each chunk; the chunks. A chunk is 16
rows of the order times 256 columns. Lane 4 g + t of 32 owns, of each 32 columns, columns 8 t to 8 t + 7 in rows g and
g + 8, as a tensor-core fragment needs them. A chunk holds its bits, 4 B for each lane and 64 columns, and then
its values: the words that all lanes have, interleaved so that each lane reads its own bank of shared memory; the
further words of each lane; and the last value of each lane with an odd count.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from .. import _checks as checks
from .._checks import BOOL
from .._dispatch import define

VERSION = 1
TILE_ROWS, CHUNK_COLUMNS, PAIR_COLUMNS, LANES = 16, 256, 64, 32
_MAGIC, _HEADER = b"FWPK", 64  # first bytes, and size of the header
_ALIGNED = 16  # bytes; every part starts at a multiple
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # the header holds the index in this list
_GROUP = 1 << 21  # weights that are packed or unpacked at once, which bounds the memory of temporaries


@dataclass(frozen=True)
class PackedHeader:
    """What the header of a packed weight says.

    Attributes:
        shape: (R, C) of the dense weight.
        dtype: of its values.
        sha256: of all bytes after the header, as 64 hexadecimal digits; "" if it was not read, as products need none.
        nbytes: of the packed weight; None if not known. Calls with a header compare it with the packed weight.

    Raises:
        ValueError: the shape is not two sizes, or the dtype is not bf16, fp16 or fp32.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    sha256: str
    nbytes: int | None = None

    def __post_init__(self):
        sizes = self.shape if isinstance(self.shape, tuple) else ()
        if len(sizes) != 2 or not all(isinstance(size, int) and 0 <= size < 1 << 31 for size in sizes):
            raise ValueError(
                f"PackedHeader: shape must be (R, C), two sizes below 2**31, got {checks.quoted(self.shape)}"
            )
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in _DTYPES:
            got = self.dtype if isinstance(self.dtype, torch.dtype) else checks.quoted(self.dtype)
            raise ValueError(f"PackedHeader: dtype must be one of {', '.join(map(str, _DTYPES))}, got {got}")


def pack_weight(weight: Tensor, mask: Tensor | None = None) -> Tensor:
    """Pack a pruned weight: the bits of its mask, and its kept values unchanged.

    Args:
        weight: [R, C] bf16|fp16|fp32; any values, NaN included.
        mask: [R, C] bool, True = kept. None keeps what is not +0.0. With a mask, a kept weight may be zero.

    Returns:
        [N] uint8 on the device of the weight, as docs/packed.md describes it.

    Raises:
        ValueError: a shape, dtype or device does not fit.

    N is about 0.135 + itemsize * density bytes a weight. Plain torch, in pieces of a few million weights.
    """
    op, (rows, cols) = "pack_weight", _shape_of("pack_weight", weight, mask)
    weight, sizes = weight.detach().resolve_neg(), _Sizes(rows, cols)
    kept, order = _kept_and_order(weight, mask, sizes)
    parts, lengths = [], [torch.zeros(1, dtype=torch.int64, device=weight.device)]
    for tile_rows in order.split(sizes.rows_at_once):
        data, ends = _pack_tiles(weight, kept, tile_rows.long(), sizes)
        parts.append(data)
        lengths.append(lengths[-1][-1] + ends)
    offsets = torch.cat(lengths)
    if int(offsets[-1]) >= 1 << 31:
        raise ValueError(f"{op}: weight [{rows}, {cols}] takes more than 32 GiB packed; split its rows")
    body = torch.cat([_padded_bytes(order), _padded_bytes(offsets.to(torch.int32)), *parts])
    return torch.cat([_header_bytes(rows, cols, weight.dtype, body).to(weight.device), body])


def packed_size(weight: Tensor, mask: Tensor | None = None) -> int:
    """Bytes that pack_weight() returns for a weight, without packing it; arguments and errors as there."""
    sizes = _Sizes(*_shape_of("packed_size", weight, mask))
    kept, order = _kept_and_order(weight.detach().resolve_neg(), mask, sizes)
    total = sizes.data_at
    for tile_rows in order.split(sizes.rows_at_once):
        rows = kept.new_zeros(len(tile_rows), sizes.chunks_of_tile * CHUNK_COLUMNS)
        rows[:, : sizes.cols] = kept[tile_rows.long().clamp(min=0)] & (tile_rows >= 0)[:, None]
        values = rows.view(len(rows) // TILE_ROWS, TILE_ROWS, sizes.chunks_of_tile, CHUNK_COLUMNS).sum((1, 3)).view(-1)
        total += (
            int(_chunk_units(sizes.bit_words(len(tile_rows) // TILE_ROWS, weight.device), values, weight).sum())
            * _ALIGNED
        )
    return total


def unpack_mask(packed: Tensor) -> Tensor:
    """Mask of a packed weight.

    Args:
        packed: [N] uint8, as pack_weight() returns it.

    Returns:
        [R, C] bool on the device of `packed`, True = kept.

    Raises:
        ValueError: as read_packed_header(); or, on the CPU, the bytes after the header have been altered.
    """
    rows, cols = read_packed_header(packed).shape
    return _unpack("unpack_mask", packed, rows, cols, None)


def read_packed_header(packed: Tensor) -> PackedHeader:
    """Read the header of a packed weight; on a GPU this waits for the device.

    Args:
        packed: [N] uint8.

    Raises:
        ValueError: it is no packed weight, has another version, or its length does not match its header.
    """
    op = "read_packed_header"
    checks.expect_dense(op, "packed", packed)
    checks.expect_values(op, "packed", packed)
    if packed.dim() != 1 or packed.dtype != torch.uint8:
        raise ValueError(f"{op}: packed must be [N] uint8 on {packed.device}, got {checks.describe_tensor(packed)}")
    head = bytes(packed[:_HEADER].tolist())
    if len(head) < _HEADER or head[:4] != _MAGIC:
        raise ValueError(f"{op}: packed must begin with a header of {_HEADER} bytes; this is no packed weight")
    version, code, reserved = (int.from_bytes(head[i : i + 4], "little") for i in (4, 8, 12))
    if version != VERSION:
        raise ValueError(f"{op}: packed must be of version {VERSION}, got version {version}; pack the weight again")
    rows, cols = (int.from_bytes(head[i : i + 8], "little") for i in (16, 24))
    if code >= len(_DTYPES) or reserved or rows >= 1 << 31 or cols >= 1 << 31:
        raise ValueError(f"{op}: packed has an unknown dtype or size in its header; it has been altered")
    sizes = _Sizes(rows, cols)
    needed = _HEADER + sizes.order_bytes + sizes.offset_bytes
    if len(packed) >= needed:
        end = sizes.offset_at + 4 * sizes.chunks
        needed += _ALIGNED * int.from_bytes(bytes(packed[end : end + 4].tolist()), "little")
    if len(packed) != needed:
        raise ValueError(f"{op}: packed must have {needed} bytes by its header, got {len(packed)}; it is incomplete")
    return PackedHeader((rows, cols), _DTYPES[code], head[32:].hex(), len(packed))


def check_packed(packed: Tensor) -> PackedHeader:
    """Compare a packed weight with the hash in its header, and its row order and offsets with its shape.

    Reads it on the host. With these checks, kernels write only where the result lies.

    Args:
        packed: [N] uint8, as pack_weight() returns it.

    Returns:
        Its header.

    Raises:
        ValueError: as read_packed_header(); a byte differs; or rows or chunks are where they cannot be.
    """
    header = read_packed_header(packed)
    if _sha256(packed[_HEADER:]).hex() != header.sha256:
        raise ValueError("check_packed: packed differs from the SHA-256 in its header; it has been altered")
    if not _parts_fit(packed, _Sizes(*header.shape)):
        raise ValueError("check_packed: packed has a row order or offsets that cannot be; it has been altered")
    return header


@define(
    "unpack_weight(Tensor packed, int rows, int columns, ScalarType dtype) -> Tensor",
    fake=lambda packed, rows, columns, dtype: packed.new_empty([rows, columns], dtype=dtype),
    sample=lambda i: (pack_weight(i.weight, i.mask), i.rows, i.cols, i.weight.dtype),
)
def _unpack_weight(packed: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return _unpack("unpack_weight", packed, rows, columns, dtype)


def unpack_weight(packed: Tensor, header: PackedHeader | None = None) -> Tensor:
    """Dense weight of a packed one: kept weights have their bits, removed ones are +0.0.

    Args:
        packed: [N] uint8, as pack_weight() returns it.
        header: what read_packed_header() or check_packed() returned for it; None reads it again. Only its size is
            compared, so that a call on a GPU does not wait.

    Returns:
        [R, C] in the dtype that was packed, contiguous, on the device of `packed`.

    Raises:
        ValueError: as read_packed_header(); or, on the CPU, the chunks or values do not fit the header, as of altered
            bytes or of another weight.
    """
    header = _header_of("unpack_weight", packed, header)
    return _unpack_weight(packed, *header.shape, header.dtype)


@define(
    "packed_linear(Tensor x, Tensor packed, Tensor? bias, int rows, int columns) -> Tensor",
    fake=lambda x, packed, bias, rows, columns: x.new_empty([x.shape[0], rows]),
    sample=lambda i: (i.x, pack_weight(i.weight, i.mask), i.weight[:, 0].contiguous(), i.rows, i.cols),
)
def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, rows: int, columns: int) -> Tensor:
    return linear(x, _unpack("packed_linear", packed, rows, columns, x.dtype), bias)


def packed_linear(
    x: Tensor, packed: Tensor, bias: Tensor | None = None, *, header: PackedHeader | None = None
) -> Tensor:
    """Linear layer x W^T + bias of a packed weight W.

    Args:
        x: [..., C] in the dtype of the weight; at least two dimensions.
        packed: [N] uint8, as pack_weight() returns it.
        bias: [R] in the dtype of `x`, or None.
        header: what read_packed_header() or check_packed() returned for `packed`; None reads it again, which takes
            longer than a small product, and on a GPU waits for the device. Only its size is compared.

    Returns:
        [..., R] in the dtype of `x`, under torch.autocast too.

    Raises:
        ValueError: a shape, dtype or device does not fit.

    The C++, CUDA and Triton kernels multiply up to 16 tokens from the packed bytes. They accumulate in fp32 in a fixed
    order and round once, after the bias is added. The order does not depend on the number of threads of a CPU, but in
    CUDA on the number of multiprocessors. For more tokens, and in plain torch, the weight is unpacked first. There is
    no derivative.
    """
    op = "packed_linear"
    header = _header_of(op, packed, header)
    rows, columns = header.shape
    if not checks.is_plain(x) or x.dim() < 2:
        checks.expect_tokens(op, x, None)
    if x.shape[-1] != columns or x.dtype != header.dtype or x.device != packed.device:
        expected = checks.describe(("...", columns), (header.dtype,), packed.device)
        raise ValueError(f"{op}: x must be {expected} like the packed weight, got {checks.describe_tensor(x)}")
    if bias is not None and not (
        checks.is_plain(bias) and bias.shape == (rows,) and bias.dtype == x.dtype and bias.device == x.device
    ):
        checks.expect(op, "bias", bias, (rows,), (x.dtype,), x)
    tokens = x.flatten(0, -2)
    return _packed_linear(tokens, packed, bias, rows, columns).view(*x.shape[:-1], rows)


def _header_of(op: str, packed: Tensor, header: PackedHeader | None) -> PackedHeader:
    if header is None:
        return read_packed_header(packed)
    if not checks.is_plain(packed):
        checks.expect_dense(op, "packed", packed)
    if packed.dim() != 1 or packed.dtype != torch.uint8:
        raise ValueError(f"{op}: packed must be [N] uint8 on {packed.device}, got {checks.describe_tensor(packed)}")
    if not isinstance(header, PackedHeader):
        raise ValueError(f"{op}: header must be what read_packed_header() returns, got {type(header).__name__}")
    if header.nbytes is not None and header.nbytes != packed.shape[0]:
        raise ValueError(
            f"{op}: header is of a packed weight of {header.nbytes} bytes, got one of {packed.shape[0]}; give its own "
            f"header"
        )
    return header


# the layout


class _Sizes:
    """Sizes of the parts of a packed [rows, cols] weight, in bytes where not said otherwise."""

    def __init__(self, rows: int, cols: int):
        self.rows, self.cols = rows, cols
        self.tiles = -(-rows // TILE_ROWS)
        self.chunks_of_tile = -(-cols // CHUNK_COLUMNS)
        self.chunks = self.tiles * self.chunks_of_tile
        self.order_bytes = 4 * TILE_ROWS * self.tiles
        self.offset_at = _HEADER + self.order_bytes
        self.offset_bytes = -(-4 * (self.chunks + 1) // _ALIGNED) * _ALIGNED
        self.data_at = self.offset_at + self.offset_bytes
        padded = max(self.chunks_of_tile * CHUNK_COLUMNS, 1)
        self.rows_at_once = TILE_ROWS * max(1, _GROUP // (TILE_ROWS * padded))

    def bit_words(self, tiles: int, device: torch.device) -> Tensor:
        """[tiles * chunks of a tile] int64: words of bits in each chunk; fewer where the columns end."""
        pairs = torch.full((self.chunks_of_tile,), CHUNK_COLUMNS // PAIR_COLUMNS, dtype=torch.int64, device=device)
        if self.cols % CHUNK_COLUMNS:
            pairs[-1:] = -(-(self.cols % CHUNK_COLUMNS) // PAIR_COLUMNS)
        return (LANES * pairs).repeat(tiles)


def packed_places(rows: int, columns: int) -> tuple[int, int, int]:
    """Where the row order, the offsets and the chunks of a packed [rows, columns] weight begin, in bytes."""
    sizes = _Sizes(rows, columns)
    return _HEADER, sizes.offset_at, sizes.data_at


def _bits_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.int16 if dtype.itemsize == 2 else torch.int32


def _by_lane(matrix: Tensor, sizes: _Sizes) -> Tensor:
    """[16 t, C] -> [chunks, 32 lanes, 128]: what each lane owns of each chunk, in its order; zeros beyond column C."""
    padded = matrix.new_zeros(len(matrix), sizes.chunks_of_tile * CHUNK_COLUMNS)
    padded[:, : sizes.cols] = matrix
    tiles = len(matrix) // TILE_ROWS
    split = padded.view(tiles, 2, 8, sizes.chunks_of_tile, 4, 2, 4, 8)  # tile, half, g, chunk, pair, step, t, column
    return split.permute(0, 3, 2, 6, 4, 5, 1, 7).reshape(tiles * sizes.chunks_of_tile, LANES, 128)


def _by_row(lanes: Tensor, sizes: _Sizes) -> Tensor:
    """The inverse of _by_lane()."""
    tiles = len(lanes) // max(sizes.chunks_of_tile, 1)
    split = lanes.view(tiles, sizes.chunks_of_tile, 8, 4, 4, 2, 2, 8)  # tile, chunk, g, t, pair, step, half, column
    return split.permute(0, 6, 2, 1, 4, 5, 3, 7).reshape(tiles * TILE_ROWS, -1)[:, : sizes.cols]


def _places(kept: Tensor, per_word: int) -> tuple[Tensor, Tensor]:
    """Where the values of a chunk stand.

    Args:
        kept: [chunks, 32, 128] bool.
        per_word: values in 4 bytes.

    Returns:
        [chunks, 32, 128] int64, place of each kept value after the bits of its chunk, in values; and [chunks] int64,
        the number of values.
    """
    index = kept.cumsum(2) - 1
    count = index[..., -1:] + 1  # [chunks, 32, 1]
    words = count // per_word
    common = words.amin(1, keepdim=True)
    further = (words - common).cumsum(1)
    odd = (count % per_word).cumsum(1)
    word, within = index // per_word, index % per_word
    lane = torch.arange(LANES, device=kept.device).view(LANES, 1)
    start = LANES * common + further - words  # minus the word gives the place among the further words
    place = torch.where(word < common, word * LANES + lane, start + word) * per_word + within
    end = (LANES * common + further[:, -1:]) * per_word
    return torch.where(word < words, place, end + odd - 1), (end + odd[:, -1:]).view(-1)


def _shape_of(op: str, weight: Tensor, mask: Tensor | None) -> torch.Size:
    checks.expect_weight(op, weight)
    checks.expect_values(op, "weight", weight)
    if mask is not None:
        checks.expect(op, "mask", mask, weight.shape, BOOL, weight)
    return weight.shape


def _kept_and_order(weight: Tensor, mask: Tensor | None, sizes: _Sizes) -> tuple[Tensor, Tensor]:
    """[R, C] bool, which weights are kept, and [16 tiles] int32, which row stands at each place."""
    kept = weight.view(_bits_dtype(weight.dtype)) != 0 if mask is None else mask
    order = torch.full((sizes.tiles * TILE_ROWS,), -1, dtype=torch.int32, device=weight.device)
    order[: sizes.rows] = kept.sum(1).sort(descending=True, stable=True).indices.to(torch.int32)
    return kept, order


def _chunk_units(bit_words: Tensor, values: Tensor, weight: Tensor) -> Tensor:
    """Sizes of chunks in units of 16 bytes, from their words of bits and their numbers of values."""
    return (bit_words * 4 + values * weight.element_size() + _ALIGNED - 1) // _ALIGNED


def _pack_tiles(weight: Tensor, kept: Tensor, order: Tensor, sizes: _Sizes) -> tuple[Tensor, Tensor]:
    """Bytes of the chunks of some tiles, and the ends of these chunks in units of 16 B."""
    rows, real = order.clamp(min=0), order >= 0
    bits_dtype, per_word = _bits_dtype(weight.dtype), 4 // weight.element_size()
    lanes = _by_lane(kept[rows] & real[:, None], sizes)
    values = _by_lane(weight[rows].view(bits_dtype), sizes)
    place, counts = _places(lanes, per_word)
    bit_words = sizes.bit_words(len(order) // TILE_ROWS, weight.device)
    ends = _chunk_units(bit_words, counts, weight).cumsum(0)
    starts = ends.new_zeros(len(ends))
    starts[1:] = ends[:-1]
    data = torch.zeros(int(ends[-1]) * _ALIGNED if len(ends) else 0, dtype=torch.uint8, device=weight.device)
    if len(ends):
        shifts = torch.arange(32, device=weight.device)
        words = (lanes.view(-1, LANES, 4, 32).long() << shifts).sum(3).transpose(1, 2).reshape(-1, 4 * LANES)
        at = torch.arange(4 * LANES, device=weight.device)
        stored = at < bit_words[:, None]
        data.view(torch.int32)[(starts[:, None] * 4 + at)[stored]] = _as_int32(words[stored])
        first = (starts * 4 + bit_words) * per_word  # of the values of each chunk
        data.view(bits_dtype)[(first[:, None, None] + place)[lanes]] = values[lanes]
    return data, ends


def _as_int32(words: Tensor) -> Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _unpack(op: str, packed: Tensor, rows: int, cols: int, dtype: torch.dtype | None) -> Tensor:
    """The dense weight in a dtype, or its mask if that is None. On the CPU, bytes that do not fit are an error."""
    sizes = _Sizes(rows, cols)
    packed = packed.clone() if packed.storage_offset() % 4 or not packed.is_contiguous() else packed
    if packed.is_cpu and not _parts_fit(packed, sizes):
        raise altered(op)
    order, offsets = (part.view(torch.int32).long() for part in _order_and_offsets(packed, sizes))
    data = packed[sizes.data_at :]
    bits_dtype = torch.bool if dtype is None else _bits_dtype(dtype)
    out = torch.zeros(rows, cols, dtype=bits_dtype, device=packed.device)
    for at in range(0, sizes.tiles * TILE_ROWS if cols else 0, sizes.rows_at_once):
        tile_rows = order[at : at + sizes.rows_at_once]
        chunk = at // TILE_ROWS * sizes.chunks_of_tile
        chunks = len(tile_rows) // TILE_ROWS * sizes.chunks_of_tile
        dense = _by_row(_unpack_chunks(op, data, offsets[chunk : chunk + chunks], dtype, sizes), sizes)
        real = tile_rows >= 0
        out[tile_rows[real]] = dense[real]
    return out if dtype is None else out.view(dtype)


def altered(op: str) -> ValueError:
    """The error of a packed weight whose bytes do not fit its header, or the header that was given for it."""
    return ValueError(
        f"{op}: packed must have the rows, chunks and values of its header; it has been altered, see check_packed()"
    )


def _unpack_chunks(op: str, data: Tensor, starts: Tensor, dtype: torch.dtype | None, sizes: _Sizes) -> Tensor:
    """[chunks, 32, 128] bits of the values, or the mask if the dtype is None."""
    bit_words = sizes.bit_words(len(starts) // sizes.chunks_of_tile, data.device)
    at = torch.arange(4 * LANES, device=data.device)
    stored = at < bit_words[:, None]
    words = data.view(torch.int32)[torch.where(stored, starts[:, None] * 4 + at, 0)] * stored
    shifts = torch.arange(32, device=data.device)
    kept = (words.view(-1, 4, LANES).transpose(1, 2)[..., None] >> shifts & 1).bool().reshape(-1, LANES, 128)
    if dtype is None:
        return kept
    per_word = 4 // dtype.itemsize
    place, _ = _places(kept, per_word)
    first = (starts * 4 + bit_words) * per_word
    values = torch.zeros(kept.shape, dtype=_bits_dtype(dtype), device=data.device)
    stored, at = data.view(values.dtype), (first[:, None, None] + place)[kept]
    if data.is_cpu and len(at) and int(at.max()) >= len(stored):
        raise altered(op)
    values[kept] = stored[at]
    return values


def _parts_fit(packed: Tensor, sizes: _Sizes) -> bool:
    """Whether the row order names each row once, and the chunks follow each other with room for their bits."""
    if len(packed) < sizes.data_at:
        return False
    order, offsets = (part.cpu().clone().view(torch.int32).long() for part in _order_and_offsets(packed, sizes))
    rows = torch.arange(sizes.rows, device="cpu")
    whole = torch.equal(order[: sizes.rows].sort().values, rows) and bool((order[sizes.rows :] == -1).all())
    room = sizes.bit_words(sizes.tiles, order.device) * 4 // _ALIGNED
    ends = int(offsets[0]) == 0 and sizes.data_at + int(offsets[-1]) * _ALIGNED == len(packed)
    return whole and ends and bool((offsets.diff() >= room).all())


def _order_and_offsets(packed: Tensor, sizes: _Sizes) -> tuple[Tensor, Tensor]:
    end = sizes.offset_at + 4 * (sizes.chunks + 1)
    return packed[_HEADER : sizes.offset_at], packed[sizes.offset_at : end]


def _padded_bytes(numbers: Tensor) -> Tensor:
    """The bytes of int32 numbers, with zeros up to a multiple of 16."""
    data = torch.zeros(-(-4 * len(numbers) // _ALIGNED) * _ALIGNED, dtype=torch.uint8, device=numbers.device)
    data[: 4 * len(numbers)] = numbers.contiguous().view(torch.uint8)
    return data


def _header_bytes(rows: int, cols: int, dtype: torch.dtype, body: Tensor) -> Tensor:
    numbers = b"".join(n.to_bytes(4, "little") for n in (VERSION, _DTYPES.index(dtype), 0))
    sizes = rows.to_bytes(8, "little") + cols.to_bytes(8, "little")
    return torch.frombuffer(bytearray(_MAGIC + numbers + sizes + _sha256(body)), dtype=torch.uint8)


def _sha256(data: Tensor) -> bytes:
    """SHA-256 of bytes. numpy need not be installed, so the memory is read by its address."""
    data = data.detach().cpu().contiguous()
    if not len(data):
        return hashlib.sha256().digest()
    import ctypes

    return hashlib.sha256((ctypes.c_ubyte * len(data)).from_address(data.data_ptr())).digest()
