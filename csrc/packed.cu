// Packed weights: a linear layer of up to 16 tokens, and unpacking. docs/packed.md has the layout.
//
// Memory: the packed bytes are read once, by bulk copies into a buffer of each warp, which holds two chunks if they fit. A
// cluster of blocks owns some tiles of 16 rows, and each of its blocks a range of their columns. The chunks of a block, tile after
// tile, are divided evenly among its warps. Sums of warps, then of blocks, are added up at the end in a fixed order; so
// the bits of a result depend on the shape and on the division, which the host chooses.
//
// Decoding: a lane owns 16 weights of each 32 columns: 8 columns of rows g and g + 8. Four bits at a time it loads the three
// words in which its next four values stand, shifts them into place, and lets a byte permutation put values and zeros
// where the bits say. The result is a fragment of the tensor cores. Before that, the words that not every lane has are
// moved to where word k of lane l stands at 32 k + l, as the others do.
#include "packed_ptx.cuh"

namespace fwanda {

constexpr int kHeader = 64, kTileRows = 16, kChunkColumns = 256;
constexpr int kTail = 24;        // further words of a lane that are moved at most
constexpr int kSlack = 14 * 128;  // bytes that a chunk may grow by that
constexpr int kTokens = 8;       // columns of a fragment
constexpr int kMaxWarps = 32;

struct PackedLinear {
  const uint8_t* packed;
  const uint8_t* x;     // [tokens, columns]
  const uint8_t* bias;  // [rows] or null
  uint8_t* out;         // [tokens, rows]; in unpacking [rows, columns]
  int rows, columns, tokens;
  int tiles;   // of a cluster
  int buffer;  // bytes of the buffer of a warp; a multiple of 128, with room for the largest chunk
};

// Shared memory: this struct, the sums, the buffers of the warps, and 512 bytes that loads may run over.
struct Shared {
  uint2 table[16];  // entry_of(); all 16 lie in different banks
  uint64_t copied[kMaxWarps][2];  // barriers
};

extern __shared__ __align__(128) unsigned char dynamic_shared[];

__device__ inline Shared& shared() { return *reinterpret_cast<Shared*>(dynamic_shared); }
__device__ inline uint32_t* shared_words() { return reinterpret_cast<uint32_t*>(dynamic_shared); }
__device__ inline int warps_of_block() { return int(blockDim.x) / 32; }

// What to do with the next four values v0, v1, v2, v3 of a lane, for the four bits of a row. x: selector of the bytes of columns 0
// and 1, and above it 16 times the number of ones. y: selector of columns 2 and 3, and above it a mask of v3. A removed
// weight takes v3, which the mask sets to 0 then.
__device__ inline uint2 entry_of(uint32_t bits) {
  uint32_t selector = 0, count = 0;
  uint2 entry;
  for (int column = 0; column < 4; column++) {
    const bool kept = bits >> column & 1;
    selector = selector >> 8 | (kept ? 0x1000 + 0x2200 * count : 0x7600);
    count += kept;
    if (column == 1) entry.x = selector;
  }
  entry.x |= 16 * count << 16, entry.y = selector | (count == 4 ? 0xffff0000 : 0);
  return entry;
}

__device__ inline void make_table() {
  if (threadIdx.x < 16) shared().table[threadIdx.x] = entry_of(threadIdx.x);
}

// Where a lane finds its values in a chunk. Places are in words of shared memory.
struct Lane {
  int values;         // place of word 0 of lane 0
  int words, common;  // whole words of this lane; words that every lane has
  int further;        // place of the first word beyond these
  int last;           // twice the place of the last value, if the count is odd
  bool odd;
  int rows;  // of 32 words, after moving

  __device__ Lane(int chunk, int pairs) {
    const int l = lane();
    int count = 0;
#pragma unroll
    for (int p = 0; p < kChunkColumns / 64; p++) count += p < pairs ? __popc(shared_words()[chunk + 32 * p + l]) : 0;
    words = count >> 1, odd = count & 1;
    common = int(__reduce_min_sync(~0u, unsigned(words)));
    const int own = words - common | int(odd) << 16;
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (l >= step) sum += other;
    }
    const int all = __shfl_sync(~0u, sum, 31) & 0xffff;
    values = chunk + 32 * pairs;
    further = values + 32 * common + (sum - own & 0xffff);
    last = 2 * (values + 32 * common + all) + (sum - own >> 16);
    rows = int(__reduce_max_sync(~0u, unsigned(words + odd)));
  }

