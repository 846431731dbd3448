// One block of obs_prune_: choose the entries to remove, then walk the columns and move their errors to the right.
//
// Memory: 8 lanes hold a row of the block, lane l the columns 32 q + 4 l ... 32 q + 4 l + 3 of q = 0 ... 3; the block's 64 KB
// of U lie in shared memory. For the rule `sparsity`, three kernels first find the k-th lowest score of the block, digit by
// digit (11, 10, 10 bits of its key); they read the block from L2. Key = bits of fp32 w^2 * (weighting * row_weight). Counts are
// integers, so atomics do not make results depend on the run.
#include "common.cuh"

namespace fwanda {

constexpr int kObsColumns = 128;  // most in a block

// How the entries to remove are chosen; numbered as RULES of fwanda_kernels/_obs.py.
enum class ObsRule { sparsity, keep, mask, pattern };
constexpr ObsRule kRule = ObsRule::RULE;

// work and factor begin at 16 bytes.
struct ObsBlock {
  const float* work;        // [R, C], the weight with all updates so far
  void* weight;             // [R, C], whose columns [start, end) are written
  const float* factor;      // [C, C], upper triangular
  const float* weighting;   // [C]
  const float* row_weight;  // [R], or nullptr
  const void* chosen;       // uint8 mask [R, C], or int64 keep [R]
  float* errors;            // [end - start, R], written
  int32_t* counters;        // 4,100 zeros, for `sparsity`: three histograms, and keys and ranks found from them
  int64_t work_stride;      // a multiple of 4, as is start
  int64_t row_stride, col_stride, chosen_row_stride, chosen_col_stride;
  int32_t rows, cols, start, end;
  int32_t dropped;          // from the block by `sparsity`, from each group by `pattern`
  int32_t group;            // 4, 8, 16 or 32 columns
  DType dtype;              // of weight
};

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kLanes = 8, kQuads = 4;           // lanes of a row, and quads of columns of a lane
constexpr int kRows = kThreads / kLanes;        // of a thread block of the walk
constexpr int kLowBits = 10;
constexpr int kBins[] = {2048, 1024, 1024}, kFirstBin[] = {0, 2048, 3072}, kState = 4096;
constexpr int kPitch = kRows + 1;
constexpr uint32_t kNever = 0xffffffffu;        // above every key

__device__ inline uint32_t key_of(float w, float scale) { return __float_as_uint(__fmul_rn(__fmul_rn(w, w), scale)) & 0x7fffffffu; }

__device__ inline int sum_of_row(int v) {
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
  return v;
}

struct Found {
  int bin, below, equal;  // the bin where the running count reaches a rank; the count before it, and in it
};

template <int BINS>
__device__ Found find(const int32_t* counts, int rank) {
  __shared__ int sums[kWarps];
  __shared__ Found found;
  constexpr int kMine = BINS / kThreads;
  int n[kMine], total = 0;
#pragma unroll
  for (int i = 0; i < kMine; i++) total += n[i] = counts[threadIdx.x * kMine + i];
  int below = total;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    int other = __shfl_up_sync(~0u, below, d);
    if (lane() >= d) below += other;
  }
  if (lane() == 31) sums[warp()] = below;
  below -= total;
  __syncthreads();
  for (int w = 0; w < warp(); w++) below += sums[w];
#pragma unroll
  for (int i = 0; i < kMine; i++) {
    if (below < rank && rank <= below + n[i]) found = {int(threadIdx.x) * kMine + i, below, n[i]};
    below += n[i];
  }
  __syncthreads();
  return found;
}

// Four neighbouring columns of a row, 0 from `end` on. Rows are padded to a multiple of 4 columns, so all four exist in
// memory. The load is unconditional, so that several of them can be issued together.
__device__ inline float4 load_quad(const ObsBlock& b, int row, int column) {
  bool inside = row < b.rows && column < b.end;
  float4 v = *reinterpret_cast<const float4*>(b.work + (inside ? row * b.work_stride + column : 0));
  auto valid = [&](int i, float x) { return inside && column + i < b.end ? x : 0.f; };
  return make_float4(valid(0, v.x), valid(1, v.y), valid(2, v.z), valid(3, v.w));
}

__device__ inline float row_scale(const ObsBlock& b, int row) { return b.row_weight && row < b.rows ? b.row_weight[row] : 1.f; }

__device__ inline void load_weighting(const ObsBlock& b, int column, float (&s)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) s[i] = column + i < b.end ? b.weighting[column + i] : 0.f;
}

