// select_threshold: the total-th largest score over a list of matrices, and each row's count above and at it.
//
// Key = bits of the fp32 score, so that integer order is score order. A sample of the keys brackets the wanted key. One
// pass over all weights counts the keys of each row above the bracket and lists those inside. A histogram of the list finds
// the wanted key, and the list completes the counts. If the bracket missed the key, or held too many keys for the histogram
// or the list, further passes do the work. They are always launched; each decides on the device whether it is needed.
//
// Memory: a pass reads the weights once; the loads bypass L1, which holds col_scale. A warp owns 4 rows. It compares the
// products |w| * col_scale with bounds of their row; these are found such that a product lies on the same side of a bound as
// its key lies of the bracket. Keys equal to the sample's own guess, where heavy ties sit, are counted but never stored.
#include "columns.cuh"

namespace fwanda {

constexpr int kInfinite = 0x7f800000, kNever = 0x7fffffff;
constexpr int kHeld = 128;  // keys that a warp can hold; it writes them to the list once half the room is used
constexpr int kBinBits = 18, kBins = 1 << kBinBits;
constexpr int kWarps = 8;
constexpr int kTileRows = 4;
constexpr int kMaxMatrices = 448;  // the table is a kernel argument: 448 * 72 B < 32,764 B
constexpr int kRanks = 3;          // of the sample: upper end, guess, lower end
constexpr int kDigits = 2048;

// Blocks of a pass on an SM, as their registers allow.
template <class E>
__device__ constexpr int blocks_per_sm() { return E::kParts == 2 ? 2 : 3; }

struct Scored {
  const void* weight;      // [R, C], last dim contiguous
  const float* row_scale;  // [R], >= 0
  const float* col_scale;  // [C], >= 0
  int64_t row_stride;      // in elements, >= C
  int32_t rows, cols;
};

struct Entry {
  Scored m;
  float* padded;  // |col_scale| up to a multiple of 256 columns
  int64_t first_element;
  int32_t first_row, first_tile;  // among all matrices; in the table
};

struct Table {
  int32_t count, tiles;
  Entry entry[kMaxMatrices];
};

struct State {
  int lo, hi;    // the bracket, both ends inside
  int guess;     // the sample's own choice
  int shift;     // keys of a bin differ in this many low bits
  int settled;   // the bracket is the wanted key
  int complete;  // and the first pass and its list hold all counts
  unsigned long long above, inside, guessed;  // keys seen by the last pass; guessed is not part of inside
  unsigned long long listed;  // of those inside; some may lie beyond the list's capacity
  uint32_t prefix[kRanks], digits[kRanks][kDigits];
  int rank[kRanks];  // from the top, counted from 1, among the keys of the prefix

