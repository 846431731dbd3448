// Row and N:M selection on the CPU, against LibTorch's stable ABI.
//
// Memory: weight [R, C] with any strides, read once (twice in place: it is validated before the first write). A row is
// turned into C fp32 scores, held as their bits: scores are non-negative, so integer order is float order. The order
// statistic comes from a radix select (11 + 10 + 10 bits), each round over the candidates of the last one, so the time
// is linear whatever the ties. Groups of 4 and 8 columns rank their scores by comparing all pairs, without a branch;
// other group sizes use std::nth_element. Rows are independent: results do not depend on the number of threads.
//
// Every op writes to a tensor that the caller allocates, returns a code of bad.h, and throws nothing.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "bad.h"
#include "bits.h"

namespace {

using fwanda::kBadKeep;
using fwanda::kBadScale;
using fwanda::kBadWeight;
using fwanda::kRefused;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// If the columns of a weight are far apart in memory, so many rows at a time are copied, to use whole cache lines.
constexpr int64_t kTileRows = 32;
// Fewest elements that a thread takes.
constexpr int64_t kGrain = 1 << 14;

struct BFloat16 {
  uint16_t bits;
  static constexpr uint16_t kMagnitude = 0x7fff, kInf = 0x7f80;
};
struct Half {
  uint16_t bits;
  static constexpr uint16_t kMagnitude = 0x7fff, kInf = 0x7c00;
};
struct Float {
  uint32_t bits;
  static constexpr uint32_t kMagnitude = 0x7fffffff, kInf = 0x7f800000;
};

inline float magnitude(Float w) { return as_float(w.bits & Float::kMagnitude); }
inline float magnitude(BFloat16 w) { return as_float(uint32_t(w.bits & BFloat16::kMagnitude) << 16); }
inline float magnitude(Half w) {
  const int32_t m = w.bits & Half::kMagnitude;
  const float subnormal = float(m) * 0x1p-24f;
  const float normal = as_float((uint32_t(m) << 13) + 0x38000000u);
  return m < 0x400 ? subnormal : normal;
}

template <class T>
bool finite(const T* w, int64_t n) {
  decltype(T::bits) bad = 0;
  for (int64_t j = 0; j < n; j++) bad |= (w[j].bits & T::kInf) == T::kInf;
  return !bad;
}

template <class T>
void score_row(const T* w, const float* scale, int32_t* score, int64_t n) {
  for (int64_t j = 0; j < n; j++) score[j] = int32_t(as_bits(magnitude(w[j]) * scale[j]));
}

struct Scratch {
  explicit Scratch(int64_t columns) : score(columns), candidates(columns), histogram(kBins * kLanes) {}
  static constexpr int64_t kBins = 1 << 11, kLanes = 2;
  std::vector<int32_t> score, candidates;
  std::vector<uint32_t> histogram;
  std::vector<uint64_t> keys;
};

// Narrows `n` candidates to those in the bin, of `bits` bits above `shift`, that holds the one of rank `rank`; `rank`
// becomes the rank inside that bin. Returns the bin's size. `from` and `to` may be the same.
int64_t narrow(const int32_t* from, int32_t* to, int64_t n, int shift, int bits, int64_t& rank, uint32_t* histogram) {
  const int64_t bins = int64_t(1) << bits;
  const uint32_t mask = uint32_t(bins - 1);
  uint32_t *even = histogram, *odd = histogram + bins;
  std::fill_n(histogram, 2 * bins, 0);
  int64_t j = 0;
  for (; j + 1 < n; j += 2) {
    even[(from[j] >> shift) & mask]++;
    odd[(from[j + 1] >> shift) & mask]++;
  }
  if (j < n) even[(from[j] >> shift) & mask]++;
  uint32_t bin = 0;
  for (int64_t size; rank >= (size = int64_t(even[bin]) + odd[bin]); bin++) rank -= size;
  int64_t kept = 0;
  for (j = 0; j < n; j++) {
    const int32_t value = from[j];
    to[kept] = value;
    kept += ((value >> shift) & mask) == bin;
  }
  return kept;
}

// A row loses the scores below `threshold`, and those equal to it in columns before `tie_end`.
struct Cut {
  int32_t threshold;
  int64_t tie_end;
};

// 0 < remove < n
Cut find_cut(Scratch& s, int64_t n, int64_t remove) {
  int64_t rank = remove - 1;
  int32_t* c = s.candidates.data();
  int64_t m = narrow(s.score.data(), c, n, 20, 11, rank, s.histogram.data());
  m = narrow(c, c, m, 10, 10, rank, s.histogram.data());
  m = narrow(c, c, m, 0, 10, rank, s.histogram.data());
  const int32_t threshold = c[0];
  // `m` scores equal the threshold, and the lowest rank + 1 columns among them go
  int64_t ties = rank + 1, j = 0;
  if (ties == m) return {threshold, n};
  while (ties > 0) ties -= s.score[j++] == threshold;
  return {threshold, j};
}

template <class Out>
void apply_cut(const int32_t* score, Cut cut, int64_t n, Out&& out) {
  for (int64_t j = 0; j < cut.tie_end; j++) out(j, score[j] > cut.threshold);
  for (int64_t j = cut.tie_end; j < n; j++) out(j, score[j] >= cut.threshold);
}

// One contiguous row: out(j, kept) for every column.
template <class T, class Out>
void select_row(const T* w, const float* scale, int64_t n, int64_t keep, Scratch& scratch, Out&& out) {
  if (keep == 0 || keep == n) {
    for (int64_t j = 0; j < n; j++) out(j, keep != 0);
    return;
  }
  score_row(w, scale, scratch.score.data(), n);
  apply_cut(scratch.score.data(), find_cut(scratch, n, n - keep), n, out);
}

// Keeps the n highest of each M neighbours: a score's rank is the number of scores that are removed before it.
template <int M, class Out>
void rank_groups(Scratch& scratch, int64_t columns, int32_t n, Out&& out) {
  const int32_t* score = scratch.score.data();
  int32_t* kept = scratch.candidates.data();
  for (int64_t j = 0; j < columns; j += M) {
    int32_t s[M], rank[M] = {};
    for (int k = 0; k < M; k++) s[k] = score[j + k];
    for (int k = 1; k < M; k++)
      for (int l = 0; l < k; l++) {
        const int32_t earlier = s[l] <= s[k];
        rank[k] += earlier;
        rank[l] += 1 - earlier;
      }
    for (int k = 0; k < M; k++) kept[j + k] = rank[k] >= M - n;
  }
  for (int64_t j = 0; j < columns; j++) out(j, kept[j] != 0);
}

// Does what rank_groups does, for any m; 0 < n < m. A key is a score and its column, so no two keys are equal.
template <class Out>
void partition_groups(Scratch& scratch, int64_t columns, int64_t n, int64_t m, Out&& out) {
  scratch.keys.resize(m);
  uint64_t* keys = scratch.keys.data();
  const auto key = [&](int64_t j) { return uint64_t(scratch.score[j]) << 32 | uint32_t(j); };
  for (int64_t first = 0; first < columns; first += m) {
    for (int64_t k = 0; k < m; k++) keys[k] = key(first + k);
    std::nth_element(keys, keys + (m - n), keys + m);
    const uint64_t lowest_kept = keys[m - n];
    for (int64_t j = first; j < first + m; j++) out(j, key(j) >= lowest_kept);
  }
}

// One contiguous row of whole groups: out(j, kept) for every column.
template <class T, class Out>
void select_groups(
    const T* w, const float* scale, int64_t columns, int64_t n, int64_t m, Scratch& scratch, Out&& out) {
  if (n == 0 || n == m) {
    for (int64_t j = 0; j < columns; j++) out(j, n != 0);
    return;
  }
  score_row(w, scale, scratch.score.data(), columns);
  if (m == 4) return rank_groups<4>(scratch, columns, n, out);
  if (m == 8) return rank_groups<8>(scratch, columns, n, out);
  partition_groups(scratch, columns, n, m, out);
}

struct Shape {
  int64_t rows, columns, row_stride, column_stride;
};

int64_t grain(int64_t columns) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns)); }

