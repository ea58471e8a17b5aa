// The gradient of RMSNorm (ops/dense/dense.h) with a frozen weight.
#pragma once

#include "ops/dense/dense.h"

namespace kt {

// With r = inverse[m], n = r * x[m], and g = by_out[m] * weight: by_x[m] = r * (g - n * mean(g * n)), in float32,
// rounded once. by_out, x and by_x [M, K] and weight [K] have one dtype, float32 or bf16; inverse [M] float32 is
// contiguous. A row's result depends on the row alone, and has the same bits on every instruction set.
struct NormGradient {
  TensorView by_out, x, weight, inverse, by_x;
};
void rms_norm_backward(const DenseEngine& engine, const NormGradient& gradient);

}  // namespace kt
