// LoRA in a step: the adapters of a batch, in the engine's pool (stack.h), which is read in place.
#pragma once

#include <vector>

#include "base/status.h"
#include "ops/dense/low_rank.h"
#include "ops/pairs/call.h"
#include "step/rows.h"
#include "step/stack.h"

namespace kt {

// An adapter of routed experts: its slot in the pool, its rank, its factor.
struct ExpertAdapter {
  int64_t slot, rank;
  float scaling;
};

// Which tokens of a batch have which adapter. Tokens in none of `rows` have none on dense layers.
struct StepAdapters {
  std::vector<LowRankRows> rows;       // in ascending order, of any number
  std::vector<ExpertAdapter> experts;  // each once
  TensorView token_slots;              // [T] int32: indices into `experts`, or -1; may be absent without `experts`
};

// An error for rows outside of the batch or out of order, for a slot or rank that the pool does not have, for a factor
// that is not finite, and for an index outside of `experts`.
Status check_adapters(const Stack& stack, const StepAdapters& adapters, int64_t tokens);

// What all layers of a step share. Kept and prepared again for each batch, it allocates only while batches grow.
class AdapterWork {
 public:
  // `adapters` have been checked, and stay valid until the batch's last layer. The products are kept in `rows`.
  void prepare(const Stack& stack, const StepAdapters& adapters, StepRows* rows);

  // Whether no token of the batch has an adapter.
  bool is_empty() const { return adapters_->rows.empty() && adapters_->experts.empty(); }
  // out [T, N] += the adapters' part of a dense layer of x [T, K].
  void add(const DenseEngine& engine, const LowRankPool& pool, const TensorView& x, const TensorView& out) const;
  // The same for the heads of latent attention (ops/dense/low_rank.h): queries and outputs.
  void add_queries(const DenseEngine& engine, const LowRankPool& pool, const TensorView& x,
                   const TensorView& out) const;
  void add_outputs(const DenseEngine& engine, const LowRankPool& pool, const TensorView& x,
                   const TensorView& out) const;
  // Sets the LoRA of a call on a layer's routed experts.
  void set_slots(const RoutedExperts& experts, RoutedCall* call) const;

 private:
  const StepAdapters* adapters_ = nullptr;
  std::vector<LowRankRows> rows_;  // cut to kMostLowRankRows
  TensorView low_;                 // [T, parts * the highest rank]
  TensorView head_low_;            // [T, N, the highest rank], in the same memory
};

}  // namespace kt
