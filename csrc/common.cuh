// What all kernels share: the dtypes of weights and how they are decoded, lanes and warps, the check of a scale.
// The device functions are in an anonymous namespace, so that each .cu file has its own copy.
#pragma once
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "bad.h"

namespace fwanda {

enum class DType : int { bf16 = 0, fp16 = 1, fp32 = 2 };

namespace {

inline int itemsize(DType dtype) { return dtype == DType::fp32 ? 4 : 2; }

__device__ inline int lane() { return int(threadIdx.x & 31); }
__device__ inline int warp() { return int(threadIdx.x >> 5); }

constexpr float kLargest = 3.402823466e38f;

__device__ inline bool bad_scale(float s) { return !(s >= 0.f && s <= kLargest); }

// A dtype of weights. Bits: one weight. Unit: four weights, as wide as one load. kParts: 16-byte loads of 8 weights.
// decode(Bits) gives one weight in fp32; decode(word, w) those of a 32-bit word: two of 16 bits or one fp32.
// poison() multiplies the weights of a word by 0 and adds them to acc: acc becomes NaN, and stays NaN, if one of them is
// not finite. poisoned() asks whether that has happened.
struct Bf16 {
  using Bits = uint16_t;
  using Unit = uint2;
  static constexpr int kParts = 1;
  static constexpr uint32_t kExponent = 0x7f80;
  static __device__ float decode(Bits b) { return __uint_as_float(uint32_t(b) << 16); }
  static __device__ void decode(uint32_t word, float* w) {
    w[0] = __uint_as_float(word << 16), w[1] = __uint_as_float(word & 0xffff0000u);
  }
  static __device__ void decode(const Unit& u, float (&w)[4]) { decode(u.x, w), decode(u.y, w + 2); }
  static __device__ void poison(uint32_t& acc, uint32_t word) {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(acc) : "r"(word), "r"(0u));
  }
  static __device__ bool poisoned(uint32_t acc) { return (acc & 0x7fff7fffu) != 0; }
};

struct Fp16 {
  using Bits = uint16_t;
  using Unit = uint2;
  static constexpr int kParts = 1;
  static constexpr uint32_t kExponent = 0x7c00;
  static __device__ float decode(Bits b) { return __half2float(__ushort_as_half(b)); }
  static __device__ void decode(uint32_t word, float* w) { w[0] = decode(Bits(word)), w[1] = decode(Bits(word >> 16)); }
  static __device__ void decode(const Unit& u, float (&w)[4]) { decode(u.x, w), decode(u.y, w + 2); }
  static __device__ void poison(uint32_t& acc, uint32_t word) {
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(acc) : "r"(word), "r"(0u));
  }
  static __device__ bool poisoned(uint32_t acc) { return (acc & 0x7fff7fffu) != 0; }
};

struct Fp32 {
  using Bits = uint32_t;
  using Unit = uint4;
  static constexpr int kParts = 2;
  static constexpr uint32_t kExponent = 0x7f800000;
  static __device__ float decode(Bits b) { return __uint_as_float(b); }
  static __device__ void decode(uint32_t word, float* w) { w[0] = decode(word); }
  static __device__ void decode(const Unit& u, float (&w)[4]) {
    w[0] = decode(u.x), w[1] = decode(u.y), w[2] = decode(u.z), w[3] = decode(u.w);
  }
  static __device__ void poison(uint32_t& acc, uint32_t word) {
    acc = __float_as_uint(__fmaf_rn(decode(word), 0.f, __uint_as_float(acc)));
  }
  static __device__ bool poisoned(uint32_t acc) { return (acc & 0x7fffffffu) != 0; }
};

}  // namespace
}  // namespace fwanda
