// Packed weights: a linear layer of up to 16 tokens, and unpacking. docs/packed.md has the layout.
//
// Memory: the packed bytes are read once, by bulk copies into a buffer of each warp, which holds two chunks if they fit. A
// cluster of blocks owns some tiles of 16 rows, and each of its blocks a range of their columns. The chunks of a block, tile after
// tile, are divided evenly among its warps. Sums of warps, then of blocks, are added up at the end in a fixed order; so
// the bits of a result depend on the shape and on the division, which the host chooses. A block keeps its columns of x in shared
// memory if there is room beside the buffers; else its warps read them when they need them. Until the last kernel has
// ended, the first chunks are only brought into the L2 cache.
#include "packed_decode.cuh"

namespace fwanda {

constexpr int kTokens = 8;  // columns of a fragment

// What a lane reads of x: 8 columns of a token for each group of 8 tokens, from shared memory or, if DIRECT, from global memory.
// For tokens that do not exist it takes other values; they only enter sums that nobody stores.
template <int GROUPS, bool DIRECT>
struct Tokens {
  const PackedLinear& p;
  uint32_t from[GROUPS];  // shared addresses of the next columns of this lane, or bytes of x before them
  bool there[GROUPS];

  __device__ void skip(int columns) {
#pragma unroll
    for (uint32_t& place : from) place += 2 * columns;
  }

  // Zeros if the columns are not inside the weight.
  __device__ void load(int offset, bool inside, uint4 (&x)[GROUPS]) const {
#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
      if constexpr (DIRECT) {
        x[n] = load_global_if(p.x + from[n] + offset, there[n] && inside);
      } else {
        x[n] = load_if(from[n] + offset, there[n]);
      }
      if (!inside) x[n] = make_uint4(0, 0, 0, 0);
    }
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
template <int GROUPS, bool DIRECT>
__device__ inline void multiply_chunk(const Lane& own, const Cursor& at, int chunk, Tokens<GROUPS, DIRECT> tokens,
                                      float (&sums)[GROUPS][4]) {
  uint32_t values = own.address(), before = 0;
  keep_order(values);
  const uint32_t end = values;  // the bits stand before the values
  uint32_t mask = end - 128 * (kChunkColumns / 64);
#pragma unroll 1
  do {
    const uint32_t bits = load_word(mask);
    const Middles middles(bits, before);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint4 x[GROUPS];
      tokens.load(64 * half, true, x);
      uint32_t part[8];
      decode<true>(own, at, bits, half, middles, values, part);
      multiply_step(part, x, sums);
    }
    mask += 128, tokens.skip(64);
  } while (mask != end);
}

// The same for a chunk of fewer columns, or whose words have not been moved.
template <int GROUPS, bool DIRECT>
__device__ inline void multiply_part(const Lane& own, const Cursor& at, int chunk, int columns, Tokens<GROUPS, DIRECT> tokens,
                                     float (&sums)[GROUPS][4]) {
  uint32_t values = own.address(), before = 0;
#pragma unroll 1
  for (int column = 0; column < columns; column += 64, tokens.skip(64)) {
    const uint32_t bits = shared_words()[chunk + column / 2 + lane()];
    const Middles middles(bits, before);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint4 x[GROUPS];
      tokens.load(64 * half, column + 32 * half + lane() % 4 * 8 < columns, x);
      uint32_t part[8];
      decode<false>(own, at, bits, half, middles, values, part);
      multiply_step(part, x, sums);
    }
  }
}

// Sums of a warp, or of a block, for a tile and GROUPS * 8 tokens.
template <int GROUPS>
using Sums = float[kTileRows][kTokens * GROUPS];

// Copies of a block, in shared memory.
struct Copies {
  int order, x, stride, end;  // places in bytes; stride: of tokens, which begin in other banks in turn
  uint32_t ready;             // shared address of their barrier

  __device__ Copies(const PackedLinear& p, int chunks) {  // chunks: of the widest block, or 0 to copy no x
    order = int(sizeof(Shared)), x = order + 4 * kTileRows * p.tiles;
    stride = 2 * kChunkColumns * chunks + 64, end = x + (chunks ? p.tokens * stride : 0);
    ready = shared_address(&shared().ready);
  }

  // By all threads.
  template <bool DIRECT>
  __device__ void start(const PackedLinear& p, const Source& source, const Area& area) const {
    const int from = area.column * kChunkColumns, units = min(area.columns * kChunkColumns, p.columns - from) / 8;
    if constexpr (!DIRECT)
      for (int token = 0; token < p.tokens; token++) {
        const uint8_t* const row = p.x + 2 * (1ll * token * p.columns + from);
        unsigned char* const to = dynamic_shared + x + token * stride;
        for (int i = threadIdx.x; i < units; i += blockDim.x) copy_16(ready, to + 16 * i, row + 16 * i);
      }
    for (int i = threadIdx.x; i < kTileRows / 4 * area.tiles; i += blockDim.x)
      copy_16(ready, dynamic_shared + order + 16 * i, source.order + kTileRows * area.tile(i / 4) + i % 4 * 4);
    arrive_after_copies(ready);
  }
};

