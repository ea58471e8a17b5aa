// Row-major products and operations on rows with AVX2. Register tile 4 x 3: 12 sums, three operands of w, one of x. Per
// step of a bf16 product 24 fma, 14 loads and 14 shifts or masks: about 0.8 of two fma a cycle.
#include "kernels/dense.h"

#include "kernels/avx2/vector.h"
#include "kernels/generic/rows/delta_rows.h"
#include "kernels/generic/rows/dense_products.h"
#include "kernels/generic/rows/norm_rows.h"
#include "kernels/generic/rows/rotary_rows.h"
#include "kernels/generic/rows/router_rows.h"

namespace kt {
namespace {

struct Tile {
  static constexpr int kRows = 4, kSums = 12, kCols = 4, kFewRows = 4;
};

template <class X, class W>
using Columns = WideColumns<Vec8, X, W>;

void multiply(const DenseProduct& p) { multiply_dense_of<Columns, EvenOddColumns<Vec8>, Tile>(p); }
void normalise(const NormRows& p) { normalise_rows(p); }
void rotate(const RotaryRows& p) { rotate_rows(p); }
void choose_experts(const RouterRows& p) { choose_for_rows(p); }
using StateColumns = float __attribute__((vector_size(32)));
void delta_rule(const DeltaRule& p) { delta_forward<StateColumns>(p); }
void delta_rule_backward(const DeltaGradient& g) { delta_backward<StateColumns>(g); }

}  // namespace

const Dense avx2::kDense = {.multiply = multiply,
                            .normalise = normalise,
                            .rotate = rotate,
                            .choose_experts = choose_experts,
                            .delta_rule = delta_rule,
                            .delta_rule_backward = delta_rule_backward};

}  // namespace kt
