"""Packed weights: unpacking, and a linear layer of up to 16 tokens that reads the packed bytes.

docs/packed.md has the layout. A program decodes several chunks of 16 rows and 256 columns at once. Element 32 w + l of
a tensor [LANES] belongs to lane l of chunk w, and where a warp has 32 threads it lies in thread l of warp w. So what a
lane finds stays in its thread, from the loads to the tensor cores; only the counts of a chunk and the sums at the end
pass between threads. The programs of packed_linear() have a tile of 16 rows each: there are no partial sums in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from ...ops.packed import CHUNK_COLUMNS, TILE_ROWS, packed_places
from .common import exact_float, nvidia_major, serves
from .launch import cdiv, launch
from .sparse24 import INTERPRETED

MOST_TOKENS = 16  # of a product from packed bytes
UNPACK_LANES = 128
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@triton.jit
def _counts(bits):
    """Of each uint32: the number of ones in each nibble, and in each byte."""
    twos = bits - ((bits >> 1) & 0x55555555)
    nibbles = (twos & 0x33333333) + ((twos >> 2) & 0x33333333)
    return nibbles, (nibbles + (nibbles >> 4)) & 0x0F0F0F0F


@triton.jit
def _chunks(words, offsets_at, data_at, chunk, columns, PER_WORD: tl.constexpr):
    """Where each lane finds its bits and its values.

    chunk, columns: [LANES], the chunk of each lane, and how many columns the weight has from the first one of that
    chunk on; without any, the lane has no values.
    Returns pointers to the bits of the first 64 columns, and what _word_at() and _word() take of each lane: a pointer
    to its common word 0, how many of its words are common, how many are whole, the distance from the number of a
    further word to its place after common word 0, and the last value.
    """
    LANES: tl.constexpr = chunk.shape[0]
    lane = tl.arange(0, LANES) % 32
    start = tl.load(words + offsets_at // 4 + chunk, mask=columns > 0, other=0).to(tl.int64) * 4
    bits_at = words + data_at // 4 + start + lane
    count = tl.zeros((LANES,), tl.int32)
    for pair in tl.static_range(4):
        bits = tl.load(bits_at + pair * 32, mask=pair * 64 < columns, other=0).to(tl.uint32, bitcast=True)
        count += (_counts(bits)[1] * 0x01010101 >> 24).to(tl.int32)
    values_at = bits_at + tl.cdiv(tl.minimum(tl.maximum(columns, 1), 256), 64) * 32
    whole, odd = count // PER_WORD, count % PER_WORD
    by_chunk: tl.constexpr = (LANES // 32, 32)
    common = tl.min(tl.reshape(whole, by_chunk), axis=1)[:, None]
    own = tl.reshape(whole, by_chunk) - common + (tl.reshape(odd, by_chunk) << 16)  # further words, and last values
    before, of_chunk = tl.cumsum(own, axis=1) - own, tl.sum(own, axis=1)[:, None]
    further = tl.reshape(31 * common + (before & 0xFFFF), (LANES,)) - lane
    last = tl.reshape(2 * (32 * common + (of_chunk & 0xFFFF)) + (before >> 16), (LANES,))
    common = tl.reshape(tl.broadcast_to(common, by_chunk), (LANES,))
    word = tl.load(values_at - lane + (last >> 1), mask=odd != 0, other=0).to(tl.uint32, bitcast=True)
    word = word >> ((last & 1) * 16).to(tl.uint32)
    return bits_at, (values_at, common, whole, further, word.to(tl.int32, bitcast=True))


@triton.jit
def _word_at(lanes, number, AFTER: tl.constexpr):
    """Pointer to word `number` + AFTER of each lane."""
    values_at, common, _, further, _ = lanes
    # AFTER * 32 is added last, where it costs nothing: what comes before is the same for all common words
    return values_at + tl.where(number < common - AFTER, number * 32, number + further - AFTER * 31) + AFTER * 32


@triton.jit
def _word(lanes, number, AFTER: tl.constexpr):
    """Word `number` + AFTER of each lane; beyond its whole words, the last value. `number` is at most their number."""
    _, _, whole, _, last = lanes
    if AFTER < 0:
        word = tl.load(_word_at(lanes, number, AFTER))  # before word 0 it is a word of the bits, which nobody needs
    else:
        word = tl.load(_word_at(lanes, number, AFTER), mask=number < whole - AFTER, other=last)
    return word.to(tl.uint32, bitcast=True)


@triton.jit
def _shifted(low, high, bits):
    """The lower 32 of 64 bits, after a shift to the right."""
    return ((high.to(tl.uint64) << 32 | low.to(tl.uint64)) >> bits.to(tl.uint64)).to(tl.uint32)


@triton.jit
def _eight_16(lanes, kept, middle, missing, BYTE: tl.constexpr):
    """Weights [LANES, 8] of 16 bits for a byte of `kept`, a bit for each of eight columns.

    middle: for each byte, how many values of the lane come before its fifth column. missing: how many of its second to
    fourth columns are removed.
    """
    number = (middle >> (8 * BYTE)) & 0xFF
    parity, number = (number & 1) * 16, (number >> 1).to(tl.int32)
    w0, w1, w2 = _word(lanes, number, -2), _word(lanes, number, -1), _word(lanes, number, 0)
    w3, w4 = _word(lanes, number, 1), _word(lanes, number, 2)
    # the four values before the middle and the four after it, two in each
    v0, v1 = _shifted(w0, w1, parity), _shifted(w1, w2, parity)
    v2, v3 = _shifted(w2, w3, parity), _shifted(w3, w4, parity)
    bits = kept >> (8 * BYTE)
    # the value of the second of two columns goes to the upper half; then that of the first one stands below it
    c01 = _shifted(v0, v1, ((missing >> (8 * BYTE)) & 3) * 16) & tl.where(bits & 1 != 0, 0xFFFFFFFF, 0xFFFF0000)
    c01 = c01 & tl.where(bits & 2 != 0, 0xFFFFFFFF, 0x0000FFFF)
    c23 = tl.where(bits & 8 != 0, v1, v1 >> 16) & tl.where(bits & 4 != 0, 0xFFFFFFFF, 0xFFFF0000)
    c45 = tl.where(bits & 16 != 0, v2, v2 << 16) & tl.where(bits & 32 != 0, 0xFFFFFFFF, 0x0000FFFF)
    c67 = _shifted(v2, v3, (((bits >> 4) & 1) + ((bits >> 5) & 1)) * 16)
    c67 = tl.where(bits & 64 != 0, c67, c67 << 16) & tl.where(bits & 128 != 0, 0xFFFFFFFF, 0x0000FFFF)
    pairs = tl.join(tl.join(c01, c45), tl.join(c23, c67))
    return tl.reshape(tl.join(pairs.to(tl.int16), (pairs >> 16).to(tl.int16)), (kept.shape[0], 8))


@triton.jit
def _eight_32(lanes, kept, middle, BYTE: tl.constexpr):
    """Weights [LANES, 8] of 32 bits, as _eight_16()."""
    bits = (kept >> (8 * BYTE)).to(tl.int32)
    number = ((middle >> (8 * BYTE)) & 0xFF).to(tl.int32) - _below(bits, 4)
    w0, w4 = _value_32(lanes, bits, number, 0), _value_32(lanes, bits, number, 4)
    w1, w5 = _value_32(lanes, bits, number, 1), _value_32(lanes, bits, number, 5)
    w2, w6 = _value_32(lanes, bits, number, 2), _value_32(lanes, bits, number, 6)
    w3, w7 = _value_32(lanes, bits, number, 3), _value_32(lanes, bits, number, 7)
    even, odd = tl.join(tl.join(w0, w4), tl.join(w2, w6)), tl.join(tl.join(w1, w5), tl.join(w3, w7))
    return tl.reshape(tl.join(even, odd), (kept.shape[0], 8))


@triton.jit
def _value_32(lanes, bits, number, COLUMN: tl.constexpr):
    """Weight of a column of eight, the first of which has value `number` of its lane."""
    return tl.load(_word_at(lanes, number + _below(bits, COLUMN), 0), mask=(bits >> COLUMN) & 1 != 0, other=0)


@triton.jit
def _below(bits, COUNT: tl.constexpr):
    """Ones among the lowest COUNT bits."""
    ones = tl.zeros_like(bits)
    for i in tl.static_range(COUNT):
        ones += (bits >> i) & 1
    return ones


@triton.jit
def _eight(lanes, kept, middle, missing, BYTE: tl.constexpr, PER_WORD: tl.constexpr):
    """Weights [LANES, 8] of the eight columns of a byte of `kept`, as int16 or int32."""
    if PER_WORD == 1:
        return _eight_32(lanes, kept, middle, BYTE)
    else:
        return _eight_16(lanes, kept, middle, missing, BYTE)


@triton.jit
def _middles(bits, before):
    """What _eight() takes, and `before` of the next bits: the values of the lane before them, in each byte."""
    nibbles, eights = _counts(bits)
    behind = eights * 0x01010101 + before
    middle = behind - eights + (nibbles & 0x0F0F0F0F)
    missing = 0x03030303 - ((nibbles - (bits & 0x11111111)) & 0x0F0F0F0F)
    return middle, missing, (behind >> 24) * 0x01010101


@triton.jit
def _unpack_kernel(
    words, out, rows, cols, order_at, offsets_at, data_at, PER_WORD: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    tile, i = tl.program_id(0), tl.arange(0, LANES)
    chunk = tl.program_id(1) * (LANES // 32) + i // 32
    columns = cols - chunk * 256
    bits_at, lanes = _chunks(words, offsets_at, data_at, tile * tl.cdiv(cols, 256) + chunk, columns, PER_WORD)
    order = words + order_at // 4 + tile * 16 + i % 32 // 4
    upper, lower = tl.load(order), tl.load(order + 8)
    before = tl.zeros((LANES,), tl.uint32)
    for pair in range(0, 4):
        bits = tl.load(bits_at + pair * 32, mask=pair * 64 < columns, other=0).to(tl.uint32, bitcast=True)
        middle, missing, before = _middles(bits, before)
        for half in tl.static_range(2):
            c = (chunk * 256 + pair * 64 + half * 32 + i % 4 * 8)[:, None] + tl.arange(0, 8)[None, :]
            for place in tl.static_range(2):
                dense = _eight(lanes, bits, middle, missing, 2 * half + place, PER_WORD)
                row = lower if place else upper
                tl.store(out + row.to(tl.int64)[:, None] * cols + c, dense, mask=(row >= 0)[:, None] & (c < cols))


@triton.jit
def _tokens(x, c, token, tokens, cols):
    """Columns c [LANES, 8] of a token for each lane: zeros where there are none."""
    return tl.load(x + token.to(tl.int64)[:, None] * cols + c, mask=(token < tokens)[:, None] & (c < cols), other=0.0)


@triton.jit(do_not_specialize=["tokens"])  # with 1 as a constant it is slower
def _linear_kernel(
    words, x, bias, out, tokens, rows, cols, order_at, offsets_at, data_at,
    BIAS: tl.constexpr, PER_WORD: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    CHUNKS: tl.constexpr = LANES // 32
    tile, i, chunks = tl.program_id(0), tl.arange(0, LANES), tl.cdiv(cols, 256)
    sums = tl.zeros((CHUNKS, 16, 8 * GROUPS), tl.float32)
    for k in range(0, tl.cdiv(chunks, CHUNKS)):
        chunk = k * CHUNKS + i // 32
        columns = cols - chunk * 256
        bits_at, lanes = _chunks(words, offsets_at, data_at, tile * chunks + chunk, columns, PER_WORD)
        before = tl.zeros((LANES,), tl.uint32)
        for pair in range(0, 4):
            bits = tl.load(bits_at + pair * 32, mask=pair * 64 < columns, other=0).to(tl.uint32, bitcast=True)
            middle, missing, before = _middles(bits, before)
            for half in tl.static_range(2):
                c = (chunk * 256 + pair * 64 + half * 32 + i % 4 * 8)[:, None] + tl.arange(0, 8)[None, :]
                inputs = _tokens(x, c, i % 32 // 4, tokens, cols)
                if GROUPS == 2:
                    inputs = tl.join(inputs, _tokens(x, c, i % 32 // 4 + 8, tokens, cols))
                upper = _eight(lanes, bits, middle, missing, 2 * half, PER_WORD)
                lower = _eight(lanes, bits, middle, missing, 2 * half + 1, PER_WORD)
                # lane 4 g + t has columns 8 t + 4 a + b of rows g and g + 8, and of token g. The tensor cores may take
                # columns in any order: if these are columns 16 a + 4 t + b, each lane has what its thread must give
                dense = tl.reshape(tl.join(upper, lower), (CHUNKS, 8, 4, 2, 4, 2))  # chunk, g, t, a, b, row
                dense = tl.reshape(tl.permute(dense, (0, 5, 1, 3, 2, 4)), (CHUNKS, 16, 32))
                inputs = tl.reshape(inputs, (CHUNKS, 8, 4, 2, 4, GROUPS))  # chunk, g, t, a, b, group
                inputs = tl.reshape(tl.permute(inputs, (0, 3, 2, 4, 5, 1)), (CHUNKS, 32, 8 * GROUPS))
                dense = dense.to(x.dtype.element_ty, bitcast=True)
                if INTERPRETED:  # interpreted products take bf16 for integers
                    dense, inputs = exact_float(dense), exact_float(inputs)
                sums = tl.dot(dense, inputs, sums, input_precision="ieee")
    total = tl.sum(sums, axis=0)
    row, t = tl.load(words + order_at // 4 + tile * 16 + tl.arange(0, 16))[:, None], tl.arange(0, 8 * GROUPS)[None, :]
    if BIAS:
        total += exact_float(tl.load(bias + row, mask=row >= 0, other=0.0))
    target = out + t.to(tl.int64) * rows + row
    tl.store(target, total.to(out.dtype.element_ty), mask=(row >= 0) & (t < tokens))


def lanes_of(chunks: int) -> int:
    """Lanes of a program of packed_linear(), for the number of chunks of a tile."""
    return 32 * (8 if chunks > 4 else 4)


def options_of(lanes: int, per_word: int, major: int) -> dict[str, int]:
    """Launch options of a kernel for the value of nvidia_major(): a thread for each lane."""
    options = {"num_warps": lanes // (32 if major else 64), "num_stages": 1}
    if major and per_word == 1:  # else ptxas aims at fewer registers, and spills
        options["maxnreg"] = 128
    return options


def unpack_weight(packed: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    if not _serves(packed, rows, columns):
        return NotImplemented
    out, per_word = torch.empty(rows, columns, dtype=dtype, device=packed.device), 4 // dtype.itemsize
    launch(
        _unpack_kernel, (cdiv(rows, TILE_ROWS), cdiv(columns, CHUNK_COLUMNS * UNPACK_LANES // 32), 1),
        packed.view(torch.int32), out.view(_BITS[dtype]), rows, columns, *packed_places(rows, columns),
        PER_WORD=per_word, LANES=UNPACK_LANES, **options_of(UNPACK_LANES, per_word, nvidia_major(packed)),
    )  # fmt: skip
    return out


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None, rows: int, columns: int) -> Tensor:
    if not _serves(packed, rows, columns) or not len(x):
        return NotImplemented
    if len(x) > MOST_TOKENS:
        return linear(x, unpack_weight(packed, rows, columns, x.dtype), bias)
    out = torch.empty(len(x), rows, dtype=x.dtype, device=x.device)
    lanes, per_word = lanes_of(cdiv(columns, CHUNK_COLUMNS)), 4 // x.element_size()
    launch(
        _linear_kernel, (cdiv(rows, TILE_ROWS), 1, 1),
        packed.view(torch.int32), x.contiguous(), None if bias is None else bias.contiguous(), out,
        len(x), rows, columns, *packed_places(rows, columns),
        BIAS=bias is not None, PER_WORD=per_word, LANES=lanes, GROUPS=cdiv(len(x), 8),
        **options_of(lanes, per_word, nvidia_major(x)),
    )  # fmt: skip
    return out


def _serves(packed: Tensor, rows: int, columns: int) -> bool:
    """Whether the kernels run: neither side is empty, and views of the packed bytes as words are possible."""
    return bool(rows and columns) and serves(packed) and packed.is_contiguous() and packed.storage_offset() % 4 == 0
