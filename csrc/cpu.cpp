// Row selection on the CPU, against LibTorch's stable ABI.
//
// Memory: weight [R, C] with any strides, read once (twice in place: it is validated before the first write). A row is
// turned into C fp32 scores, held as their bits: scores are non-negative, so integer order is float order. The order
// statistic comes from a radix select (11 + 10 + 10 bits), each round over the candidates of the last one, so the time
// is linear whatever the ties. Rows are independent: results do not depend on the number of threads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

enum Flag : int64_t { kBadWeight = 1, kBadScale = 2, kBadKeep = 4 };

// Rows of a weight whose columns are far apart are copied in tiles of this many, to use whole cache lines.
constexpr int64_t kTileRows = 32;
// Elements a thread takes at least.
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

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

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

// What a row removes: scores below `threshold`, and scores equal to it in columns before `tie_end`.
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

void check(const Tensor& weight, const Tensor& scale, const Tensor& keep) {
  STD_TORCH_CHECK(weight.dim() == 2, "fwanda_C: weight must be [R, C], got ", weight.dim(), " dimensions");
  STD_TORCH_CHECK(
      scale.dim() == 1 && scale.size(0) == weight.size(1) && scale.scalar_type() == ScalarType::Float,
      "fwanda_C: scale must be [C]=[", weight.size(1), "] fp32");
  STD_TORCH_CHECK(
      keep.dim() == 1 && keep.size(0) == weight.size(0) && keep.scalar_type() == ScalarType::Long,
      "fwanda_C: keep must be [R]=[", weight.size(0), "] int64");
}

template <class V>
std::vector<V> to_vector(const Tensor& t) {
  const V* data = static_cast<const V*>(t.data_ptr());
  std::vector<V> out(t.size(0));
  for (size_t i = 0; i < out.size(); i++) out[i] = data[int64_t(i) * t.stride(0)];
  return out;
}

struct Arguments {
  std::vector<float> scale;
  std::vector<int64_t> keep;
  int64_t flag = 0;
};

Arguments read_arguments(const Tensor& scale, const Tensor& keep, int64_t columns) {
  Arguments a{to_vector<float>(scale), to_vector<int64_t>(keep)};
  for (float& value : a.scale) {
    if (!(value >= 0 && std::isfinite(value))) a.flag |= kBadScale;
    value = std::fabs(value);  // -0.0 would break the integer order
  }
  for (int64_t k : a.keep)
    if (k < 0 || k > columns) a.flag |= kBadKeep;
  return a;
}

template <class T>
int64_t prune(const Tensor& weight, const Shape& s, const Tensor& scale, const Tensor& keep) {
  Arguments a = read_arguments(scale, keep, s.columns);
  T* data = static_cast<T*>(weight.data_ptr());
  if (s.rows == 0 || s.columns == 0) return a.flag;
  if (!all_finite(data, s)) a.flag |= kBadWeight;
  if (a.flag) return a.flag;
  for_rows(data, s, true, [&](int64_t first, int64_t n, T* tile, int64_t stride, Scratch& scratch) {
    for (int64_t i = 0; i < n; i++) {
      T* row = tile + i * stride;
      select_row(row, a.scale.data(), s.columns, a.keep[first + i], scratch,
                 [row](int64_t j, bool kept) { row[j].bits = kept ? row[j].bits : 0; });
    }
  });
  return 0;
}

template <class T>
int64_t mask(const Tensor& weight, const Shape& s, const Tensor& scale, const Tensor& keep, const Tensor& out) {
  Arguments a = read_arguments(scale, keep, s.columns);
  T* data = static_cast<T*>(weight.data_ptr());
  auto* kept_out = static_cast<uint8_t*>(out.data_ptr());
  if (s.rows == 0 || s.columns == 0) return a.flag;
  if (a.flag) return a.flag | (all_finite(data, s) ? 0 : kBadWeight);
  std::atomic<bool> ok{true};
  for_rows(data, s, false, [&](int64_t first, int64_t n, T* tile, int64_t stride, Scratch& scratch) {
    for (int64_t i = 0; i < n; i++) {
      const T* row = tile + i * stride;
      if (!finite(row, s.columns)) {
        ok = false;
        continue;
      }
      uint8_t* kept_row = kept_out + (first + i) * s.columns;
      select_row(row, a.scale.data(), s.columns, a.keep[first + i], scratch,
                 [kept_row](int64_t j, bool kept) { kept_row[j] = kept; });
    }
  });
  return ok ? 0 : kBadWeight;
}

// Calls f with a value of the weight's element type.
template <class F>
auto dispatch(const Tensor& weight, F&& f) {
  const ScalarType dtype = weight.scalar_type();
  STD_TORCH_CHECK(
      dtype == ScalarType::BFloat16 || dtype == ScalarType::Half || dtype == ScalarType::Float,
      "fwanda_C: weight must be bf16, fp16 or fp32");
  if (dtype == ScalarType::BFloat16) return f(BFloat16{});
  if (dtype == ScalarType::Half) return f(Half{});
  return f(Float{});
}

Shape shape_of(const Tensor& weight) {
  return {weight.size(0), weight.size(1), weight.stride(0), weight.stride(1)};
}

int64_t row_topk_prune_(const Tensor& weight, const Tensor& scale, const Tensor& keep) {
  check(weight, scale, keep);
  return dispatch(weight, [&](auto type) { return prune<decltype(type)>(weight, shape_of(weight), scale, keep); });
}

std::tuple<Tensor, int64_t> row_topk_mask(const Tensor& weight, const Tensor& scale, const Tensor& keep) {
  check(weight, scale, keep);
  Tensor out = torch::stable::new_empty(scale, {weight.size(0), weight.size(1)}, ScalarType::Bool);
  const int64_t flag =
      dispatch(weight, [&](auto type) { return mask<decltype(type)>(weight, shape_of(weight), scale, keep, out); });
  if (flag) torch::stable::zero_(out);
  return {out, flag};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fwanda_C, m) {
  m.def("row_topk_mask(Tensor weight, Tensor scale, Tensor keep) -> (Tensor, int)");
  m.def("row_topk_prune_(Tensor(a!) weight, Tensor scale, Tensor keep) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(fwanda_C, CPU, m) {
  m.impl("row_topk_mask", TORCH_BOX(&row_topk_mask));
  m.impl("row_topk_prune_", TORCH_BOX(&row_topk_prune_));
}
