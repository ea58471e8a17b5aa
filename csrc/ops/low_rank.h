// LoRA's products on dense layers (Hu et al. 2021, arXiv:2106.09685), forward and backward, for serving and training
// alike. The routed experts' are in ops/lora.
#pragma once

#include "ops/dense.h"

namespace kt {

// out [M, N] = base [M, N] + alpha * x [M, K] times the transpose of weight [N, K], without base if it is absent. The
// product (with the bits of `linear`), the one with alpha and the sum are float32, each rounded; out is rounded once.
// All are float32 or bf16 with contiguous rows. `out` may be `base`. A row's result depends on its own rows alone.
void linear_added(const DenseEngine& engine, const TensorView& x, const TensorView& weight, float alpha,
                  const TensorView& base, const TensorView& out);

// out [R, N] = alpha * a [M, R] transposed times b [M, N]: the gradient of a LoRA matrix. a and b are float32 or bf16
// with contiguous rows, out is float32 and contiguous. Sums are float32, over the rows in ascending order, so the bits
// do not depend on the number of threads.
void inner_product(const DenseEngine& engine, const TensorView& a, const TensorView& b, float alpha,
                   const TensorView& out);

}  // namespace kt
