// The CUDA kernels as ops of namespace fwanda_C, against LibTorch's stable ABI.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <tuple>
#include <vector>

#include "obs.cuh"
#include "select.cuh"
#include "sparse24.cuh"
#include "stats.cuh"
#include "threshold.cuh"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

cudaStream_t current_stream(const Tensor& on) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

void check(cudaError_t error) { STD_TORCH_CHECK(error == cudaSuccess, "fwanda_C: ", cudaGetErrorString(error)); }

fwanda::DType dtype_of(const Tensor& weight) {
  switch (weight.scalar_type()) {
    case ScalarType::BFloat16: return fwanda::DType::bf16;
    case ScalarType::Half: return fwanda::DType::fp16;
    case ScalarType::Float: return fwanda::DType::fp32;
    default: STD_TORCH_CHECK(false, "fwanda_C: weights must be bf16, fp16 or fp32");
  }
}

fwanda::RowTopk arguments(const Tensor& weight, const Tensor& scale, const Tensor& keep, int32_t* bad, uint8_t* mask) {
  return {
      weight.data_ptr(), mask, static_cast<const float*>(scale.data_ptr()),
      static_cast<const int64_t*>(keep.data_ptr()), bad, weight.stride(0),
      static_cast<int32_t>(weight.size(0)), static_cast<int32_t>(weight.size(1)),
  };
}

// The caller guarantees that all weights have one dtype and unit column stride, and that scales and keeps are contiguous.
void foreach_row_topk_prune_(
    std::vector<Tensor> weights, std::vector<Tensor> scales, std::vector<Tensor> keeps, const Tensor& bad) {
  DeviceGuard guard(bad.get_device_index());
  auto* flags = static_cast<int32_t*>(bad.data_ptr());
  std::vector<fwanda::RowTopk> matrices;
  for (size_t i = 0; i < weights.size(); i++)
    matrices.push_back(arguments(weights[i], scales[i], keeps[i], flags + i, nullptr));
  check(fwanda::row_topk_prune_(dtype_of(weights[0]), matrices.data(), int(matrices.size()), current_stream(bad)));
}

Tensor row_topk_mask(const Tensor& weight, const Tensor& scale, const Tensor& keep, const Tensor& bad) {
  DeviceGuard guard(bad.get_device_index());
  Tensor out = torch::stable::new_empty(scale, {weight.size(0), weight.size(1)}, ScalarType::Bool);
  auto* flag = static_cast<int32_t*>(bad.data_ptr());
  auto matrix = arguments(weight, scale, keep, flag, static_cast<uint8_t*>(out.data_ptr()));
  check(fwanda::row_topk_mask(dtype_of(weight), matrix, current_stream(bad)));
  return out;
}

// In this and all functions below, the caller guarantees that inputs have unit column stride, and that scales and masks are
// contiguous.
void foreach_accumulate_sq_sums_(std::vector<Tensor> accs, std::vector<Tensor> xs, std::optional<Tensor> counted) {
  DeviceGuard guard(xs[0].get_device_index());
  std::vector<fwanda::SqSums> entries;
  int64_t size = 0;
  for (size_t i = 0; i < xs.size(); i++) {
    const Tensor &x = xs[i], &acc = accs[i];
    STD_TORCH_CHECK(x.size(0) <= INT32_MAX && x.size(1) <= INT32_MAX, "fwanda_C: x is too large");
    entries.push_back({
        x.data_ptr(), static_cast<float*>(acc.data_ptr()), x.stride(0), acc.stride(0),
        static_cast<int32_t>(x.size(0)), static_cast<int32_t>(x.size(1)), dtype_of(x),
    });
    size += fwanda::sq_sums_partial(entries[i].tokens, entries[i].cols);
  }
  Tensor partial = torch::stable::new_empty(accs[0], {size});
  auto* tokens = counted ? static_cast<const uint8_t*>(counted->data_ptr()) : nullptr;
  auto* scratch = static_cast<float*>(partial.data_ptr());
  check(fwanda::accumulate_sq_sums_(entries.data(), int(entries.size()), tokens, scratch, current_stream(xs[0])));
}

