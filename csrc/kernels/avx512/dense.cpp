// Row-major products and RMSNorm with AVX-512. bf16: vdpbf16ps on 32 columns of a row of each matrix, as they lie.
//
// Register tile 8 x 3: 24 sums, three operands of w, one of x. Per step 24 vdpbf16ps (or fma) and 11 loads. One row
// takes 8 columns at a time, which are eight streams from memory.
#include "kernels/dense.h"

#include "kernels/avx512/vector.h"
#include "kernels/generic/dense_products.h"
#include "kernels/generic/norm_rows.h"

namespace kt {
namespace {

struct Tile {
  static constexpr int kRows = 8, kSums = 24, kCols = 8;
};

// Four vectors at a time, each in the order of Vec16::sum.
inline __m128 sums_of_four(const __m512* from) {
  __m256 eight[4];
  for (int i = 0; i < 4; ++i) eight[i] = _mm256_add_ps(half_of<0>(from[i]), half_of<1>(from[i]));
  const auto quarters = [](__m256 x, __m256 y) {
    return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
  };
  const __m256 low = quarters(eight[0], eight[1]), high = quarters(eight[2], eight[3]);
  // In each half: two sums of an even vector, two of the vector two places on.
  const __m256 pairs = _mm256_add_ps(_mm256_shuffle_ps(low, high, 0x44), _mm256_shuffle_ps(low, high, 0xee));
  const __m256 all = _mm256_add_ps(_mm256_shuffle_ps(pairs, pairs, 0x88), _mm256_shuffle_ps(pairs, pairs, 0xdd));
  return _mm_unpacklo_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

template <class XType, class WType>
struct Columns16 : WideColumns<Vec16, XType, WType> {
  static void totals(const __m512* sums, int count, float* to) {
    int i = 0;
    for (; i + 4 <= count; i += 4) _mm_storeu_ps(to + i, sums_of_four(sums + i));
    for (; i < count; ++i) to[i] = Vec16::sum(sums[i]);
  }
};

struct PairColumns : Columns16<uint16_t, uint16_t> {
  using Sum = __m512;
  using Operand = __m512bh;
  static constexpr int kStep = 32;

  template <int>
  static Operand of_x(const uint16_t* from) {
    return (__m512bh)_mm512_loadu_si512(from);
  }
  template <int>
  static Operand of_w(const uint16_t* from) {
    return (__m512bh)_mm512_loadu_si512(from);
  }
  static Sum dot(Operand a, Operand b, Sum sum) { return _mm512_dpbf16_ps(sum, a, b); }
};

void multiply(const DenseProduct& p) { multiply_dense_of<Columns16, PairColumns, Tile>(p); }
void normalise(const NormRows& p) { normalise_rows(p); }

}  // namespace

const Dense avx512::kDense = {.isa = "avx512", .multiply = multiply, .normalise = normalise};

}  // namespace kt