  // Shared address of word 0 of lane 0.
  __device__ uint32_t address() const { return shared_address(shared_words() + values); }

  // The last value, or 0.
  __device__ uint32_t last_value() const { return odd ? reinterpret_cast<const uint16_t*>(dynamic_shared)[last] : 0; }

  // Word w of this lane; the last value alone, or 0, beyond the whole words.
  __device__ uint32_t word(int w) const {
    if (w < common) return shared_words()[values + 32 * w + lane()];
    if (w < words) return shared_words()[further + w - common];
    return w == words ? last_value() : 0;
  }

  // Move the further words, and the last value, so that word w of lane l stands at values + 32 w + l; rows are filled up with
  // anything. The room of the chunk ends at `end`. Returns false, and moves nothing, if it is too small.
  __device__ bool move(int end) const {
    constexpr int kGroup = 4;
    const int tail = rows - common;
    if (tail > kTail || values + 32 * (common + (tail + kGroup - 1) / kGroup * kGroup) > end) return false;
    uint32_t moved[kTail];
    const uint32_t value = last_value();
    uint32_t* const to = shared_words() + values + 32 * common + lane();
#pragma unroll
    for (int k = 0; k < kTail; k++)
      if (k < words - common) moved[k] = shared_words()[further + k];  // fewer lanes, fewer conflicts of banks
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kTail; i += kGroup)
      if (i < tail)
#pragma unroll
        for (int k = i; k < i + kGroup; k++) to[32 * k] = moved[k];
    if (odd) to[32 * (words - common)] = value;
    return true;
  }
};

// What all steps of a chunk need, in registers.
struct Cursor {
  uint32_t table, lane;  // shared address of the table

  __device__ Cursor() : table(shared_address(shared().table)), lane(lane_register()) {}
};

// Weights of 32 columns: part[0..3] is a fragment of columns 8 t to 8 t + 3 of rows g and g + 8, part[4..7] of the next four.
// next: 16 times the number of values before these, plus a quarter of the shared address of
// the first word of lane 0, which is a multiple of 128.
template <bool MOVED>
__device__ inline void decode(const Lane& own, const Cursor& at, uint32_t bits, uint32_t& next, uint32_t (&part)[8]) {
#pragma unroll
  for (int j = 0; j < 4; j++) {  // four columns of row g, four more, then those of row g + 8
    const uint2 entry = load_two_words((j ? bits >> (4 * j - 3) : bits << 3) & 0x78 | at.table);
    const uint32_t from = 4 * (next & ~31u | at.lane);
    uint32_t words[3];
    if constexpr (MOVED) {
      words[0] = load_word(from), words[1] = load_word(from + 128);
      words[2] = load_word_if(from + 256, int(entry.y));  // only four values can reach so far
    } else {
#pragma unroll
      for (int i = 0; i < 3; i++) words[i] = own.word((next - own.address() / 4) / 32 + i);
    }
    const uint32_t low = __funnelshift_r(words[0], words[1], next);
    const uint32_t high = __funnelshift_r(words[1], words[2], next) & (entry.y | 0xffff);
    const int first = 4 * (j & 1) + (j >> 1);
    part[first] = permute(low, high, entry.x);
    part[first + 2] = permute(low, high, entry.y);
    next += entry.x >> 16;
  }
}

// The parts of a packed weight.
struct Source {
  const int32_t *order, *offsets;
  const uint8_t* data;
  int tiles, chunks_of_tile;

  __device__ Source(const PackedLinear& p) {
    tiles = (p.rows + kTileRows - 1) / kTileRows;
    chunks_of_tile = (p.columns + kChunkColumns - 1) / kChunkColumns;
    order = reinterpret_cast<const int32_t*>(p.packed + kHeader);
    offsets = order + kTileRows * tiles;
    data = reinterpret_cast<const uint8_t*>(offsets) + (4ll * (1ll * tiles * chunks_of_tile + 1) + 15) / 16 * 16;
  }
};

