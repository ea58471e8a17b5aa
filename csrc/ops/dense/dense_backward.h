// The gradient of a linear layer for its input (ops/dense/dense.h), from the row-major weight as it lies.
#pragma once

#include "ops/dense/dense.h"

namespace kt {

// by_x [M, K] = by_out [M, N] times weight [N, K], summed in float32 over the rows of weight in ascending order and
// rounded once. All have one dtype, float32 or bf16, and contiguous rows. A row's result depends on its own row of
// by_out, on the weight and on the instruction set, not on the number of threads.
void linear_backward(const DenseEngine& engine, const TensorView& by_out, const TensorView& weight,
                     const TensorView& by_x);

// The gradient of a linear layer of its own for each head (ops/dense/heads.h): by_out [T, N, O], weight [N, O, K], by_x
// [T, N, K]. A head's result has the bits of `linear_backward` with its weight.
void linear_heads_backward(const DenseEngine& engine, const TensorView& by_out, const TensorView& weight,
                           const TensorView& by_x);

}  // namespace kt
