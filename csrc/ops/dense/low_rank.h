// LoRA's products on dense layers (Hu et al. 2021, arXiv:2106.09685), forward and backward, for serving and training
// alike. The routed experts' are in ops/experts/lora.
#pragma once

#include <vector>

#include "ops/dense/dense.h"

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

// The adapters of a linear layer, by slot: a [slots, parts * R, K], b [slots, N, R], contiguous. The columns of the
// layer's result are `parts` linear layers after each other, such as queries, keys and values; part p ends before
// column ends[p]. An adapter of rank r has r rows of a for each part, one part after the other, and the first r columns
// of b.
struct LowRankPool {
  static constexpr int kMostParts = 3;

  TensorView a, b;
  int parts = 1;
  int64_t ends[kMostParts] = {};
};

// Rows [first, first + rows) of a batch have the adapter in `slot`, of this rank.
struct LowRankRows {
  int64_t first, rows;
  int64_t slot, rank;
  float scaling;
};
inline constexpr int64_t kMostLowRankRows = 64;

// Adds scaling * x A^T B^T to each of the given rows of out [T, N]; other rows do not change. x [T, K]. Each of `rows`
// has at most kMostLowRankRows, a slot and a rank of the pool. low [T, parts * the highest rank of `rows`] receives
// scaling * x A^T. All have one dtype and contiguous rows; x, low and out do not overlap. For each part the bits are
// those of two calls of `linear_added`: low, of A and scaling; then out, of B and 1, with itself as base.
void add_low_rank(const DenseEngine& engine, const TensorView& x, const LowRankPool& pool,
                  const std::vector<LowRankRows>& rows, const TensorView& low, const TensorView& out);

// LoRA on `kv_b_proj` of latent attention (MLA) in absorbed order; kt_runtime/ops/mla.py states the formula and its
// roundings. `pool` has one part: a [slots, R, latent], b [slots, N (key + value), R]. Of each head's rows of b, the
// first `key` belong to the query and the others to the output. Of `rows` and low [T, N, the highest rank of `rows`]
// the same holds as above. The first two dimensions of each tensor are at one distance each; its rows are contiguous.
//
// out [T, N, latent] += scaling * (x [T, N, key] b_key) a
void add_low_rank_queries(const DenseEngine& engine, const TensorView& x, const LowRankPool& pool,
                          const std::vector<LowRankRows>& rows, const TensorView& low, const TensorView& out);
// out [T, N, value] += scaling * (x [T, N, latent] a^T) b_value^T
void add_low_rank_outputs(const DenseEngine& engine, const TensorView& x, const LowRankPool& pool,
                          const std::vector<LowRankRows>& rows, const TensorView& low, const TensorView& out);

}  // namespace kt
