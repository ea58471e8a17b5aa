// A layer's routed experts over ranks, each of which has as many of them, in their order, as the others.
//
// One process adds up a token's experts in the order in which the router has chosen them. Partial sums of ranks would
// be added in another order. So ranks exchange the experts' outputs in float32, without routing weights, and then do
// what one process does. Few tokens: every rank gets all outputs and sums all columns. Many tokens, or ranks on several
// machines: a rank gets and sums its own columns, and the ranks exchange the sums.
#pragma once

#include <vector>

#include "base/memory.h"
#include "ops/pairs/call.h"
#include "ranks/exchange.h"

namespace kt {

// Kept from call to call.
struct SharedExpertsWork {
  RoutedCall own{};                     // a pair of token and expert of this rank as a token
  std::vector<int64_t> counts{};        // pairs of each rank
  std::vector<int64_t> row_of{};        // of a token's position: its row among the outputs of all ranks; -1: not routed
  std::vector<int64_t> pairs{};         // of this rank, as token * K + position
  std::vector<int32_t> ids{}, slots{};  // of `own`
  std::vector<float> weights{};
  AlignedBuffer x, own_rows, rows;
};

// As `forward` (ops/experts/forward.h), with the bits of one process. `engine.layer` has this rank's experts, `call`
// the ids of all and slots with this rank's experts; all else is equal on all ranks, `out` too. kNumerics, for NaN or
// Inf in x or the routing weights, comes from all ranks, before anything is exchanged.
Status forward_over_ranks(const Engine& engine, Exchange& exchange, const RoutedCall& call, const TensorView& out,
                          SharedExpertsWork* work);

}  // namespace kt
