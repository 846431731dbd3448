// Packed weights on the CPU: a linear layer of up to 16 tokens, and unpacking. docs/packed.md has the layout.
//
// Memory: the packed bytes are read once. A chunk (16 rows, 256 columns) first becomes 32 runs of values, one for each
// lane, in a buffer that stays in L1. Then 32 bits of a lane at a time expand its values to registers, with zeros where
// weights are removed, and these are multiplied with x, which is fp32 and arranged once in the order of the registers.
// Sums are fp32, in an order that depends on nothing but the shape. Threads share tiles of 16 rows, by their bytes; a row
// belongs to one thread, so the results do not depend on the number of threads.
//
// Every op returns a code of bad.h besides its result, and throws nothing.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <vector>

#include "bad.h"
#include "bits.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define FWANDA_AVX2 __attribute__((target("avx2,fma,f16c,popcnt,bmi")))
#define FWANDA_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,popcnt,bmi")))
#endif

namespace {

using fwanda::kAltered;
using fwanda::kRefused;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kHeader = 64, kTileRows = 16, kChunkColumns = 256, kPairColumns = 64, kLanes = 32, kAligned = 16;
constexpr int64_t kMaxTokens = 16;
constexpr int64_t kRun = 144;             // words from one lane's run to the next: 128 values, and what loads overshoot
constexpr int64_t kSerialBytes = 1 << 16;  // smaller weights are not worth a second thread

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
using Float = uint32_t;

template <class T>
constexpr int per_word() {
  return 4 / int(sizeof(T));
}

inline uint32_t load32(const uint8_t* p) {
  uint32_t value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

inline float to_float(Float w) { return as_float(w); }
inline float to_float(BFloat16 w) { return as_float(uint32_t(w.bits) << 16); }
inline float to_float(Half w) {
  const uint32_t sign = uint32_t(w.bits & 0x8000) << 16, m = w.bits & 0x7fff;
  const float magnitude = m < 0x400 ? float(m) * 0x1p-24f : as_float((m << 13) + (m < 0x7c00 ? 0x38000000u : 0x70000000u));
  return as_float(as_bits(magnitude) | sign);
}

inline void from_float(float value, Float& out) { out = as_bits(value); }
inline void from_float(float value, BFloat16& out) {
  const uint32_t bits = as_bits(value);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  out.bits = nan ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void from_float(float value, Half& out) {
  const uint32_t bits = as_bits(value), sign = bits >> 16 & 0x8000, m = bits & 0x7fffffff;
  uint32_t half;
  if (m > 0x7f800000) {
    half = 0x7e00;
  } else if (m >= 0x477ff000) {  // rounds to infinity
    half = 0x7c00;
  } else if (m < 0x38800000) {  // subnormal: the sum rounds to a multiple of 2^-24
    half = as_bits(as_float(m) + 0.5f) - as_bits(0.5f);
  } else {
    half = (m - 0x38000000 + 0xfff + (m >> 13 & 1)) >> 13;
  }
  out.bits = uint16_t(half | sign);
}

// Parts of a packed [rows, columns] weight; only `code` has a meaning where that is not 0.
struct Packed {
  Packed(const Tensor& packed, int64_t rows, int64_t columns) : rows(rows), columns(columns) {
    const bool fits = packed.dim() == 1 && packed.scalar_type() == ScalarType::Byte && packed.is_contiguous();
    if (!fits || rows < 0 || columns < 0) {
      code = kRefused;
      return;
    }
    tiles = (rows + kTileRows - 1) / kTileRows;
    chunks_of_tile = (columns + kChunkColumns - 1) / kChunkColumns;
    const auto* bytes = static_cast<const uint8_t*>(packed.data_ptr());
    const int64_t chunks = tiles * chunks_of_tile;
    order = bytes + kHeader;
    offsets = order + 4 * kTileRows * tiles;
    data = offsets + (4 * (chunks + 1) + kAligned - 1) / kAligned * kAligned;
    size = packed.numel() - (data - bytes);
    if (size < 0 || size != end_of(chunks - 1) || !order_is_whole()) code = kAltered;
  }
  bool order_is_whole() const {
    std::vector<bool> named(rows);
    for (int64_t place = 0; place < rows; place++) {
      const int64_t row = row_of(place);
      if (row < 0 || row >= rows || named[row]) return false;
      named[row] = true;
    }
    for (int64_t place = rows; place < tiles * kTileRows; place++) {
      if (row_of(place) != -1) return false;
    }
    return true;
  }
  int64_t start_of(int64_t chunk) const { return kAligned * int64_t(load32(offsets + 4 * chunk)); }
  int64_t end_of(int64_t chunk) const { return start_of(chunk + 1); }
  int64_t row_of(int64_t place) const { return int32_t(load32(order + 4 * place)); }
  int pairs_of(int64_t chunk) const {
    const int64_t left = columns - chunk % chunks_of_tile * kChunkColumns;
    return int((std::min(left, kChunkColumns) + kPairColumns - 1) / kPairColumns);
  }
  int64_t rows, columns, tiles, chunks_of_tile, size, code = 0;
  const uint8_t *order, *offsets, *data;
};

// What a thread works in: the runs of the lanes, and sums of 16 rows x 16 tokens.
struct Lanes {
  alignas(64) uint32_t words[kLanes * kRun];
  alignas(64) float sums[8 * kMaxTokens * 16];
};

struct Counts {
  int count[kLanes];   // values
  int words[kLanes];   // whole words
  int common;          // words that all lanes have
  int further, odd;    // words beyond these, and lanes with an odd count, of all lanes
};

// Asks for the bytes of the next chunk, a few lines with each lane, so that memory works while the core computes. It may
// ask for more than there is: that is harmless, and has no branch that could be predicted wrongly.
struct Ahead {
  const uint8_t* at;
  template <int kLines>
  inline __attribute__((always_inline)) void take() {
    for (int i = 0; i < kLines; i++) __builtin_prefetch(at + 64 * i, 0, 2);
    at += 64 * kLines;
  }
};

// Lines of a chunk for each lane at about half of the weights, and a few more.
template <class T>
constexpr int lines_of_lane() {
  return sizeof(T) == 2 ? 3 : 5;
}

#define FWANDA_INLINE inline __attribute__((always_inline))

FWANDA_INLINE void complete(Counts& c, int per_word) {
  const int shift = per_word - 1;
  c.common = 128;
  for (int l = 0; l < kLanes; l++) {
    c.words[l] = c.count[l] >> shift;
    c.common = std::min(c.common, c.words[l]);
    c.odd += c.count[l] & shift;
  }
  c.further = -kLanes * c.common;
  for (int l = 0; l < kLanes; l++) c.further += c.words[l];
}

FWANDA_INLINE bool fits(const Counts& c, int pairs, int64_t bytes) {
  return 4 * kLanes * pairs + 4 * (kLanes * c.common + c.further) + 2 * c.odd <= bytes;
}

// The further words of each lane, and its last odd value. Copies 64 B at a time, and 2 B for every lane, where `last` lies
// beyond them: what is too much is overwritten or never read, and the branches that are left are predictable.
FWANDA_INLINE void copy_rest(const uint8_t* values, const uint8_t* last, const Counts& c, int per_word, Lanes& lanes) {
  const uint8_t* further = values + 4 * kLanes * c.common;
  const uint8_t* odd = further + 4 * c.further;
  for (int l = 0; l < kLanes; l++) {
    auto* run = reinterpret_cast<uint8_t*>(lanes.words + l * kRun) + 4 * c.common;
    const int n = 4 * (c.words[l] - c.common);
    if (further + 4 * kRun <= last) {
      int at = 0;
      do std::memcpy(run + at, further + at, 64);
      while ((at += 64) < n);
    } else {
      std::memcpy(run, further, n);
    }
    further += n;
    if (per_word == 2) {  // of 32 bits, the words are the values
      if (odd + 2 <= last) std::memcpy(run + n, odd, 2);
      odd += 2 * (c.count[l] & 1);
    }
  }
}

bool gather_plain(
    const uint8_t* chunk, int64_t bytes, const uint8_t* last, int pairs, int per_word, Lanes& lanes) {
  Counts c{};
  for (int i = 0; i < pairs * kLanes; i++) c.count[i % kLanes] += __builtin_popcount(load32(chunk + 4 * i));
  complete(c, per_word);
  if (!fits(c, pairs, bytes)) return false;
  const uint8_t* values = chunk + 4 * kLanes * pairs;
  for (int k = 0; k < c.common; k++)
    for (int l = 0; l < kLanes; l++) lanes.words[l * kRun + k] = load32(values + 4 * (k * kLanes + l));
  copy_rest(values, last, c, per_word, lanes);
  return true;
}

template <class T>
void expand_plain(const uint32_t* run, uint32_t mask, int64_t& at, float* out) {
  const auto* values = reinterpret_cast<const T*>(run);
  for (int i = 0; i < 32; i++) out[i] = mask >> i & 1 ? to_float(values[at++]) : 0.0f;
}

// Adds 16 rows x one chunk to the sums [8 pairs of rows, tokens, 16]. x: [pairs, 4, tokens, 32].
template <class T>
void multiply_plain(const uint8_t* bits, int pairs, const Lanes& lanes, const float* x, int tokens, float* sums, Ahead) {
  for (int l = 0; l < kLanes; l++) {
    int64_t at = 0;
    for (int p = 0; p < pairs; p++) {
      float w[32];
      expand_plain<T>(lanes.words + l * kRun, load32(bits + 4 * (p * kLanes + l)), at, w);
      for (int b = 0; b < tokens; b++) {
        const float* xb = x + ((p * 4 + l % 4) * tokens + b) * 32;
        float* sum = sums + ((l / 4) * tokens + b) * 16;
        for (int i = 0; i < 16; i++) sum[i] += w[i] * xb[i] + w[16 + i] * xb[16 + i];
      }
    }
  }
}

#if defined(__x86_64__)

FWANDA_AVX2 inline void transpose_8x8(const uint8_t* from, uint32_t* to) {
  __m256i r[8], s[8];
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 4 * kLanes * i));
  for (int i = 0; i < 8; i += 2) {
    s[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    s[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm256_unpacklo_epi64(s[i + j], s[i + j + 2]);
      r[i + 2 * j + 1] = _mm256_unpackhi_epi64(s[i + j], s[i + j + 2]);
    }
  for (int i = 0; i < 4; i++) {
    auto* low = reinterpret_cast<__m256i*>(to + i * kRun);
    auto* high = reinterpret_cast<__m256i*>(to + (i + 4) * kRun);
    _mm256_storeu_si256(low, _mm256_permute2x128_si256(r[i], r[i + 4], 0x20));
    _mm256_storeu_si256(high, _mm256_permute2x128_si256(r[i], r[i + 4], 0x31));
  }
}

FWANDA_AVX2 inline Counts count_avx2(const uint8_t* bits, int pairs, int per_word) {
  const __m256i low = _mm256_set1_epi8(15), of_nibble = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
  Counts c{};
  for (int l = 0; l < kLanes; l += 8) {
    __m256i sums = _mm256_setzero_si256();  // of each byte, at most 8 for each pair
    for (int p = 0; p < pairs; p++) {
      const __m256i word = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bits + 4 * (p * kLanes + l)));
      sums = _mm256_add_epi8(sums, _mm256_shuffle_epi8(of_nibble, _mm256_and_si256(word, low)));
      sums = _mm256_add_epi8(sums, _mm256_shuffle_epi8(of_nibble, _mm256_and_si256(_mm256_srli_epi32(word, 4), low)));
    }
    sums = _mm256_madd_epi16(_mm256_maddubs_epi16(sums, _mm256_set1_epi8(1)), _mm256_set1_epi16(1));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(c.count + l), sums);
  }
  complete(c, per_word);
  return c;
}