// counters[kState ...]: {digits of the wanted key so far, its rank among the keys that share them}, twice.
template <int DIGIT>
__device__ __forceinline__ void count(const ObsBlock& b) {
  constexpr int kOwn = kBins[DIGIT], kFirst = kFirstBin[DIGIT], kBefore = kBins[DIGIT ? DIGIT - 1 : 0];
  __shared__ int bins[kOwn];
  for (int i = threadIdx.x; i < kOwn; i += kThreads) bins[i] = 0;
  uint32_t digits = 0;
  if (DIGIT > 0) {
    int32_t* state = b.counters + kState + 2 * DIGIT - 2;
    int rank = DIGIT == 1 ? b.dropped : state[-1];
    Found found = find<kBefore>(b.counters + kFirst - kBefore, rank);
    digits = DIGIT == 1 ? found.bin : state[-2] << kLowBits | found.bin;
    if (blockIdx.x == 0 && threadIdx.x == 0) state[0] = int(digits), state[1] = rank - found.below;
  }
  __syncthreads();
  int column = b.start + 4 * lane();
  float s[4];
  load_weighting(b, column, s);
#pragma unroll 4
  for (int row = blockIdx.x * kWarps + warp(); row < b.rows; row += gridDim.x * kWarps) {
    float4 v = load_quad(b, row, column);
    float w[4] = {v.x, v.y, v.z, v.w}, scale = row_scale(b, row);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t shared = key_of(w[i], __fmul_rn(s[i], scale)) >> (2 - DIGIT) * kLowBits;
      bool counted = column + i < b.end && (DIGIT == 0 || shared >> kLowBits == digits);
      if (counted) atomicAdd(&bins[shared & (kOwn - 1)], 1);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kOwn; i += kThreads)
    if (bins[i]) atomicAdd(b.counters + kFirst + i, bins[i]);
}

// 16 columns of a row. In a set of them, bit 4 q + i stands for w[q][i].
struct Tile {
  float w[kQuads][4];
  int row, l;

  __device__ int column(int q) const { return 32 * q + 4 * l; }

  __device__ void keys(const ObsBlock& b, int q, float scale, uint32_t (&key)[4]) const {
    float s[4];
    load_weighting(b, b.start + column(q), s);
#pragma unroll
    for (int i = 0; i < 4; i++)
      key[i] = row < b.rows && b.start + column(q) + i < b.end ? key_of(w[q][i], __fmul_rn(s[i], scale)) : kNever;
  }
};

__device__ inline void compare(const uint32_t (&key)[kQuads][4], uint32_t kth, uint32_t& below, uint32_t& equal) {
  below = equal = 0;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    below |= uint32_t(key[i / 4][i % 4] < kth) << i;
    equal |= uint32_t(key[i / 4][i % 4] == kth) << i;
  }
}

// The first n columns of a row's set.
__device__ uint32_t first_of_row(uint32_t set, int n, int l) {
  uint32_t taken = 0;
#pragma unroll
  for (int q = 0; q < kQuads; q++) {
    uint32_t quad = set >> 4 * q & 15;
    int before = __popc(quad);
#pragma unroll
    for (int d = 1; d < kLanes; d *= 2) {
      int other = __shfl_up_sync(~0u, before, d, kLanes);
      if (l >= d) before += other;
    }
    int all = __shfl_sync(~0u, before, kLanes - 1, kLanes);
    before -= __popc(quad);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (quad >> i & 1 && before + __popc(quad & ((1 << i) - 1)) < n) taken |= 1u << 4 * q + i;
    n -= all;
  }
  return taken;
}

// Keys equal to kth in the rows before this block's.
__device__ int ties_before(const ObsBlock& b, uint32_t kth) {
  __shared__ int ties;
  if (threadIdx.x == 0) ties = 0;
  __syncthreads();
  int column = b.start + 4 * lane(), mine = 0;
  float s[4];
  load_weighting(b, column, s);
#pragma unroll 4
  for (int row = warp(); row < int(blockIdx.x) * kRows; row += kWarps) {
    float4 v = load_quad(b, row, column);
    float w[4] = {v.x, v.y, v.z, v.w}, scale = row_scale(b, row);
#pragma unroll
    for (int i = 0; i < 4; i++) mine += column + i < b.end && key_of(w[i], __fmul_rn(s[i], scale)) == kth;
  }
  mine = __reduce_add_sync(~0u, mine);
  if (lane() == 0 && mine) atomicAdd(&ties, mine);
  __syncthreads();
  return ties;
}