// Calls body(first_row, n_rows, tile, tile_stride, scratch) with rows whose columns are contiguous: the weight's own,
// or a copy that is written back afterwards where `write_back` is set.
template <class T, class Body>
void for_rows(T* weight, const Shape& s, bool write_back, const Body& body) {
  if (s.column_stride == 1 || s.columns == 1) {
    torch::stable::parallel_for(0, s.rows, grain(s.columns), [&](int64_t begin, int64_t end) {
      Scratch scratch(s.columns);
      body(begin, end - begin, weight + begin * s.row_stride, s.row_stride, scratch);
    });
    return;
  }
  const int64_t tiles = (s.rows + kTileRows - 1) / kTileRows;
  torch::stable::parallel_for(0, tiles, grain(s.columns * kTileRows), [&](int64_t begin, int64_t end) {
    Scratch scratch(s.columns);
    std::vector<T> tile(kTileRows * s.columns);
    for (int64_t t = begin; t < end; t++) {
      const int64_t first = t * kTileRows, n = std::min(kTileRows, s.rows - first);
      T* source = weight + first * s.row_stride;
      for (int64_t j = 0; j < s.columns; j++)
        for (int64_t i = 0; i < n; i++) tile[i * s.columns + j] = source[i * s.row_stride + j * s.column_stride];
      body(first, n, tile.data(), s.columns, scratch);
      if (!write_back) continue;
      for (int64_t j = 0; j < s.columns; j++)
        for (int64_t i = 0; i < n; i++) source[i * s.row_stride + j * s.column_stride] = tile[i * s.columns + j];
    }
  });
}