FWANDA_AVX2 bool gather_avx2(
    const uint8_t* chunk, int64_t bytes, const uint8_t* last, int pairs, int per_word, Lanes& lanes) {
  const Counts c = count_avx2(chunk, pairs, per_word);
  if (!fits(c, pairs, bytes)) return false;
  const uint8_t* values = chunk + 4 * kLanes * pairs;
  int k = 0;
  // the last step may read beyond the common words; copy_rest() overwrites what it brings
  for (; k < c.common && values + 4 * kLanes * (k + 8) <= last; k += 8)
    for (int l = 0; l < kLanes; l += 8) transpose_8x8(values + 4 * (k * kLanes + l), lanes.words + l * kRun + k);
  for (; k < c.common; k++)
    for (int l = 0; l < kLanes; l++) lanes.words[l * kRun + k] = load32(values + 4 * (k * kLanes + l));
  copy_rest(values, last, c, per_word, lanes);
  return true;
}

// 16 words of each of 4 lanes. Part i of a register first holds 4 lanes of word j + 4 i, and then 4 words of a lane.
FWANDA_AVX512 inline void transpose_16x4(const uint8_t* from, uint32_t* to) {
  __m512i r[4];
  for (int j = 0; j < 4; j++) {
    const auto word = [&](int i) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 4 * kLanes * (j + 4 * i)));
    };
    r[j] = _mm512_inserti32x4(_mm512_inserti32x4(_mm512_castsi128_si512(word(0)), word(1), 1), word(2), 2);
    r[j] = _mm512_inserti32x4(r[j], word(3), 3);
  }
  const __m512i low0 = _mm512_unpacklo_epi32(r[0], r[1]), high0 = _mm512_unpackhi_epi32(r[0], r[1]);
  const __m512i low1 = _mm512_unpacklo_epi32(r[2], r[3]), high1 = _mm512_unpackhi_epi32(r[2], r[3]);
  _mm512_store_si512(to, _mm512_unpacklo_epi64(low0, low1));
  _mm512_store_si512(to + kRun, _mm512_unpackhi_epi64(low0, low1));
  _mm512_store_si512(to + 2 * kRun, _mm512_unpacklo_epi64(high0, high1));
  _mm512_store_si512(to + 3 * kRun, _mm512_unpackhi_epi64(high0, high1));
}

