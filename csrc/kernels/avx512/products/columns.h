// Operands of row-major products with AVX-512, and the totals of their sums, eight at a time.
#pragma once

#include "kernels/avx512/transpose.h"
#include "kernels/avx512/vector.h"
#include "kernels/generic/rows/dense_products.h"

namespace kt {
namespace {

// Lanes of each block of four of x and y.
template <int kOrder>
inline __m512 lanes_of(__m512 x, __m512 y) {
  return _mm512_maskz_shuffle_ps(0xffff, x, y, kOrder);
}

// Eight vectors at a time, each in the order of Vec16::sum.
inline __m256 sums_of_eight(const __m512* from) {
  __m512 half[4];  // 8 sums of an even vector, 8 of the next
  for (int i = 0; i < 4; ++i) {
    const __m512 x = from[2 * i], y = from[2 * i + 1];
    half[i] = _mm512_add_ps(blocks_of<0x44>(x, y), blocks_of<0xee>(x, y));
  }
  // Four vectors, 4 sums of each.
  const __m512 low = _mm512_add_ps(blocks_of<0x88>(half[0], half[1]), blocks_of<0xdd>(half[0], half[1]));
  const __m512 high = _mm512_add_ps(blocks_of<0x88>(half[2], half[3]), blocks_of<0xdd>(half[2], half[3]));
  // In block i: two sums of vector i, two of vector 4 + i; then one of each.
  const __m512 pairs = _mm512_add_ps(lanes_of<0x44>(low, high), lanes_of<0xee>(low, high));
  const __m512 all = _mm512_add_ps(lanes_of<0x88>(pairs, pairs), lanes_of<0xdd>(pairs, pairs));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
  return half_of<0>(_mm512_maskz_permutexvar_ps(0xffff, order, all));
}

template <class XType, class WType>
struct Columns16 : WideColumns<Vec16, XType, WType> {
  static void totals(const __m512* sums, int count, float* to) {
    int i = 0;
    for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, sums_of_eight(sums + i));
    for (; i < count; ++i) to[i] = Vec16::sum(sums[i]);
  }
};

}  // namespace
}  // namespace kt