// The chunks of this warp. Sums of a tile whose first chunk it has go to sums[tile of the area]; of another, to sums[tiles + warp].
template <int GROUPS, bool DIRECT>
__device__ inline void multiply_area(const PackedLinear& p, const Source& source, const Area& area, const Copies& copies,
                                     Sums<GROUPS>* all, int buffer) {
  Chunks chunks(p, source, area, buffer);
  chunks.guess();
  if (threadIdx.x < kMaxWarps) shared().begun[threadIdx.x] = -1;
  if (threadIdx.x == 0) init_barrier(copies.ready, blockDim.x);
  __syncthreads();
  wait_for_last_kernel();
  chunks.start();
  chunks.load(0);
  copies.template start<DIRECT>(p, source, area);
  chunks.confirm();
  const int g = lane() / 4, t = lane() % 4;
  const Cursor at;
  float sums[GROUPS][4] = {};
  Tokens<GROUPS, DIRECT> tokens{p};
#pragma unroll
  for (int n = 0; n < GROUPS; n++) {
    const int token = kTokens * n + g;
    const int start = DIRECT ? 2 * (token * p.columns + area.column * kChunkColumns)
                             : int(shared_address(dynamic_shared + copies.x)) + copies.stride * token;
    tokens.from[n] = start + 16 * t;
    tokens.there[n] = token < p.tokens;
  }
  const int first = area.first_of(warp());
  int tile = quotient(first, area.columns), column = first - tile * area.columns;
  int slot = column ? area.tiles + warp() : tile;
  if (column && chunks.count() > 0) shared().begun[warp()] = int16_t(tile);
#pragma unroll 1
  for (; chunks.wait(); chunks.release()) {
    const int start = column * kChunkColumns, columns = min(kChunkColumns, p.columns - area.column * kChunkColumns - start);
    const Lane own(chunks.place(), columns + 63 >> 6);
    const int used = columns == kChunkColumns ? own.move(chunks.end()) : 0;
    chunks.proceed(used ? used : chunks.end());
    if (!DIRECT && chunks.is_first()) wait_copy(copies.ready, 0);
    Tokens<GROUPS, DIRECT> here = tokens;
    here.skip(start);
#pragma unroll
    for (uint32_t& place : here.from) keep_order(place);
    if (used) {
      multiply_chunk(own, at, chunks.place(), here, sums);
    } else {
      multiply_part(own, at, chunks.place(), columns, here, sums);
    }
#pragma unroll
    for (int n = 0; n < GROUPS; n++) keep_order(sums[n][0]);
    if (++column == area.columns || chunks.is_last()) {
#pragma unroll
      for (int n = 0; n < GROUPS; n++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
          all[slot][g + 8 * (k / 2)][kTokens * n + 2 * t + k % 2] = sums[n][k];
          sums[n][k] = 0;
        }
      slot = ++tile, column = 0;
    }
  }
}

