// Linear layers whose matrix is packed (weights/packed.h), with the products of the routed experts.
//
// The arithmetic is chosen by x as for experts (kernels/tiles.h): float32 rows are multiplied by weights that are
// decoded to float32 in registers. Rows of bf16 are quantized to int8, each group of columns with a scale of its own;
// sums within a group are exact integers. A row's result depends on its own row of x, on the matrix and on the
// instruction set alone. A row with NaN or Inf has no finite result; the other rows do not change.
#pragma once

#include "ops/dense/dense.h"
#include "weights/packed.h"

namespace kt {

// out [M, N] = x [M, K] times the transpose of the matrix [N, K], plus bias [N] if present. x and bias: float32 or
// bf16; out: any of both. Sums are float32 and include the bias; the result is rounded once.
void linear(const DenseEngine& engine, const TensorView& x, const PackedMatrix& matrix, const TensorView& bias,
            const TensorView& out);

// The gradient of `linear` for x, without the rounding of x to int8: by_x [M, K] = by_out [M, N] times the matrix, of
// one dtype. Sums are float32, over the rows of the matrix in ascending order, and rounded once.
void linear_backward(const DenseEngine& engine, const TensorView& by_out, const PackedMatrix& matrix,
                     const TensorView& by_x);

}  // namespace kt
