// Packed weights: a linear layer of up to 16 tokens, and unpacking. docs/packed.md has the layout.
//
// Memory: the packed bytes are read once, by bulk copies into the buffers of each warp. A block owns four tiles of 16 rows and
// has two warps for each. These two, and the blocks of a cluster, share the chunks of a tile and add their sums up at the
// end, in a fixed order; so the bits of a result depend on the shape and on how many blocks a cluster has.
//
// Decoding: a lane owns 16 weights of each 32 columns: 8 columns of rows g and g + 8. Four bits at a time it loads the three
// words in which its next four values stand, shifts them into place, and lets a byte permutation put values and zeros
// where the bits say. The result is a fragment of the tensor cores.
#include "common.cuh"

namespace fwanda {

constexpr bool kBf16 = WEIGHT::kExponent == Bf16::kExponent;
constexpr int kHeader = 64, kTileRows = 16, kChunkColumns = 256;
constexpr int kTiles = 4, kSplit = 2, kWarps = kTiles * kSplit, kMaxStages = 4;
constexpr int kScratchRows = 24;  // words of each lane that can be put side by side with those of the other lanes
constexpr int kTokens = 8;        // columns of a fragment

struct PackedLinear {
  const uint8_t* packed;
  const uint8_t* x;     // [tokens, columns]
  const uint8_t* bias;  // [rows] or null
  uint8_t* out;         // [tokens, rows]; in unpacking [rows, columns]
  int rows, columns, tokens;
  int stages, stage_bytes;  // buffers of a warp; a multiple of 128 bytes for each
};

__device__ inline uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ inline uint32_t load_shared(uint32_t address) {
  uint32_t word;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
}

__device__ inline void store_shared(uint32_t address, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
  return out;
}

__device__ inline void start_bulk_copy(uint32_t barrier, uint32_t to, const void* from, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ inline void wait_bulk_copy(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
}

// For four bits: byte selectors of the first and of the second two columns, and how far the values of the second two begin.
__device__ inline uint2 selectors(uint32_t bits) {
  const uint32_t b0 = bits & 1, b1 = bits >> 1 & 1, b2 = bits >> 2 & 1, b3 = bits >> 3;
  const uint32_t zero = 0x44, first = 0x10, second = 0x32;
  const uint32_t low = (b0 ? first : zero) | (b1 ? (b0 ? second : first) : zero) << 8;
  const uint32_t high = (b2 ? first : zero) | (b3 ? (b2 ? second : first) : zero) << 8;
  return make_uint2(low | high << 16, 16 * (b0 + b1));
}

// What a lane knows of the chunk that it decodes.
struct Lane {
  uint32_t values;    // shared address of the first value of the chunk
  int words, common;  // whole words of this lane; words that every lane has
  uint32_t further;   // shared address of the first word beyond these
  uint32_t last;      // shared address of the last value, if the count is odd
  bool odd;

  __device__ void read(uint32_t chunk, int pairs) {
    const int l = lane();
    int count = 0;
#pragma unroll 1
    for (int p = 0; p < pairs; p++) count += __popc(load_shared(chunk + 128 * p + 4 * l));
    words = count >> 1, odd = count & 1;
    common = int(__reduce_min_sync(~0u, unsigned(words)));
    int sum = words - common;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, sum, step);
      if (l >= step) sum += other;
    }
    const uint32_t odds = __ballot_sync(~0u, odd);
    values = chunk + 128 * pairs;
    const uint32_t end = values + 128 * common;
    further = end + 4 * (sum - (words - common));
    last = end + 4 * __shfl_sync(~0u, sum, 31) + 2 * __popc(odds & ((1u << l) - 1));
  }

  // Word w of this lane; the last value alone, or 0, beyond the whole words.
  __device__ uint32_t word(int w) const {
    if (w < common) return load_shared(values + 128 * w + 4 * lane());
    if (w < words) return load_shared(further + 4 * (w - common));
    uint16_t value = 0;
    if (odd && w == words) asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(last));
    return value;
  }
};

// Where a lane is in its values. Value i of the lane stands in the half i % 2 of the word at base + 128 (i / 2) + 4 lane, as
// long as that lies before end; so `base + 64 i`, the place, tells word and half.
struct Place {
  uint32_t base, end;
  uint32_t next;  // place of the next value
  bool held;      // whether the words can be read so; else Lane::word() reads them

  __device__ explicit Place(const Lane& own) : base(own.values), end(own.values + 128 * own.common), next(own.values), held(true) {}

