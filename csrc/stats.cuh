// Interface of stats.cu.
#pragma once
#include "common.cuh"

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

// Adds to acc the squares of x, summed over the tokens whose `counted` [T] is not 0 (nullptr: all tokens). partial is
// scratch memory for all entries together. Needs compute capability 9.0.
cudaError_t accumulate_sq_sums_(const SqSums* entries, int count, const uint8_t* counted, float* partial, cudaStream_t stream);

}  // namespace fwanda
