// Packed weights: a linear layer of up to 16 tokens, and unpacking. docs/packed.md has the layout.
//
// Memory: the packed bytes are read once, by bulk copies into a buffer of each warp, which holds two chunks if they fit. A
// cluster of blocks owns some tiles of 16 rows, and each of its blocks a range of their columns. The chunks of a block, tile after
// tile, are divided evenly among its warps. Sums of warps, then of blocks, are added up at the end in a fixed order; so
// the bits of a result depend on the shape and on the division, which the host chooses. A block keeps its columns of x in shared
// memory. Only these depend on the last kernel: the first chunks are copied while that one ends.
//
// Decoding: a lane owns 16 weights of each 32 columns: 8 columns of rows g and g + 8. For each four columns it counts the ones
// before their middle, loads the three words around that place, and shifts the two values before it into one register and the
// two after it into another. Byte permutations then put values and zeros where the bits say. The result is a fragment of the
// tensor cores. No step waits for another one. Before that, the words that not every lane has are moved to where word k of
// lane l stands at 32 k + l, as the others do.
#include "packed_ptx.cuh"

namespace fwanda {

constexpr int kHeader = 64, kTileRows = 16, kChunkColumns = 256;
constexpr int kTail = 24;        // further words of a lane that are moved at most
constexpr int kGroup = 4;        // rows of them that are moved together
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

// Shared memory: this struct, places of the order, x, the sums, the buffers of the warps, and 512 bytes that loads may run over.
struct Shared {
  uint64_t copied[kMaxWarps][2];  // barriers
  uint64_t ready, unused;         // order and x have been copied
};

extern __shared__ __align__(128) unsigned char dynamic_shared[];

__device__ inline Shared& shared() { return *reinterpret_cast<Shared*>(dynamic_shared); }
__device__ inline uint32_t* shared_words() { return reinterpret_cast<uint32_t*>(dynamic_shared); }
__device__ inline int warps_of_block() { return int(blockDim.x >> 5); }

// Of two numbers that are not negative, in fewer instructions.
__device__ inline int quotient(int a, int b) { return int(unsigned(a) / unsigned(b)); }

// Selectors of the bytes of four columns, for their four bits. In the lower half those of columns 0 and 1, from the two values
// before the middle; in the upper half those of columns 2 and 3, from the two after it. Byte 4 is 0.
__device__ inline uint32_t selectors_of(uint32_t bits) {
  constexpr uint32_t kZero = 0x44, kFirst = 0x10, kSecond = 0x32;
  const bool kept[4] = {bool(bits & 1), bool(bits & 2), bool(bits & 4), bool(bits & 8)};
  const uint32_t columns[4] = {kept[0] ? kept[1] ? kFirst : kSecond : kZero, kept[1] ? kSecond : kZero, kept[2] ? kFirst : kZero,
                               kept[3] ? kept[2] ? kSecond : kFirst : kZero};
  return columns[0] | columns[1] << 8 | columns[2] << 16 | columns[3] << 24;
}

// Where a lane finds its values in a chunk. Places are in words of shared memory.
struct Lane {
  int values;         // place of word 0 of lane 0
  int words, common;  // whole words of this lane; words that every lane has
  int further;        // place of the first word beyond these
  int further_words;  // of all lanes
  int last;           // twice the place of the last value, if the count is odd
  bool odd;
  int rows;  // of 32 words, after moving

