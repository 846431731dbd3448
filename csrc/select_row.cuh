// One row of select.cu: score keys in registers, threshold search, exact ranking, ties, write.
#pragma once
#include "common.cuh"

namespace fwanda {

constexpr int kSteps = STEPS;                    // units of 4 columns a thread holds, 16 or 20
constexpr int kUnit = 4;                         // columns
constexpr int kStride = 32 * kUnit;              // columns a warp takes in one step
constexpr int kColsPerWarp = kSteps * kStride;   // contiguous
constexpr int kMaxCols = 65535;                  // counts travel as 16-bit pairs
constexpr uint32_t kOnes = 0x00010001u;
constexpr uint32_t kInfinite = 0x7f807f80u;      // keys of inf

// Most columns that are ranked one by one. About 0.25 % of a row share one upper half.
__device__ constexpr int list_capacity(int threads) { return threads >= 256 ? 128 : 64; }

__device__ constexpr int list_bytes(int threads) { return list_capacity(threads) * 8; }

// fabsf turns a scale of -0.0 into 0, and keeps keys non-negative even for scales that `bad` reports.
__device__ inline uint32_t score_bits(float w, float s) { return __float_as_uint(__fmul_rn(fabsf(w), fabsf(s))); }

__device__ inline float root(float x) { return x * rsqrtf(x); }

__device__ inline uint32_t splat(int v) { return (uint32_t(v) & 0xffffu) * kOnes; }

// All ones in each half whose key is at least that of `cutoff`. Keys are compared as bf16, which they are: the upper half of an
// fp32 score. NaN, so also the key of a column past the row, is never at least anything, and nothing is at least NaN.
__device__ inline uint32_t at_least(uint32_t keys, uint32_t cutoff) {
  uint32_t r;
  asm("set.ge.u32.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(keys), "r"(cutoff));
  return r;
}

// The stores bypass L1, which holds the scale.
__device__ inline void store_past(uint2* p, uint2 v) {
  asm volatile("st.global.L1::no_allocate.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}

__device__ inline void store_past(uint4* p, uint4 v) {
  asm volatile("st.global.L1::no_allocate.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Keys less one.
__device__ inline uint32_t lowered(uint32_t keys) { return __viaddmax_s16x2(keys, ~0u, 0x80008000u); }

__device__ inline uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// Bulk copies exist from sm_90 on; code for older cards compiles but is never launched.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
__device__ inline void start_copy(uint64_t*, void*, const void*, uint32_t) { __trap(); }
__device__ inline void wait_copy(uint64_t*) { __trap(); }
#else
__device__ inline void start_copy(uint64_t* copied, void* row, const void* global, uint32_t bytes) {
  uint32_t barrier = shared_address(copied);
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(row)),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ inline void wait_copy(uint64_t* copied) {
  uint32_t done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(copied))
                 : "memory");
}
#endif

struct RowTopk {
  void* weight;         // [R, C], last dim contiguous
  uint8_t* mask;        // [R, C] bool, contiguous; nullptr: prune the weight in place
  const float* scale;   // [C], >= 0
  const int64_t* keep;  // [R]
  int32_t* bad;         // codes of bad.h; a keep outside of [0, C] is clamped
  int64_t row_stride;   // in elements, >= C
  int32_t rows, cols;
};

// The smallest interval [lo, hi) of upper score halves known to hold the k-th largest: count(>= lo) >= k > count(>= hi).
struct Bracket {
  int lo, hi, at_lo, at_hi;
};

struct Shared {
  RowTopk m;        // of a list: a copy takes no registers for the place of the original
  uint64_t copied;  // mbarrier
  void* weight;     // of this row; in shared memory, as this and the next two would spill from registers
  int32_t keep;
  uint32_t listed;
  uint2 exchange[2][32];
};

template <class E, bool ALIGNED, bool MASK>
struct Row {
  using Bits = typename E::Bits;
  using Unit = typename E::Unit;

  const RowTopk& m;
  Shared* shared;
  Bits* row;  // shared
  int parity;
  uint32_t key[2 * kSteps];

  __device__ uint64_t* list() const {
    extern __shared__ __align__(128) char dynamic[];
    return reinterpret_cast<uint64_t*>(dynamic);
  }
  __device__ static int threads() { return int(blockDim.x); }
  __device__ static int warps() { return int(blockDim.x) / 32; }
  __device__ static int warp() { return int(threadIdx.x) / 32; }
  __device__ static int lane() { return int(threadIdx.x) % 32; }
  __device__ static int column(int step) { return warp() * kColsPerWarp + step * kStride + lane() * kUnit; }

  // Combines over all warps values that are the same in all lanes of a warp.
  template <class Op>
  __device__ uint2 combine(uint2 v, uint2 neutral, Op op) {
    if (warps() == 1) return v;
    uint2* cell = shared->exchange[parity];
    parity ^= 1;
    if (lane() == 0) cell[warp()] = v;
    __syncthreads();
    return op(lane() < warps() ? cell[lane()] : neutral);
  }
  __device__ uint2 add(uint2 v) {
    return combine(v, make_uint2(0, 0), [](uint2 a) { return make_uint2(__reduce_add_sync(~0u, a.x), __reduce_add_sync(~0u, a.y)); });
  }
  __device__ uint32_t add(uint32_t v) { return add(make_uint2(v, 0)).x; }
  __device__ uint2 min_max(uint2 v) {
    auto op = [](uint2 a) { return make_uint2(__reduce_min_sync(~0u, a.x), __reduce_max_sync(~0u, a.y)); };
    return combine(op(v), make_uint2(~0u, 0), op);
  }

  __device__ float4 load_scale(int c) const {
    if (ALIGNED) return __ldg(reinterpret_cast<const float4*>(m.scale + c));
    auto at = [&](int i) { return c + i < m.cols ? __ldg(m.scale + c + i) : 0.f; };
    return make_float4(at(0), at(1), at(2), at(3));
  }

  __device__ void scores(int c, uint32_t (&s)[4]) const {
    float w[4];
    E::decode(*reinterpret_cast<const Unit*>(row + c), w);
    float4 f = load_scale(c);
    s[0] = score_bits(w[0], f.x), s[1] = score_bits(w[1], f.y), s[2] = score_bits(w[2], f.z), s[3] = score_bits(w[3], f.w);
  }

  // Columns past the row get key -1 in a step that ends past it.
  __device__ void void_past(int v) {
    if (ALIGNED) return;
    if (column(v) + 1 >= m.cols) key[2 * v] |= 0xffff0000u;
    if (column(v) + 2 >= m.cols) key[2 * v + 1] |= 0x0000ffffu;
    if (column(v) + 3 >= m.cols) key[2 * v + 1] |= 0xffff0000u;
  }

  // Columns past the row get key -1, which is below every threshold. FULL: this warp has no such columns.
  template <bool FULL>
  __device__ bool make_keys() {
    uint32_t largest = 0;
    int first = column(0);
#pragma unroll
    for (int v = 0; v < kSteps; v++) {
      int c = first + v * kStride;
      // keeps the compiler from issuing all loads at once, which spills registers
      if (kSteps == 16 ? v && v % 4 == 0 : v % 5 == 0) __syncwarp();
      if (!FULL) key[2 * v] = key[2 * v + 1] = ~0u;
      if (FULL || c < m.cols) {
        uint32_t s[4];
        scores(c, s);
        key[2 * v] = __byte_perm(s[0], s[1], 0x7632), key[2 * v + 1] = __byte_perm(s[2], s[3], 0x7632);
        if (!FULL) void_past(v);
        largest = __vimax3_s16x2(largest, key[2 * v], key[2 * v + 1]);
      }
    }
    return (~__viaddmax_s16x2(largest, splat(-0x7f80), 0x80008000u) & 0x80008000u) != 0;  // a score of inf or NaN
  }

  __device__ bool has_nonfinite_weight() const {
    bool found = false;
#pragma unroll 1
    for (int v = 0; v < kSteps; v++)
      for (int c = column(v), i = 0; i < kUnit && c + i < m.cols; i++) found |= (row[c + i] & E::kExponent) == E::kExponent;
    return found;
  }

  // Two order statistics around the wanted quantile, of a sample of 64 keys in each warp: a bitonic sort of two lists
  // that share registers.
  __device__ uint2 sample_quantiles(int k) {
    uint32_t a = key[kSteps / 2], b = key[kSteps + kSteps / 2];
    a = a == ~0u ? key[0] : a, b = b == ~0u ? key[1] : b;
    uint32_t x = __vmaxs2(__byte_perm(a, b, 0x7610), 0);
#pragma unroll
    for (int size = 2; size <= 32; size *= 2)
#pragma unroll
      for (int j = size / 2; j > 0; j /= 2) {
        uint32_t y = __shfl_xor_sync(~0u, x, j);
        bool take_min = ((lane() & j) == 0) == ((lane() & size) == 0);
        x = take_min ? __vmins2(x, y) : __vmaxs2(x, y);
      }
    float both = float((x & 0xffff) + (x >> 16));
    float p = __fdividef(float(k), float(m.cols));
    float center = (1.f - p) * 32.f - 0.5f, reach = 6.f * root(__fdividef(p * (1.f - p), float(warps())));
    auto at = [&](float position) {
      position = fminf(fmaxf(position, 0.f), 31.f);
      int i = int(position);
      float a = __shfl_sync(~0u, both, i), b = __shfl_sync(~0u, both, min(i + 1, 31));
      return uint32_t(a + (position - float(i)) * (b - a));
    };
    return add(make_uint2(at(center - reach), at(center + reach)));
  }

  // counts of keys >= low and >= high
  __device__ uint2 count(int low, int high) {
    uint32_t a = 0, b = 0, shift_a = splat(1 - low), shift_b = splat(1 - high);
#pragma unroll
    for (int r = 0; r < 2 * kSteps; r += 2) {
      a += __viaddmin_s16x2_relu(key[r], shift_a, kOnes) + __viaddmin_s16x2_relu(key[r + 1], shift_a, kOnes);
      b += __viaddmin_s16x2_relu(key[r], shift_b, kOnes) + __viaddmin_s16x2_relu(key[r + 1], shift_b, kOnes);
    }
    uint32_t sum = __reduce_add_sync(~0u, __byte_perm(a, b, 0x5410) + __byte_perm(a, b, 0x7632));
    sum = add(sum);
    return make_uint2(sum & 0xffff, sum >> 16);
  }

  __device__ Bracket search(int k) {
    Bracket b{0, 0x8000, m.cols, 0};
    uint2 q = sample_quantiles(k);
    float scale_down = __fdividef(0.5f, float(warps())), low = float(q.x) * scale_down, high = float(q.y) * scale_down;
    float center = 0.5f * (low + high) + 0.5f, step = fmaxf(0.5f * (high - low), 0.5f), span = fmaxf(high - low, 8.f);
    for (int round = 1;; round++) {
      int first = b.lo + 1, last = b.hi - 1;
      int t0 = last - first <= 1 ? first : min(max(__float2int_rn(center - step), first), last);
      int t1 = last - first <= 1 ? last : min(max(__float2int_rn(center + step), first), last);
      uint2 n = count(t0, t1);
      if (int(n.x) >= k) b.lo = t0, b.at_lo = int(n.x);
      if (int(n.y) < k) b.hi = t1, b.at_hi = int(n.y);
      if (int(n.y) >= k) b.lo = t1, b.at_lo = int(n.y);
      if (int(n.x) < k) b.hi = t0, b.at_hi = int(n.x);
      int inside = b.at_lo - b.at_hi;
      float width = float(b.hi - b.lo), m = float(inside);
      if (inside <= list_capacity(threads()) || b.hi - b.lo == 1) return b;
      if (b.lo == 0 || b.hi == 0x8000) {  // the guess missed: widen the step until the bracket closes
        center = b.lo == 0 ? float(b.hi) - span : float(b.lo) + span, step = 0.5f * span, span *= 4.f;
      } else if (round >= 3 && (round & 1)) {  // an even split bounds the rounds whatever the distribution
        center = float(b.lo) + 0.5f * width, step = width * (1.f / 6.f);
      } else {
        center = float(b.lo) + width * __fdividef(float(b.at_lo - k) + 0.5f, m);
        step = fmaxf(width * fmaxf(__fdividef(25.f, m), 0.7f * rsqrtf(m)), 0.5f);
      }
    }
  }

  // The bits of miss[h] that stand for columns.
  __device__ static constexpr uint32_t used(int h) { return h < kSteps / 8 ? ~0u : kOnes * ((1u << 2 * (kSteps % 8)) - 1); }

  // MASK: the column is marked with all ones instead. That is a NaN, so no finite weight looks like it.
  __device__ void remove(int c) const { row[c] = MASK ? Bits(~Bits(0)) : Bits(0); }

  // Of the `inside` columns with score bits in [first, last], at most the list's capacity, the `rest` largest by (score,
  // column) stay. Columns with a key in the bracket but score bits outside of [first, last] are decided here too.
  __device__ void rank_candidates(const Bracket& b, uint32_t first, uint32_t last, int inside, int rest) {
    // Bits r and r + 16 of miss[h]: the low and the high column of key register 16 h + r lie outside of the bracket.
    uint32_t shift = splat(-b.lo), width = splat(b.hi - b.lo), last_inside = splat(b.lo - b.hi + 1), miss[(kSteps + 7) / 8] = {};
#pragma unroll
    for (int r = 0; r < 2 * kSteps; r++)
      miss[r / 16] += __viaddmax_s16x2(__viaddmin_u16x2(key[r], shift, width), last_inside, 0) * (1u << r % 16);
#pragma unroll
    for (int h = 0; h < (kSteps + 7) / 8; h++) {
      for (uint32_t hit = ~miss[h] & used(h); hit; hit &= hit - 1) {
        int i = __ffs(hit) - 1, c = column(h * 8 + i % 16 / 2) + i % 2 * 2 + i / 16;
        uint32_t s = score_bits(E::decode(row[c]), __ldg(m.scale + c));
        if (s > last) continue;
        if (s < first) remove(c);
        else list()[atomicAdd(&shared->listed, 1u)] = uint64_t(s) << 32 | uint32_t(c);
      }
    }
    __syncthreads();
    // An entry, score bits above a column, is a positive finite double with the same order: one compare instead of two.
    const double* list = reinterpret_cast<const double*>(this->list());
    if (warps() >= 4) {  // each warp takes one column at a time; a lane holds up to four of its rivals
      double rival[4];
#pragma unroll
      for (int i = 0; i < 4; i++) rival[i] = lane() + 32 * i < inside ? list[lane() + 32 * i] : 0.;
#pragma unroll 2
      for (int i = warp(); i < inside; i += warps()) {
        double mine = list[i];
        int larger = __popc(__ballot_sync(~0u, rival[0] > mine)) + __popc(__ballot_sync(~0u, rival[1] > mine));
        if (inside > 64) larger += __popc(__ballot_sync(~0u, rival[2] > mine)) + __popc(__ballot_sync(~0u, rival[3] > mine));
        if (larger >= rest && lane() == 0) remove(int(uint32_t(__double_as_longlong(mine))));
      }
    } else {  // each thread takes one column
      for (int i = int(threadIdx.x); i < inside; i += threads()) {
        double mine = list[i];
        int larger = 0, j = 0;
#pragma unroll 4
        for (; j + 2 <= inside; j += 2) {
          double2 other = *reinterpret_cast<const double2*>(list + j);
          larger += (other.x > mine) + (other.y > mine);
        }
        if (j < inside) larger += list[j] > mine;
        if (larger >= rest) remove(int(uint32_t(__double_as_longlong(mine))));
      }
    }
    __syncthreads();
  }

  // Narrows the scores that share the upper half `lo`, [lo << 16, lo << 16 | 0xffff], to score bits [first, last] that are
  // one value or fit the list. Both ends move to scores that occur, so a few distinct values need only a few rounds.
  __device__ void split_bucket(uint32_t& first, uint32_t& last, int& at_first, int& above) {
    while (first < last && at_first - above > list_capacity(threads())) {
      uint32_t pivot = first + (last - first + 1) / 2, up = ~0u, down = 0, n = 0;
#pragma unroll 1
      for (int v = 0; v < kSteps && column(v) < m.cols; v++) {
        int c = column(v);
        uint32_t s[4];
        scores(c, s);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          bool in = s[i] >= first && s[i] <= last && (ALIGNED || c + i < m.cols);
          if (in && s[i] >= pivot) up = min(up, s[i]), n++;
          if (in && s[i] < pivot) down = max(down, s[i]);
        }
      }
      int at_pivot = above + int(add(__reduce_add_sync(~0u, n)));
      uint2 ends = min_max(make_uint2(up, down));
      if (at_pivot >= shared->keep) first = ends.x, at_first = at_pivot;
      else last = ends.y, above = at_pivot;
    }
  }

  // The smallest and the largest of the scores whose upper half is that of `base`.
  __device__ uint2 ends_of_bucket(uint32_t base) {
    // For scores outside of [base, base + 0xffff] the offsets wrap around, so those never win the minimum or the maximum.
    uint32_t first = ~0u, last = 0;
#pragma unroll 1  // unrolled, the addresses would occupy registers during the whole fast path
    for (int v = 0; v < kSteps; v++) {
      if (column(v) >= m.cols) continue;
      uint32_t s[4];
      scores(column(v), s);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (!ALIGNED && column(v) + i >= m.cols) break;
        first = __viaddmin_u32(s[i], 0u - base, first), last = __viaddmax_u32(s[i], 0u - base - 0x10000u, last);
      }
    }
    uint2 ends = min_max(make_uint2(first, last));
    return make_uint2(ends.x + base, ends.y + base + 0x10000u);
  }

  // New keys: `tied` for scores equal to `value`, one less for lower ones, and one more for higher ones.
  __device__ void set_apart(uint32_t value, int tied) {
#pragma unroll
    for (int v = 0; v < kSteps; v++) {
      if (v % 4 == 0) __syncwarp();  // as in make_keys()
      key[2 * v] = key[2 * v + 1] = ~0u;
      if (column(v) >= m.cols) continue;
      uint32_t s[4];
      scores(column(v), s);
#pragma unroll
      for (int i = 0; i < 4; i++) s[i] = uint32_t(tied + min(max(int(s[i] - value), -1), 1));
      key[2 * v] = __byte_perm(s[0], s[1], 0x5410), key[2 * v + 1] = __byte_perm(s[2], s[3], 0x5410);
      void_past(v);
    }
  }

  // For more equal upper halves than the list holds. Returns true if all columns are decided.
  __device__ bool settle_bucket(int lo, uint32_t& first, uint32_t& last, int& at_first, int& above) {
    uint2 ends = ends_of_bucket(first);
    first = ends.x, last = ends.y;
    if (first < last) {
      split_bucket(first, last, at_first, above);
      if (first < last) return false;
      set_apart(first, lo);
    }
    remove_low_ties(lo, shared->keep - above);
    return true;
  }

  // Of all columns with the key `tied` the `rest` highest stay. Columns are ordered by (warp, step, lane, column of the lane).
  // Ties that go get a lower key, but for those of the one step in which others stay: they go from the shared row.
  __device__ void remove_low_ties(int tied, int rest) {
    uint32_t others[(kSteps + 3) / 4] = {}, minus = splat(-tied);  // columns of a step with other keys, at most 128: a byte
    int mine = kColsPerWarp;
#pragma unroll
    for (int v = 0; v < kSteps; v++) {
      uint32_t n = __viaddmin_u16x2(key[2 * v], minus, kOnes) + __viaddmin_u16x2(key[2 * v + 1], minus, kOnes);
      others[v / 4] += ((n + (n >> 16)) & 7u) << 8 * (v % 4);
    }
#pragma unroll
    for (uint32_t& of_4 : others) {
      of_4 = __reduce_add_sync(~0u, of_4);
      mine -= int(__dp4a(of_4, 0x01010101u, 0u));
    }
    uint2 all = combine(make_uint2(uint32_t(mine), 0), make_uint2(0, 0),
                        [](uint2 a) { return make_uint2(__reduce_add_sync(~0u, lane() > warp() ? a.x : 0u), 0); });
    int stay = rest - (warps() == 1 ? 0 : int(all.x)), step = kSteps - 1;
    if (stay >= mine) return;
#pragma unroll
    for (int v = kSteps - 1; v >= 0; v--) {
      int n = 4 * 32 - int(others[v / 4] >> 8 * (v % 4) & 255u);
      if (v != step || stay < n) continue;
      stay -= n, step--;
    }
    uint32_t pair[2] = {};
#pragma unroll
    for (int v = 0; v < kSteps; v++) {
      if (v < step) key[2 * v] = lowered(key[2 * v]), key[2 * v + 1] = lowered(key[2 * v + 1]);
      if (v == step) pair[0] = key[2 * v], pair[1] = key[2 * v + 1];
    }
    uint32_t gone = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) gone |= uint32_t((pair[i / 2] >> 16 * (i % 2) & 0xffffu) == uint32_t(tied)) << i;
    int own = __popc(gone), sum = own;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      int next = __shfl_down_sync(~0u, sum, o);
      if (lane() + o < 32) sum += next;
    }
    int keep = stay - (sum - own);  // the higher lanes keep the others
#pragma unroll
    for (int i = 3; i >= 0; i--)
      if (keep > 0 && (gone >> i & 1u)) gone &= ~(1u << i), keep--;
    if (gone) remove_unit(column(step), gone);
  }