FWANDA_AVX512 bool gather_avx512(
    const uint8_t* chunk, int64_t bytes, const uint8_t* last, int pairs, int per_word, Lanes& lanes) {
  const Counts c = count_avx2(chunk, pairs, per_word);
  if (!fits(c, pairs, bytes)) return false;
  const uint8_t* values = chunk + 4 * kLanes * pairs;
  int k = 0;
  for (; k < c.common && values + 4 * kLanes * (k + 16) <= last; k += 16)
    for (int l = 0; l < kLanes; l += 4) transpose_16x4(values + 4 * (k * kLanes + l), lanes.words + l * kRun + k);
  for (; k < c.common; k++)
    for (int l = 0; l < kLanes; l++) lanes.words[l * kRun + k] = load32(values + 4 * (k * kLanes + l));
  copy_rest(values, last, c, per_word, lanes);
  return true;
}

// Selectors that move values to the places of the bits of a byte, and masks of these places.
struct Places {
  Places() {
    for (int byte = 0; byte < 256; byte++)
      for (int i = 0, n = 0; i < 8; i++) {
        index[byte][i] = byte >> i & 1 ? n++ : 0;
        mask[byte][i] = byte >> i & 1 ? -1 : 0;
      }
  }
  alignas(32) int32_t index[256][8], mask[256][8];
};
const Places kPlaces;

