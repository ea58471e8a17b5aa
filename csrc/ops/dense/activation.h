// SwiGLU (Shazeer 2020, arXiv:2002.05202) of dense MLPs and shared experts, for serving and training alike. An
// element's result depends on its own gate and up alone, and has the same bits on every instruction set.
#pragma once

#include "ops/dense/dense.h"

namespace kt {

// out[m, i] = silu(gate[m, i]) * up[m, i], computed in float32 and rounded once. All [M, I], of one dtype, float32 or
// bf16, with contiguous rows.
void silu_and_multiply(const DenseEngine& engine, const TensorView& gate, const TensorView& up, const TensorView& out);

// With s = sigmoid(gate): by_up = by_out * gate * s and by_gate = by_out * up * s * (1 + gate * (1 - s)), in float32,
// each rounded once. All have the shape and dtype of gate, and contiguous rows.
struct SwigluGradient {
  TensorView by_out, gate, up, by_gate, by_up;
};
void silu_and_multiply_backward(const DenseEngine& engine, const SwigluGradient& gradient);

// out[m, i] = sigmoid(gate[m, i / (I / G)]) * x[m, i]: of a row, each of G gates multiplies I / G adjacent elements. In
// float32, rounded once. gate [M, G]; x, out [M, I]; all of one dtype, float32 or bf16, with contiguous rows.
void sigmoid_and_multiply(const DenseEngine& engine, const TensorView& gate, const TensorView& x,
                          const TensorView& out);

// With s = sigmoid(gate): by_x = by_out * s; by_gate = s * (1 - s) * the sum of by_out * x over the gate's elements.
struct SigmoidGradient {
  TensorView by_out, gate, x, by_gate, by_x;
};
void sigmoid_and_multiply_backward(const DenseEngine& engine, const SigmoidGradient& gradient);

}  // namespace kt
