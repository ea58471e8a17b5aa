// Rotary embedding of queries and keys (Su et al. 2021, arXiv:2104.09864). The native step calls the same kernel on
// each token's heads (step/grouped_query.cpp, step/latent.cpp).
#pragma once

#include "ops/dense/dense.h"

namespace kt {

// out [T, N, D] = x [T, N, D] with the first R elements of each head rotated by the angles of the token's position, as
// kernels/dense.h (RotaryRows) states; the elements from R on are copied. `angles` [P, R]: cosines, then sines.
// `positions` [T] int64, each 0 to P - 1 (checked in bind). `inverse`: rotated by the negative angles, which is the
// gradient for x of a gradient for out. x, angles and out have one dtype, float32 or bf16.
struct Rotation {
  TensorView x, angles, positions, out;
  bool interleaved = false, inverse = false;
};
void rotate(const DenseEngine& engine, const Rotation& rotation);

}  // namespace kt