FWANDA_AVX2 inline __m256 load8(const BFloat16* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
FWANDA_AVX2 inline __m256 load8(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
FWANDA_AVX2 inline __m256 load8(const Float* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }

template <class T>
FWANDA_AVX2 void multiply_avx2(
    const uint8_t* bits, int pairs, const Lanes& lanes, const float* x, int tokens, float* sums, Ahead ahead) {
  for (int l = 0; l < kLanes; l++) {
    const auto* values = reinterpret_cast<const T*>(lanes.words + l * kRun);
    ahead.take<lines_of_lane<T>()>();
    for (int p = 0; p < pairs; p++) {
      const uint32_t mask = load32(bits + 4 * (p * kLanes + l));
      __m256 w[4];
      for (int i = 0; i < 4; i++) {
        const int byte = mask >> (8 * i) & 0xff;
        const __m256i index = _mm256_load_si256(reinterpret_cast<const __m256i*>(kPlaces.index[byte]));
        const __m256 places = _mm256_load_ps(reinterpret_cast<const float*>(kPlaces.mask[byte]));
        w[i] = _mm256_and_ps(_mm256_permutevar8x32_ps(load8(values), index), places);
        values += __builtin_popcount(byte);
      }
      for (int b = 0; b < tokens; b++) {
        const float* xb = x + ((p * 4 + l % 4) * tokens + b) * 32;
        float* sum = sums + ((l / 4) * tokens + b) * 16;
        const __m256 first = _mm256_load_ps(xb), second = _mm256_load_ps(xb + 16);
        for (int half = 0; half < 2; half++) {
          const __m256 s = _mm256_fmadd_ps(w[half], first, _mm256_load_ps(sum + 8 * half));
          _mm256_store_ps(sum + 8 * half, _mm256_fmadd_ps(w[half + 2], second, s));
        }
      }
    }
  }
}

struct Pair512 {
  __m512 first, second;
};

// The even and the odd values of 32: see arrange().
FWANDA_AVX512 inline Pair512 expand_512(const BFloat16*& values, uint32_t mask) {
  const __m512i v = _mm512_maskz_expand_epi16(mask, _mm512_loadu_si512(values));
  values += __builtin_popcount(mask);
  return {
      _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)),
      _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(int(0xffff0000))))};
}
FWANDA_AVX512 inline Pair512 expand_512(const Half*& values, uint32_t mask) {
  const __m512i v = _mm512_maskz_expand_epi16(mask, _mm512_loadu_si512(values));
  values += __builtin_popcount(mask);
  return {_mm512_cvtph_ps(_mm512_castsi512_si256(v)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(v, 1))};
}
FWANDA_AVX512 inline Pair512 expand_512(const Float*& values, uint32_t mask) {
  const __m512 first = _mm512_maskz_expand_ps(uint16_t(mask), _mm512_loadu_ps(values));
  values += __builtin_popcount(mask & 0xffff);
  const __m512 second = _mm512_maskz_expand_ps(uint16_t(mask >> 16), _mm512_loadu_ps(values));
  values += __builtin_popcount(mask >> 16);
  return {first, second};
}

