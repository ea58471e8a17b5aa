// One element of a float32 or bf16 matrix: read as float32, and rounded to nearest even when written.
//
// Include only in a kernel's own translation unit.
#pragma once

#include <cstdint>

#include "base/bf16.h"

namespace kt {
namespace {

inline float wide_of(float value) { return value; }
inline float wide_of(uint16_t bits) { return bf16_to_float(bits); }
template <class T>
inline T narrow_of(float value);
template <>
inline float narrow_of<float>(float value) {
  return value;
}
template <>
inline uint16_t narrow_of<uint16_t>(float value) {  // float_to_bf16 without a branch
  const auto bits = __builtin_bit_cast(uint32_t, value);
  const uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16, quiet = bits >> 16 | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : nearest);
}

}  // namespace
}  // namespace kt
