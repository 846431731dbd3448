// The bits of an fp32 number on a CPU, for the C++ files.
#pragma once

#include <cstdint>
#include <cstring>

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