template <class T, int kTokens>
FWANDA_AVX512 void multiply_tokens_512(
    const uint8_t* bits, int pairs, const Lanes& lanes, const float* x, float* sums, Ahead ahead) {
  constexpr int kWays = kTokens == 1 ? 2 : 1;  // independent sums, so that additions need not wait for each other
  for (int g = 0; g < 8; g++) {
    __m512 even[kWays][kTokens], odd[kWays][kTokens];
    for (int b = 0; b < kTokens; b++) {
      odd[0][b] = even[kWays - 1][b] = odd[kWays - 1][b] = _mm512_setzero_ps();
      even[0][b] = _mm512_load_ps(sums + (g * kTokens + b) * 16);
    }
    for (int t = 0; t < 4; t++) {
      const auto* values = reinterpret_cast<const T*>(lanes.words + (4 * g + t) * kRun);
      ahead.take<lines_of_lane<T>()>();
      for (int p = 0; p < pairs; p++) {
        const Pair512 w = expand_512(values, load32(bits + 4 * (p * kLanes + 4 * g + t)));
        for (int b = 0; b < kTokens; b++) {
          const float* xb = x + ((p * 4 + t) * kTokens + b) * 32;
          even[t % kWays][b] = _mm512_fmadd_ps(w.first, _mm512_load_ps(xb), even[t % kWays][b]);
          odd[t % kWays][b] = _mm512_fmadd_ps(w.second, _mm512_load_ps(xb + 16), odd[t % kWays][b]);
        }
      }
    }
    for (int b = 0; b < kTokens; b++) {
      __m512 sum = _mm512_add_ps(even[0][b], odd[0][b]);
      if (kWays == 2) sum = _mm512_add_ps(sum, _mm512_add_ps(even[1][b], odd[1][b]));
      _mm512_store_ps(sums + (g * kTokens + b) * 16, sum);
    }
  }
}

template <class T>
void multiply_avx512(const uint8_t* bits, int pairs, const Lanes& lanes, const float* x, int tokens, float* sums, Ahead ahead) {
  switch (tokens) {
    case 1: return multiply_tokens_512<T, 1>(bits, pairs, lanes, x, sums, ahead);
    case 2: return multiply_tokens_512<T, 2>(bits, pairs, lanes, x, sums, ahead);
    case 4: return multiply_tokens_512<T, 4>(bits, pairs, lanes, x, sums, ahead);
    case 8: return multiply_tokens_512<T, 8>(bits, pairs, lanes, x, sums, ahead);
    default: return multiply_tokens_512<T, 16>(bits, pairs, lanes, x, sums, ahead);
  }
}

#endif

using Gather = bool (*)(const uint8_t*, int64_t, const uint8_t*, int, int, Lanes&);
using Multiply = void (*)(const uint8_t*, int, const Lanes&, const float*, int, float*, Ahead);

enum class Isa { kPlain, kAvx2, kAvx512 };

