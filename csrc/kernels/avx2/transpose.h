// Rows out of packed lines: 8 x 8 transposes of column pairs. Shared by AVX2 and AVX-512 (not arithmetic-bound).
#pragma once

#include <immintrin.h>

#include "kernels/layout.h"

namespace kt {
namespace {

// in[r] holds pair r of rows 0..7; out[r] holds pairs 0..7 of row r.
inline void transpose_8x8(const __m256i in[8], __m256i out[8]) {
  __m256i half[8], quad[8];
  for (int i = 0; i < 8; i += 2) {
    half[i] = _mm256_unpacklo_epi32(in[i], in[i + 1]);
    half[i + 1] = _mm256_unpackhi_epi32(in[i], in[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    quad[i] = _mm256_unpacklo_epi64(half[i], half[i + 2]);
    quad[i + 1] = _mm256_unpackhi_epi64(half[i], half[i + 2]);
    quad[i + 2] = _mm256_unpacklo_epi64(half[i + 1], half[i + 3]);
    quad[i + 3] = _mm256_unpackhi_epi64(half[i + 1], half[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm256_permute2x128_si256(quad[i], quad[i + 4], 0x20);
    out[i + 4] = _mm256_permute2x128_si256(quad[i], quad[i + 4], 0x31);
  }
}

inline void store_widened(__m256i sixteen_bf16, float* to) {
  const __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(sixteen_bf16));
  const __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(sixteen_bf16, 1));
  _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_slli_epi32(low, 16)));
  _mm256_storeu_ps(to + 8, _mm256_castsi256_ps(_mm256_slli_epi32(high, 16)));
}

void unpack_rows_avx2(const uint16_t* block, int64_t first_pair, int64_t num_pairs, float* out, int64_t ld) {
  for (int64_t pair = 0; pair < num_pairs; pair += 8) {
    for (int half = 0; half < 2; ++half) {
      const uint16_t* lines = block + (first_pair + pair) * kLine + half * 16;
      __m256i in[8], rows[8];
      for (int i = 0; i < 8; ++i) in[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lines + i * kLine));
      transpose_8x8(in, rows);
      for (int i = 0; i < 8; ++i) store_widened(rows[i], out + (half * 8 + i) * ld + 2 * pair);
    }
  }
}

}  // namespace
}  // namespace kt
