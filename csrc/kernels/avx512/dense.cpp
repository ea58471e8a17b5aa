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

// Eight vectors at a time, each in the order of Vec16::sum.
inline __m256 sums_of_eight(const __m512* from) {
  const auto halves = [](__m512 x, __m512 y) {  // 8 sums of x, 8 of y
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
  };
  const auto quarters = [](__m512 x, __m512 y) {  // four vectors, 4 sums of each
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  };
  const __m512 low = quarters(halves(from[0], from[1]), halves(from[2], from[3]));
  const __m512 high = quarters(halves(from[4], from[5]), halves(from[6], from[7]));
  // In block i: two sums of vector i, two of vector 4 + i; then one of each.
  const __m512 pairs = _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x44), _mm512_shuffle_ps(low, high, 0xee));
  const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(pairs, pairs, 0x88), _mm512_shuffle_ps(pairs, pairs, 0xdd));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
  return _mm512_castps512_ps256(_mm512_permutexvar_ps(order, all));
}

template <class XType, class WType>
struct Columns16 : WideColumns<Vec16, XType, WType> {
  static void totals(const __m512* sums, int count, float* to) {
    int i = 0;
    for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, sums_of_eight(sums + i));
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
