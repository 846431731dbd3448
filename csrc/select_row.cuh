// One row of select.cu: score keys in registers, threshold search, exact ranking, ties, write.
#pragma once
#include "common.cuh"

namespace fwanda {

constexpr int kSteps = 16;                       // units of 4 columns a thread holds
constexpr int kUnit = 4;                         // columns
constexpr int kStride = 32 * kUnit;              // columns a warp takes in one step
constexpr int kColsPerWarp = kSteps * kStride;   // 2048, contiguous
constexpr int kMaxCols = 65535;                  // counts travel as 16-bit pairs
constexpr uint32_t kOnes = 0x00010001u;

// Most columns that are ranked one by one. About 0.25 % of a row share one upper half.
__device__ constexpr int list_capacity(int threads) { return threads >= 256 ? 128 : 64; }

// Bytes for the candidates, or for the tie counts of each warp and step, which take their place.
__device__ constexpr int list_bytes(int threads) { return threads * 2 > list_capacity(threads) * 8 ? threads * 2 : list_capacity(threads) * 8; }

// fabsf turns a scale of -0.0 into 0, and keeps keys non-negative even for scales that `bad` reports.
__device__ inline uint32_t score_bits(float w, float s) { return __float_as_uint(__fmul_rn(fabsf(w), fabsf(s))); }

__device__ inline float root(float x) { return x * rsqrtf(x); }

__device__ inline uint32_t splat(int v) { return (uint32_t(v) & 0xffffu) * kOnes; }

// Fills each half with its own sign bit; __byte_perm lacks the sign mode of prmt.
__device__ inline uint32_t spread_signs(uint32_t pair) {
  uint32_t r;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(r) : "r"(pair));
  return r;
}