  __device__ int bin_of(int key) const { return int(min(uint32_t(key - lo) >> shift, uint32_t(kBins - 1))); }
  __device__ bool all_listed(unsigned capacity) const { return listed == inside && listed <= capacity; }
};

// Ranks in the sample, from the top, counted from 1. An open end of the bracket has no rank.
struct Ranks {
  int of[kRanks];
  bool open_hi, open_lo;
};

struct Listed {
  int row, key;
};

struct Workspace {
  State* state;
  unsigned long long* histogram;  // [kBins]
  unsigned* next_tile;            // [passes + 1, tables]
  float* scales;
  int* sample;
  Listed* list;       // in the place of the sample
  unsigned capacity;  // of the list
};

__device__ inline int padded(int cols) { return (cols + kStrip - 1) / kStrip * kStrip; }

__device__ inline int bits(float x) { return __float_as_int(x); }

// Key of the score whose product |w| * col_scale has these bits.
__device__ inline int key_of(int product, float row_scale) {
  return row_scale == 0.f ? 0 : bits(__fmul_rn(__int_as_float(product), row_scale));
}

// The smallest product whose key is at least `key`. Rounding is monotone, so larger products have keys at least as large.
__device__ int smallest_product(int key, float row_scale) {
  if (row_scale == 0.f) return key <= 0 ? 0 : kNever;
  if (key > kInfinite) return kNever;
  int low = 0, high = kInfinite;
  int guess = min(max(bits(__int_as_float(key) / row_scale), 0), kInfinite);
  if (guess >= 2 && key_of(guess - 2, row_scale) < key) low = guess - 1;
  if (guess + 2 <= kInfinite && key_of(guess + 2, row_scale) >= key) high = guess + 2;
  while (low < high) {
    int mid = low + (high - low) / 2;
    if (key_of(mid, row_scale) >= key) high = mid;
    else low = mid + 1;
  }
  return low;
}

template <class F>
__device__ const Entry& find(const Table& table, int64_t place, F first) {
  int low = 0, high = table.count - 1;
  while (low < high) {
    int mid = (low + high + 1) / 2;
    if (first(table.entry[mid]) <= place) low = mid;
    else high = mid - 1;
  }
  return table.entry[low];
}

// Padding is -0: as integers, the bits of a product with it lie below those of every other product, and far from them.
extern "C" __global__ void threshold_copy_scales(const __grid_constant__ Table table, int32_t* bad) {
  const Entry& e = table.entry[blockIdx.x];
  bool wrong = false;
  for (int i = int(threadIdx.x + blockIdx.y * blockDim.x); i < max(e.m.rows, padded(e.m.cols)); i += int(blockDim.x * gridDim.y)) {
    if (i < e.m.rows) wrong |= bad_scale(e.m.row_scale[i]);
    if (i < e.m.cols) wrong |= bad_scale(e.m.col_scale[i]);
    if (i < padded(e.m.cols)) e.padded[i] = i < e.m.cols ? fabsf(e.m.col_scale[i]) : -0.f;
  }
  if (wrong) atomicOr(bad, kBadScale);
}

// One weight from each of `drawn` equal stretches, at a golden-ratio sequence of places.
template <class E>
__device__ __forceinline__ void sample(const Table& table, const Workspace& space, int64_t size, int drawn) {
  int64_t j = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (j >= drawn) return;
  int64_t start = j * size / drawn, span = (j + 1) * size / drawn - start;
  int64_t place = start + ((j * 0x9e3779b1ll & 0xffffff) * span >> 24);
  const Entry& e = find(table, place, [](const Entry& x) { return x.first_element; });
  int64_t inner = place - e.first_element;
  if (inner < 0 || inner >= int64_t(e.m.rows) * e.m.cols) return;
  int64_t r = inner / e.m.cols, c = inner - r * e.m.cols;
  float w[2];
  E::decode(static_cast<const typename E::Bits*>(e.m.weight)[r * e.m.row_stride + c], w);
  int product = bits(__fmul_rn(fabsf(w[0]), fabsf(e.m.col_scale[c])));
  space.sample[j] = key_of(product, fabsf(e.m.row_scale[r]));
}

// Keys are taken apart as 11 + 10 + 10 bits.
__device__ inline int width_of(int digit) { return digit == 0 ? 11 : 10; }
__device__ inline int shift_of(int digit) { return 20 - 10 * digit; }

// Counts the next digit of the sample's keys that begin with each prefix. Ranks with the same prefix share a count.
extern "C" __global__ void __launch_bounds__(1024) threshold_count_digits(Workspace space, int drawn, int digit) {
  const int shift = shift_of(digit), width = width_of(digit);
  __shared__ uint32_t count[kRanks][kDigits];
  State& s = *space.state;
  for (int i = int(threadIdx.x); i < kRanks * kDigits; i += int(blockDim.x)) count[0][i] = 0;
  uint32_t prefix[kRanks];
  for (int q = 0; q < kRanks; q++) prefix[q] = s.prefix[q];
  __syncthreads();
  for (int i = int(blockIdx.x * blockDim.x + threadIdx.x); i < drawn; i += int(blockDim.x * gridDim.x)) {
    uint32_t key = uint32_t(space.sample[i]), top = key >> (shift + width);
#pragma unroll
    for (int q = 0; q < kRanks; q++)
      if (top == prefix[q] && (q == 0 || prefix[q] != prefix[q - 1])) atomicAdd(&count[q][key >> shift & ((1u << width) - 1)], 1);
  }
  __syncthreads();
  for (int i = int(threadIdx.x); i < kRanks * kDigits; i += int(blockDim.x))
    if (count[0][i]) atomicAdd(&s.digits[0][i], count[0][i]);
}

struct Found {
  int bin;
  unsigned long long above;  // counted in higher bins
};

// The highest bin at which the count from the top reaches k, by all 1024 threads; bin 0 if none does.
template <class Count>
__device__ Found find_from_top(const Count* counts, int bins, unsigned long long k) {
  __shared__ unsigned long long warps[32];
  __shared__ Found found;
  int each = (bins + 1023) / 1024, last = bins - int(threadIdx.x) * each, first = max(last - each, 0);
  unsigned long long own = 0;
  for (int b = last - 1; b >= first; b--) own += counts[b];
  if (threadIdx.x == 0) found = {0, 0};
  unsigned long long upto = own;
  for (int d = 1; d < 32; d *= 2) {
    unsigned long long other = __shfl_up_sync(0xffffffffu, upto, d);
    if (lane() >= d) upto += other;
  }
  if (lane() == 31) warps[warp()] = upto;
  __syncthreads();
  for (int w = 0; w < warp(); w++) upto += warps[w];
  unsigned long long above = upto - own;
  if (above < k && k <= upto) {
    int b = last - 1;
    while (b > first && above + counts[b] < k) above += counts[b--];
    found = {b, above};
  }
  __syncthreads();
  Found result = found;
  __syncthreads();
  return result;
}

__device__ void set_bracket(State& s, int lo, int hi) {
  s.lo = lo, s.hi = hi;
  s.shift = max(0, 32 - __clz(hi - lo) - kBinBits);
  s.above = s.inside = s.guessed = 0;
  s.settled = lo == hi;
}

// Finds one digit of each rank's key, and with the last digit the bracket. Its ends lie just inside the outer two keys, so
// that heavy ties there stay outside.
extern "C" __global__ void __launch_bounds__(1024) threshold_pick_digits(Workspace space, Ranks ranks, int digit) {
  State& s = *space.state;
  Found found[kRanks];
  for (int q = 0, from = 0; q < kRanks; q++) {
    if (q > 0 && s.prefix[q] != s.prefix[q - 1]) from = q;
    found[q] = find_from_top(s.digits[from], 1 << width_of(digit), digit == 0 ? ranks.of[q] : s.rank[q]);
  }
  for (int i = int(threadIdx.x); i < kRanks * kDigits; i += int(blockDim.x)) s.digits[0][i] = 0;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int q = 0; q < kRanks; q++) {
    s.prefix[q] = s.prefix[q] << width_of(digit) | found[q].bin;
    s.rank[q] = (digit == 0 ? ranks.of[q] : s.rank[q]) - int(found[q].above);
  }
  if (digit < 2) return;
  int key[kRanks];
  for (int q = 0; q < kRanks; q++) key[q] = int(min(s.prefix[q], uint32_t(kInfinite)));
  int hi = key[0], guess = key[1], lo = key[2];
  s.guess = guess;
  set_bracket(s, ranks.open_lo ? 0 : min(lo + 1, guess), ranks.open_hi ? kInfinite : max(hi - 1, guess));
  s.settled = false;  // a pass has yet to verify it
}