  __device__ Lane(int chunk, int pairs) {
    const int l = lane();
    int count = 0;
#pragma unroll
    for (int p = 0; p < kChunkColumns / 64; p++) count += p < pairs ? __popc(shared_words()[chunk + 32 * p + l]) : 0;
    words = count >> 1, odd = count & 1;
    const int own = words | int(odd) << 16;
    const int sum = sum_of_lanes(own), before = sum - own;
    const int all = __shfl_sync(~0u, sum, 31) & 0xffff;
    common = int(__reduce_min_sync(~0u, unsigned(words)));
    rows = int(__reduce_max_sync(~0u, unsigned(words + odd)));
    values = chunk + 32 * pairs;
    further_words = all - 32 * common;
    further = values + common * (32 - l) + (before & 0xffff);
    last = 2 * (values + all) + (before >> 16);
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
  // anything. The room of the chunk ends at `end`. Returns the end of what is used now; or moves nothing and returns 0 if the
  // room is too small.
  __device__ int move(int end) const {
    const int tail = rows - common, used = values + 32 * (common + (tail + kGroup - 1 & -kGroup));
    // the upper half of the rows is moved first, to where no further word stands
    if (tail > kTail || further_words > 16 * kTail || used > end) return 0;
    const uint32_t value = last_value();
    if (tail > kTail / 2) move_rows(kTail / 2, tail);
    move_rows(0, tail);
    if (odd) shared_words()[values + 32 * words + lane()] = value;
    return used;
  }

  __device__ void move_rows(int first, int tail) const {
    uint32_t moved[kTail / 2];
    const uint32_t mine = ~(~0u << (words - common)) >> first;
#pragma unroll
    for (int i = 0; i < kTail / 2; i += kGroup)
      if (first + i < tail)
#pragma unroll
        for (int k = i; k < i + kGroup; k++)
          if (mine >> k & 1) moved[k] = shared_words()[further + first + k];  // fewer lanes, fewer conflicts of banks
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kTail / 2; i += kGroup)
      if (first + i < tail)
#pragma unroll
        for (int k = i; k < i + kGroup; k++) shared_words()[values + 32 * (common + first + k) + lane()] = moved[k];
  }
};

// What all steps need, in registers.
struct Cursor {
  uint32_t lane, selectors;  // selectors_of(lane)

  __device__ Cursor() : lane(lane_register()), selectors(selectors_of(lane)) {}
};

// Weights of 32 columns: part[0..3] is a fragment of columns 8 t to 8 t + 3 of rows g and g + 8, part[4..7] of the next four.
// bits: of 64 columns, of which `half` says which; next: 16 times the number of values before these 64 columns, plus a
// quarter of the shared address of the first word of lane 0, which is a multiple of 128.
template <bool MOVED>
__device__ inline void decode(const Lane& own, const Cursor& at, uint32_t bits, int half, uint32_t next, uint32_t (&part)[8]) {
#pragma unroll
  for (int j = 0; j < 4; j++) {  // four columns of row g, four more, then those of row g + 8
    const int shift = 16 * half + 4 * j;
    const uint32_t selectors = __shfl_sync(~0u, at.selectors, bits >> shift);  // of the lane that the lowest five bits name
    const uint32_t middle = next + 16 * __popc(bits << (30 - shift));
    uint32_t words[3];
    if constexpr (MOVED) {
      const uint32_t from = 4 * (middle & ~31u | at.lane);
      words[0] = load_word(from - 128), words[1] = load_word(from), words[2] = load_word(from + 128);
    } else {
#pragma unroll
      for (int i = 0; i < 3; i++) words[i] = own.word(int(middle - own.address() / 4) / 32 + i - 1);
    }
    const int first = 4 * (j & 1) + (j >> 1);
    part[first] = permute(__funnelshift_r(words[0], words[1], middle), 0, selectors);
    part[first + 2] = permute(__funnelshift_r(words[1], words[2], middle), 0, selectors >> 16);
  }
}

// The parts of a packed weight.
struct Source {
  const int32_t *order, *offsets;
  const uint8_t* data;
  int tiles, chunks_of_tile;

  __device__ Source(const PackedLinear& p) {
    tiles = quotient(p.rows + kTileRows - 1, kTileRows);
    chunks_of_tile = quotient(p.columns + kChunkColumns - 1, kChunkColumns);
    order = reinterpret_cast<const int32_t*>(p.packed + kHeader);
    offsets = order + kTileRows * tiles;
    data = reinterpret_cast<const uint8_t*>(offsets) + (4ll * (1ll * tiles * chunks_of_tile + 1) + 15) / 16 * 16;
  }
};

// A part of a packed weight: `columns` chunks of each of `tiles` tiles. Each warp has `share` of them, tile after tile; the first
// `longer` warps, which differ in their schedulers, have one more.
struct Area {
  int tile, tiles, column, columns, share, longer;

  __device__ Area(int tile, int tiles, int column, int columns) : tile(tile), tiles(tiles), column(column), columns(columns) {
    share = quotient(tiles * columns, warps_of_block()), longer = tiles * columns - share * warps_of_block();
  }

  // First chunk of a warp; that of the next warp is the end.
  __device__ int first_of(int warp) const { return warp * share + min(warp, longer); }

