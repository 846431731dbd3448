// Decoding of packed weights: where the values of a lane lie, and fragments of the tensor cores made of them.
//
// A lane owns 16 weights of each 32 columns: 8 columns of rows g and g + 8. For each four columns it counts the ones
// before their middle, loads the three words around that place, and shifts the two values before it into one register and the
// two after it into another. Byte permutations then put values and zeros where the bits say. The result is a fragment of the
// tensor cores. No step waits for another one. Before that, the words that not every lane has are moved to where word k of
// lane l stands at 32 k + l, as the others do.
#pragma once

#include "packed_chunks.cuh"

namespace fwanda {

constexpr int kTail = 24;  // further words of a lane that are moved at most
constexpr int kGroup = 4;  // rows of them that are moved together

// Selectors of the bytes of four columns, for their four bits. In the lower half those of columns 0 and 1, from the two values
// before the middle; in the upper half those of columns 2 and 3, from the two after it. Byte 4 is 0.
__device__ inline uint32_t selectors_of(uint32_t bits) {
  constexpr uint32_t kZero = 0x44, kFirst = 0x10, kSecond = 0x32;
  const bool kept[4] = {bool(bits & 1), bool(bits & 2), bool(bits & 4), bool(bits & 8)};
  const uint32_t columns[4] = {kept[0] ? kept[1] ? kFirst : kSecond : kZero, kept[1] ? kSecond : kZero, kept[2] ? kFirst : kZero,
                               kept[3] ? kept[2] ? kSecond : kFirst : kZero};
  return columns[0] | columns[1] << 8 | columns[2] << 16 | columns[3] << 24;
}

// Where a lane finds its values in a chunk. Places are in words of shared memory.
struct Lane {
  int values;         // place of word 0 of lane 0
  int words, common;  // whole words of this lane; words that every lane has
  int further;        // place of the first word beyond these
  int further_words;  // of all lanes
  int last;           // twice the place of the last value, if the count is odd
  bool odd;
  int rows;  // of 32 words, after moving

  __device__ Lane(int chunk, int pairs) {
    const int l = lane();
    int count = 0;
#pragma unroll
    for (int p = 0; p < kChunkColumns / 64; p++) count += p < pairs ? __popc(shared_words()[chunk + 32 * p + l]) : 0;
    words = count >> 1, odd = count & 1;
    const int own = words | int(odd) << 16;
    const int sum = inclusive_scan(own), before = sum - own;
    const int all = __shfl_sync(~0u, sum, 31) & 0xffff;
    common = int(__reduce_min_sync(~0u, unsigned(words)));
    rows = int(__reduce_max_sync(~0u, unsigned(words + odd)));
    values = chunk + 32 * pairs;
    further_words = all - 32 * common;
    further = values + common * (32 - l) + (before & 0xffff);
    last = 2 * (values + all) + (before >> 16);
  }

  // Shared address of word 0 of this lane.
  __device__ uint32_t address() const { return shared_address(shared_words() + values + lane()); }

  // The last value, or 0.
  __device__ uint32_t last_value() const { return odd ? reinterpret_cast<const uint16_t*>(dynamic_shared)[last] : 0; }

  // Word w of this lane; the last value alone, or 0, beyond the whole words.
  __device__ uint32_t word(int w) const {
    if (w < common) return shared_words()[values + 32 * w + lane()];
    if (w < words) return shared_words()[further + w - common];
    return w == words ? last_value() : 0;
  }

  // Move the further words, and the last value, so that word w of lane l stands at values + 32 w + l; rows are filled up with
  // anything. The room of the chunk ends at `end`. Returns the end of what is used now; or moves nothing and returns 0 if the
  // room is too small.
  __device__ int move(int end) const {
    const int tail = rows - common, used = values + 32 * (common + (tail + kGroup - 1 & -kGroup));
    // the upper half of the rows is moved first, to where no further word stands
    if (tail > kTail || further_words > 16 * kTail || used > end) return 0;
    const uint32_t value = last_value();
    if (tail > kTail / 2) move_rows(kTail / 2, tail);
    move_rows(0, tail);
    if (odd) shared_words()[values + 32 * words + lane()] = value;
    return used;
  }

