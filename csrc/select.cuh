// What select.cu offers to bindings.cu.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

namespace fwanda {

enum class DType : int { bf16 = 0, fp16 = 1, fp32 = 2 };

struct RowTopk {
  void* weight;         // [R, C], last dim contiguous
  uint8_t* mask;        // [R, C] bool, contiguous; nullptr: prune the weight in place
  const float* scale;   // [C], >= 0
  const int64_t* keep;  // [R]
  int32_t* bad;         // |= 1 non-finite weight, 2 non-finite or negative scale, 4 keep outside 0..C (clamped)
  int64_t row_stride;   // in elements, >= C
  int32_t rows, cols;
};

// In place on a list of matrices of one dtype. Needs compute capability 9.0; C up to 65,535, in fp32 up to 57,344.
cudaError_t row_topk_prune_(DType dtype, const RowTopk* matrices, int count, cudaStream_t stream);

cudaError_t row_topk_mask(DType dtype, const RowTopk& matrix, cudaStream_t stream);

}  // namespace fwanda
