// SwiGLU (Shazeer 2020, arXiv:2002.05202) of dense MLPs and shared experts, for serving and training alike. An
// element's result depends on its own gate and up alone, and has the same bits on every instruction set.
#pragma once

#include "ops/dense/dense.h"

namespace kt {

// out[m, i] = silu(gate[m, i]) * up[m, i], computed in float32 and rounded once. All [M, I], of one dtype, float32 or
// bf16, with contiguous rows.
void silu_and_multiply(const DenseEngine& engine, const TensorView& gate, const TensorView& up, const TensorView& out);

}  // namespace kt