// A part of a packed weight: `columns` chunks of each of `tiles` tiles.
struct Area {
  int tile, tiles, column, columns;

  // First chunk of a warp, in the order tile after tile; that of the next warp is the end.
  __device__ int first_of(int warp) const { return warp * tiles * columns / warps_of_block(); }
  // The warp that has a chunk.
  __device__ int warp_of(int chunk) const { return ((chunk + 1) * warps_of_block() - 1) / (tiles * columns); }
};

// Copies the chunks of this warp to shared memory and calls use(number in the area, place of its first word, end of its room) on
// each, in order. One warp does that. Chunks lie at the beginning and at the end of its buffer in turn, so that the next one
// is copied meanwhile, if both fit. The buffer begins at a multiple of 128 bytes.
template <class Use>
__device__ inline void each_chunk(const PackedLinear& p, const Source& source, const Area& area, int buffer, Use use) {
  uint64_t* const copied = shared().copied[warp()];
  if (lane() < 2) init_barrier(copied + lane());
  fence_copies();
  __syncwarp();
  const int first = area.first_of(warp()), count = area.first_of(warp() + 1) - first;
  int begin = 0, end = 0;  // of the chunk that this lane knows, in units of 16 bytes
  struct Room {
    int from, bytes, size, place;
  };
  auto find = [&](int n) {
    if (n % 32 == 0) {
      const int mine = first + min(n + lane(), count - 1);
      const int64_t chunk = 1ll * (area.tile + mine / area.columns) * source.chunks_of_tile + area.column + mine % area.columns;
      begin = source.offsets[chunk], end = source.offsets[chunk + 1];
    }
    Room room;
    room.from = __shfl_sync(~0u, begin, n % 32);
    room.bytes = min(16 * (__shfl_sync(~0u, end, n % 32) - room.from), p.buffer);  // more only if the weight has been altered
    room.size = min(room.bytes + kSlack + 127 & ~127, p.buffer);
    room.place = buffer + (n % 2 ? p.buffer - room.size : 0);
    return room;
  };
  auto start = [&](int n, const Room& room) {
    if (lane() == 0) start_copy(copied + n % 2, dynamic_shared + room.place, source.data + 16ll * room.from, room.bytes);
  };
  if (count <= 0) return;
  Room room = find(0);
  start(0, room);
#pragma unroll 1
  for (int n = 0; n < count; n++) {
    Room next = room;
    bool waits = false;
    if (n + 1 < count) {
      next = find(n + 1);
      waits = room.size + next.size > p.buffer;
      if (!waits) start(n + 1, next);
    }
    wait_copy(copied + n % 2, n / 2 & 1);
    use(first + n, room.place / 4, (room.place + room.size) / 4);
    fence_copies();
    __syncwarp();
    if (waits) start(n + 1, next);
    room = next;
  }
}

// What a lane reads of x: 8 columns of a token for each group of 8 tokens. For tokens that do not exist it reads other
// values; they only enter sums that nobody stores.
template <int GROUPS>
struct Tokens {
  const uint8_t* from[GROUPS];  // the next columns of this lane
  bool there[GROUPS];

  __device__ void skip(int columns) {
#pragma unroll
    for (int n = 0; n < GROUPS; n++) from[n] += 2 * columns;
  }

  // Zeros beyond the last column, as they are multiplied by the zeros that the weight has there.
  __device__ uint4 load(int n, int columns) const {
    const bool inside = lane() % 4 * 8 < columns;
    const uint4 x = load_if(from[n], there[n] && inside);
    return inside ? x : make_uint4(0, 0, 0, 0);
  }
};

template <int GROUPS>
__device__ inline void multiply_step(const uint32_t (&part)[8], const uint4 (&x)[GROUPS], float (&sums)[GROUPS][4]) {
#pragma unroll
  for (int n = 0; n < GROUPS; n++) {
    multiply<WEIGHT>(sums[n], part, x[n].x, x[n].y);
    multiply<WEIGHT>(sums[n], part + 4, x[n].z, x[n].w);
  }
}