  // The warp that has a chunk.
  __device__ int warp_of(int chunk) const {
    const int start = longer * (share + 1);  // of the shorter shares
    return chunk < start ? quotient(chunk, share + 1) : longer + quotient(chunk - start, share);
  }
};

// The chunks of this warp, in order, and their copies in shared memory. They lie at the beginning and at the end of its buffer in
// turn; the next one is copied while one is in use, if there is room for both. The buffer begins at a multiple of 128 bytes. All
// lanes call these functions together.
class Chunks {
 public:
  // Starts the first copies.
  __device__ Chunks(const PackedLinear& p, const Source& source, const Area& area, int buffer)
      : source_(source), area_(area), copied_(shared().copied[warp()]), buffer_(buffer), size_(p.buffer) {
    first_ = area.first_of(warp()), count_ = area.first_of(warp() + 1) - first_;
    if (count_ > 0) load_offsets(0);
    if (lane() < 2) init_barrier(copied_ + lane());
    fence_copies();
    __syncwarp();
    if (count_ > 0) {
      room_ = find(0);
      start(0, room_);
    }
    if (count_ > 1) {
      next_ = find(1);
      if (room_.size + next_.size <= size_) start(1, next_);
    }
  }

  // Waits for the next chunk; false at the end. The chunk is used until release().
  __device__ bool wait() {
    if (n_ == count_) return false;
    wait_copy(copied_ + n_ % 2, n_ / 2 & 1);
    return true;
  }

  __device__ int number() const { return first_ + n_; }  // in the area
  __device__ bool is_first() const { return n_ == 0; }
  __device__ bool is_last() const { return n_ + 1 == count_; }
  __device__ int place() const { return room_.place >> 2; }              // of its first word
  __device__ int end() const { return room_.place + room_.size >> 2; }  // of its room

  // Starts the next copy if there is room for it beside what is used of this room, up to `end`. To be called once.
  __device__ void proceed(int end) {
    if (started_ > n_ + 1 || is_last()) return;
    if ((n_ + 1) % 32 == 0) load_offsets(n_ + 1);
    if (n_) next_ = find(n_ + 1);
    // a chunk at the beginning needs no room to grow in before this one, at the end, is released
    const int taken = n_ % 2 ? room_.size + next_.bytes : 4 * end - room_.place + next_.size;
    if (taken <= size_) start(n_ + 1, next_);
  }

  __device__ void release() {
    fence_copies();
    __syncwarp();
    if (started_ == n_ + 1 && !is_last()) start(n_ + 1, next_);
    room_ = next_, n_++;
  }

 private:
  struct Room {
    int from, bytes, size, place;  // from: in units of 16 bytes
  };

  // Of 32 chunks from n on, one for each lane.
  __device__ void load_offsets(int n) {
    const int mine = first_ + min(n + lane(), count_ - 1), tile = quotient(mine, area_.columns);
    const int column = area_.column + mine - tile * area_.columns;
    const int32_t* const at = source_.offsets + (1ll * (area_.tile + tile) * source_.chunks_of_tile + column);
    begin_ = at[0], end_ = at[1];
  }

  __device__ Room find(int n) const {
    Room room;
    room.from = __shfl_sync(~0u, begin_, n % 32);
    room.bytes = min(16 * (__shfl_sync(~0u, end_, n % 32) - room.from), size_);  // more only if the weight has been altered
    room.size = min(room.bytes + kSlack + 127 & ~127, size_);
    room.place = buffer_ + (n % 2 ? size_ - room.size : 0);
    return room;
  }

  __device__ void start(int n, const Room& room) {
    started_ = n + 1;
    if (lane()) return;
    expect_bytes(copied_ + n % 2, room.bytes);
    start_copy(copied_ + n % 2, dynamic_shared + room.place, source_.data + 16ll * room.from, room.bytes);
  }

  const Source& source_;
  const Area& area_;
  uint64_t* const copied_;
  const int buffer_, size_;
  int first_, count_, n_ = 0, started_ = 0;
  int begin_ = 0, end_ = 0;  // of the chunk that this lane knows
  Room room_, next_;
};

// What a lane reads of x: 8 columns of a token for each group of 8 tokens. For tokens that do not exist it takes other
// values; they only enter sums that nobody stores.
template <int GROUPS>
struct Tokens {
  uint32_t from[GROUPS];  // shared address of the next columns of this lane
  bool there[GROUPS];

  __device__ void skip(int columns) {
#pragma unroll
    for (int n = 0; n < GROUPS; n++) from[n] += 2 * columns;
  }