fwanda::Weight24 weight24(const Tensor& weight, const Tensor& scale, const Tensor& bad) {
  return {
      weight.data_ptr(), static_cast<const float*>(scale.data_ptr()), static_cast<int32_t*>(bad.data_ptr()),
      weight.stride(0), static_cast<int32_t>(weight.size(0)), static_cast<int32_t>(weight.size(1)), dtype_of(weight),
  };
}

void prune_n_of_4_(const Tensor& weight, const Tensor& scale, int64_t n, const Tensor& bad) {
  DeviceGuard guard(bad.get_device_index());
  check(fwanda::keep_n_of_4(weight24(weight, scale, bad), int(n), nullptr, current_stream(bad)));
}

Tensor mask_n_of_4(const Tensor& weight, const Tensor& scale, int64_t n, const Tensor& bad) {
  DeviceGuard guard(bad.get_device_index());
  Tensor out = torch::stable::new_empty(scale, {weight.size(0), weight.size(1)}, ScalarType::Bool);
  auto* mask = static_cast<uint8_t*>(out.data_ptr());
  check(fwanda::keep_n_of_4(weight24(weight, scale, bad), int(n), mask, current_stream(bad)));
  return out;
}

std::tuple<Tensor, Tensor> compress_24(const Tensor& weight, const Tensor& scale, const Tensor& bad) {
  DeviceGuard guard(bad.get_device_index());
  int64_t rows = weight.size(0), cols = weight.size(1);
  Tensor values = torch::stable::new_empty(weight, {rows, cols / 2});
  Tensor meta = torch::stable::new_empty(scale, {rows, cols / 16}, ScalarType::Short);
  auto* words = static_cast<int16_t*>(meta.data_ptr());
  check(fwanda::compress_24(weight24(weight, scale, bad), values.data_ptr(), words, current_stream(bad)));
  return {values, meta};
}

// Returns two vectors [R] int32, with R the rows of all matrices together.
std::tuple<Tensor, Tensor> count_at_threshold(
    std::vector<Tensor> weights, std::vector<Tensor> row_scales, std::vector<Tensor> col_scales, int64_t total, const Tensor& bad) {
  DeviceGuard guard(bad.get_device_index());
  std::vector<fwanda::Scored> matrices;
  int64_t rows = 0;
  for (size_t i = 0; i < weights.size(); i++) {
    const Tensor& w = weights[i];
    matrices.push_back({
        w.data_ptr(), static_cast<const float*>(row_scales[i].data_ptr()),
        static_cast<const float*>(col_scales[i].data_ptr()), w.stride(0), static_cast<int32_t>(w.size(0)),
        static_cast<int32_t>(w.size(1)), dtype_of(w),
    });
    rows += w.size(0);
  }
  STD_TORCH_CHECK(rows <= INT32_MAX, "fwanda_C: too many rows");
  int64_t bytes = fwanda::threshold_workspace(matrices.data(), int(matrices.size()));
  Tensor workspace = torch::stable::new_empty(bad, {bytes}, ScalarType::Byte);
  Tensor larger = torch::stable::new_empty(bad, {rows}), equal = torch::stable::new_empty(bad, {rows});
  check(fwanda::count_at_threshold(
      matrices.data(), int(matrices.size()), total, workspace.data_ptr(), static_cast<int32_t*>(larger.data_ptr()),
      static_cast<int32_t*>(equal.data_ptr()), static_cast<int32_t*>(bad.data_ptr()), current_stream(bad)));
  return {larger, equal};
}