  // Ready for the values up to the place `stop`. The words that not every lane has, and those before them that are still
  // needed, are put side by side in scratch, unless too many lie between the lanes. Returns the new stop.
  __device__ uint32_t prepare(const Lane& own, uint32_t scratch, uint32_t stop) {
    if (!__any_sync(~0u, stop > end)) return stop;
    const uint32_t first = __reduce_min_sync(~0u, (next - base) / 128);
    held = !__any_sync(~0u, stop - base > 128 * (first + kScratchRows));
    const uint32_t moved = scratch - 128 * first - base;
    if (held) {
      const int rows = kScratchRows, common = max(0, own.common - int(first));
      const int last = min(rows, int(__reduce_max_sync(~0u, unsigned(own.words + own.odd))) - int(first));
      const uint32_t to = scratch + 4 * lane(), from = own.values + 128 * first + 4 * lane();
#pragma unroll 4
      for (int w = 0; w < min(rows, common); w++) store_shared(to + 128 * w, load_shared(from + 128 * w));
      const uint32_t beyond = own.further - 4 * (own.common - first);
#pragma unroll 4
      for (int w = common; w < last; w++) store_shared(to + 128 * w, int(first) + w < own.words ? load_shared(beyond + 4 * w) : 0);
      const int odd = own.words - int(first);
      if (own.odd && odd >= 0 && odd < rows) store_shared(to + 128 * odd, own.word(own.words));
      base += moved, next += moved, stop += moved;
      end = scratch + 128 * kScratchRows;
    } else {
      end = base;  // asks again at the next step
    }
    return stop;
  }
};

// Four columns of a row, from the three words that begin with the first value and its place.
__device__ inline void expand(const uint32_t (&words)[3], uint32_t place, uint2 selector, uint32_t& a, uint32_t& b) {
  const uint32_t low = __funnelshift_r(words[0], words[1], place >> 2), high = __funnelshift_r(words[1], words[2], place >> 2);
  a = prmt(low, 0, selector.x);
  b = prmt(__funnelshift_rc(low, high, selector.y), 0, selector.x >> 16);
}

// Weights of 32 columns: part[0..3] is a fragment of columns 8 t to 8 t + 3 of rows g and g + 8, part[4..7] of the next four.
template <bool HELD>
__device__ inline void decode(const Lane& own, const Place& place, uint32_t table, uint32_t bits, uint32_t (&part)[8]) {
#pragma unroll
  for (int j = 0; j < 4; j++) {  // four columns of row g, four more, then those of row g + 8
    const uint32_t at = place.next + 64 * __popc(bits & ((1u << 4 * j) - 1));
    uint2 selector;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(selector.x), "=r"(selector.y)
                 : "r"((4 * j < 8 ? bits << (8 - 4 * j) : bits >> (4 * j - 8)) & 0xf00 | table));
    uint32_t words[3];
#pragma unroll
    for (int i = 0; i < 3; i++)
      words[i] = HELD ? load_shared(((at & ~127u) | 4 * lane()) + 128 * i) : own.word((at - place.base) / 128 + i);
    const int first = 4 * (j & 1) + (j >> 1);
    expand(words, at, selector, part[first], part[first + 2]);
  }
}

__device__ inline void decode_step(const Lane& own, Place& place, uint32_t table, uint32_t scratch, uint32_t bits, uint32_t (&part)[8]) {
  const uint32_t stop = place.prepare(own, scratch, place.next + 64 * __popc(bits & 0xffff));
  if (place.held) {
    decode<true>(own, place, table, bits, part);
  } else {
    decode<false>(own, place, table, bits, part);
  }
  place.next = stop;
}

__device__ inline void multiply(float (&sums)[4], const uint32_t* a, uint32_t b0, uint32_t b1) {
#define FWANDA_MULTIPLY(dtype)                                                                                              \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." dtype "." dtype ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (kBf16) {
    FWANDA_MULTIPLY("bf16");
  } else {
    FWANDA_MULTIPLY("f16");
  }
}

__device__ inline uint16_t rounded(float value) {
  uint16_t bits;
  if constexpr (kBf16) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  } else {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  }
  return bits;
}

// The parts of a packed weight.
struct Source {
  const int32_t *order, *offsets;
  const uint8_t* data;
  int chunks_of_tile;

  __device__ Source(const uint8_t* packed, int rows, int columns) {
    const int tiles = (rows + kTileRows - 1) / kTileRows;
    chunks_of_tile = (columns + kChunkColumns - 1) / kChunkColumns;
    order = reinterpret_cast<const int32_t*>(packed + kHeader);
    offsets = order + kTileRows * tiles;
    data = reinterpret_cast<const uint8_t*>(offsets) + (4ll * (1ll * tiles * chunks_of_tile + 1) + 15) / 16 * 16;
  }
};

__device__ inline uint32_t block_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline uint32_t blocks_of_cluster() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

