// Row-major products and operations on rows with AVX-512 without a bf16 dot product. Register tile 8 x 3: 24 sums,
// three operands of w, one of x; bf16 is widened in registers.
#include "kernels/dense.h"

#include "kernels/avx512/products/columns.h"
#include "kernels/generic/rows/delta_rows.h"
#include "kernels/generic/rows/norm_rows.h"
#include "kernels/generic/rows/rotary_rows.h"
#include "kernels/generic/rows/router_rows.h"

namespace kt {
namespace {

struct Tile {
  static constexpr int kRows = 8, kSums = 24, kCols = 8, kFewRows = 12;
};

void multiply(const DenseProduct& p) { multiply_dense_of<Columns16, EvenOddColumns<Vec16>, Tile>(p); }
void normalise(const NormRows& p) { normalise_rows(p); }
void rotate(const RotaryRows& p) { rotate_rows(p); }
void choose_experts(const RouterRows& p) { choose_for_rows(p); }
using StateColumns = float __attribute__((vector_size(64)));
void delta_rule(const DeltaRule& p) { delta_forward<StateColumns>(p); }
void delta_rule_backward(const DeltaGradient& g) { delta_backward<StateColumns>(g); }

}  // namespace

const Dense avx512_base::kDense = {.multiply = multiply,
                                   .normalise = normalise,
                                   .rotate = rotate,
                                   .choose_experts = choose_experts,
                                   .delta_rule = delta_rule,
                                   .delta_rule_backward = delta_rule_backward};

}  // namespace kt
