// The rows of a call's tensors, one a token: reading one as float32, and summing up a token's pairs into one.
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

}  // namespace kt
