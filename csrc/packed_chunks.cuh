// Packed weights in memory: their parts, which of them a block multiplies, and their copies in shared memory.
#pragma once

#include "packed_ptx.cuh"

namespace fwanda {

constexpr int kHeader = 64, kTileRows = 16, kChunkColumns = 256;
constexpr int kSlack = 14 * 128;  // bytes that a chunk may grow by when words are moved
constexpr int kMaxWarps = 32;

struct PackedLinear {
  const uint8_t* packed;
  const uint8_t* x;     // [tokens, columns]
  const uint8_t* bias;  // [rows] or null
  uint8_t* out;         // [tokens, rows]; in unpacking [rows, columns]
  int rows, columns, tokens;
  int tiles;   // of a cluster, at most
  int buffer;  // bytes of the buffer of a warp; a multiple of 128, with room for the largest chunk
  int units;   // 16 bytes each, of the packed weight
};

// Shared memory: this struct, places of the order, x, the sums, the buffers of the warps, and 512 bytes that loads may run over.
struct Shared {
  uint64_t copied[kMaxWarps][2];  // barriers
  uint64_t ready, unused;         // order and x have been copied
  int16_t begun[kMaxWarps];       // tile of the area whose sums each warp has only from some column on, or -1
};

extern __shared__ __align__(128) unsigned char dynamic_shared[];

__device__ inline Shared& shared() { return *reinterpret_cast<Shared*>(dynamic_shared); }
__device__ inline uint32_t* shared_words() { return reinterpret_cast<uint32_t*>(dynamic_shared); }
__device__ inline int warps_of_block() { return int(blockDim.x >> 5); }

// a / b, for 0 <= a < 2^20 and 0 < b, in few instructions: the error of the reciprocal is too small to matter.
__device__ inline int quotient(int a, int b) { return int((float(a) + 0.5f) * reciprocal(float(b))); }

// The parts of a packed weight.
struct Source {
  const int32_t *order, *offsets;
  const uint8_t* data;
  int tiles, chunks_of_tile;
  int units;  // of the data

  __device__ Source(const PackedLinear& p) {
    tiles = int(unsigned(p.rows + kTileRows - 1) / kTileRows);
    chunks_of_tile = int(unsigned(p.columns + kChunkColumns - 1) / kChunkColumns);
    order = reinterpret_cast<const int32_t*>(p.packed + kHeader);
    offsets = order + kTileRows * tiles;
    const int64_t before = 1ll * tiles * chunks_of_tile / 4 + 1;  // units of the offsets
    data = reinterpret_cast<const uint8_t*>(offsets) + 16 * before;
    units = int(p.units - kHeader / 16 - kTileRows / 4 * tiles - before);
  }
};

// A part of a packed weight: `columns` chunks of each of `tiles` tiles. Rows that keep more weights come first, so clusters take
// tiles in turn, forwards and backwards. Each warp has `share` of the chunks, tile after tile; the first `longer` warps, which
// differ in their schedulers, have one more.
struct Area {
  int cluster, clusters, tiles, column, columns, share, longer;

  // At most `most` tiles, of `all`.
  __device__ Area(int cluster, int clusters, int most, int all, int column, int columns)
      : cluster(cluster), clusters(clusters), tiles(most), column(column), columns(columns) {
    while (tile(tiles - 1) >= all) tiles--;
    share = quotient(tiles * columns, warps_of_block()), longer = tiles * columns - share * warps_of_block();
  }

  // Number in the weight of tile i.
  __device__ int tile(int i) const { return i * clusters + (i % 2 ? clusters - 1 - cluster : cluster); }

  // First chunk of a warp; that of the next warp is the end.
  __device__ int first_of(int warp) const { return warp * share + min(warp, longer); }
};

// The chunks of this warp, in order, and their copies in shared memory. They lie at the beginning and at the end of its buffer in
// turn; the next one is copied while one is in use, if there is room for both. The buffer begins at a multiple of 128 bytes. All
// lanes call these functions together: load(0) or guess(), start(), load(0) and confirm(), and then wait() and release() in turn.
class Chunks {
 public:
  __device__ Chunks(const PackedLinear& p, const Source& source, const Area& area, int buffer)
      : source_(source), area_(area), copied_(shared_address(shared().copied[warp()])), buffer_(buffer), size_(p.buffer) {
    first_ = area.first_of(warp()), count_ = area.first_of(warp() + 1) - first_;
    keep(count_);
    if (lane() < 2) init_barrier(copied_ + 8 * lane(), 1);
    fence_copies();
    __syncwarp();
  }