// This tile's part of the k lowest keys of the block. Among equal keys the lowest (row, column) goes first.
__device__ uint32_t lowest_of_block(const ObsBlock& b, const Tile& t, const uint32_t (&key)[kQuads][4]) {
  const int32_t* state = b.counters + kState + 2;
  Found found = find<kBins[2]>(b.counters + kFirstBin[2], state[1]);
  uint32_t kth = uint32_t(state[0]) << kLowBits | found.bin, below, equal;
  compare(key, kth, below, equal);
  int n = state[1] - found.below;
  if (n == found.equal) return below | equal;
  __shared__ int ties[kRows];
  n -= ties_before(b, kth);
  int of_row = sum_of_row(__popc(equal)), local = threadIdx.x / kLanes;
  ties[local] = of_row;
  __syncthreads();
  for (int i = 0; i < local; i++) n -= ties[i];
  return below | first_of_row(equal, n, t.l);
}

// The n lowest keys of the row. Among equal keys the lowest column goes first.
__device__ uint32_t lowest_of_row(const uint32_t (&key)[kQuads][4], int n, int l) {
  uint32_t kth = 0, below, equal;
  for (uint32_t bit = 1u << 30; bit; bit >>= 1) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) count += key[i / 4][i % 4] < (kth | bit);
    if (sum_of_row(count) < n) kth |= bit;
  }
  compare(key, kth, below, equal);
  return below | first_of_row(equal, n - sum_of_row(__popc(below)), l);
}

// Bits of this lane's quad that are among the `dropped` lowest of its group of `lanes` quads.
__device__ uint32_t lowest_of_group(const uint32_t (&key)[4], int dropped, int lanes, int l) {
  int rank[4] = {};
  for (int d = 0; d < lanes; d++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint32_t other = __shfl_xor_sync(~0u, key[j], d);
#pragma unroll
      for (int i = 0; i < 4; i++) rank[i] += other < key[i] || (other == key[i] && (d ? (l ^ d) < l : j < i));
    }
  }
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) bits |= uint32_t(rank[i] < dropped) << i;
  return bits;
}

__device__ uint32_t choose(const ObsBlock& b, const Tile& t, float scale) {
  uint32_t drop = 0;
  if (kRule == ObsRule::mask) {
    auto* mask = static_cast<const uint8_t*>(b.chosen) + t.row * b.chosen_row_stride;
#pragma unroll
    for (int i = 0; i < 16; i++) {
      int64_t column = b.start + t.column(i / 4) + i % 4;
      if (t.row < b.rows && column < b.end) drop |= uint32_t(mask[column * b.chosen_col_stride] == 0) << i;
    }
  }
  if (kRule == ObsRule::sparsity || kRule == ObsRule::keep) {
    uint32_t key[kQuads][4];
#pragma unroll
    for (int q = 0; q < kQuads; q++) t.keys(b, q, scale, key[q]);
    if (kRule == ObsRule::sparsity && b.dropped) drop = lowest_of_block(b, t, key);
    if (kRule == ObsRule::keep) {
      int64_t pruned = t.row < b.rows ? b.cols - static_cast<const int64_t*>(b.chosen)[t.row] : 0;
      drop = lowest_of_row(key, int(pruned * b.end / b.cols - pruned * b.start / b.cols), t.l);
    }
  }
  return drop;
}

// Starts a copy and does not wait for it. Bytes beyond `valid` become 0.
template <int BYTES>
__device__ inline void copy_async(float* to, const float* from, int valid) {
  uint32_t address = uint32_t(__cvta_generic_to_shared(to));
  if (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from), "r"(valid) : "memory");
}

// Starts to copy U of the block into shared memory (0 outside), then its diagonal (1 past the end) and the reciprocals of the
// diagonal. receive_factor() waits for it.
__device__ void request_factor(const ObsBlock& b, float* shared) {
  int size = b.end - b.start;
  const float* upper = b.factor + int64_t(b.start) * b.cols + b.start;
#pragma unroll 4
  for (int k = 0; k < kObsColumns * kObsColumns / 4 / kThreads; k++) {
    int place = k * kThreads + int(threadIdx.x), c = place / 32, j = place % 32 * 4;
    int valid = c < size && j + 3 > c ? max(0, min(4, size - j)) : 0;
    const float* from = upper + (valid ? int64_t(c) * b.cols + j : 0);
    if (b.cols % 4 == 0) {
      copy_async<16>(shared + 4 * place, from, 4 * valid);
    } else {
      for (int i = 0; i < 4; i++) copy_async<4>(shared + 4 * place + i, i < valid ? from + i : upper, i < valid ? 4 : 0);
    }
  }
  float* diagonal = shared + kObsColumns * kObsColumns;
  if (int c = threadIdx.x; c < kObsColumns) {
    diagonal[c] = c < size ? upper[int64_t(c) * (b.cols + 1)] : 1.f;
    diagonal[kObsColumns + c] = __frcp_rn(diagonal[c]);
  }
}