// Multiplies a whole chunk, whose words have been moved.
template <int GROUPS>
__device__ inline void multiply_chunk(const Lane& own, int chunk, Tokens<GROUPS> tokens, float (&sums)[GROUPS][4]) {
  const Cursor at;
  uint32_t next = own.address() / 4;
  keep_order(next);
  const uint32_t* bits_at = shared_words() + chunk + lane();
#pragma unroll 1
  for (const uint32_t* const end = bits_at + kChunkColumns / 2; bits_at != end; bits_at += 32, tokens.skip(64)) {
    const uint32_t bits = *bits_at;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint4 x[GROUPS];
#pragma unroll
      for (int n = 0; n < GROUPS; n++) x[n] = load_if(tokens.from[n] + 64 * half, tokens.there[n]);
      uint32_t part[8];
      decode<true>(own, at, bits >> 16 * half, next, part);
      multiply_step(part, x, sums);
    }
  }
}

// The same for a chunk of fewer columns, or whose words have not been moved.
template <int GROUPS>
__device__ inline void multiply_part(const Lane& own, int chunk, int columns, Tokens<GROUPS> tokens, float (&sums)[GROUPS][4]) {
  const Cursor at;
  uint32_t next = own.address() / 4;
#pragma unroll 1
  for (int column = 0; column < columns; column += 32, tokens.skip(32)) {
    const uint32_t bits = shared_words()[chunk + column / 64 * 32 + lane()] >> column % 64 / 2;
    uint4 x[GROUPS];
#pragma unroll
    for (int n = 0; n < GROUPS; n++) x[n] = tokens.load(n, columns - column);
    uint32_t part[8];
    decode<false>(own, at, bits, next, part);
    multiply_step(part, x, sums);
  }
}

// Sums of a warp, or of a block, for a tile and GROUPS * 8 tokens.
template <int GROUPS>
using Sums = float[kTileRows][kTokens * GROUPS];

// The chunks of this warp. Sums of a tile whose first chunk it has go to sums[tile of the area]; of another, to sums[tiles + warp].
template <int GROUPS>
__device__ inline void multiply_area(const PackedLinear& p, const Source& source, const Area& area, Sums<GROUPS>* all, int buffer) {
  const int g = lane() / 4, t = lane() % 4;
  float sums[GROUPS][4] = {};
  Tokens<GROUPS> tokens;
#pragma unroll
  for (int n = 0; n < GROUPS; n++) {
    tokens.from[n] = p.x + 2ll * (kTokens * n + g) * p.columns + 16 * t;
    tokens.there[n] = kTokens * n + g < p.tokens;
  }
  const int first = area.first_of(warp()), last = area.first_of(warp() + 1);
  int tile = first / area.columns, column = first % area.columns;
  int slot = column ? area.tiles + warp() : tile;
  for (int i = lane(); i < kTileRows * kTokens * GROUPS; i += 32) (&all[area.tiles + warp()][0][0])[i] = 0;
  __syncwarp();
  each_chunk(p, source, area, buffer, [&](int i, int chunk, int end) {
    const int start = (area.column + column) * kChunkColumns, columns = min(kChunkColumns, p.columns - start);
    const Lane own(chunk, (columns + 63) / 64);
    Tokens<GROUPS> here = tokens;
    here.skip(start);
    if (columns == kChunkColumns && own.move(end)) {
      multiply_chunk<GROUPS>(own, chunk, here, sums);
    } else {
      multiply_part<GROUPS>(own, chunk, columns, here, sums);
    }
#pragma unroll
    for (int n = 0; n < GROUPS; n++) keep_order(sums[n][0]);
    if (++column == area.columns || i + 1 == last) {
#pragma unroll
      for (int n = 0; n < GROUPS; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
          all[slot][g + 8 * (k / 2)][kTokens * n + 2 * t + k % 2] = sums[n][k];
          sums[n][k] = 0;
        }
      slot = ++tile, column = 0;
    }
  });
}