  // Guesses the offsets of the first 32 chunks, and brings two chunks into the L2 cache, while the last kernel ends. That one may
  // still be writing this weight, and what it has written can be relied on only after wait_for_last_kernel(). So what is read
  // here decides nothing but which bytes of the weight are prefetched, and which ones start() copies; confirm() looks again.
  // A prefetch changes no value that anyone sees. Guesses are read past the L1 cache: no old line is left there.
  __device__ void guess() {
    if (count_ == 0) return;
    const int32_t* const at = offset_of(min(lane(), count_ - 1));
    const int end = int(min(load_hint(at + 1), unsigned(source_.units)));
    begin_ = int(min(load_hint(at), unsigned(source_.units - 1)));
    end_ = begin_ + max(1, min(end - begin_, size_ / 16));
    if (lane() < min(count_, 2)) prefetch_bytes(source_.data + 16ll * begin_, 16 * (end_ - begin_));
  }

  // Loads the offsets of the next 32 chunks, from n on.
  __device__ void load(int n) {
    if (count_ == 0) return;
    const int32_t* const at = offset_of(min(n + lane(), count_ - 1));
    begin_ = at[0], end_ = at[1];
  }

  // Starts the first copy.
  __device__ void start() {
    if (count_ == 0) return;
    room_ = find(0);
    copy(0, room_);
  }

  // After guess(), start() and load(0): if other bytes have been copied, waits for them and starts again.
  __device__ void confirm() {
    if (count_ == 0) return;
    const Room room = find(0);
    if (room.from == room_.from && room.bytes == room_.bytes) return;
    wait_copy(copied_, 0);
    __syncwarp();
    if (lane() == 0) renew_barrier(copied_, 1);
    room_ = room;
    copy(0, room_);
    __syncwarp();
  }

  // Waits for the next chunk; false at the end. The chunk is used until release().
  __device__ bool wait() {
    if (n_ == count_) return false;
    wait_copy(copied_ + n_ % 2 * 8, n_ / 2 & 1);
    return true;
  }

  __device__ int count() const { return count_; }
  __device__ int number() const { return first_ + n_; }  // in the area
  __device__ bool is_first() const { return n_ == 0; }
  __device__ bool is_last() const { return n_ + 1 == count_; }
  __device__ int place() const { return room_.place >> 2; }              // of its first word
  __device__ int end() const { return room_.place + room_.size >> 2; }  // of its room

  // Starts the next copy if there is room for it beside what is used of this room, up to `end`.
  __device__ void proceed(int end) {
    if (started_ > n_ + 1 || is_last()) return;
    if ((n_ + 1) % 32 == 0) load(n_ + 1);
    next_ = find(n_ + 1);
    // a chunk at the beginning needs no room to grow in before this one, at the end, is released
    const int taken = n_ % 2 ? room_.size + next_.bytes : 4 * end - room_.place + next_.size;
    if (taken <= size_) copy(n_ + 1, next_);
  }

  __device__ void release() {
    fence_copies();
    __syncwarp();
    if (started_ == n_ + 1 && !is_last()) copy(n_ + 1, next_);
    room_ = next_, n_++;
  }

 private:
  struct Room {
    int from, bytes, size, place;  // from: in units of 16 bytes
  };

  __device__ const int32_t* offset_of(int n) const {
    const int mine = first_ + n, tile = quotient(mine, area_.columns), column = area_.column + mine - tile * area_.columns;
    return source_.offsets + (1ll * area_.tile(tile) * source_.chunks_of_tile + column);
  }

  __device__ Room find(int n) const {
    Room room;
    room.from = __shfl_sync(~0u, begin_, n % 32);
    room.bytes = min(16 * (__shfl_sync(~0u, end_, n % 32) - room.from), size_);  // more only if the weight has been altered
    room.size = min(room.bytes + kSlack + 127 & ~127, size_);
    room.place = buffer_ + (n % 2 ? size_ - room.size : 0);
    return room;
  }

  __device__ void copy(int n, const Room& room) {
    started_ = n + 1;
    if (lane()) return;
    expect_bytes(copied_ + n % 2 * 8, room.bytes);
    start_copy(copied_ + n % 2 * 8, dynamic_shared + room.place, source_.data + 16ll * room.from, room.bytes);
  }

  const Source& source_;
  const Area& area_;
  const uint32_t copied_;  // shared address of the two barriers
  const int buffer_, size_;
  int first_, count_, n_ = 0, started_ = 0;
  int begin_ = 0, end_ = 0;  // of the chunk that this lane knows
  Room room_, next_;
};

}  // namespace fwanda
