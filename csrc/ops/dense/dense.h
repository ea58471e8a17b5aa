// Linear layers and RMSNorm on row-major matrices (kernels/dense.h), cut between the pool's threads.
//
// Serving and training call the same functions. A row's result depends on its own row of x, on the weights and on the
// instruction set, not on the other rows, on how rows are cut into calls, or on the number of threads. A row with NaN
// or Inf has a result like any product's; the other rows do not change.
#pragma once

#include "base/views.h"
#include "kernels/dense.h"

namespace kt {

inline RowMajor matrix_of(const TensorView& view) {
  if (!view.present()) return {};
  return {.data = view.data, .stride = view.strides[0], .bf16 = view.dtype == DType::kBf16};
}

// With what a call computes.
struct DenseEngine {
  const Tiles& tiles;
  int num_threads;

  const Dense& kernels() const { return *tiles.dense; }
};

// out [M, N] = x [M, K] times the transpose of weight [N, K], plus bias [N] if present. x, weight and bias: float32 or
// bf16; out: any of both, rounded once. Last dimensions are contiguous. Shapes fit (checked in bind).
void linear(const DenseEngine& engine, const TensorView& x, const TensorView& weight, const TensorView& bias,
            const TensorView& out);

// A product on the calling thread alone, which is in an operation (OperationScope). `first_row` is 0.
void multiply_here(const DenseEngine& engine, DenseProduct product);

// out [M, K] = RMSNorm of x [M, K], or of x + residual, which is written to `total`. `inverse` [M], if present:
// 1 / rms in float32. All others have one dtype, float32 or bf16. `total` may be `residual` itself. `offset`: the
// weight is an offset from one.
struct NormViews {
  TensorView x, residual, weight, out, total, inverse;
  float epsilon;
  bool offset = false;
};
void rms_norm(const DenseEngine& engine, const NormViews& views);

}  // namespace kt
