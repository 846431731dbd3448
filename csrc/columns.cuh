// How stats.cu, sparse24.cu and threshold.cu read a row: a warp takes a strip of 256 columns, a lane 8 of them in 16-byte
// loads. A 16-bit lane holds columns 8 l ... 8 l + 7; an fp32 lane 4 l ... 4 l + 3 of both halves of the strip. Anonymous
// on purpose: each file gets its own copy.
#pragma once
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "select.cuh"

namespace fwanda {
namespace {

constexpr int kStrip = 256;
constexpr float kLargest = 3.402823466e38f;

__device__ inline int lane() { return int(threadIdx.x & 31); }
__device__ inline int warp() { return int(threadIdx.x >> 5); }

// `poison` becomes NaN, and stays so, where a weight is not finite: x * 0 is 0 for every other x.
struct Bf16 {
  using Bits = uint16_t;
  static constexpr int kParts = 1;
  static __device__ void decode(uint32_t pair, float* w) {
    w[0] = __uint_as_float(pair << 16), w[1] = __uint_as_float(pair & 0xffff0000u);
  }
  static __device__ void poison(uint32_t& acc, uint32_t pair) {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(acc) : "r"(pair), "r"(0u));
  }
  static __device__ bool poisoned(uint32_t acc) { return (acc & 0x7fff7fffu) != 0; }
};

struct Fp16 {
  using Bits = uint16_t;
  static constexpr int kParts = 1;
  static __device__ void decode(uint32_t pair, float* w) {
    w[0] = __half2float(__ushort_as_half(uint16_t(pair))), w[1] = __half2float(__ushort_as_half(uint16_t(pair >> 16)));
  }
  static __device__ void poison(uint32_t& acc, uint32_t pair) {
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(acc) : "r"(pair), "r"(0u));
  }
  static __device__ bool poisoned(uint32_t acc) { return (acc & 0x7fff7fffu) != 0; }
};

struct Fp32 {
  using Bits = uint32_t;
  static constexpr int kParts = 2;
  static __device__ void decode(uint32_t bits, float* w) { w[0] = __uint_as_float(bits); }
  static __device__ void poison(uint32_t& acc, uint32_t bits) {
    acc = __float_as_uint(__fmaf_rn(__uint_as_float(bits), 0.f, __uint_as_float(acc)));
  }
  static __device__ bool poisoned(uint32_t acc) { return (acc & 0x7fffffffu) != 0; }
};

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

  // Columns from `valid` on, and all if it is not positive, read as 0. ALIGNED: rows begin at 16 bytes and `valid` ends
  // with a part. Past L1, which is for scales.
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

// Scale of this lane's 8 columns, 0 past the last.
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

__device__ inline bool bad_scale(float s) { return !(s >= 0.f && s <= kLargest); }

// Whether Eight can load in vectors: every row begins at 16 bytes and no part is cut by the last column.
inline bool in_vectors(const void* rows, int64_t row_stride, int cols, int itemsize) {
  return reinterpret_cast<uintptr_t>(rows) % 16 == 0 && row_stride * itemsize % 16 == 0 && int64_t(cols) * itemsize % 16 == 0;
}

inline int itemsize(DType dtype) { return dtype == DType::fp32 ? 4 : 2; }

}  // namespace
}  // namespace fwanda
