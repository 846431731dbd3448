// Interface of threshold.cu.
#pragma once
#include "common.cuh"

namespace fwanda {

struct Scored {
  const void* weight;      // [R, C], last dim contiguous
  const float* row_scale;  // [R], >= 0
  const float* col_scale;  // [C], >= 0
  int64_t row_stride;      // in elements, >= C
  int32_t rows, cols;
  DType dtype;
};

// Bytes of scratch memory, which must begin at 16 bytes: the larger of 36 MB, and 2 MB plus 1 B for each 96 weights; and 4 B
// for each column.
int64_t threshold_workspace(const Scored* matrices, int count);

// Finds the total-th largest score of all matrices, 1 <= total <= their weights. For each row, over all matrices in order,
// counts the weights with a larger score and those with this score. bad gets the codes of bad.h.
cudaError_t count_at_threshold(
    const Scored* matrices, int count, int64_t total, void* workspace, int32_t* larger, int32_t* equal, int32_t* bad, cudaStream_t stream);

}  // namespace fwanda