// FWANDA_CPU_ISA=plain|avx2 keeps to older instructions, so that tests can compare all of them on one machine.
Isa find_isa() {
#if defined(__x86_64__)
  const char* asked = std::getenv("FWANDA_CPU_ISA");
  const auto most = [&](const char* name) { return asked != nullptr && std::strcmp(asked, name) == 0; };
  if (most("plain")) return Isa::kPlain;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vbmi2");
  if (avx512 && !most("avx2")) return Isa::kAvx512;
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kPlain;
}

template <class T>
struct Kernel {
  explicit Kernel(Isa isa) : isa(isa) {
#if defined(__x86_64__)
    if (isa != Isa::kPlain) gather = gather_avx2;
    if (isa == Isa::kAvx2) multiply = multiply_avx2<T>;
    if (isa == Isa::kAvx512) {
      gather = gather_avx512;
      multiply = multiply_avx512<T>;
    }
#endif
  }
  Isa isa;
  Gather gather = gather_plain;
  Multiply multiply = multiply_plain<T>;
  // whether registers hold the even and the odd values of 32, not the first and the second 16
  bool interleaved() const { return isa == Isa::kAvx512 && std::is_same_v<T, BFloat16>; }
};

const Isa kIsa = find_isa();

// x [tokens, columns] as fp32 [pairs, 4, padded tokens, 32], zero where there is no token or column. The 32 are what a
// lane's 32 values are multiplied with: 8 columns for each of two rows, then those 32 columns on for the same two rows.
template <class T>
void arrange(const Tensor& x, int64_t columns, int tokens, int padded, bool interleaved, float* out) {
  const auto* data = static_cast<const T*>(x.data_ptr());
  const int64_t groups = (columns + kPairColumns - 1) / kPairColumns * 4;
  for (int64_t group = 0; group < groups; group++) {
    const int64_t first = group / 4 * kPairColumns + group % 4 * 8;
    for (int b = 0; b < padded; b++) {
      float in[16] = {};  // 8 columns, and those 32 columns on
      const T* row = data + b * columns + first;
      if (b < tokens && first + 40 <= columns) {
        for (int i = 0; i < 8; i++) in[i] = to_float(row[i]);
        for (int i = 0; i < 8; i++) in[8 + i] = to_float(row[32 + i]);
      } else if (b < tokens) {
        for (int i = 0; i < 16; i++)
          if (first + i / 8 * 32 + i % 8 < columns) in[i] = to_float(row[i / 8 * 32 + i % 8]);
      }
      float* to = out + (group * padded + b) * 32;
      if (interleaved) {
        for (int odd = 0; odd < 2; odd++)
          for (int i = 0; i < 16; i++) to[16 * odd + i] = in[i / 8 * 8 + i % 4 * 2 + odd];
      } else {
        for (int i = 0; i < 32; i++) to[i] = in[i / 16 * 8 + i % 8];
      }
    }
  }
}

// The sums of rows g and g + 8 from 16 partial ones.
inline void reduce(const float* sums, bool interleaved, float* of_row, float* of_row_8) {
  const int other = interleaved ? 8 : 4, row_8 = interleaved ? 4 : 8;  // second half of a row's sums, and the other row
  float four[2][4];
  for (int i = 0; i < 4; i++) {
    four[0][i] = sums[i] + sums[other + i];
    four[1][i] = sums[row_8 + i] + sums[row_8 + other + i];
  }
  *of_row = (four[0][0] + four[0][1]) + (four[0][2] + four[0][3]);
  *of_row_8 = (four[1][0] + four[1][1]) + (four[1][2] + four[1][3]);
}

// Boundaries of the tiles that each part gets, so that parts have about the same number of bytes.
std::vector<int64_t> parts_of(const Packed& w) {
  const int64_t wanted = w.size < kSerialBytes ? 1 : std::min<int64_t>(torch::stable::get_num_threads(), w.tiles);
  std::vector<int64_t> bounds{0};
  for (int64_t tile = 1, part = 1; part < wanted; part++) {
    while (tile < w.tiles && w.start_of(tile * w.chunks_of_tile) < w.size * part / wanted) tile++;
    bounds.push_back(tile);
  }
  bounds.push_back(w.tiles);
  return bounds;
}

