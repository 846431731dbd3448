// Interface of sparse24.cu.
#pragma once
#include "common.cuh"

namespace fwanda {

struct Weight24 {
  void* weight;        // [R, C], last dim contiguous, C a multiple of 4
  const float* scale;  // [C], >= 0
  int32_t* bad;        // codes of bad.h
  int64_t row_stride;  // in elements, >= C
  int32_t rows, cols;
  DType dtype;
};

// Keep the n largest of every 4 columns: in place, or as mask [R, C] bool where that is not nullptr.
cudaError_t keep_n_of_4(const Weight24& w, int n, uint8_t* mask, cudaStream_t stream);

// 16-bit weights with R and C multiples of 32: values [R, C / 2] and reordered metadata [R, C / 16], both contiguous.
cudaError_t compress_24(const Weight24& w, void* values, int16_t* meta, cudaStream_t stream);

}  // namespace fwanda