// Bounds for the products of a row.
struct Bounds {
  float row_scale;
  int above;  // the first product above the bracket
  int lo;     // the first inside it
};

// By a whole warp: each lane finds one bound.
__device__ inline void find_bounds(Bounds (&bound)[kTileRows], const float* row_scale, int rows, int lo, int hi) {
  int q = lane() / 2 % kTileRows;
  float scale = q < rows ? fabsf(row_scale[q]) : 0.f;
  int product = q < rows ? smallest_product(lane() % 2 ? lo : hi + 1, scale) : kNever;
#pragma unroll
  for (int i = 0; i < kTileRows; i++) {
    bound[i].row_scale = __shfl_sync(0xffffffffu, scale, 2 * i);
    bound[i].above = __shfl_sync(0xffffffffu, product, 2 * i);
    bound[i].lo = __shfl_sync(0xffffffffu, product, 2 * i + 1);
  }
}

// In two instructions; the compiler takes three.
__device__ inline void count_if_ge(int& count, int a, int b) {
  asm("{ .reg .pred p; setp.ge.s32 p, %1, %2; @p add.s32 %0, %0, 1; }" : "+r"(count) : "r"(a), "r"(b));
}

// Keys that a warp gathers before it writes them to the list.
struct Held {
  unsigned count;
  Listed key[kHeld];

  __device__ void add(int row, int k) {
    unsigned at = atomicAdd(&count, 1u);
    if (at < kHeld) key[at] = {row, k};
  }

  // By the whole warp, once it holds `enough`. Keys beyond kHeld are lost; `listed` below `inside` then tells of it.
  __device__ void write(const Workspace& space, unsigned enough) {
    __syncwarp();
    unsigned added = __shfl_sync(0xffffffffu, count, 0), holds = min(added, unsigned(kHeld));
    if (added < enough) return;
    unsigned long long first = 0;
    if (lane() == 0) first = atomicAdd(&space.state->listed, holds), atomicAdd(&space.state->inside, added);
    first = __shfl_sync(0xffffffffu, first, 0);
    for (unsigned i = lane(); i < holds; i += 32)
      if (first + i < space.capacity) space.list[first + i] = key[i];
    __syncwarp();
    if (lane() == 0) count = 0;
    __syncwarp();
  }
};

