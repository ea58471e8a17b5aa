// A packed line of fp8 (4 columns) to two lines of bf16 (2 columns each). Exact: every fp8 number is a bf16.
#pragma once

#include <cstdint>

#include "kernels/amx/kernels.h"

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

// bf16 bits of the fp8 without its sign bit.
constexpr uint16_t bf16_of_magnitude(int magnitude) {
  if (magnitude == 0x7f) return 0x7fc0;
  if (magnitude >= 8) return static_cast<uint16_t>((magnitude << 4) + (120 << 7));
  if (magnitude == 0) return 0;
  const int top = magnitude >= 4 ? 2 : magnitude >= 2 ? 1 : 0;  // magnitude * 2^-9
  return static_cast<uint16_t>((118 + top) << 7 | (magnitude ^ 1 << top) << (7 - top));
}

struct Fp8Tables {
  alignas(64) uint8_t low[128] = {}, high[128] = {};
  constexpr Fp8Tables() {
    for (int i = 0; i < 128; ++i) {
      low[i] = static_cast<uint8_t>(bf16_of_magnitude(i) & 255);
      high[i] = static_cast<uint8_t>(bf16_of_magnitude(i) >> 8);
    }
  }
};
constexpr Fp8Tables kFp8Tables;

inline void unpack_fp8_line(const uint8_t* line, uint8_t* out) {
  look_up_fp8(line, kFp8Tables.low, kFp8Tables.high, out);
}

// `cols` columns, a multiple of 4, from the line that `lines` points to; lines `ahead` bytes away are prefetched.
inline void unpack_fp8(const uint8_t* lines, int64_t cols, uint8_t* out, int64_t ahead) {
  for (int64_t line = 0; line < cols / 4; ++line) {
    __builtin_prefetch(lines + line * kLineBytes + ahead);
    unpack_fp8_line(lines + line * kLineBytes, out + 2 * line * kLineBytes);
  }
}

}  // namespace
}  // namespace kt::amx::inline KT_AMX_BUILD