__device__ inline void sync_cluster() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

__device__ inline float load_cluster(uint32_t address, uint32_t block) {
  float value;
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote) : "memory");
  return value;
}

// Shared memory of a block. The buffers of the warps follow, and 256 bytes that loads may run over.
struct Shared {
  uint2 table[16][32];  // selectors() for every lane, in its own banks; the address is a multiple of 4096
  union {
    uint32_t scratch[kWarps][kScratchRows + 2][32];
    struct {  // when all chunks are done
      float sums[kWarps][kTileRows][2 * kTokens];
      float block_sums[kTiles * kTileRows][2 * kTokens];
    };
  };
  uint64_t copied[kWarps][kMaxStages];
};

// Copies the chunks first, first + step, ... of a tile to shared memory and calls use(chunk, pairs of 32 columns, its address) on
// each. One warp does that.
template <class Use>
__device__ inline void each_chunk(const PackedLinear& p, Shared& shared, uint8_t* buffers, int tile, int first, int step, Use use) {
  const Source source(p.packed, p.rows, p.columns);
  const int count = (source.chunks_of_tile - first + step - 1) / step;  // <= 0: none
  const uint32_t buffer = shared_address(buffers) + warp() * p.stages * p.stage_bytes;
  const uint32_t barrier = shared_address(&shared.copied[warp()][0]);
  if (lane() < p.stages) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier + 8 * lane()) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  int begin = 0, end = 0;  // of the chunk lane + 32 n of this warp, in units of 16 bytes
  auto start = [&](int i) {
    if (i % 32 == 0) {
      const int chunk = tile * source.chunks_of_tile + first + (i + lane()) * step;
      const bool mine = i + lane() < count;
      begin = mine ? source.offsets[chunk] : 0;
      end = mine ? source.offsets[chunk + 1] : 0;
    }
    const int from = __shfl_sync(~0u, begin, i % 32), to = __shfl_sync(~0u, end, i % 32);
    const int stage = i % p.stages;
    if (lane() == 0)
      start_bulk_copy(barrier + 8 * stage, buffer + stage * p.stage_bytes, source.data + 16ll * from, 16 * (to - from));
  };
#pragma unroll 1
  for (int i = 0; i < min(count, p.stages); i++) start(i);
#pragma unroll 1
  for (int i = 0; i < count; i++) {
    const int stage = i % p.stages;
    const int chunk = first + i * step;
    const int pairs = min(4, (p.columns - chunk * kChunkColumns + 63) / 64);
    wait_bulk_copy(barrier + 8 * stage, i / p.stages & 1);
    use(chunk, pairs, buffer + stage * p.stage_bytes);
    __syncwarp();
    if (i + p.stages < count) start(i + p.stages);
  }
}

__device__ inline void make_table(Shared& shared) {
  for (int i = threadIdx.x; i < 16 * 32; i += blockDim.x) shared.table[i / 32][i % 32] = selectors(i / 32);
}

// GROUPS: groups of 8 tokens.
template <int GROUPS>
__device__ inline void linear(const PackedLinear& p, Shared& shared, uint8_t* buffers) {
  make_table(shared);
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  const uint32_t rank = block_in_cluster(), blocks = blocks_of_cluster();
  const int tiles = (p.rows + kTileRows - 1) / kTileRows, group = blockIdx.x / blocks;
  const int place = warp() / kSplit, tile = group * kTiles + place, part = warp() % kSplit;
  const int g = lane() / 4, t = lane() % 4;
  const uint32_t table = shared_address(shared.table) | 8 * lane(), scratch = shared_address(shared.scratch[warp()]);
  float sums[GROUPS][4] = {};
  const uint8_t* x_of[GROUPS];  // of the token that this lane reads, 8 t columns further
#pragma unroll
  for (int n = 0; n < GROUPS; n++) x_of[n] = p.x + 2 * (1ll * (kTokens * n + g) * p.columns + 8 * t);
  if (tile < tiles)
    each_chunk(p, shared, buffers, tile, int(rank) * kSplit + part, int(blocks) * kSplit, [&](int chunk, int pairs, uint32_t bytes) {
      Lane own;
      own.read(bytes, pairs);
      Place place_of(own);
#pragma unroll 1
      for (int pair = 0; pair < pairs; pair++) {
        const uint32_t bits = load_shared(bytes + 128 * pair + 4 * lane());
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int column = chunk * kChunkColumns + 64 * pair + 32 * half;
          uint4 x[GROUPS];
#pragma unroll
          for (int n = 0; n < GROUPS; n++) {
            x[n] = make_uint4(0, 0, 0, 0);
            if (kTokens * n + g < p.tokens && column + 8 * t < p.columns) x[n] = *reinterpret_cast<const uint4*>(x_of[n] + 2 * column);
          }
          uint32_t fragment[8];
          decode_step(own, place_of, table, scratch, bits >> 16 * half, fragment);
#pragma unroll
          for (int n = 0; n < GROUPS; n++) {
            multiply(sums[n], fragment, x[n].x, x[n].y);
            multiply(sums[n], fragment + 4, x[n].z, x[n].w);
          }
        }
      }
    });
  __syncthreads();
