// Interface of select.cu.
#pragma once
#include "common.cuh"

namespace fwanda {

struct RowTopk {
  void* weight;         // [R, C], last dim contiguous
  uint8_t* mask;        // [R, C] bool, contiguous; nullptr: prune the weight in place
  const float* scale;   // [C], >= 0
  const int64_t* keep;  // [R]
  int32_t* bad;         // codes of bad.h; a keep outside of [0, C] is clamped
  int64_t row_stride;   // in elements, >= C
  int32_t rows, cols;
};

// Prunes a list of matrices of one dtype in place, in one launch for each number of threads that a row takes (a warp for
// 2,048 columns). Does not wait for the device. Needs compute capability 9.0. C is at most 65,535, and a row must fit into
// shared memory: 57,344 columns of fp32.
cudaError_t row_topk_prune_(DType dtype, const RowTopk* matrices, int count, cudaStream_t stream);

// Writes the mask of one matrix, true = keep; reads the weight only.
cudaError_t row_topk_mask(DType dtype, const RowTopk& matrix, cudaStream_t stream);

}  // namespace fwanda
