// Row-major products and operations on rows with AVX-512. bf16: vdpbf16ps on 32 columns of a row of each matrix, as
// they lie.
//
// Register tile 8 x 3: 24 sums, three operands of w, one of x. Per step 24 vdpbf16ps (or fma) and 11 loads. One row
// takes 8 columns at a time, which are eight streams from memory. Up to 12 rows read w once (12 x 2); a tile 16 x 1
// was slower than two of 8 x 3, whose second one finds w in the L2 cache. Short sums of many rows: short_sums.h.
#include "kernels/dense.h"

#include "kernels/avx512/short_sums.h"
#include "kernels/avx512/transpose.h"
#include "kernels/avx512/vector.h"
#include "kernels/generic/rows/dense_products.h"
#include "kernels/generic/rows/norm_rows.h"
#include "kernels/generic/rows/rotary_rows.h"
#include "kernels/generic/rows/router_rows.h"

namespace kt {
namespace {

struct Tile {
  static constexpr int kRows = 8, kSums = 24, kCols = 8, kFewRows = 12;
};

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
  static void pad(const uint16_t* from, int64_t count, uint16_t* to) { pad_pairs(from, count, to); }
};

void multiply(const DenseProduct& p) {
  if (p.rows > Tile::kFewRows && is_short(p)) return multiply_short(p);
  multiply_dense_of<Columns16, PairColumns, Tile>(p);
}
void normalise(const NormRows& p) { normalise_rows(p); }
void rotate(const RotaryRows& p) { rotate_rows(p); }
void choose_experts(const RouterRows& p) { choose_for_rows(p); }

}  // namespace

const Dense avx512::kDense = {
    .multiply = multiply, .normalise = normalise, .rotate = rotate, .choose_experts = choose_experts};

}  // namespace kt
