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
constexpr int kBands = 2;           // of 32 rows, in a block of compress_24
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

// For two kept columns: the selector of __byte_perm that picks their 16 bits from the group's two words, and above it their
// metadata.
__device__ inline uint32_t pack_code(uint32_t bits) {
  uint32_t low = bits & 1 ? 0 : bits & 2 ? 1 : 2, high = bits & 8 ? 3 : bits & 4 ? 2 : 1;
  return 0x1010u + 0x22u * low + 0x2200u * high + (low << 16 | high << 18);
}

template <class E, bool ALIGNED>
__device__ __forceinline__ void pack(const Weight24& m, uint16_t* values, int16_t* meta) {
  __shared__ __align__(16) uint8_t shared[kBands][kPairs * kPairPitch];
  constexpr int kPerBand = 32 / kWarps, kMine = kBands * kPerBand;
  int strips = (m.cols + kStrip - 1) / kStrip;
  int strip = int(blockIdx.x) % strips * kStrip, valid = m.cols - strip, c = strip + Eight<E>::column(0);
  int64_t top = int64_t(int(blockIdx.x) / strips) * kBands * 32;
  auto row_of = [&](int i) { return top + i / kPerBand * 32 + i % kPerBand * kWarps + warp(); };
  Eight<E> v[kMine];
#pragma unroll
  for (int i = 0; i < kMine; i++) {
    int64_t row = row_of(i);
    v[i].template load<ALIGNED>(static_cast<const uint16_t*>(m.weight) + row * m.row_stride + strip, row < m.rows ? valid : 0);
  }
  float s[8];
  load_scale<E, ALIGNED>(m.scale + strip, valid, s);
  if (top == 0) flag_scale(s, m.bad);
  uint32_t poisoned = 0;
#pragma unroll
  for (int i = 0; i < kMine; i++) {
    float w[8];
    v[i].decode(w);
    poison(v[i], poisoned);
    uint32_t code0 = pack_code(kept(w, s, 2)), code1 = pack_code(kept(w + 4, s + 4, 2));
    uint2 two = {__byte_perm(v[i].word[0], v[i].word[1], code0), __byte_perm(v[i].word[2], v[i].word[3], code1)};
    int64_t row = row_of(i);
    if (row < m.rows && c < m.cols) *reinterpret_cast<uint2*>(values + (row * m.cols + c) / 2) = two;
    shared[i / kPerBand][meta_place(int(row & 31), lane() >> 1, lane() & 1)] = uint8_t(code0 >> 16 | code1 >> 16 << 4);
  }
  if (E::poisoned(poisoned)) atomicOr(m.bad, kBadWeight);
  __syncthreads();
  constexpr int kVectors = kPairBytes / 16;
  for (int i = int(threadIdx.x); i < kBands * kPairs * kVectors; i += kWarps * 32) {
    int band = i / kVectors % kBands, pair = i / (kVectors * kBands), part = i % kVectors;
    int64_t row = top + band * 32;
    if (row >= m.rows || strip + pair * 32 >= m.cols) continue;
    int16_t* to = meta + (strip / 32 + pair) * (2 * int64_t(m.rows)) + row * 2;
    reinterpret_cast<uint4*>(to)[part] = *reinterpret_cast<const uint4*>(&shared[band][pair * kPairPitch + part * 16]);
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
