// The CUDA kernels as ops of namespace fwanda_C, against LibTorch's stable ABI.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <vector>

#include "select.cuh"

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
    default: return fwanda::DType::fp32;
  }
}

fwanda::RowTopk arguments(const Tensor& weight, const Tensor& scale, const Tensor& keep, int32_t* bad, uint8_t* mask) {
  return {
      weight.data_ptr(), mask, static_cast<const float*>(scale.data_ptr()),
      static_cast<const int64_t*>(keep.data_ptr()), bad, weight.stride(0),
      static_cast<int32_t>(weight.size(0)), static_cast<int32_t>(weight.size(1)),
  };
}

// All weights have one dtype and unit column stride; scales and keeps are contiguous: the caller sees to it.
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

}  // namespace

// Overload names apart from those of the CPU library, which may be loaded beside this one.
STABLE_TORCH_LIBRARY_FRAGMENT(fwanda_C, m) {
  m.def("row_topk_mask.flag(Tensor weight, Tensor scale, Tensor keep, Tensor(a!) bad) -> Tensor");
  m.def("foreach_row_topk_prune_(Tensor(a!)[] weights, Tensor[] scales, Tensor[] keeps, Tensor(b!) bad) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fwanda_C, CUDA, m) {
  m.impl("row_topk_mask.flag", TORCH_BOX(&row_topk_mask));
  m.impl("foreach_row_topk_prune_", TORCH_BOX(&foreach_row_topk_prune_));
}
