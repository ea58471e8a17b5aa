// The bytes of the bf16 that equals an fp8 code without its sign (base/fp8.h), for look-ups in registers: vdpbf16ps and
// TDPBF16PS take bf16 subnormals for zero, so a subnormal code must become a normal bf16.
//
// Include only in a kernel's own translation unit.
#pragma once

#include <cstdint>

namespace kt {
namespace {

constexpr uint16_t bf16_of_magnitude(int magnitude) {
  if (magnitude == 0x7f) return 0x7fc0;
  if (magnitude >= 8) return static_cast<uint16_t>((magnitude << 4) + (120 << 7));
  if (magnitude == 0) return 0;
  const int top = magnitude >= 4 ? 2 : magnitude >= 2 ? 1 : 0;  // magnitude * 2^-9
  return static_cast<uint16_t>((118 + top) << 7 | (magnitude ^ 1 << top) << (7 - top));
}

struct Fp8Bytes {
  alignas(64) uint8_t low[128] = {}, high[128] = {};
  constexpr Fp8Bytes() {
    for (int i = 0; i < 128; ++i) {
      low[i] = static_cast<uint8_t>(bf16_of_magnitude(i) & 255);
      high[i] = static_cast<uint8_t>(bf16_of_magnitude(i) >> 8);
    }
  }
};
constexpr Fp8Bytes kFp8Bytes;

}  // namespace
}  // namespace kt
