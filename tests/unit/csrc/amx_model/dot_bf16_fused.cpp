// TDPBF16PS with the processor's own fused multiply-add. Compiled once, with the library's optimization: of an inline
// function the linker might keep the copy of a test, which is compiled with less.
#if defined(__x86_64__)
#include <immintrin.h>

#include "tile_model.h"

namespace kt_test::tile_model::detail {

namespace {

struct Lanes {
  __m256 left, right;
};

// Two rows of c at a time: the additions of one wait for nothing of the other. `low` and `high`: the rows of b, even
// and odd members of its pairs as float32.
template <int kRowsAtOnce>
__attribute__((always_inline, target("avx2,fma"))) inline void dot_rows_fused(TileState* s, int c, int a, int m,
                                                                              int pairs, const Lanes* low,
                                                                              const Lanes* high) {
  Lanes even[kRowsAtOnce], odd[kRowsAtOnce];
  for (int r = 0; r < kRowsAtOnce; ++r) {
    even[r] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    odd[r] = even[r];
  }
  for (int k = 0; k < pairs; ++k) {
    for (int r = 0; r < kRowsAtOnce; ++r) {
      uint32_t x;
      std::memcpy(&x, s->data[a][m + r] + 4 * k, sizeof x);
      const __m256 x_low = _mm256_set1_ps(from_bits(x << 16)), x_high = _mm256_set1_ps(from_bits(x & 0xffff0000u));
      even[r] = {_mm256_fmadd_ps(x_low, low[k].left, even[r].left),
                 _mm256_fmadd_ps(x_low, low[k].right, even[r].right)};
      odd[r] = {_mm256_fmadd_ps(x_high, high[k].left, odd[r].left),
                _mm256_fmadd_ps(x_high, high[k].right, odd[r].right)};
    }
  }
  for (int r = 0; r < kRowsAtOnce; ++r) {
    auto* total = reinterpret_cast<float*>(s->data[c][m + r]);
    const __m256 left = _mm256_add_ps(even[r].left, odd[r].left), right = _mm256_add_ps(even[r].right, odd[r].right);
    _mm256_storeu_ps(total, _mm256_add_ps(_mm256_loadu_ps(total), left));
    _mm256_storeu_ps(total + 8, _mm256_add_ps(_mm256_loadu_ps(total + 8), right));
  }
}

}  // namespace

__attribute__((target("avx2,fma"))) void dot_bf16_fused(TileState* s, int c, int a, int b) {
  const int rows = s->rows[c], pairs = s->rows[b];
  Lanes low[kRows], high[kRows];
  const __m256i upper_half = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const auto* from = reinterpret_cast<const __m256i*>(s->data[b]);
  for (int k = 0; k < pairs; ++k) {
    const __m256i left = _mm256_load_si256(from + 2 * k), right = _mm256_load_si256(from + 2 * k + 1);
    low[k] = {_mm256_castsi256_ps(_mm256_slli_epi32(left, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(right, 16))};
    high[k] = {_mm256_castsi256_ps(_mm256_and_si256(left, upper_half)),
               _mm256_castsi256_ps(_mm256_and_si256(right, upper_half))};
  }
  int m = 0;
  for (; m + 2 <= rows; m += 2) dot_rows_fused<2>(s, c, a, m, pairs, low, high);
  if (m < rows) dot_rows_fused<1>(s, c, a, m, pairs, low, high);
  _mm256_zeroupper();  // a compiler adds it where it optimizes; SSE instructions are slow without
}

}  // namespace kt_test::tile_model::detail
#endif