// Waits for the copies of request_factor() and sets everything up to and including the diagonal to 0.
__device__ void receive_factor(float* shared) {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  if (int c = threadIdx.x; c < kObsColumns)
    for (int j = c / 4 * 4; j <= c; j++) shared[c * kObsColumns + j] = 0.f;
  __syncthreads();
}

// x / d, rounded once, with r the rounded 1 / d.
__device__ inline float divide(float x, float d, float r) {
  float q = __fmul_rn(x, r);
  return __fmaf_rn(__fmaf_rn(-q, d, x), r, q);
}

__device__ inline void store(const ObsBlock& b, int64_t place, float w) {
  uint16_t half;
  switch (b.dtype) {
    case DType::bf16:
      asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(w));
      static_cast<uint16_t*>(b.weight)[place] = half;
      break;
    case DType::fp16:
      asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(w));
      static_cast<uint16_t*>(b.weight)[place] = half;
      break;
    case DType::fp32: static_cast<float*>(b.weight)[place] = w; break;
  }
}

// Errors are gathered in shared memory, so that they are written 32 rows at a time.
__device__ void write(const ObsBlock& b, const Tile& t, uint32_t drop, const float (&error)[kQuads][4], float* shared) {
  __syncthreads();
  int first = blockIdx.x * kRows;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    int c = t.column(i / 4) + i % 4;
    shared[c * kPitch + t.row - first] = error[i / 4][i % 4];
    if (t.row < b.rows && b.start + c < b.end)
      store(b, t.row * b.row_stride + (b.start + c) * b.col_stride, drop >> i & 1 ? 0.f : t.w[i / 4][i % 4]);
  }
  __syncthreads();
  for (int c = warp(); c < b.end - b.start; c += kWarps)
    if (first + lane() < b.rows) b.errors[int64_t(c) * b.rows + first + lane()] = shared[c * kPitch + lane()];
}

__device__ __forceinline__ void walk(const ObsBlock& b) {
  extern __shared__ __align__(16) float shared[];
  request_factor(b, shared);
  Tile t;
  t.row = blockIdx.x * kRows + threadIdx.x / kLanes, t.l = threadIdx.x % kLanes;
  float scale = row_scale(b, t.row), error[kQuads][4] = {};
#pragma unroll
  for (int q = 0; q < kQuads; q++) {
    float4 v = load_quad(b, t.row, b.start + t.column(q));
    t.w[q][0] = v.x, t.w[q][1] = v.y, t.w[q][2] = v.z, t.w[q][3] = v.w;
  }
  uint32_t drop = choose(b, t, scale);
  receive_factor(shared);
  const float* diagonal = shared + kObsColumns * kObsColumns;
  int lanes = b.group / 4;
#pragma unroll
  for (int q = 0; q < kQuads; q++) {
#pragma unroll 1
    for (int l = 0; l < kLanes; l++) {
      int first = 32 * q + 4 * l;
      if (kRule == ObsRule::pattern && l % lanes == 0 && b.start + first + b.group <= b.end) {
        uint32_t key[4];
        t.keys(b, q, scale, key);
        uint32_t bits = lowest_of_group(key, b.dropped, lanes, t.l);
        if (t.l / lanes == l / lanes) drop |= bits << 4 * q;
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float removed = __shfl_sync(~0u, drop >> 4 * q + i & 1 ? t.w[q][i] : 0.f, l, kLanes);
        float e = divide(removed, diagonal[first + i], diagonal[kObsColumns + first + i]);
        if (t.l == l) error[q][i] = e;
        auto* u = reinterpret_cast<const float4*>(shared) + (first + i) * 32 + t.l;
#pragma unroll
        for (int p = q; p < kQuads; p++) {
          float4 v = u[8 * p];
          t.w[p][0] -= e * v.x, t.w[p][1] -= e * v.y, t.w[p][2] -= e * v.z, t.w[p][3] -= e * v.w;
        }
      }
    }
  }
  write(b, t, drop, error, shared);
}

extern "C" __global__ void __launch_bounds__(kThreads) obs_count_0(ObsBlock b) { count<0>(b); }
extern "C" __global__ void __launch_bounds__(kThreads) obs_count_1(ObsBlock b) { count<1>(b); }
extern "C" __global__ void __launch_bounds__(kThreads) obs_count_2(ObsBlock b) { count<2>(b); }
extern "C" __global__ void __launch_bounds__(kThreads) obs_walk(ObsBlock b) { walk(b); }

}  // namespace fwanda
