// Reading with 64-byte loads: shared by AVX-512 and AMX, whose tiles are loaded from memory at the same rate.
#pragma once

#include <immintrin.h>

#include "kernels/generic/reading.h"

namespace kt {
namespace {

struct Load64 {
  using Vector = __m512i;
  static constexpr int64_t kBytes = 64;
  static Vector load(const uint8_t* from) { return _mm512_load_si512(from); }
  static Vector mix(Vector a, Vector b) { return _mm512_xor_si512(a, b); }
};

void read_avx512(const uint8_t* data, int64_t bytes, int streams) {
  __asm__ volatile("" : : "v"(read_memory<Load64>(data, bytes, streams)));
}

}  // namespace
}  // namespace kt
