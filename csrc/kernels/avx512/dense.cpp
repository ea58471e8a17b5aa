// Row-major products and operations on rows with AVX-512. bf16: vdpbf16ps on 32 columns of a row of each matrix, as
// they lie.
//
// Register tile 8 x 3: 24 sums, three operands of w, one of x. Per step 24 vdpbf16ps (or fma) and 11 loads. One row
// takes 8 columns at a time, which are eight streams from memory. Up to 12 rows read w once (12 x 2); a tile 16 x 1
// was slower than two of 8 x 3, whose second one finds w in the L2 cache. Short sums of many rows: short_sums.h.
#include "kernels/dense.h"

#include "kernels/avx512/products/columns.h"
#include "kernels/avx512/short_sums.h"
#include "kernels/generic/rows/delta_rows.h"
#include "kernels/generic/rows/norm_rows.h"
#include "kernels/generic/rows/rotary_rows.h"
#include "kernels/generic/rows/router_rows.h"

namespace kt {
namespace {

struct Tile {
  static constexpr int kRows = 8, kSums = 24, kCols = 8, kFewRows = 12;
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
using StateColumns = float __attribute__((vector_size(64)));
void delta_rule(const DeltaRule& p) { delta_forward<StateColumns>(p); }
void delta_rule_backward(const DeltaGradient& g) { delta_backward<StateColumns>(g); }

}  // namespace

const Dense avx512::kDense = {.multiply = multiply,
                              .normalise = normalise,
                              .rotate = rotate,
                              .choose_experts = choose_experts,
                              .delta_rule = delta_rule,
                              .delta_rule_backward = delta_rule_backward};

}  // namespace kt
