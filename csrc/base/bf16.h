// bfloat16 as its 16 bits. Widening is exact; narrowing rounds to nearest, ties to even.
//
// `static inline` on purpose: files compiled for one instruction set include this header. Where several objects define
// an inline function, the linker keeps one copy, perhaps the AVX-512 copy for code that must run on any x86-64. Every
// function in such headers is therefore static, or in a namespace of the instruction set, or in an unnamed namespace.
// For the rest (member functions, templates of the standard library) CMakeLists.txt compiles those files with
// -fno-weak. tests/unit/csrc/test_kernels.py checks the objects.
#pragma once

#include <cstdint>
#include <cstring>

namespace kt {

static inline float bf16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

static inline uint16_t float_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN stays NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline bool bf16_is_finite(uint16_t bits) { return (bits & 0x7f80u) != 0x7f80u; }

static inline bool float_is_finite(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return (bits & 0x7f800000u) != 0x7f800000u;
}

}  // namespace kt
