// What stats.cu offers to bindings.cu.
#pragma once
#include "select.cuh"

namespace fwanda {

struct SqSums {
  const void* x;  // [T, C], last dim contiguous
  float* acc;     // [C]
  int64_t token_stride, acc_stride;  // in elements
  int32_t tokens, cols;
  DType dtype;
};

// Floats that `partial` must hold for one entry.
int64_t sq_sums_partial(int32_t tokens, int32_t cols);

// acc += squares of x summed over the tokens that `counted` [T] does not mark 0 (nullptr: all). partial holds the
// entries' needs together. Needs compute capability 9.0.
cudaError_t accumulate_sq_sums_(const SqSums* entries, int count, const uint8_t* counted, float* partial, cudaStream_t stream);

}  // namespace fwanda