  __device__ void load(int offset, uint4 (&x)[GROUPS]) const {
#pragma unroll
    for (int n = 0; n < GROUPS; n++) x[n] = load_if(from[n] + offset, there[n]);
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
__device__ inline void multiply_chunk(const Lane& own, const Cursor& at, int chunk, Tokens<GROUPS> tokens,
                                      float (&sums)[GROUPS][4]) {
  uint32_t next = own.address() / 4;
  keep_order(next);
#pragma unroll 1
  for (int column = 0; column < kChunkColumns; column += 64, tokens.skip(64)) {
    const uint32_t bits = shared_words()[chunk + column / 2 + lane()];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint4 x[GROUPS];
      tokens.load(64 * half, x);
      uint32_t part[8];
      decode<true>(own, at, bits, half, next, part);
      multiply_step(part, x, sums);
    }
    next += 16 * __popc(bits);
  }
}

// The same for a chunk of fewer columns, or whose words have not been moved.
template <int GROUPS>
__device__ inline void multiply_part(const Lane& own, const Cursor& at, int chunk, int columns, Tokens<GROUPS> tokens,
                                     float (&sums)[GROUPS][4]) {
  uint32_t next = own.address() / 4;
#pragma unroll 1
  for (int column = 0; column < columns; column += 64, tokens.skip(64)) {
    const uint32_t bits = shared_words()[chunk + column / 2 + lane()];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint4 x[GROUPS];
      tokens.load(64 * half, x);
      if (column + 32 * half + lane() % 4 * 8 >= columns)  // the weight has zeros there
#pragma unroll
        for (int n = 0; n < GROUPS; n++) x[n] = make_uint4(0, 0, 0, 0);
      uint32_t part[8];
      decode<false>(own, at, bits, half, next, part);
      multiply_step(part, x, sums);
    }
    next += 16 * __popc(bits);
  }
}

// Sums of a warp, or of a block, for a tile and GROUPS * 8 tokens.
template <int GROUPS>
using Sums = float[kTileRows][kTokens * GROUPS];

// Copies of a block, in shared memory.
struct Copies {
  int order, x, stride, end;  // places in bytes; stride: of tokens, which begin in other banks in turn

  __device__ Copies(const PackedLinear& p, int chunks) {  // chunks: of the widest block
    order = int(sizeof(Shared)), x = order + 4 * kTileRows * p.tiles;
    stride = 2 * kChunkColumns * chunks + 64, end = x + p.tokens * stride;
  }