template <class T>
bool all_finite(T* weight, Shape s) {
  std::atomic<bool> ok{true};
  // order does not matter here: walk along the smaller stride
  if (s.row_stride < s.column_stride) s = {s.columns, s.rows, s.column_stride, s.row_stride};
  if (s.column_stride == 1) {
    torch::stable::parallel_for(0, s.rows, grain(s.columns), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        if (!finite(weight + i * s.row_stride, s.columns)) ok = false;
    });
    return ok;
  }
  for_rows(weight, s, false, [&](int64_t, int64_t n, const T* tile, int64_t stride, Scratch&) {
    for (int64_t i = 0; i < n; i++)
      if (!finite(tile + i * stride, s.columns)) ok = false;
  });
  return ok;
}

bool fits(const Tensor& weight, const Tensor& scale) {
  const ScalarType dtype = weight.scalar_type();
  return weight.dim() == 2 && (dtype == ScalarType::BFloat16 || dtype == ScalarType::Half || dtype == ScalarType::Float) &&
         scale.dim() == 1 && scale.size(0) == weight.size(1) && scale.scalar_type() == ScalarType::Float;
}

bool fits_keep(const Tensor& weight, const Tensor& keep) {
  return keep.dim() == 1 && keep.size(0) == weight.size(0) && keep.scalar_type() == ScalarType::Long;
}

bool fits_pattern(const Tensor& weight, int64_t n, int64_t m) {
  return m >= 1 && 0 <= n && n <= m && weight.size(1) % m == 0;
}

bool fits_mask(const Tensor& weight, const Tensor& out) {
  return out.dim() == 2 && out.size(0) == weight.size(0) && out.size(1) == weight.size(1) && out.is_contiguous() &&
         out.scalar_type() == ScalarType::Bool;
}

template <class V>
std::vector<V> to_vector(const Tensor& t) {
  const V* data = static_cast<const V*>(t.data_ptr());
  std::vector<V> out(t.size(0));
  for (size_t i = 0; i < out.size(); i++) out[i] = data[int64_t(i) * t.stride(0)];
  return out;
}

// Validated copies of the small arguments.
struct Arguments {
  explicit Arguments(const Tensor& scale_in) : scale(to_vector<float>(scale_in)) {
    for (float& value : scale) {
      if (!(value >= 0 && std::isfinite(value))) flag |= kBadScale;
      value = std::fabs(value);  // -0.0 would break the integer order
    }
  }
  Arguments(const Tensor& scale_in, const Tensor& keep_in) : Arguments(scale_in) {
    keep = to_vector<int64_t>(keep_in);
    for (int64_t k : keep)
      if (k < 0 || k > int64_t(scale.size())) flag |= kBadKeep;
  }
  std::vector<float> scale;
  std::vector<int64_t> keep;
  int64_t flag = 0;
};

// select(i, row, scratch, out) calls out(j, kept) for every column of row i, in `prune` and in `mask`.
template <class T, class Select>
int64_t prune(const Tensor& weight, const Shape& s, int64_t flag, const Select& select) {
  T* data = static_cast<T*>(weight.data_ptr());
  if (s.rows == 0 || s.columns == 0) return flag;
  if (!all_finite(data, s)) flag |= kBadWeight;
  if (flag) return flag;
  for_rows(data, s, true, [&](int64_t first, int64_t n, T* tile, int64_t stride, Scratch& scratch) {
    for (int64_t i = 0; i < n; i++) {
      T* row = tile + i * stride;
      select(first + i, row, scratch, [row](int64_t j, bool kept) { row[j].bits = kept ? row[j].bits : 0; });
    }
  });
  return 0;
}

