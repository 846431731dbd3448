// Squared column sums: accumulate_sq_sums_, of one input or of a list in two launches.
//
// Memory: x [T, C] is read once; the loads bypass L1. A block sums a slab of 128 or 256 tokens over a strip of 256 columns in
// fp32: each of its 8 warps takes every 8th token, their sums meet in shared memory, and the block writes one row of
// partial [slabs, C] fp32. The second kernel adds the slabs to acc in fp64; it starts while the first one ends. The order
// of all additions depends on T alone, so single and grouped calls, and 16-byte and single loads, give the same bits.
#include <algorithm>

#include "columns.cuh"
#include "stats.cuh"

namespace fwanda {

namespace {

constexpr int kWarps = 8;
constexpr int kFew = 4096;         // tokens, up to which slabs of 128 are faster (H200, the widths of LLaMA-2-7B)
constexpr int kInFlight = 8;       // 16-byte loads that a thread issues before it uses one
constexpr int kFinishCols = 32;    // columns of a block of the second kernel
constexpr int kMaxEntries = 64;    // the table is a kernel argument

struct Entry {
  SqSums in;
  float* partial;
  int32_t first_block, first_finish, slabs;
  bool aligned;
};

__host__ __device__ inline int slab_tokens(int tokens) { return tokens <= kFew ? 128 : 256; }
inline int32_t slab_count(int tokens) { return (tokens - 1) / slab_tokens(tokens) + 1; }

template <int N>
struct Table {
  int32_t count;
  Entry entry[N];
};

template <int N, class F>
__device__ const Entry& find(const Table<N>& table, F first) {
  int low = 0, high = table.count - 1;
  while (N > 1 && low < high) {
    int mid = (low + high + 1) / 2;
    if (first(table.entry[mid]) <= int(blockIdx.x)) low = mid;
    else high = mid - 1;
  }
  return table.entry[low];
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
__device__ inline void let_next_kernel_start() {}
__device__ inline void wait_for_last_kernel() { __trap(); }
#else
__device__ inline void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ inline void wait_for_last_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif

template <class E, bool ALIGNED, bool MASKED>
__device__ void sum_slab(const Entry& e, const uint8_t* counted, int strip, int slab, float (&sum)[8]) {
  constexpr int kRows = kInFlight / E::kParts;
  auto* x = static_cast<const typename E::Bits*>(e.in.x) + strip;
  int size = slab_tokens(e.in.tokens), end = min((slab + 1) * size, e.in.tokens);
#pragma unroll 1
  for (int t = slab * size + warp(); t < end; t += kRows * kWarps) {
    Eight<E> v[kRows];
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      int row = t + i * kWarps;
      bool in = row < end && (!MASKED || counted[row]);
      v[i].template load<ALIGNED>(x + row * e.in.token_stride, in ? e.in.cols - strip : 0);
    }
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      float w[8];
      v[i].decode(w);
#pragma unroll
      for (int j = 0; j < 8; j++) sum[j] = __fmaf_rn(w[j], w[j], sum[j]);
    }
  }
}

template <class E, bool MASKED>
__device__ void write_slab(const Entry& e, const uint8_t* counted, int strip, int slab, float (*shared)[kStrip]) {
  float sum[8] = {};
  if (e.aligned) sum_slab<E, true, MASKED>(e, counted, strip, slab, sum);
  else sum_slab<E, false, MASKED>(e, counted, strip, slab, sum);
#pragma unroll
  for (int j = 0; j < 8; j += 4)
    *reinterpret_cast<float4*>(&shared[warp()][Eight<E>::column(j)]) = make_float4(sum[j], sum[j + 1], sum[j + 2], sum[j + 3]);
}

template <bool MASKED, int N>
__global__ void __launch_bounds__(kWarps * 32) _sq_sums_kernel(const __grid_constant__ Table<N> table, const uint8_t* counted) {
  __shared__ __align__(16) float shared[kWarps][kStrip];
  let_next_kernel_start();
  const Entry& e = find(table, [](const Entry& x) { return x.first_block; });
  int block = int(blockIdx.x) - e.first_block, strips = (e.in.cols + kStrip - 1) / kStrip;
  int slab = block / strips, strip = block % strips * kStrip;
  switch (e.in.dtype) {
    case DType::bf16: write_slab<Bf16, MASKED>(e, counted, strip, slab, shared); break;
    case DType::fp16: write_slab<Fp16, MASKED>(e, counted, strip, slab, shared); break;
    case DType::fp32: write_slab<Fp32, MASKED>(e, counted, strip, slab, shared); break;
  }
  __syncthreads();
  int c = strip + int(threadIdx.x);
  if (c >= e.in.cols) return;
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; w++) total += shared[w][threadIdx.x];
  e.partial[int64_t(slab) * e.in.cols + c] = total;
}