// counters: int32 zeros for the rule `sparsity`, else unused. chosen: keep or mask. fwanda::ObsBlock describes the rest.
void obs_prune_block(
    const Tensor& weight, const Tensor& work, const Tensor& factor, const Tensor& weighting,
    std::optional<Tensor> row_weight, std::optional<Tensor> chosen, const Tensor& errors, const Tensor& counters,
    int64_t rule, int64_t start, int64_t end, int64_t dropped, int64_t group) {
  DeviceGuard guard(weight.get_device_index());
  STD_TORCH_CHECK(end - start <= fwanda::kObsColumns && counters.size(0) >= fwanda::kObsCounters, "fwanda_C: block");
  bool mask = chosen && chosen->dim() == 2;
  fwanda::ObsBlock block{
      static_cast<const float*>(work.data_ptr()), weight.data_ptr(), static_cast<const float*>(factor.data_ptr()),
      static_cast<const float*>(weighting.data_ptr()),
      row_weight ? static_cast<const float*>(row_weight->data_ptr()) : nullptr, chosen ? chosen->data_ptr() : nullptr,
      static_cast<float*>(errors.data_ptr()), static_cast<int32_t*>(counters.data_ptr()), work.stride(0),
      weight.stride(0), weight.stride(1), mask ? chosen->stride(0) : 0, mask ? chosen->stride(1) : 0,
      static_cast<int32_t>(weight.size(0)), static_cast<int32_t>(weight.size(1)), static_cast<int32_t>(start),
      static_cast<int32_t>(end), static_cast<int32_t>(dropped), static_cast<int32_t>(group),
      static_cast<fwanda::ObsRule>(rule), dtype_of(weight),
  };
  check(fwanda::obs_prune_block(block, current_stream(weight)));
}

}  // namespace

// The CPU library may be loaded beside this one, so no op has the name of one of its ops.
STABLE_TORCH_LIBRARY_FRAGMENT(fwanda_C, m) {
  m.def("row_topk_mask_flagged(Tensor weight, Tensor scale, Tensor keep, Tensor(a!) bad) -> Tensor");
  m.def("foreach_row_topk_prune_(Tensor(a!)[] weights, Tensor[] scales, Tensor[] keeps, Tensor(b!) bad) -> ()");
  m.def("foreach_accumulate_sq_sums_(Tensor(a!)[] accs, Tensor[] xs, Tensor? counted) -> ()");
  m.def("prune_n_of_4_(Tensor(a!) weight, Tensor scale, int n, Tensor(b!) bad) -> ()");
  m.def("mask_n_of_4(Tensor weight, Tensor scale, int n, Tensor(a!) bad) -> Tensor");
  m.def("compress_24(Tensor weight, Tensor scale, Tensor(a!) bad) -> (Tensor, Tensor)");
  m.def(
      "count_at_threshold(Tensor[] weights, Tensor[] row_scales, Tensor[] col_scales, int total, Tensor(a!) bad)"
      " -> (Tensor, Tensor)");
  m.def(
      "obs_prune_block(Tensor(a!) weight, Tensor work, Tensor factor, Tensor weighting, Tensor? row_weight,"
      " Tensor? chosen, Tensor(b!) errors, Tensor(c!) counters, int rule, int start, int end, int dropped, int group)"
      " -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fwanda_C, CUDA, m) {
  m.impl("row_topk_mask_flagged", TORCH_BOX(&row_topk_mask));
  m.impl("foreach_row_topk_prune_", TORCH_BOX(&foreach_row_topk_prune_));
  m.impl("foreach_accumulate_sq_sums_", TORCH_BOX(&foreach_accumulate_sq_sums_));
  m.impl("prune_n_of_4_", TORCH_BOX(&prune_n_of_4_));
  m.impl("mask_n_of_4", TORCH_BOX(&mask_n_of_4));
  m.impl("compress_24", TORCH_BOX(&compress_24));
  m.impl("count_at_threshold", TORCH_BOX(&count_at_threshold));
  m.impl("obs_prune_block", TORCH_BOX(&obs_prune_block));
}