template <class T, class Select>
int64_t mask(const Tensor& weight, const Shape& s, int64_t flag, const Tensor& out, const Select& select) {
  T* data = static_cast<T*>(weight.data_ptr());
  auto* kept_out = static_cast<uint8_t*>(out.data_ptr());
  if (s.rows == 0 || s.columns == 0) return flag;
  if (flag) return flag | (all_finite(data, s) ? 0 : kBadWeight);
  std::atomic<bool> ok{true};
  for_rows(data, s, false, [&](int64_t first, int64_t n, T* tile, int64_t stride, Scratch& scratch) {
    for (int64_t i = 0; i < n; i++) {
      const T* row = tile + i * stride;
      if (!finite(row, s.columns)) {
        ok = false;
        continue;
      }
      uint8_t* kept_row = kept_out + (first + i) * s.columns;
      select(first + i, row, scratch, [kept_row](int64_t j, bool kept) { kept_row[j] = kept; });
    }
  });
  return ok ? 0 : kBadWeight;
}

Shape shape_of(const Tensor& weight) {
  return {weight.size(0), weight.size(1), weight.stride(0), weight.stride(1)};
}

template <class Select>
int64_t prune(const Tensor& weight, int64_t flag, const Select& select) {
  const ScalarType dtype = weight.scalar_type();
  if (dtype == ScalarType::BFloat16) return prune<BFloat16>(weight, shape_of(weight), flag, select);
  if (dtype == ScalarType::Half) return prune<Half>(weight, shape_of(weight), flag, select);
  return prune<Float>(weight, shape_of(weight), flag, select);
}

template <class Select>
int64_t mask(const Tensor& weight, int64_t flag, const Tensor& out, const Select& select) {
  const Shape s = shape_of(weight);
  const ScalarType dtype = weight.scalar_type();
  if (dtype == ScalarType::BFloat16) flag = mask<BFloat16>(weight, s, flag, out, select);
  if (dtype == ScalarType::Half) flag = mask<Half>(weight, s, flag, out, select);
  if (dtype == ScalarType::Float) flag = mask<Float>(weight, s, flag, out, select);
  if (flag) std::memset(out.data_ptr(), 0, s.rows * s.columns);
  return flag;
}

auto topk(const Arguments& a, int64_t columns) {
  return [&a, columns](int64_t i, auto* row, Scratch& scratch, auto out) {
    select_row(row, a.scale.data(), columns, a.keep[i], scratch, out);
  };
}

auto groups(const Arguments& a, int64_t columns, int64_t n, int64_t m) {
  return [&a, columns, n, m](int64_t, auto* row, Scratch& scratch, auto out) {
    select_groups(row, a.scale.data(), columns, n, m, scratch, out);
  };
}

int64_t row_topk_prune_(const Tensor& weight, const Tensor& scale, const Tensor& keep) {
  if (!fits(weight, scale) || !fits_keep(weight, keep)) return kRefused;
  const Arguments a(scale, keep);
  return prune(weight, a.flag, topk(a, weight.size(1)));
}

int64_t row_topk_mask(const Tensor& weight, const Tensor& scale, const Tensor& keep, const Tensor& out) {
  if (!fits(weight, scale) || !fits_keep(weight, keep) || !fits_mask(weight, out)) return kRefused;
  const Arguments a(scale, keep);
  return mask(weight, a.flag, out, topk(a, weight.size(1)));
}

int64_t nm_prune_(const Tensor& weight, const Tensor& scale, int64_t n, int64_t m) {
  if (!fits(weight, scale) || !fits_pattern(weight, n, m)) return kRefused;
  const Arguments a(scale);
  return prune(weight, a.flag, groups(a, weight.size(1), n, m));
}

int64_t nm_mask(const Tensor& weight, const Tensor& scale, int64_t n, int64_t m, const Tensor& out) {
  if (!fits(weight, scale) || !fits_pattern(weight, n, m) || !fits_mask(weight, out)) return kRefused;
  const Arguments a(scale);
  return mask(weight, a.flag, out, groups(a, weight.size(1), n, m));
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fwanda_C, m) {
  m.def("row_topk_mask(Tensor weight, Tensor scale, Tensor keep, Tensor(a!) out) -> int");
  m.def("row_topk_prune_(Tensor(a!) weight, Tensor scale, Tensor keep) -> int");
  m.def("nm_mask(Tensor weight, Tensor scale, int n, int m, Tensor(a!) out) -> int");
  m.def("nm_prune_(Tensor(a!) weight, Tensor scale, int n, int m) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(fwanda_C, CPU, m) {
  m.impl("row_topk_mask", TORCH_BOX(&row_topk_mask));
  m.impl("row_topk_prune_", TORCH_BOX(&row_topk_prune_));
  m.impl("nm_mask", TORCH_BOX(&nm_mask));
  m.impl("nm_prune_", TORCH_BOX(&nm_prune_));
}
