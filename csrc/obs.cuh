// What obs.cu offers to bindings.cu.
#pragma once
#include "select.cuh"

namespace fwanda {

enum class ObsChoice { sparsity, keep, mask, pattern };

constexpr int kObsColumns = 128;     // most in a block
constexpr int kObsCounters = 4100;   // int32, histograms of three digits and what they led to

struct ObsBlock {
  const float* work;        // [R, C], the weight with all updates so far
  void* weight;             // [R, C], whose columns [start, end) are written
  const float* factor;      // [C, C], upper triangular
  const float* weighting;   // [C]
  const float* row_weight;  // [R], or nullptr
  const void* chosen;       // uint8 mask [R, C], or int64 keep [R]
  float* errors;            // [end - start, R], written
  int32_t* counters;        // kObsCounters zeros, for `sparsity`
  int64_t work_stride;      // a multiple of 4, as is start
  int64_t row_stride, col_stride, chosen_row_stride, chosen_col_stride;
  int32_t rows, cols, start, end;
  int32_t dropped;          // from the block by `sparsity`, from each group by `pattern`
  int32_t group;            // 4, 8, 16 or 32 columns
  ObsChoice choice;
  DType dtype;              // of weight
};

// Prune one block of columns and write its errors. work and factor begin at 16 bytes.
cudaError_t obs_prune_block(const ObsBlock& block, cudaStream_t stream);

}  // namespace fwanda
