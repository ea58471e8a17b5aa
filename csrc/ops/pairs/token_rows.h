// The rows of a call's tensors, one a token: reading one as float32, and summing up a token's pairs into one.
// `combine_rows` sums up pairs of several processes, each of which has computed those of its own experts.
#pragma once

#include "base/rows.h"
#include "ops/pairs/call.h"
#include "ops/pairs/routing.h"

namespace kt {

// values [cols of the matrix]: row `token` of a float32 or bf16 matrix, as float32.
void widen_row(const Tiles& tiles, const TensorView& matrix, int64_t token, float* values);

// Row `token` (of the routing's tokens) of `out`, float32 or bf16: the sum over the token's positions, in their order,
// of factor * rows[pair]; the factor is the routing weight if `weighted`, else 1.
void combine_pairs(const Tiles& tiles, const Routing& routing, Rows<const float> rows, bool weighted, int64_t token,
                   const TensorView& out);

// Outputs of pairs, without their routing weights.
struct PairRows {
  TensorView rows;     // [P, C] float32
  TensorView row_of;   // [T, K] int64: the row of a token's position, of no other; -1: not routed
  TensorView weights;  // [T, K] float32
};

// out [T, C] float32 or bf16: the sums of combine_pairs, with the same bits. Refuses rows outside [-1, P).
Status combine_rows(const Tiles& tiles, int num_threads, const PairRows& call, const TensorView& out);

}  // namespace kt
