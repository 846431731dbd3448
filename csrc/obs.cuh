// Interface of obs.cu.
#pragma once
#include "common.cuh"

namespace fwanda {

// How the entries to remove are chosen; numbered as RULES of fwanda_kernels/_obs.py.
enum class ObsRule { sparsity, keep, mask, pattern };

constexpr int kObsColumns = 128;     // most in a block
constexpr int kObsCounters = 4100;   // int32: the histograms of three digits, and the keys and ranks found from them

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
  ObsRule rule;
  DType dtype;              // of weight
};

// Prunes one block of columns and writes its errors. work and factor begin at 16 bytes.
cudaError_t obs_prune_block(const ObsBlock& block, cudaStream_t stream);

}  // namespace fwanda