  __device__ void move_rows(int first, int tail) const {
    uint32_t moved[kTail / 2];
    const uint32_t mine = ~(~0u << (words - common)) >> first;
#pragma unroll
    for (int i = 0; i < kTail / 2; i += kGroup)
      if (first + i < tail)
#pragma unroll
        for (int k = i; k < i + kGroup; k++)
          if (mine >> k & 1) moved[k] = shared_words()[further + first + k];  // fewer lanes, fewer conflicts of banks
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kTail / 2; i += kGroup)
      if (first + i < tail)
#pragma unroll
        for (int k = i; k < i + kGroup; k++) shared_words()[values + 32 * (common + first + k) + lane()] = moved[k];
  }
};

// What all steps need, in registers.
struct Cursor {
  uint32_t selectors;  // selectors_of(lane)

  __device__ Cursor() : selectors(selectors_of(lane_register())) {}
};

// Factors for products of bytes, which are computed beside the other integer instructions. In constant memory because the
// instruction takes no other constants.
__constant__ uint32_t kByte[4] = {1, 1 << 8, 1 << 16, 1 << 24};
__constant__ uint32_t kByteTimes16[4] = {1 << 4, 1 << 12, 1 << 20, 1 << 28};
__constant__ uint32_t kUpperHalf = 1 << 8;
__constant__ uint32_t kByteTimes64[4] = {1 << 6, 1 << 14, 1 << 22, 1 << 30};

// How many values of this lane come before the middle of each four columns, of 64: eight bytes.
struct Middles {
  uint32_t even, odd;  // of columns 0, 8, ..., and of columns 4, 12, ...

  // bits: of these columns; before: four times the number of values before them, in bytes; becomes that of the next ones.
  __device__ Middles(uint32_t bits, uint32_t& before) {
    const uint32_t twos = bits - (bits >> 1 & 0x55555555), firsts = twos & 0x33333333;
    const uint32_t fours = firsts + (twos >> 2 & 0x33333333), eights = fours + (fours >> 4) & 0x0f0f0f0f;
    const uint32_t after = eights * 0x01010101 + before, start = after - eights;
    even = start + (firsts & 0x0f0f0f0f), odd = start + (fours + (firsts >> 4) & 0x0f0f0f0f);
    before = permute(after, 0, 0x3333);
  }
};

// Weights of 32 columns: part[0..3] is a fragment of columns 8 t to 8 t + 3 of rows g and g + 8, part[4..7] of the next four.
// bits: of 64 columns, of which `half` says which; values: shared address of word 0 of this lane.
template <bool MOVED>
__device__ inline void decode(const Lane& own, const Cursor& at, uint32_t bits, int half, const Middles& middles, uint32_t values,
                              uint32_t (&part)[8]) {
#pragma unroll
  for (int j = 0; j < 4; j++) {  // four columns of row g, four more, then those of row g + 8
    const int byte = 2 * half + j / 2;
    const uint32_t counts = j % 2 ? middles.odd : middles.even;
    const uint32_t nibbles = j % 2 ? bits >> 4 : bits;
    const uint32_t from_lane = byte ? dot_of_bytes(nibbles, kByte[byte], 0) : nibbles;  // its lowest five bits name a lane
    const uint32_t selectors = __shfl_sync(~0u, at.selectors, from_lane);
    const uint32_t shift = byte ? dot_of_bytes(counts, kByteTimes16[byte], 0) : counts << 4;  // its lowest five bits count
    uint32_t words[3];
    if constexpr (MOVED) {
      const uint32_t from = dot_of_bytes(counts & 0xfefefefe, kByteTimes64[byte], values);  // 128 for each two values
      words[0] = load_word(from - 128), words[1] = load_word(from), words[2] = load_word(from + 128);
    } else {
#pragma unroll
      for (int i = 0; i < 3; i++) words[i] = own.word(int(counts >> 8 * byte & 255) / 2 + i - 1);
    }
    const int first = 4 * (j & 1) + (j >> 1);
    part[first] = permute(__funnelshift_r(words[0], words[1], shift), 0, selectors);
    part[first + 2] = permute(__funnelshift_r(words[1], words[2], shift), 0, dot_of_halves(selectors, kUpperHalf, 0));
  }
}

}  // namespace fwanda
