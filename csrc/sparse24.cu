// N:4 selection and the 2:4 pack: nm_prune_ (in place), nm_mask and compress_24.
//
// Memory: a warp takes a strip of 256 columns over several rows. It holds the strip's scales in registers and loads all its
// rows at once. A lane holds two whole groups of 4 and ranks each by 6 comparisons. compress_24 gathers the metadata of 32
// rows in shared memory, because the reordered metadata of 32 rows and 2 words of columns is one stretch of 128 bytes.
#include "columns.cuh"

namespace fwanda {

struct Weight24 {
  void* weight;        // [R, C], last dim contiguous, C a multiple of 4
  const float* scale;  // [C], >= 0
  int32_t* bad;        // codes of bad.h
  int64_t row_stride;  // in elements, >= C
  int32_t rows, cols;
};

constexpr int kWarps = 8;
constexpr int kRows = 2;            // of a warp, in keep_n_of_4
constexpr int kBandRows = 32;       // of a block of compress_24
constexpr int kPairs = kStrip / 32; // stretches of metadata in a strip and band
constexpr int kPairBytes = 128, kPairPitch = 144;  // 16 bytes apart keep a warp's writes on different banks

// Bit i: column i of a group is among the n largest. Among equal scores the lowest column is removed first.
__device__ inline uint32_t kept(const float* w, const float* s, int n) {
  float p[4];
#pragma unroll
  for (int i = 0; i < 4; i++) p[i] = __fmul_rn(fabsf(w[i]), s[i]);
  int a01 = p[1] >= p[0], a02 = p[2] >= p[0], a03 = p[3] >= p[0], a12 = p[2] >= p[1], a13 = p[3] >= p[1], a23 = p[3] >= p[2];
  return uint32_t(a01 + a02 + a03 < n) | uint32_t(a12 + a13 + 1 - a01 < n) << 1 | uint32_t(a23 + 2 - a02 - a12 < n) << 2 |
         uint32_t(3 - a03 - a13 - a23 < n) << 3;
}

// Clear the columns of group g that are not kept.
template <class E>
__device__ inline void clear(Eight<E>& v, int g, uint32_t bits) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t keep = bits >> i & 1 ? 0xffffffffu : 0u;
    if (E::kParts == 2) v.word[4 * g + i] &= keep;
    else v.word[2 * g + i / 2] &= keep | 0xffff0000u >> i % 2 * 16;
  }
}

template <class E>
__device__ inline void poison(const Eight<E>& v, uint32_t& acc) {
#pragma unroll
  for (int i = 0; i < Eight<E>::kWords; i++) E::poison(acc, v.word[i]);
}

__device__ inline void flag_scale(const float (&s)[8], int32_t* bad) {
  bool wrong = false;
#pragma unroll
  for (int j = 0; j < 8; j++) wrong |= bad_scale(s[j]);
  if (wrong) atomicOr(bad, kBadScale);
}

template <class E, bool ALIGNED, bool MASK>
__device__ __forceinline__ void keep_n_of_4(const Weight24& m, int n, uint8_t* mask) {
  using Bits = typename E::Bits;
  uint32_t strips = (m.cols + kStrip - 1) / kStrip, task = blockIdx.x * kWarps + warp();
  int strip = int(task % strips) * kStrip, valid = m.cols - strip;
  int64_t row = int64_t(task / strips) * kRows;
  if (row >= m.rows) return;
  Bits* weight = static_cast<Bits*>(m.weight) + row * m.row_stride + strip;
  int rows = int(min(int64_t(kRows), m.rows - row));
  Eight<E> v[kRows];
#pragma unroll
  for (int i = 0; i < kRows; i++) v[i].template load<ALIGNED>(weight + i * m.row_stride, i < rows ? valid : 0);
  float s[8];
  load_scale<E, ALIGNED>(m.scale + strip, valid, s);
  if (row == 0) flag_scale(s, m.bad);
  uint32_t poisoned = 0;
#pragma unroll
  for (int i = 0; i < kRows; i++) {
    float w[8];
    v[i].decode(w);
    poison(v[i], poisoned);
    uint32_t bits[2] = {kept(w, s, n), kept(w + 4, s + 4, n)};
    if (MASK) {
      uint8_t* to = mask + (row + i) * m.cols + strip;
#pragma unroll
      for (int g = 0; g < 2; g++) {
        int c = Eight<E>::column(4 * g);
        uint32_t bytes = (bits[g] * 0x00204081u) & 0x01010101u;
        if (i < rows && c < valid) *reinterpret_cast<uint32_t*>(to + c) = bytes;
      }
    } else {
      clear(v[i], 0, bits[0]), clear(v[i], 1, bits[1]);
      v[i].template store<ALIGNED>(weight + i * m.row_stride, i < rows ? valid : 0);
    }
  }
  if (E::poisoned(poisoned)) atomicOr(m.bad, kBadWeight);
}

// Where byte `byte` of word w (of 16) of row r (of 32) goes in shared memory; _meta_offsets() in ops/sparse24.py
// describes the order.
__device__ inline int meta_place(int r, int w, int byte) {
  int moved = (r & 7) << 2 | r >> 3, shift = (w & 1) - (moved & 1);
  return (w >> 1) * kPairPitch + ((moved + shift) * 2 + (w - shift & 1)) * 2 + byte;
}

