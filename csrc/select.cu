// Exact variable-k row selection: row_topk_prune_ (in place) and row_topk_mask.
//
// Memory: a block owns one row. The bulk copy engine copies the row once into shared memory, and registers write it once;
// scale [C] stays in L1. Each thread keeps the upper 16 bits of its scores in pairs (`key`, 2 columns in a register). Each
// round counts them against two thresholds; the first two come from a sample. The few columns left between two thresholds
// are ranked exactly by (score bits, column). Ties too many for that are cut by column.
// sm_90: bulk copies, 16-bit min/max on pairs, fast 64-bit compares.
#include "select_row.cuh"

namespace fwanda {

constexpr int kMaxMatrices = 448;  // the table is a kernel argument: 448 * 64 B < 32,764 B

struct Entry {
  RowTopk m;
  int32_t first_row;  // of this matrix among all rows of the launch
};

template <int N>
struct Table {
  int32_t count;
  Entry entry[N];
};

template <class E, bool ALIGNED, bool MASK, int N>
__device__ __forceinline__ void row_topk(const Table<N>& table) {
  using Bits = typename E::Bits;
  extern __shared__ __align__(128) char dynamic[];
  __shared__ Shared shared;
  int low = 0, high = table.count - 1;
  while (N > 1 && low < high) {
    int mid = (low + high + 1) / 2;
    if (table.entry[mid].first_row <= int(blockIdx.x)) low = mid;
    else high = mid - 1;
  }
  const RowTopk& given = table.entry[low].m;
  const RowTopk& m = N == 1 ? given : shared.m;
  int64_t r = int(blockIdx.x) - table.entry[low].first_row;
  Row<E, ALIGNED, MASK> x{m, &shared, reinterpret_cast<Bits*>(dynamic + list_bytes(int(blockDim.x))), 0};
  if (threadIdx.x == 0) {
    Bits* weight = static_cast<Bits*>(given.weight) + r * given.row_stride;
    if (ALIGNED) start_copy(&shared.copied, x.row, weight, uint32_t(given.cols) * uint32_t(sizeof(Bits)));
    int64_t wanted = given.keep[r], keep = min(max(wanted, int64_t(0)), int64_t(given.cols));
    if (wanted != keep) atomicOr(given.bad, kBadKeep);
    if (N > 1) shared.m = given;
    shared.weight = weight, shared.keep = int32_t(keep), shared.listed = 0;
  }
  if (r == 0)
    for (int c = int(threadIdx.x); c < given.cols; c += int(blockDim.x))
      if (!(given.scale[c] >= 0.f && given.scale[c] <= kLargest)) atomicOr(given.bad, kBadScale);
  __syncthreads();
  if (!ALIGNED) {
    for (int c = int(threadIdx.x); c < m.cols; c += int(blockDim.x)) x.row[c] = static_cast<const Bits*>(shared.weight)[c];
    __syncthreads();
  }
  if (ALIGNED) wait_copy(&shared.copied);
  bool full = (x.warp() + 1) * kColsPerWarp <= m.cols;
  bool overflow = full ? x.template make_keys<true>() : x.template make_keys<false>();
  if (overflow && x.has_nonfinite_weight()) atomicOr(m.bad, kBadWeight);
  int k = shared.keep;
  int cutoff = k == 0 ? 0x7fff : 0;  // no key is at least NaN
  if (k > 0 && k < m.cols) {
    Bracket b = x.search(k);
    cutoff = b.lo;
    if (b.at_lo > k) {
      uint32_t first = uint32_t(b.lo) << 16, last = (uint32_t(b.hi) << 16) - 1;
      int at_first = b.at_lo, above = b.at_hi;
      bool settled = false;
      if (at_first - above > list_capacity(x.threads())) {
        b.hi = b.lo + 1;  // it is this already; known to the compiler, it takes no register
        settled = x.settle_bucket(b.lo, first, last, at_first, above);
      }
      if (!settled) x.rank_candidates(b, first, last, at_first - above, shared.keep - above);
    }
  }
  Bits* weight = static_cast<Bits*>(shared.weight);
  uint8_t* mask = MASK ? m.mask + r * m.cols : nullptr;
  if (x.warp() < m.cols / kColsPerWarp) x.template write<true>(cutoff, weight, mask);
  else x.template write<false>(cutoff, weight, mask);
  if (!ALIGNED && !MASK) {
    __syncthreads();
    for (int c = int(threadIdx.x); c < m.cols; c += int(blockDim.x)) weight[c] = x.row[c];
  }
}

// A thread has 64 registers, and 32 of them hold keys; or 72 and 40. On sm_120, shared memory has no room for so many rows of
// fp32 that 72 registers would cost a block, and spares spills.
#if STEPS == 20
constexpr int kMaxThreads = 896;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kMaxThreads = sizeof(WEIGHT::Bits) == 4 ? 896 : 1024;
#else
constexpr int kMaxThreads = 1024;
#endif

// A module holds one kernel: compiling all three takes three times as long, and a call needs one.
// Blocks of one launch take the same number of threads. Only barrier 0 is used: a barrier with its id in a register would
// reserve all 16 barriers of a block, and then four blocks would fill an SM.
extern "C" __global__ void __launch_bounds__(kMaxThreads) KERNEL(const __grid_constant__ Table<MATRICES> table) {
  row_topk<WEIGHT, ROWS_ALIGNED, TO_MASK>(table);
}

}  // namespace fwanda