// Calls body(tile, chunk of the tile, its bits, pairs, lanes) for all chunks, and end(tile, lanes) after those of a tile.
// Returns a code of bad.h.
template <class Chunk, class End>
int64_t for_chunks(const Packed& w, Gather gather, int per_word, const Chunk& body, const End& end) {
  const std::vector<int64_t> bounds = parts_of(w);
  std::atomic<bool> ok{true};
  torch::stable::parallel_for(0, int64_t(bounds.size()) - 1, 1, [&](int64_t first, int64_t last) {
    Lanes lanes;
    for (int64_t tile = bounds[first]; tile < bounds[last]; tile++) {
      for (int64_t k = 0; k < w.chunks_of_tile; k++) {
        const int64_t chunk = tile * w.chunks_of_tile + k, start = w.start_of(chunk), stop = w.end_of(chunk);
        const int pairs = w.pairs_of(chunk);
        const bool inside = 0 <= start && start + 4 * kLanes * pairs <= stop && stop <= w.size;
        if (!inside || !gather(w.data + start, stop - start, w.data + w.size, pairs, per_word, lanes)) {
          ok = false;
          return;
        }
        body(tile, k, w.data + start, pairs, lanes, Ahead{w.data + stop});
      }
      end(tile, lanes);
    }
  });
  return ok ? 0 : kAltered;
}

struct AlignedFloats {
  explicit AlignedFloats(int64_t n) : storage(n + 16) {
    const auto address = reinterpret_cast<uintptr_t>(storage.data());
    data = storage.data() + (64 - address % 64) % 64 / 4;
  }
  std::vector<float> storage;
  float* data;
};

template <class T>
int64_t linear(const Tensor& x, const Packed& w, const std::optional<Tensor>& bias, const Tensor& out) {
  const Kernel<T> kernel(kIsa);
  const int tokens = int(x.size(0));
  int padded = 1;
  while (padded < tokens) padded *= 2;
  AlignedFloats arranged((w.columns + kPairColumns - 1) / kPairColumns * 4 * padded * 32);
  arrange<T>(x, w.columns, tokens, padded, kernel.interleaved(), arranged.data);
  const auto* added = bias ? static_cast<const T*>(bias->data_ptr()) : nullptr;
  auto* result = static_cast<T*>(out.data_ptr());
  const auto multiply = [&](int64_t, int64_t k, const uint8_t* bits, int pairs, Lanes& lanes, Ahead ahead) {
    if (k == 0) std::fill_n(lanes.sums, 8 * padded * 16, 0.0f);
    kernel.multiply(bits, pairs, lanes, arranged.data + k * 4 * 4 * padded * 32, padded, lanes.sums, ahead);
  };
  const auto finish = [&](int64_t tile, const Lanes& lanes) {
    for (int g = 0; g < 8; g++) {
      const int64_t rows[2] = {w.row_of(tile * kTileRows + g), w.row_of(tile * kTileRows + 8 + g)};
      for (int b = 0; b < tokens; b++) {
        float values[2];
        reduce(lanes.sums + (g * padded + b) * 16, kernel.interleaved(), values, values + 1);
        for (int half = 0; half < 2; half++) {
          if (rows[half] < 0) continue;
          const float sum = values[half] + (added ? to_float(added[rows[half]]) : 0.0f);
          from_float(sum, result[b * w.rows + rows[half]]);
        }
      }
    }
  };
  return for_chunks(w, kernel.gather, per_word<T>(), multiply, finish);
}

// Writes the 32 values of a lane, 8 to each of two rows at two places; rows are null where there is none.
template <class T>
void scatter(const T*& values, uint32_t mask, int64_t column, int64_t columns, T* const rows[2]) {
  for (int i = 0; i < 4; i++) {
    T* row = rows[i % 2];
    for (int j = 0; j < 8; j++) {
      const int64_t at = column + i / 2 * 32 + j;
      const bool kept = mask >> (8 * i + j) & 1;
      if (row != nullptr && at < columns) row[at] = kept ? *values : T{};
      values += kept;
    }
  }
}

#if defined(__x86_64__)
FWANDA_AVX512 void scatter_512(const uint16_t*& values, uint32_t mask, int64_t column, uint16_t* const rows[2]) {
  const __m512i v = _mm512_maskz_expand_epi16(mask, _mm512_loadu_si512(values));
  values += __builtin_popcount(mask);
  const __m128i eights[4] = {
      _mm512_castsi512_si128(v), _mm512_extracti32x4_epi32(v, 1), _mm512_extracti32x4_epi32(v, 2),
      _mm512_extracti32x4_epi32(v, 3)};
  for (int i = 0; i < 4; i++)
    if (rows[i % 2] != nullptr)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(rows[i % 2] + column + i / 2 * 32), eights[i]);
}
FWANDA_AVX512 void scatter_512(const uint32_t*& values, uint32_t mask, int64_t column, uint32_t* const rows[2]) {
  for (int i = 0; i < 2; i++) {
    const auto half = uint16_t(mask >> (16 * i));
    const __m512i v = _mm512_maskz_expand_epi32(half, _mm512_loadu_si512(values));
    values += __builtin_popcount(half);
    const __m256i eights[2] = {_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1)};
    for (int j = 0; j < 2; j++)
      if (rows[j] != nullptr) _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows[j] + column + i * 32), eights[j]);
  }
}
#endif

