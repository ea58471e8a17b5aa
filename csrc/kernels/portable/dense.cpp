// Row-major products and operations on rows for any processor. Register tile: 2 x 3 vectors of sums.
#include "kernels/dense.h"

#include "kernels/generic/rows/delta_rows.h"
#include "kernels/generic/rows/dense_products.h"
#include "kernels/generic/rows/norm_rows.h"
#include "kernels/generic/rows/rotary_rows.h"
#include "kernels/generic/rows/router_rows.h"
#include "kernels/portable/vector.h"

namespace kt {
namespace {

struct Tile {
  static constexpr int kRows = 2, kSums = 6, kCols = 4, kFewRows = 2;
};

template <class X, class W>
using Columns = WideColumns<Vec4, X, W>;

void multiply(const DenseProduct& p) { multiply_dense_of<Columns, EvenOddColumns<Vec4>, Tile>(p); }
void normalise(const NormRows& p) { normalise_rows(p); }
void rotate(const RotaryRows& p) { rotate_rows(p); }
void choose_experts(const RouterRows& p) { choose_for_rows(p); }
using StateColumns = float __attribute__((vector_size(16)));
void delta_rule(const DeltaRule& p) { delta_forward<StateColumns>(p); }
void delta_rule_backward(const DeltaGradient& g) { delta_backward<StateColumns>(g); }

}  // namespace

const Dense portable::kDense = {.multiply = multiply,
                                .normalise = normalise,
                                .rotate = rotate,
                                .choose_experts = choose_experts,
                                .delta_rule = delta_rule,
                                .delta_rule_backward = delta_rule_backward};

}  // namespace kt