// The two largest columns of a group, as kept() with n = 2: a number from 1 to 6 whose bits tell of columns 0, 1 and 2. The
// sign of a difference says which of two columns is larger. A column is among the two if it wins two of three comparisons.
__device__ inline uint32_t largest_two(const float* w, const float* s) {
  float p[4];
#pragma unroll
  for (int i = 0; i < 4; i++) p[i] = __fmul_rn(fabsf(w[i]), s[i]);
  auto less = [&](int i, int j) { return __float_as_uint(__fsub_rn(p[i], p[j])); };
  auto majority = [](uint32_t x, uint32_t y, uint32_t z) { return (x & y) | (x & z) | (y & z); };
  uint32_t l10 = less(1, 0), l20 = less(2, 0), l30 = less(3, 0), l21 = less(2, 1), l31 = less(3, 1), l32 = less(3, 2);
  uint32_t first = majority(l10, l20, l30), second = majority(~l10, l21, l31), third = majority(~l20, ~l21, l32);
  return __funnelshift_l(first, __funnelshift_l(second, third >> 31, 1), 1);
}

// As __byte_perm, which would mask the selector.
__device__ inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}

// The kept values of two groups and their metadata byte. The tables have a byte for each number of largest_two(): metadata,
// and the selectors of the 16 bits of the lower and of the higher column.
__device__ inline uint2 pack_groups(const uint32_t* word, const float* w, const float* s, uint8_t& meta) {
  uint32_t both = largest_two(w, s) | largest_two(w + 4, s + 4) << 4;
  uint32_t codes = permute(0x040d0c00, 0x0009080e, both);
  uint32_t lower = permute(0x10321000, 0x00321054, both), higher = permute(0x32767600, 0x00545476, both);
  meta = uint8_t(codes | codes >> 4);
  return make_uint2(permute(word[0], word[1], permute(lower, higher, 0x40)), permute(word[2], word[3], permute(lower, higher, 0x51)));
}

template <class E, bool ALIGNED>
__device__ __forceinline__ void pack(const Weight24& m, uint16_t* values, int16_t* meta) {
  __shared__ __align__(16) uint8_t shared[kPairs * kPairPitch];
  constexpr int kMine = kBandRows / kWarps;
  int strips = (m.cols + kStrip - 1) / kStrip;
  int strip = int(blockIdx.x) % strips * kStrip, valid = m.cols - strip, c = strip + Eight<E>::column(0);
  int64_t top = int64_t(int(blockIdx.x) / strips) * kBandRows, first = top + warp();
  int left = int(min(int64_t(m.rows) - first, int64_t(kBandRows)));  // row `first` and every kWarps-th after it
  const uint16_t* from = static_cast<const uint16_t*>(m.weight) + first * m.row_stride + strip;
  Eight<E> v[kMine];
#pragma unroll
  for (int i = 0; i < kMine; i++, from += kWarps * m.row_stride) v[i].template load<ALIGNED>(from, i * kWarps < left ? valid : 0);
  float s[8];
  load_scale<E, ALIGNED>(m.scale + strip, valid, s);
  if (top == 0) flag_scale(s, m.bad);
  uint32_t poisoned = 0;
  uint16_t* to = values + (first * m.cols + c) / 2;
  if (c >= m.cols) left = 0;
#pragma unroll
  for (int i = 0; i < kMine; i++, to += kWarps / 2 * int64_t(m.cols)) {
    float w[8];
    v[i].decode(w);
    poison(v[i], poisoned);
    uint8_t code;
    uint2 two = pack_groups(v[i].word, w, s, code);
    if (i * kWarps < left) *reinterpret_cast<uint2*>(to) = two;
    shared[meta_place(i * kWarps + warp(), lane() >> 1, lane() & 1)] = code;
  }
  if (E::poisoned(poisoned)) atomicOr(m.bad, kBadWeight);
  __syncthreads();
  constexpr int kVectors = kPairBytes / 16;
  for (int i = int(threadIdx.x); i < kPairs * kVectors; i += kWarps * 32) {
    int pair = i / kVectors, part = i % kVectors;
    if (strip + pair * 32 >= m.cols) continue;
    int16_t* to = meta + (strip / 32 + pair) * (2 * int64_t(m.rows)) + top * 2;
    reinterpret_cast<uint4*>(to)[part] = *reinterpret_cast<const uint4*>(&shared[pair * kPairPitch + part * 16]);
  }
}

extern "C" __global__ void __launch_bounds__(kWarps * 32) n_of_4_prune(Weight24 m, int n) {
  keep_n_of_4<WEIGHT, ROWS_ALIGNED, false>(m, n, nullptr);
}

extern "C" __global__ void __launch_bounds__(kWarps * 32) n_of_4_mask(Weight24 m, int n, uint8_t* mask) {
  keep_n_of_4<WEIGHT, ROWS_ALIGNED, true>(m, n, mask);
}

extern "C" __global__ void __launch_bounds__(kWarps * 32) compress_24(Weight24 m, uint16_t* values, int16_t* meta) {
  if constexpr (sizeof(WEIGHT::Bits) == 2) pack<WEIGHT, ROWS_ALIGNED>(m, values, meta);
}

}  // namespace fwanda