  __device__ void remove_unit(int c, uint32_t gone) const {
    Unit* unit = reinterpret_cast<Unit*>(row + c);
    Unit u = *unit;
    auto word = [](uint32_t w, uint32_t bits) { return MASK ? w | bits : w & ~bits; };
    if constexpr (sizeof(Bits) == 2) {
      uint32_t spread = (gone & 1u) | (gone & 2u) << 15 | (gone & 4u) << 6 | (gone & 8u) << 21;  // bits 0, 16, 8, 24
      u.x = word(u.x, (spread & kOnes) * 0xffffu), u.y = word(u.y, (spread >> 8 & kOnes) * 0xffffu);
    } else {
      u.x = word(u.x, 0u - (gone & 1u)), u.y = word(u.y, 0u - (gone >> 1 & 1u));
      u.z = word(u.z, 0u - (gone >> 2 & 1u)), u.w = word(u.w, 0u - (gone >> 3));
    }
    *unit = u;
  }

  // Removes keys below `cutoff` and what remove() marked in the shared row.
  template <bool FULL>
  __device__ void write(int cutoff, Bits* weight, uint8_t* mask) {
    uint32_t lowest = splat(cutoff);
    int start = column(0);
#pragma unroll
    for (int v = 0; v < kSteps; v++) {
      int c = start + v * kStride;
      if (!FULL && c >= m.cols) continue;
      Unit u = *reinterpret_cast<const Unit*>(row + c);
      uint32_t stays[2] = {at_least(key[2 * v], lowest), at_least(key[2 * v + 1], lowest)};
      if constexpr (MASK) {
        uint32_t keep = __byte_perm(stays[0], stays[1], 0x6420);
        const Bits* w = reinterpret_cast<const Bits*>(&u);
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (w[i] == Bits(~Bits(0))) keep &= ~(0xffu << 8 * i);
        keep &= 0x01010101u;
        if (ALIGNED) *reinterpret_cast<uint32_t*>(mask + c) = keep;
        else
          for (int i = 0; i < 4 && c + i < m.cols; i++) mask[c + i] = uint8_t(keep >> 8 * i);
      } else {
        if constexpr (sizeof(Bits) == 2) {
          u.x &= stays[0], u.y &= stays[1];
        } else {
          u.x &= __byte_perm(stays[0], 0, 0x1111), u.y &= __byte_perm(stays[0], 0, 0x3333);
          u.z &= __byte_perm(stays[1], 0, 0x1111), u.w &= __byte_perm(stays[1], 0, 0x3333);
        }
        if (ALIGNED) store_past(reinterpret_cast<Unit*>(weight + c), u);
        else *reinterpret_cast<Unit*>(row + c) = u;
      }
    }
  }
};

}  // namespace fwanda