  // By one warp.
  __device__ void start(const PackedLinear& p, const Source& source, const Area& area) const {
    const int from = area.column * kChunkColumns, columns = min(area.columns * kChunkColumns, p.columns - from);
    const int places = 4 * kTileRows * area.tiles;
    if (lane() == 0) {
      expect_bytes(&shared().ready, places + 2 * columns * p.tokens);
      start_copy(&shared().ready, dynamic_shared + order, source.order + kTileRows * area.tile, places);
    }
    __syncwarp();
    if (lane() < p.tokens)
      start_copy(&shared().ready, dynamic_shared + x + stride * lane(), p.x + 2 * (1ll * lane() * p.columns + from), 2 * columns);
  }
};

// The chunks of this warp. Sums of a tile whose first chunk it has go to sums[tile of the area]; of another, to sums[tiles + warp].
template <int GROUPS>
__device__ inline void multiply_area(const PackedLinear& p, const Source& source, const Area& area, const Copies& copies,
                                     Sums<GROUPS>* all, int buffer) {
  Chunks chunks(p, source, area, buffer);
  const int g = lane() / 4, t = lane() % 4;
  const Cursor at;
  float sums[GROUPS][4] = {};
  Tokens<GROUPS> tokens;
#pragma unroll
  for (int n = 0; n < GROUPS; n++) {
    tokens.from[n] = shared_address(dynamic_shared + copies.x) + copies.stride * (kTokens * n + g) + 16 * t;
    tokens.there[n] = kTokens * n + g < p.tokens;
  }
  const int first = area.first_of(warp());
  int tile = quotient(first, area.columns), column = first - tile * area.columns;
  int slot = column ? area.tiles + warp() : tile;
  for (int i = lane(); i < kTileRows * kTokens * GROUPS; i += 32) (&all[area.tiles + warp()][0][0])[i] = 0;
  if (threadIdx.x == 0) init_barrier(&shared().ready);
  fence_copies();
  __syncthreads();
  wait_for_last_kernel();
  if (warp() == 0) copies.start(p, source, area);
#pragma unroll 1
  for (; chunks.wait(); chunks.release()) {
    const int start = column * kChunkColumns, columns = min(kChunkColumns, p.columns - area.column * kChunkColumns - start);
    const Lane own(chunks.place(), columns + 63 >> 6);
    const int used = columns == kChunkColumns ? own.move(chunks.end()) : 0;
    chunks.proceed(used ? used : chunks.end());
    if (chunks.is_first()) wait_copy(&shared().ready, 0);
    Tokens<GROUPS> here = tokens;
    here.skip(start);
#pragma unroll
    for (int n = 0; n < GROUPS; n++) keep_order(here.from[n]);
    if (used) {
      multiply_chunk<GROUPS>(own, at, chunks.place(), here, sums);
    } else {
      multiply_part<GROUPS>(own, at, chunks.place(), columns, here, sums);
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

// GROUPS: groups of 8 tokens.
template <int GROUPS>
__device__ inline void linear(const PackedLinear& p) {
  let_next_kernel_start();
  // Until wait_for_last_kernel(), only the weight is read: kernels that let this one start early write no weight.
  const Source source(p);
  const int rank = block_in_cluster(), blocks = blocks_of_cluster(), shift = __popc(blocks - 1);  // a power of two
  const int column = rank * source.chunks_of_tile >> shift, end = (rank + 1) * source.chunks_of_tile >> shift;
  const int tile = int(blockIdx.x >> shift) * p.tiles;
  const Area area(tile, min(p.tiles, source.tiles - tile), column, end - column);
  const Copies copies(p, source.chunks_of_tile + blocks - 1 >> shift);
  auto* const sums = reinterpret_cast<Sums<GROUPS>*>(dynamic_shared + copies.end);
  const int buffers = int(copies.end + sizeof(Sums<GROUPS>) * (p.tiles + warps_of_block()) + 127) & ~127;
  multiply_area<GROUPS>(p, source, area, copies, sums, buffers + warp() * p.buffer);
  __syncthreads();
  wait_copy(&shared().ready, 0);
  const int places = area.tiles * kTileRows;
  auto at = [&](int place, int token) { return &sums[place / kTileRows][place % kTileRows][token]; };
  auto store = [&](int place, int token, float sum) {
    const int row = reinterpret_cast<const int32_t*>(dynamic_shared + copies.order)[place];
    if (row < 0) return;
    if (p.bias) sum += WEIGHT::decode(reinterpret_cast<const uint16_t*>(p.bias)[row]);
    reinterpret_cast<uint16_t*>(p.out)[1ll * token * p.rows + row] = rounded<WEIGHT>(sum);
  };
  for (int i = threadIdx.x; i < places * p.tokens; i += blockDim.x) {
    const int token = quotient(i, places), place = i - token * places, tile = place / kTileRows;
    const int first = area.warp_of(tile * area.columns), last = area.warp_of((tile + 1) * area.columns - 1);
    float sum = *at(place, token);
    for (int w = first + 1; w <= last; w++) sum += sums[area.tiles + w][place % kTileRows][token];
    if (blocks > 1) {
      *at(place, token) = sum;
    } else {
      store(place, token, sum);
    }
  }
  if (blocks == 1) return;
  sync_cluster();
  for (int i = rank * blockDim.x + threadIdx.x; i < places * p.tokens; i += blocks * blockDim.x) {
    const int token = quotient(i, places), place = i - token * places;
    float sum = 0;
    for (int k = 0; k < blocks; k++) sum += load_cluster(at(place, token), k);
    store(place, token, sum);
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
  for (int column = 0; column < columns; column += 64) {
    const uint32_t bits = shared_words()[chunk + column / 2 + lane()];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int mine = column + 32 * half;
      uint32_t part[8];
      decode<MOVED>(own, at, bits, half, next, part);
#pragma unroll
      for (int r = 0; r < 2; r++)
        if (to[r] && mine + lane() % 4 * 8 < columns)
          *reinterpret_cast<uint4*>(to[r] + 2 * mine) = make_uint4(part[r], part[2 + r], part[4 + r], part[6 + r]);
    }
    next += 16 * __popc(bits);
  }
}

// A block unpacks a tile; each lane writes 8 columns of two rows at a time.
extern "C" __global__ void __launch_bounds__(256, 2) unpack(PackedLinear p) {
  const Source source(p);
  const Area area(int(blockIdx.x), 1, 0, source.chunks_of_tile);
  uint8_t* rows[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = source.order[area.tile * kTileRows + lane() / 4 + 8 * r];
    rows[r] = row < 0 ? nullptr : p.out + 2ll * row * p.columns + lane() % 4 * 16;
  }
  const int buffers = int(sizeof(Shared) + 127) & ~127;
  Chunks chunks(p, source, area, buffers + warp() * p.buffer);
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

}  // namespace fwanda
