// What all kernels share: the dtypes of weights and how they are decoded, lanes and warps, the check of a scale.
//
// NVRTC and nvcc both compile these files, without any header of CUDA or of the host. Each .cu file is compiled once for each
// variant that fwanda_kernels/_backends/cuda/compile.py lists, which sets macros: WEIGHT is the dtype of weights, ROWS_ALIGNED
// says whether all rows can be read by 16-byte loads, STEPS is a size of select.cu, and RULE is a rule of obs.cu. KERNEL,
// TO_MASK and MATRICES make one kernel of select.cu, ENTRIES and WITH_MASK those of stats.cu, and LINEAR_8, LINEAR_16,
// LINEAR_DIRECT or UNPACK takes one of packed.cu. The kernels are the extern "C" functions at the end of a .cu file. The
// Python module of the same name in _backends/cuda/ launches them.
#pragma once

#ifdef __CUDACC_RTC__  // NVRTC has no <stdint.h>
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
#else
#include <stdint.h>
#endif

#include "bad.h"

namespace fwanda {

enum class DType : int { bf16 = 0, fp16 = 1, fp32 = 2 };

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
  static __device__ float decode(Bits b) {
    float w;
    asm("cvt.f32.f16 %0, %1;" : "=f"(w) : "h"(b));
    return w;
  }
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

}  // namespace fwanda