enum class Pass { first, next, last };

// Counts, in each of 4 rows, the keys above the bracket and those equal to the guess. The other keys inside the bracket go on
// the list in the first pass, and into the histogram in later ones. In the last pass the bracket is the wanted key.
template <class E, bool ALIGNED, Pass PASS>
__device__ __forceinline__ void pass(
    const Table& table, const Workspace& space, unsigned* next_tile, int32_t* larger, int32_t* equal, int32_t* bad) {
  using Bits = typename E::Bits;
  __shared__ Held held_by[PASS == Pass::first ? kWarps : 1];
  State& s = *space.state;
  if (PASS == Pass::last ? s.complete : s.settled) return;
  const int bracket_lo = s.lo, bracket_hi = s.hi, guess = s.guess;
  Held& held = held_by[PASS == Pass::first ? warp() : 0];
  if (PASS == Pass::first && lane() == 0) held.count = 0;
  __syncwarp();
  unsigned long long all_above = 0, all_equal = 0, all_inside = 0;
  uint32_t poisoned = 0;
  auto take = [&] { return lane() == 0 ? atomicAdd(next_tile, 1u) : 0u; };
  auto shared = [](unsigned ticket) { return int(__shfl_sync(0xffffffffu, ticket, 0)); };
  unsigned ticket = take();
  for (int tile = shared(ticket); tile < table.tiles; tile = shared(ticket)) {
    ticket = take();  // the next ticket arrives while this tile is worked on
    const Entry& e = find(table, tile, [](const Entry& x) { return x.first_tile; });
    const int cols = e.m.cols, row = (tile - e.first_tile) * kTileRows, rows = min(kTileRows, e.m.rows - row);
    Bounds bound[kTileRows];
    find_bounds(bound, e.m.row_scale + row, rows, bracket_lo, bracket_hi);
    const Bits* from[kTileRows];
#pragma unroll
    for (int q = 0; q < kTileRows; q++) from[q] = static_cast<const Bits*>(e.m.weight) + (row + min(q, rows - 1)) * e.m.row_stride;
    int above[kTileRows] = {}, equals[kTileRows] = {};
    Eight<E> next[kTileRows];
#pragma unroll
    for (int q = 0; q < kTileRows; q++) next[q].template load<ALIGNED>(from[q], cols);
#pragma unroll 1
    for (int strip = 0; strip < cols; strip += kStrip) {
      Eight<E> v[kTileRows];
#pragma unroll
      for (int q = 0; q < kTileRows; q++) {
        v[q] = next[q];
        next[q].template load<ALIGNED>(from[q] += kStrip, cols - strip - kStrip);
      }
      float scale[8];
      load_scale<E, true>(e.padded + strip, kStrip, scale);
#pragma unroll
      for (int q = 0; q < kTileRows; q++) {
        float w[8];
        int product[8];
        v[q].decode(w);
        const uint32_t width = uint32_t(bound[q].above - bound[q].lo);
        uint32_t nearest = 0xffffffffu;
#pragma unroll
        for (int j = 0; j < 8; j++) {
          product[j] = bits(__fmul_rn(fabsf(w[j]), scale[j]));
          count_if_ge(above[q], product[j], bound[q].above);
          nearest = __viaddmin_u32(uint32_t(product[j]), uint32_t(-bound[q].lo), nearest);
        }
        if (PASS == Pass::first) {
#pragma unroll
          for (int i = 0; i < Eight<E>::kWords; i++) E::poison(poisoned, v[q].word[i]);
        }
        if (nearest >= width) continue;
#pragma unroll
        for (int j = 0; j < 8; j++) {
          if (uint32_t(product[j] - bound[q].lo) >= width) continue;
          int key = PASS == Pass::last ? guess : key_of(product[j], bound[q].row_scale);
          if (PASS == Pass::last || key == guess) {
            equals[q]++;
            continue;
          }
          if (PASS == Pass::first) held.add(e.first_row + row + q, key);
          else atomicAdd(&space.histogram[s.bin_of(key)], 1ull), all_inside++;
        }
      }
      if (PASS == Pass::first) held.write(space, kHeld / 2);
    }
#pragma unroll
    for (int q = 0; q < kTileRows; q++) {
      unsigned row_above = __reduce_add_sync(0xffffffffu, unsigned(above[q]));
      unsigned row_equal = __reduce_add_sync(0xffffffffu, unsigned(equals[q]));
      int r = e.first_row + row + q;
      if (PASS != Pass::next && lane() == q && q < rows) larger[r] = int(row_above), equal[r] = int(row_equal);
      all_above += row_above, all_equal += row_equal;
    }
  }
  if (PASS == Pass::last) return;
  if (PASS == Pass::first) held.write(space, 1);
  if (PASS == Pass::next) atomicAdd(&s.inside, all_inside);
  if (lane() == 0) atomicAdd(&s.above, all_above), atomicAdd(&s.guessed, all_equal);
  if (E::poisoned(poisoned)) atomicOr(bad, kBadWeight);
}

