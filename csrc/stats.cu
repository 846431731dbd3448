// Squared column sums: accumulate_sq_sums_, of one input or of a list in two launches.
//
// Memory: x [T, C] is read once; the loads bypass L1. A block sums a slab of 128 or 256 tokens over a strip of 256 columns in
// fp32: each of its 8 warps takes every 8th token, their sums meet in shared memory, and the block writes one row of
// partial [slabs, C] fp32. The second kernel adds the slabs to acc in fp64; it starts while the first one ends. The order
// of all additions depends on T alone, so single and grouped calls, and 16-byte and single loads, give the same bits.
#include "columns.cuh"

namespace fwanda {

constexpr int kWarps = 8;
constexpr int kFew = 4096;         // tokens, up to which slabs of 128 are faster (H200, the widths of LLaMA-2-7B)
constexpr int kInFlight = 8;       // 16-byte loads that a thread issues before it uses one
constexpr int kFinishCols = 32;    // columns of a block of the second kernel
constexpr int kMaxEntries = 64;    // the table is a kernel argument

struct SqSums {
  const void* x;  // [T, C], last dim contiguous
  float* acc;     // [C]
  int64_t token_stride, acc_stride;  // in elements
  int32_t tokens, cols;
  DType dtype;
};

struct Entry {
  SqSums in;
  float* partial;
  int32_t first_block, first_finish, slabs;
  bool aligned;
};

__device__ constexpr int slab_tokens(int tokens) { return tokens <= kFew ? 128 : 256; }

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
__device__ __forceinline__ void sq_sums(const Table<N>& table, const uint8_t* counted) {
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
__device__ __forceinline__ void add_slabs(const Table<N>& table) {
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

// A module holds the kernels of one kind of call: compiling those of all four takes three times as long.
extern "C" __global__ void __launch_bounds__(kWarps * 32)
    sq_sums(const __grid_constant__ Table<ENTRIES> table, const uint8_t* counted) {
  sq_sums<WITH_MASK>(table, counted);
}
extern "C" __global__ void __launch_bounds__(kWarps * 32) add_slabs(const __grid_constant__ Table<ENTRIES> table) {
  add_slabs<ENTRIES>(table);
}

}  // namespace fwanda
