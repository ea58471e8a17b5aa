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

struct PairColumns : WideColumns<Vec16, uint16_t, uint16_t> {
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

void multiply(const DenseProduct& p) { multiply_dense_of<Vec16, PairColumns, Tile>(p); }
void normalise(const NormRows& p) { normalise_rows(p); }

}  // namespace

const Dense avx512::kDense = {.isa = "avx512", .multiply = multiply, .normalise = normalise};

}  // namespace kt