// GROUPS: groups of 8 tokens. DIRECT: x is not copied.
template <int GROUPS, bool DIRECT>
__device__ inline void linear(const PackedLinear& p) {
  let_next_kernel_start();
  const Source source(p);
  const int rank = block_in_cluster(), blocks = blocks_of_cluster(), shift = __popc(blocks - 1);  // a power of two
  const int column = rank * source.chunks_of_tile >> shift, end = (rank + 1) * source.chunks_of_tile >> shift;
  const Area area(int(blockIdx.x >> shift), int(gridDim.x >> shift), p.tiles, source.tiles, column, end - column);
  const Copies copies(p, DIRECT ? 0 : source.chunks_of_tile + blocks - 1 >> shift);
  auto* const sums = reinterpret_cast<Sums<GROUPS>*>(dynamic_shared + copies.end);
  const int buffers = int(copies.end + sizeof(Sums<GROUPS>) * (p.tiles + warps_of_block()) + 127) & ~127;
  multiply_area<GROUPS, DIRECT>(p, source, area, copies, sums, buffers + warp() * p.buffer);
  __syncthreads();
  wait_copy(copies.ready, 0);
  // element i: rows of a tile, tokens up to a power of two, tiles
  const int bits = 4 + (p.tokens > 1) + (p.tokens > 2) + (p.tokens > 4) + (p.tokens > 8), elements = area.tiles << bits;
  auto token_of = [&](int i) { return (i & (1 << bits) - 1) / kTileRows; };
  auto at = [&](int tile, int i) { return &sums[tile][i % kTileRows][token_of(i)]; };
  auto store = [&](int i, float sum) {
    const int row = reinterpret_cast<const int32_t*>(dynamic_shared + copies.order)[(i >> bits) * kTileRows + i % kTileRows];
    if (row < 0) return;
    if (p.bias) sum += WEIGHT::decode(reinterpret_cast<const uint16_t*>(p.bias)[row]);
    reinterpret_cast<uint16_t*>(p.out)[1ll * token_of(i) * p.rows + row] = rounded<WEIGHT>(sum);
  };
  for (int i = threadIdx.x; i < elements; i += blockDim.x) {
    if (token_of(i) >= p.tokens) continue;
    const int tile = i >> bits;
    float sum = *at(tile, i);
#pragma unroll 4
    for (int w = 1; w < warps_of_block(); w++)
      if (shared().begun[w] == tile) sum += *at(area.tiles + w, i);
    if (blocks > 1) {
      *at(tile, i) = sum;
    } else {
      store(i, sum);
    }
  }
  if (blocks == 1) return;
  sync_cluster();
  for (int i = rank * blockDim.x + threadIdx.x; i < elements; i += blocks * blockDim.x) {
    if (token_of(i) >= p.tokens) continue;
    float sum = 0;
    for (int k = 0; k < blocks; k++) sum += load_cluster(at(i >> bits, i), k);
    store(i, sum);
  }
  sync_cluster();  // no block ends while another reads its sums
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200  // 99 KB of shared memory hold the buffers of 11 warps
constexpr int kDirectThreads = 384;
#else
constexpr int kDirectThreads = THREADS;
#endif

// A module holds one kernel: compiling all four takes three times as long, and a call needs one.
#ifdef LINEAR_8
extern "C" __global__ void __launch_bounds__(THREADS, 1) packed_linear_8(PackedLinear p) { linear<1, false>(p); }
#endif
#ifdef LINEAR_16
extern "C" __global__ void __launch_bounds__(THREADS, 1) packed_linear_16(PackedLinear p) { linear<2, false>(p); }
#endif
#ifdef LINEAR_DIRECT
extern "C" __global__ void __launch_bounds__(kDirectThreads, 1) packed_linear_direct(PackedLinear p) { linear<2, true>(p); }
#endif

#ifdef UNPACK
template <bool MOVED>
__device__ inline void write_chunk(const Lane& own, int chunk, int columns, uint8_t* const (&to)[2]) {
  const Cursor at;
  uint32_t values = own.address(), before = 0;
  keep_order(values);
#pragma unroll 1
  for (int column = 0; column < columns; column += 64) {
    const uint32_t bits = shared_words()[chunk + column / 2 + lane()];
    const Middles middles(bits, before);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int mine = column + 32 * half;
      uint32_t part[8];
      decode<MOVED>(own, at, bits, half, middles, values, part);
#pragma unroll
      for (int r = 0; r < 2; r++)
        if (to[r] && mine + lane() % 4 * 8 < columns)
          *reinterpret_cast<uint4*>(to[r] + 2 * mine) = make_uint4(part[r], part[2 + r], part[4 + r], part[6 + r]);
    }
  }
}

// A block unpacks a tile; each lane writes 8 columns of two rows at a time.
extern "C" __global__ void __launch_bounds__(256, 2) unpack(PackedLinear p) {
  const Source source(p);
  const Area area(int(blockIdx.x), int(gridDim.x), 1, source.tiles, 0, source.chunks_of_tile);
  uint8_t* rows[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = source.order[area.tile(0) * kTileRows + lane() / 4 + 8 * r];
    rows[r] = row < 0 ? nullptr : p.out + 2ll * row * p.columns + lane() % 4 * 16;
  }
  const int buffers = int(sizeof(Shared) + 127) & ~127;
  Chunks chunks(p, source, area, buffers + warp() * p.buffer);
  chunks.load(0);
  chunks.start();
#pragma unroll 1
  for (; chunks.wait(); chunks.release()) {
    const int start = chunks.number() * kChunkColumns, columns = min(kChunkColumns, p.columns - start);
    const Lane own(chunks.place(), columns + 63 >> 6);
    uint8_t* const to[2] = {rows[0] ? rows[0] + 2 * start : nullptr, rows[1] ? rows[1] + 2 * start : nullptr};
    const int used = own.move(chunks.end());
    chunks.proceed(used ? used : chunks.end());
    if (used) {
      write_chunk<true>(own, chunks.place(), columns, to);
    } else {
      write_chunk<false>(own, chunks.place(), columns, to);
    }
  }
}
#endif

}  // namespace fwanda
