// A linear layer of its own for each head: the two products of absorbed latent attention (MLA) with the halves of
// `kv_b_proj` (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
//
// The kernels are those of `linear` (ops/dense/dense.h), so the bits are too: a result depends on its own token and
// head, on the weights and on the instruction set.
#pragma once

#include "ops/dense/dense.h"

namespace kt {

// out[t, n] [O] = x[t, n] [K] times the transpose of weight[n] [O, K]: x [T, N, K], weight [N, O, K], out [T, N, O].
// Each is float32 or bf16; out is rounded once. Last dimensions are contiguous. Shapes fit (checked in bind).
void linear_heads(const DenseEngine& engine, const TensorView& x, const TensorView& weight, const TensorView& out);

}  // namespace kt
