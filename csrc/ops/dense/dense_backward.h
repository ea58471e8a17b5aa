// The gradient of a linear layer for its input (ops/dense/dense.h), from the row-major weight as it lies.
#pragma once

#include "ops/dense/dense.h"

namespace kt {

// by_x [M, K] = by_out [M, N] times weight [N, K], summed in float32 over the rows of weight in ascending order and
// rounded once. All have one dtype, float32 or bf16, and contiguous rows. A row's result depends on its own row of
// by_out, on the weight and on the instruction set, not on the number of threads.
void linear_backward(const DenseEngine& engine, const TensorView& by_out, const TensorView& weight,
                     const TensorView& by_x);

}  // namespace kt