// GROUPS: groups of 8 tokens.
template <int GROUPS>
__device__ inline void linear(const PackedLinear& p) {
  make_table();
  __syncthreads();
  let_next_kernel_start();
  wait_for_last_kernel();
  const Source source(p);
  const int rank = block_in_cluster(), blocks = blocks_of_cluster(), tile = int(blockIdx.x) / blocks * p.tiles;
  Area area;
  area.tile = tile, area.tiles = min(p.tiles, source.tiles - tile);
  area.column = rank * source.chunks_of_tile / blocks;
  area.columns = (rank + 1) * source.chunks_of_tile / blocks - area.column;
  auto* const sums = reinterpret_cast<Sums<GROUPS>*>(dynamic_shared + sizeof(Shared));
  const int buffers = int(sizeof(Shared) + sizeof(Sums<GROUPS>) * (p.tiles + warps_of_block()) + 127) & ~127;
  multiply_area<GROUPS>(p, source, area, sums, buffers + warp() * p.buffer);
  __syncthreads();
  for (int tile = warp(); tile < area.tiles; tile += warps_of_block()) {
    const int first = area.warp_of(tile * area.columns), last = area.warp_of((tile + 1) * area.columns - 1);
    for (int i = lane(); i < kTileRows * kTokens * GROUPS; i += 32) {
      float sum = (&sums[tile][0][0])[i];
      for (int w = first + 1; w <= last; w++) sum += (&sums[area.tiles + w][0][0])[i];
      (&sums[tile][0][0])[i] = sum;
    }
  }
  sync_cluster();
  const int places = area.tiles * kTileRows;
  for (int i = rank * blockDim.x + threadIdx.x; i < places * p.tokens; i += blocks * blockDim.x) {
    const int place = i % places, token = i / places, row = source.order[tile * kTileRows + place];
    if (row < 0) continue;
    const float* const at = &sums[place / kTileRows][place % kTileRows][token];
    float sum = 0;
    for (int k = 0; k < blocks; k++) sum += load_cluster(at, k);
    if (p.bias) sum += WEIGHT::decode(reinterpret_cast<const uint16_t*>(p.bias)[row]);
    reinterpret_cast<uint16_t*>(p.out)[1ll * token * p.rows + row] = rounded<WEIGHT>(sum);
  }
  sync_cluster();  // no block ends while another reads its sums
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) packed_linear_8(PackedLinear p) { linear<1>(p); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) packed_linear_16(PackedLinear p) { linear<2>(p); }

template <bool MOVED>
__device__ inline void write_chunk(const Lane& own, int chunk, int columns, uint8_t* const (&to)[2]) {
  const Cursor at;
  uint32_t next = own.address() / 4;
  keep_order(next);
#pragma unroll 1
  for (int column = 0; column < columns; column += 32) {
    const uint32_t bits = shared_words()[chunk + column / 64 * 32 + lane()] >> column % 64 / 2;
    uint32_t part[8];
    decode<MOVED>(own, at, bits, next, part);
#pragma unroll
    for (int r = 0; r < 2; r++)
      if (to[r] && column + lane() % 4 * 8 < columns)
        *reinterpret_cast<uint4*>(to[r] + 2 * column) = make_uint4(part[r], part[2 + r], part[4 + r], part[6 + r]);
  }
}

// A block unpacks a tile; each lane writes 8 columns of two rows at a time.
extern "C" __global__ void __launch_bounds__(256, 2) unpack(PackedLinear p) {
  make_table();
  __syncthreads();
  const Source source(p);
  const Area area = {int(blockIdx.x), 1, 0, source.chunks_of_tile};
  uint8_t* rows[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = source.order[area.tile * kTileRows + lane() / 4 + 8 * r];
    rows[r] = row < 0 ? nullptr : p.out + 2ll * row * p.columns + lane() % 4 * 16;
  }
  const int buffers = int(sizeof(Shared) + 127) & ~127;
  each_chunk(p, source, area, buffers + warp() * p.buffer, [&](int i, int chunk, int end) {
    const int start = i * kChunkColumns, columns = min(kChunkColumns, p.columns - start);
    const Lane own(chunk, (columns + 63) / 64);
    uint8_t* const to[2] = {rows[0] ? rows[0] + 2 * start : nullptr, rows[1] ? rows[1] + 2 * start : nullptr};
    if (own.move(end)) {
      write_chunk<true>(own, chunk, columns, to);
    } else {
      write_chunk<false>(own, chunk, columns, to);
    }
  });
}

}  // namespace fwanda