extern "C" __global__ void threshold_list_to_histogram(Workspace space) {
  const State& s = *space.state;
  if (!s.all_listed(space.capacity)) return;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < unsigned(s.listed); i += blockDim.x * gridDim.x)
    atomicAdd(&space.histogram[s.bin_of(space.list[i].key)], 1ull);
}

// Shrinks the bracket to the bin of the wanted key; after a miss, moves it to the side where that key is.
extern "C" __global__ void __launch_bounds__(1024) threshold_narrow(Workspace space, unsigned long long total, bool first) {
  State& s = *space.state;
  if (s.settled) return;
  const unsigned long long above = s.above, upto = above + s.inside + s.guessed;
  const bool counted = !first || s.all_listed(space.capacity);
  const int lo = s.lo, hi = s.hi, bins = s.bin_of(hi) + 1;
  if (threadIdx.x == 0 && s.guess >= lo && s.guess <= hi) space.histogram[s.bin_of(s.guess)] += s.guessed;
  __syncthreads();
  Found found = find_from_top(space.histogram, bins, total - above);
  for (int b = int(threadIdx.x); b < bins; b += 1024) space.histogram[b] = 0;
  if (threadIdx.x != 0) return;
  if (above >= total) {
    set_bracket(s, min(hi + 1, kInfinite), kInfinite);
  } else if (upto < total) {
    set_bracket(s, 0, max(lo - 1, 0));
  } else if (counted) {
    int bottom = lo + (found.bin << s.shift);
    set_bracket(s, bottom, min(hi, bottom + (1 << s.shift) - 1));
    s.complete = first && s.settled;
  } else {
    set_bracket(s, lo, hi);  // once more, for the histogram
  }
}

// `equal` holds the counts of the guess. If the guess is not the wanted key, they belong to `larger` or nowhere.
extern "C" __global__ void threshold_move_guesses(Workspace space, int64_t rows, int32_t* larger, int32_t* equal) {
  const State& s = *space.state;
  if (!s.complete || s.guess == s.lo) return;
  for (int64_t r = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; r < rows; r += int64_t(blockDim.x) * gridDim.x) {
    if (s.guess > s.lo) larger[r] += equal[r];
    equal[r] = 0;
  }
}

extern "C" __global__ void threshold_count_listed(Workspace space, int32_t* larger, int32_t* equal) {
  const State& s = *space.state;
  if (!s.complete) return;
  const int wanted = s.lo;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < unsigned(s.listed); i += blockDim.x * gridDim.x) {
    Listed listed = space.list[i];
    if (listed.key > wanted) atomicAdd(&larger[listed.row], 1);
    if (listed.key == wanted) atomicAdd(&equal[listed.row], 1);
  }
}

extern "C" __global__ void threshold_sample(const __grid_constant__ Table table, Workspace space, int64_t size, int drawn) {
  sample<WEIGHT>(table, space, size, drawn);
}

#define PASS(NAME, WHICH)                                                                                          \
  extern "C" __global__ void __launch_bounds__(kWarps * 32, blocks_per_sm<WEIGHT>()) NAME(                         \
      const __grid_constant__ Table table, Workspace space, unsigned* next_tile, int32_t* larger, int32_t* equal,  \
      int32_t* bad) {                                                                                              \
    pass<WEIGHT, ROWS_ALIGNED, Pass::WHICH>(table, space, next_tile, larger, equal, bad);                               \
  }

PASS(threshold_first, first)
PASS(threshold_next, next)
PASS(threshold_last, last)

}  // namespace fwanda
