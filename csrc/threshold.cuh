// What threshold.cu offers to bindings.cu.
#pragma once
#include "select.cuh"

namespace fwanda {

struct Scored {
  const void* weight;      // [R, C], last dim contiguous
  const float* row_scale;  // [R], >= 0
  const float* col_scale;  // [C], >= 0
  int64_t row_stride;      // in elements, >= C
  int32_t rows, cols;
  DType dtype;
};

// Bytes of scratch memory, at 16 bytes: 36 MB, or 2 MB and 1 B for each 96 weights where that is more, and 4 B a column.
int64_t threshold_workspace(const Scored* matrices, int count);

// Finds the total-th largest score of all matrices, 1 <= total <= size, and counts in each row, over all matrices in order,
// the weights with a larger score and those with just this one. bad |= 1 non-finite weight, 2 non-finite or negative scale.
cudaError_t count_at_threshold(
    const Scored* matrices, int count, int64_t total, void* workspace, int32_t* larger, int32_t* equal, int32_t* bad, cudaStream_t stream);

}  // namespace fwanda
