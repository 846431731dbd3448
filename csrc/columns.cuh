// How stats.cu, sparse24.cu and threshold.cu read a row: a warp takes a strip of 256 columns, and a lane takes 8 of them in
// 16-byte loads. Lane l holds columns 8 l ... 8 l + 7 of 16-bit weights, or columns 4 l ... 4 l + 3 of both halves of the
// strip of fp32 weights.
#pragma once
#include "common.cuh"

namespace fwanda {

constexpr int kStrip = 256;
// Eight columns of a row as they lie in memory.
template <class E>
struct Eight {
  static constexpr int kWords = 4 * E::kParts, kPerPart = 8 / E::kParts;
  uint32_t word[kWords];

  // Column j of this lane, counted from the first of the strip.
  static __device__ int column(int j) { return j / kPerPart * (32 * kPerPart) + lane() * kPerPart + j % kPerPart; }

  __device__ void decode(float (&w)[8]) const {
#pragma unroll
    for (int i = 0; i < kWords; i++) E::decode(word[i], w + i * 8 / kWords);
  }

  // Columns from `valid` on read as 0; `valid` may be 0 or negative. ALIGNED: rows begin at 16 bytes and `valid` ends with
  // a 16-byte load. The loads bypass L1, which holds the scales.
  template <bool ALIGNED>
  __device__ void load(const typename E::Bits* strip, int valid) {
#pragma unroll
    for (int p = 0; p < E::kParts; p++) {
      int first = column(p * kPerPart);
      uint32_t* to = word + 4 * p;
      to[0] = to[1] = to[2] = to[3] = 0;
      if constexpr (ALIGNED) {
        if (first < valid)
          asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                       : "l"(strip + first));
      } else {
#pragma unroll
        for (int j = 0; j < kPerPart; j++)
          if (first + j < valid) to[j * 4 / kPerPart] |= uint32_t(strip[first + j]) << j % (kPerPart / 4) * 16;
      }
    }
  }

  template <bool ALIGNED>
  __device__ void store(typename E::Bits* strip, int valid) const {
#pragma unroll
    for (int p = 0; p < E::kParts; p++) {
      int first = column(p * kPerPart);
      const uint32_t* from = word + 4 * p;
      if constexpr (ALIGNED) {
        if (first < valid) *reinterpret_cast<uint4*>(strip + first) = make_uint4(from[0], from[1], from[2], from[3]);
      } else {
#pragma unroll
        for (int j = 0; j < kPerPart; j++)
          if (first + j < valid) strip[first + j] = typename E::Bits(from[j * 4 / kPerPart] >> j % (kPerPart / 4) * 16);
      }
    }
  }
};

// Scales of this lane's 8 columns, 0 past the last column.
template <class E, bool ALIGNED>
__device__ inline void load_scale(const float* strip, int valid, float (&s)[8]) {
#pragma unroll
  for (int j = 0; j < 8; j += 4) {
    int first = Eight<E>::column(j);
    if constexpr (ALIGNED) {
      float4 v = first < valid ? __ldg(reinterpret_cast<const float4*>(strip + first)) : make_float4(0.f, 0.f, 0.f, 0.f);
      s[j] = v.x, s[j + 1] = v.y, s[j + 2] = v.z, s[j + 3] = v.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) s[j + i] = first + i < valid ? __ldg(strip + first + i) : 0.f;
    }
  }
}

}  // namespace fwanda