#pragma unroll
  for (int n = 0; n < GROUPS; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) shared.sums[warp()][g + 8 * (i / 2)][kTokens * n + 2 * t + i % 2] = sums[n][i];
  __syncthreads();
  constexpr int kAll = kTiles * kTileRows * kTokens * GROUPS;
  for (int i = threadIdx.x; i < kAll; i += blockDim.x) {
    const int row = i / (kTokens * GROUPS), token = i % (kTokens * GROUPS);
    const int w = row / kTileRows * kSplit;
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kSplit; k++) sum += shared.sums[w + k][row % kTileRows][token];
    shared.block_sums[row][token] = sum;
  }
  sync_cluster();
  const Source source(p.packed, p.rows, p.columns);
  for (int i = int(rank) * blockDim.x + threadIdx.x; i < kAll; i += int(blocks) * blockDim.x) {
    const int place_of_row = i % (kTiles * kTileRows), token = i / (kTiles * kTileRows);
    if (token >= p.tokens || group * kTiles * kTileRows + place_of_row >= tiles * kTileRows) continue;
    const int row = source.order[group * kTiles * kTileRows + place_of_row];
    if (row < 0) continue;
    const uint32_t address = shared_address(&shared.block_sums[place_of_row][token]);
    float sum = 0;
    for (uint32_t k = 0; k < blocks; k++) sum += load_cluster(address, k);
    if (p.bias) sum += WEIGHT::decode(reinterpret_cast<const uint16_t*>(p.bias)[row]);
    reinterpret_cast<uint16_t*>(p.out)[1ll * token * p.rows + row] = rounded(sum);
  }
  sync_cluster();  // no block ends while another reads its sums
}

extern __shared__ __align__(128) unsigned char dynamic_shared[];
constexpr int kSharedBytes = (sizeof(Shared) + 127) / 128 * 128;

// The table of selectors is at a multiple of 4096, because its addresses are put together by bits.
__device__ inline unsigned char* aligned_shared() { return dynamic_shared + (-shared_address(dynamic_shared) & 4095); }

extern "C" __global__ void __launch_bounds__(32 * kWarps, 2) packed_linear_8(PackedLinear p) {
  linear<1>(p, *reinterpret_cast<Shared*>(aligned_shared()), aligned_shared() + kSharedBytes);
}

extern "C" __global__ void __launch_bounds__(32 * kWarps, 2) packed_linear_16(PackedLinear p) {
  linear<2>(p, *reinterpret_cast<Shared*>(aligned_shared()), aligned_shared() + kSharedBytes);
}

// A block unpacks a tile: each warp decodes every eighth chunk, and writes 8 columns of two rows at a time.
extern "C" __global__ void __launch_bounds__(32 * kWarps, 2) unpack(PackedLinear p) {
  Shared& shared = *reinterpret_cast<Shared*>(aligned_shared());
  make_table(shared);
  __syncthreads();
  const Source source(p.packed, p.rows, p.columns);
  const int tile = int(blockIdx.x), g = lane() / 4, t = lane() % 4;
  const int rows[2] = {source.order[tile * kTileRows + g], source.order[tile * kTileRows + g + 8]};
  const uint32_t table = shared_address(shared.table) | 8 * lane(), scratch = shared_address(shared.scratch[warp()]);
  each_chunk(p, shared, aligned_shared() + kSharedBytes, tile, warp(), kWarps, [&](int chunk, int pairs, uint32_t bytes) {
    Lane own;
    own.read(bytes, pairs);
    Place place(own);
#pragma unroll 1
    for (int step = 0; step < 2 * pairs; step++) {
      const uint32_t bits = load_shared(bytes + 128 * (step / 2) + 4 * lane()) >> 16 * (step % 2);
      uint32_t part[8];
      decode_step(own, place, table, scratch, bits, part);
      const int column = chunk * kChunkColumns + 32 * step + 8 * t;
#pragma unroll
      for (int r = 0; r < 2; r++)
        if (rows[r] >= 0 && column < p.columns)
          *reinterpret_cast<uint4*>(p.out + 2 * (1ll * rows[r] * p.columns + column)) =
              make_uint4(part[r], part[2 + r], part[4 + r], part[6 + r]);
    }
  });
}

}  // namespace fwanda