template <int N>
__global__ void __launch_bounds__(kWarps * 32) _add_slabs_kernel(const __grid_constant__ Table<N> table) {
  __shared__ double shared[kWarps][kFinishCols];
  const Entry& e = find(table, [](const Entry& x) { return x.first_finish; });
  int c = (int(blockIdx.x) - e.first_finish) * kFinishCols + lane();
  wait_for_last_kernel();
  double total = 0;
  if (c < e.in.cols) {
#pragma unroll 8
    for (int s = warp(); s < e.slabs; s += kWarps) total += double(e.partial[int64_t(s) * e.in.cols + c]);
  }
  shared[warp()][lane()] = total;
  __syncthreads();
  if (warp() != 0 || c >= e.in.cols) return;
  float* acc = e.in.acc + c * e.in.acc_stride;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; w++) total += shared[w][lane()];
  *acc = float(double(*acc) + total);
}

template <int N>
cudaError_t launch(const SqSums* entries, int count, const uint8_t* counted, float* partial, cudaStream_t stream) {
  Table<N> table;
  int64_t blocks = 0, finish = 0;
  for (int i = 0; i < count; i++) {
    const SqSums& in = entries[i];
    if (in.tokens < 1 || in.cols < 1) return cudaErrorInvalidValue;
    int32_t slabs = slab_count(in.tokens);
    bool aligned = in_vectors(in.x, in.token_stride, in.cols, itemsize(in.dtype));
    table.entry[i] = {in, partial, int32_t(blocks), int32_t(finish), slabs, aligned};
    blocks += int64_t(slabs) * ((in.cols + kStrip - 1) / kStrip);
    finish += (in.cols + kFinishCols - 1) / kFinishCols;
    partial += int64_t(slabs) * in.cols;
  }
  if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
  table.count = count;
  if (counted) _sq_sums_kernel<true, N><<<unsigned(blocks), kWarps * 32, 0, stream>>>(table, counted);
  else _sq_sums_kernel<false, N><<<unsigned(blocks), kWarps * 32, 0, stream>>>(table, nullptr);
  if (cudaError_t error = cudaGetLastError()) return error;
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = unsigned(finish), config.blockDim = kWarps * 32, config.stream = stream;
  config.attrs = &early, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, _add_slabs_kernel<N>, table);
}

}  // namespace

int64_t sq_sums_partial(int32_t tokens, int32_t cols) { return int64_t(slab_count(tokens)) * cols; }

cudaError_t accumulate_sq_sums_(const SqSums* entries, int count, const uint8_t* counted, float* partial, cudaStream_t stream) {
  if (count == 1) return launch<1>(entries, 1, counted, partial, stream);
  for (int i = 0; i < count; i += kMaxEntries) {
    int n = std::min(kMaxEntries, count - i);
    if (cudaError_t error = launch<kMaxEntries>(entries + i, n, counted, partial, stream)) return error;
    for (int k = i; k < i + n; k++) partial += sq_sums_partial(entries[k].tokens, entries[k].cols);
  }
  return cudaSuccess;
}

}  // namespace fwanda