// The stores bypass L1, which holds the scale.
__device__ inline void store_past(uint2* p, uint2 v) {
  asm volatile("st.global.L1::no_allocate.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}

__device__ inline void store_past(uint4* p, uint4 v) {
  asm volatile("st.global.L1::no_allocate.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

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

// The smallest interval [lo, hi) of upper score halves known to hold the k-th largest: count(>= lo) >= k > count(>= hi).
struct Bracket {
  int lo, hi, at_lo, at_hi;
};

struct Shared {
  uint64_t copied;  // mbarrier
  void* weight;     // of this row; in shared memory, as this and the next two would spill from registers
  int32_t* bad;
  int32_t keep;
  uint32_t listed;
  uint2 exchange[2][32];
};

template <class E, bool ALIGNED, bool MASK>
struct Row {
  using Bits = typename E::Bits;
  using Unit = typename E::Unit;

  Shared* shared;
  Bits* row;           // shared
  const float* scale;  // global
  int cols, parity;
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
    if (ALIGNED) return __ldg(reinterpret_cast<const float4*>(scale + c));
    auto at = [&](int i) { return c + i < cols ? __ldg(scale + c + i) : 0.f; };
    return make_float4(at(0), at(1), at(2), at(3));
  }

  __device__ void scores(int c, uint32_t (&s)[4]) const {
    float w[4];
    E::decode(*reinterpret_cast<const Unit*>(row + c), w);
    float4 f = load_scale(c);
    s[0] = score_bits(w[0], f.x), s[1] = score_bits(w[1], f.y), s[2] = score_bits(w[2], f.z), s[3] = score_bits(w[3], f.w);
  }

  // Columns past the row get key -1, which is below every threshold. FULL: this warp has no such columns.
  template <bool FULL>
  __device__ bool make_keys() {
    uint32_t largest = 0;
    int first = column(0);
#pragma unroll
    for (int v = 0; v < kSteps; v++) {
      int c = first + v * kStride;
      if (v && v % 4 == 0) __syncwarp();  // keeps the compiler from issuing all loads at once, which spills registers
      if (!FULL) key[2 * v] = key[2 * v + 1] = ~0u;
      if (FULL || c < cols) {
        uint32_t s[4];
        scores(c, s);
        key[2 * v] = __byte_perm(s[0], s[1], 0x7632), key[2 * v + 1] = __byte_perm(s[2], s[3], 0x7632);
        if (!ALIGNED && !FULL) {
          if (c + 1 >= cols) key[2 * v] |= 0xffff0000u;
          if (c + 2 >= cols) key[2 * v + 1] |= 0x0000ffffu;
          if (c + 3 >= cols) key[2 * v + 1] |= 0xffff0000u;
        }
        largest = __vimax3_s16x2(largest, key[2 * v], key[2 * v + 1]);
      }
    }
    return (~__viaddmax_s16x2(largest, splat(-0x7f80), 0x80008000u) & 0x80008000u) != 0;  // a score of inf or NaN
  }

  __device__ bool has_nonfinite_weight() const {
    bool found = false;
#pragma unroll 1
    for (int v = 0; v < kSteps; v++)
      for (int c = column(v), i = 0; i < kUnit && c + i < cols; i++) found |= (row[c + i] & E::kExponent) == E::kExponent;
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
    float p = __fdividef(float(k), float(cols));
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
    Bracket b{0, 0x8000, cols, 0};
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

  // MASK: the column is marked with all ones instead. That is a NaN, so no finite weight looks like it.
  __device__ void remove(int c) const { row[c] = MASK ? Bits(~Bits(0)) : Bits(0); }

  // Of the `inside` columns with score bits in [first, last], at most the list's capacity, the `rest` largest by (score,
  // column) stay. Columns with a key in the bracket but score bits outside of [first, last] are decided here too.
  __device__ void rank_candidates(const Bracket& b, uint32_t first, uint32_t last, int inside, int rest) {
    // Bits r and r + 16 of miss[h]: the low and the high column of key register 16 h + r lie outside of the bracket.
    uint32_t shift = splat(-b.lo), width = splat(b.hi - b.lo), last_inside = splat(b.lo - b.hi + 1), miss[kSteps / 8] = {};
#pragma unroll
    for (int r = 0; r < 2 * kSteps; r++)
      miss[r / 16] += __viaddmax_s16x2(__viaddmin_u16x2(key[r], shift, width), last_inside, 0) * (1u << r % 16);
#pragma unroll
    for (int h = 0; h < kSteps / 8; h++) {
      for (uint32_t hit = ~miss[h]; hit; hit &= hit - 1) {
        int i = __ffs(hit) - 1, c = column(h * 8 + i % 16 / 2) + i % 2 * 2 + i / 16;
        uint32_t s = score_bits(E::decode(row[c]), __ldg(scale + c));
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
  __device__ void split_bucket(int k, uint32_t& first, uint32_t& last, int& at_first, int& above) {
    while (first < last && at_first - above > list_capacity(threads())) {
      uint32_t pivot = first + (last - first + 1) / 2, up = ~0u, down = 0, n = 0;
#pragma unroll 1
      for (int v = 0; v < kSteps && column(v) < cols; v++) {
        int c = column(v);
        uint32_t s[4];
        scores(c, s);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          bool in = s[i] >= first && s[i] <= last && (ALIGNED || c + i < cols);
          if (in && s[i] >= pivot) up = min(up, s[i]), n++;
          if (in && s[i] < pivot) down = max(down, s[i]);
        }
      }
      int at_pivot = above + int(add(__reduce_add_sync(~0u, n)));
      uint2 ends = min_max(make_uint2(up, down));
      if (at_pivot >= k) first = ends.x, at_first = at_pivot;
      else last = ends.y, above = at_pivot;
    }
  }

  // For more equal upper halves than the list holds. Returns true if all columns are decided. Loops stay rolled:
  // unrolled, their addresses would occupy registers during the whole fast path.
  __device__ bool settle_bucket(const Bracket& b, int k, uint32_t& first, uint32_t& last, int& at_first, int& above) {
    uint32_t base = first;
    first = ~0u, last = 0;
    uint64_t tie = 0;  // bit 4 v + i: column i of step v has the tied score
    // For scores outside of [base, base + 0xffff] the offsets wrap around, so those never win the minimum or the maximum.
#pragma unroll 1
    for (int v = 0; v < kSteps && column(v) < cols; v++) {
      uint32_t s[4], bits = 0;
      scores(column(v), s);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (!ALIGNED && column(v) + i >= cols) break;
        first = __viaddmin_u32(s[i], 0u - base, first), last = __viaddmax_u32(s[i], 0u - base - 0x10000u, last);
        bits |= uint32_t((s[i] >> 16) == uint32_t(b.lo)) << i;
      }
      tie |= uint64_t(bits) << 4 * v;
    }
    uint2 ends = min_max(make_uint2(first, last));
    first = ends.x + base, last = ends.y + base + 0x10000u;
    if (first < last) {
      split_bucket(k, first, last, at_first, above);
      if (first < last) return false;
      tie = 0;
#pragma unroll 1
      for (int v = 0; v < kSteps && column(v) < cols; v++) {
        uint32_t s[4];
        scores(column(v), s);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (!ALIGNED && column(v) + i >= cols) break;
          tie |= uint64_t(s[i] == first) << (4 * v + i);
          if (s[i] >= base && s[i] < first) remove(column(v) + i);
        }
      }
    }
    remove_low_columns(tie, k - above);
    return true;
  }

  // Of the tied columns the `rest` highest stay. Columns are ordered by (warp, step, lane, column of the lane): suffix sums
  // of the counts for each (warp, step) leave one cell in which some stay and some go.
  __device__ void remove_low_columns(uint64_t tie, int rest) {
    uint32_t* cell = reinterpret_cast<uint32_t*>(list());  // [warp, step]; the list is not in use
    int cells = warps() * kSteps;
    uint32_t mine = 0;
#pragma unroll 1
    for (int v = 0; v < kSteps; v++) {
      uint32_t n = __reduce_add_sync(~0u, __popc(uint32_t(tie >> 4 * v) & 15u));
      if (lane() == v) mine = n;
    }
    if (lane() < kSteps) cell[warp() * kSteps + lane()] = mine;
    __syncthreads();
    if (warp() == 0) {  // a cell becomes the number of ties after it
      uint32_t carry = 0;
#pragma unroll 1
      for (int end = cells; end > 0; end -= 32) {
        int i = end - 1 - lane();
        uint32_t n = i >= 0 ? cell[i] : 0, sum = n;
#pragma unroll
        for (int o = 1; o < 32; o *= 2) {
          uint32_t before = __shfl_up_sync(~0u, sum, o);
          if (lane() >= o) sum += before;
        }
        if (i >= 0) cell[i] = carry + sum - n;
        carry += __shfl_sync(~0u, sum, 31);
      }
    }
    __syncthreads();
    uint32_t after_mine = lane() < kSteps ? cell[warp() * kSteps + lane()] : 0;
#pragma unroll 1
    for (int v = 0; v < kSteps; v++) {
      int after = int(__shfl_sync(~0u, after_mine, v)), n = int(__shfl_sync(~0u, mine, v));
      if (after + n <= rest) continue;
      uint32_t gone = uint32_t(tie >> 4 * v) & 15u;
      if (after < rest) {
        int own = __popc(gone), sum = own;
#pragma unroll
        for (int o = 1; o < 32; o *= 2) {
          int next = __shfl_down_sync(~0u, sum, o);
          if (lane() + o < 32) sum += next;
        }
        int keep = rest - after - (sum - own);  // the higher lanes keep the others
#pragma unroll
        for (int i = 3; i >= 0; i--)
          if (keep > 0 && (gone >> i & 1u)) gone &= ~(1u << i), keep--;
      }
      if (gone) remove_unit(column(v), gone);
    }
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
    uint32_t shift = splat(-cutoff);
    int start = column(0);
#pragma unroll
    for (int v = 0; v < kSteps; v++) {
      int c = start + v * kStride;
      if (!FULL && c >= cols) continue;
      Unit u = *reinterpret_cast<const Unit*>(row + c);
      // the sign of key - cutoff, copied to all bits of its half
      uint32_t gone[2];
#pragma unroll
      for (int i = 0; i < 2; i++) gone[i] = spread_signs(__viaddmax_s16x2(key[2 * v + i], shift, 0x80008000u));
      if constexpr (MASK) {
        uint32_t keep = ~__byte_perm(gone[0], gone[1], 0x6420);
        const Bits* w = reinterpret_cast<const Bits*>(&u);
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (w[i] == Bits(~Bits(0))) keep &= ~(0xffu << 8 * i);
        keep &= 0x01010101u;
        if (ALIGNED) *reinterpret_cast<uint32_t*>(mask + c) = keep;
        else
          for (int i = 0; i < 4 && c + i < cols; i++) mask[c + i] = uint8_t(keep >> 8 * i);
      } else {
        if constexpr (sizeof(Bits) == 2) {
          u.x &= ~gone[0], u.y &= ~gone[1];
        } else {
          u.x &= ~__byte_perm(gone[0], 0, 0x1111), u.y &= ~__byte_perm(gone[0], 0, 0x3333);
          u.z &= ~__byte_perm(gone[1], 0, 0x1111), u.w &= ~__byte_perm(gone[1], 0, 0x3333);
        }
        if (ALIGNED) store_past(reinterpret_cast<Unit*>(weight + c), u);
        else *reinterpret_cast<Unit*>(row + c) = u;
      }
    }
  }
};

}  // namespace fwanda
