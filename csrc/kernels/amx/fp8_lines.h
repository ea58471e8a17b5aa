// A packed line of fp8 (4 columns) to two lines of bf16 (2 columns each). Exact: every fp8 number is a bf16.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "kernels/amx/kernels.h"
#if !defined(KT_AMX_MODEL)
#include <immintrin.h>
#endif

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

#if defined(KT_AMX_MODEL)

inline void unpack_fp8_line(const uint8_t* line, uint8_t* out) {
  for (int lane = 0; lane < 4; ++lane) {
    for (int i = 0; i < 16; ++i) {
      const uint8_t code = line[16 * lane + i];
      uint8_t* to = out + i / 8 * kLineBytes + 16 * lane + 2 * (i % 8);
      to[0] = kFp8Tables.low[code & 127];
      to[1] = static_cast<uint8_t>(kFp8Tables.high[code & 127] | (code & 128));
    }
  }
}

#else

// Two look-ups in tables of 128 bytes (VPERMI2B, which ignores the index's top bit: the sign), then the interleaving
// for which the layout is designed.
inline void unpack_fp8_line(const uint8_t* line, uint8_t* out) {
  const __m512i codes = _mm512_loadu_si512(line);
  const __m512i low =
      _mm512_permutex2var_epi8(_mm512_load_si512(kFp8Tables.low), codes, _mm512_load_si512(kFp8Tables.low + 64));
  const __m512i magnitude =
      _mm512_permutex2var_epi8(_mm512_load_si512(kFp8Tables.high), codes, _mm512_load_si512(kFp8Tables.high + 64));
  constexpr int kOrAnd = 0xf8;  // a | (b & c)
  const __m512i high = _mm512_ternarylogic_epi32(magnitude, codes, _mm512_set1_epi8(static_cast<char>(0x80)), kOrAnd);
  _mm512_store_si512(out, _mm512_unpacklo_epi8(low, high));
  _mm512_store_si512(out + kLineBytes, _mm512_unpackhi_epi8(low, high));
}

#endif

// `cols` columns, a multiple of 4, from the line that `lines` points to; lines `ahead` bytes away are prefetched.
inline void unpack_fp8(const uint8_t* lines, int64_t cols, uint8_t* out, int64_t ahead) {
  for (int64_t line = 0; line < cols / 4; ++line) {
    __builtin_prefetch(lines + line * kLineBytes + ahead);
    unpack_fp8_line(lines + line * kLineBytes, out + 2 * line * kLineBytes);
  }
}

}  // namespace
}  // namespace kt::amx::inline KT_AMX_BUILD