// T: unsigned integers of the size of a value.
template <class T>
int64_t unpack(const Packed& w, const Tensor& out) {
  const Kernel<Float> kernel(kIsa);
  auto* dense = static_cast<T*>(out.data_ptr());
  const auto write = [&](int64_t tile, int64_t k, const uint8_t* bits, int pairs, const Lanes& lanes, Ahead ahead) {
    for (int l = 0; l < kLanes; l++) {
      ahead.take<lines_of_lane<T>()>();
      T* rows[2];
      for (int half = 0; half < 2; half++) {
        const int64_t row = w.row_of(tile * kTileRows + 8 * half + l / 4);
        rows[half] = row < 0 ? nullptr : dense + row * w.columns;
      }
      const auto* values = reinterpret_cast<const T*>(lanes.words + l * kRun);
      for (int p = 0; p < pairs; p++) {
        const uint32_t mask = load32(bits + 4 * (p * kLanes + l));
        const int64_t column = k * kChunkColumns + p * kPairColumns + l % 4 * 8;
#if defined(__x86_64__)
        if (kernel.isa == Isa::kAvx512 && column + 40 <= w.columns) {
          scatter_512(values, mask, column, rows);
          continue;
        }
#endif
        scatter(values, mask, column, w.columns, rows);
      }
    }
  };
  return for_chunks(w, kernel.gather, per_word<T>(), write, [](int64_t, const Lanes&) {});
}

bool fits_result(const Tensor& out, int64_t rows, int64_t columns, ScalarType dtype) {
  return out.dim() == 2 && out.size(0) == rows && out.size(1) == columns && out.is_contiguous() && out.scalar_type() == dtype;
}

int64_t packed_linear(
    const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t rows, int64_t columns, const Tensor& out) {
  const Packed w(packed, rows, columns);
  if (w.code) return w.code;
  const ScalarType dtype = x.scalar_type();
  const bool x_fits = x.dim() == 2 && x.size(1) == columns && x.size(0) <= kMaxTokens && x.is_contiguous();
  const bool bias_fits = !bias || (bias->dim() == 1 && bias->size(0) == rows && bias->scalar_type() == dtype && bias->is_contiguous());
  if (!x_fits || !bias_fits || !fits_result(out, x.size(0), rows, dtype)) return kRefused;
  if (x.size(0) == 0 || rows == 0) return 0;
  if (dtype == ScalarType::BFloat16) return linear<BFloat16>(x, w, bias, out);
  if (dtype == ScalarType::Half) return linear<Half>(x, w, bias, out);
  if (dtype == ScalarType::Float) return linear<Float>(x, w, bias, out);
  return kRefused;
}

// `out` gives the shape and the dtype.
int64_t unpack_weight(const Tensor& packed, const Tensor& out) {
  if (out.dim() != 2) return kRefused;
  const int64_t rows = out.size(0), columns = out.size(1);
  const Packed w(packed, rows, columns);
  if (w.code) return w.code;
  const ScalarType dtype = out.scalar_type();
  if (!fits_result(out, rows, columns, dtype)) return kRefused;
  if (rows == 0 || columns == 0) return 0;
  if (dtype == ScalarType::Float) return unpack<uint32_t>(w, out);
  if (dtype == ScalarType::BFloat16 || dtype == ScalarType::Half) return unpack<uint16_t>(w, out);
  return kRefused;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fwanda_C, m) {
  m.def("packed_linear(Tensor x, Tensor packed, Tensor? bias, int rows, int columns, Tensor(a!) out) -> int");
  m.def("unpack_weight(Tensor packed, Tensor(a!) out) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(fwanda_C, CPU, m) {
  m.impl("packed_linear", TORCH_BOX(&packed_linear));
  m.impl("unpack_weight", TORCH_BOX(&unpack_weight));
}
