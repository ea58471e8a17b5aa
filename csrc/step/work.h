// What the layers of a step share: the batch, memory, and how they multiply, norm and attend.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/attention/attention.h"
#include "ops/delta/gated_delta.h"
#include "ops/dense/dense.h"
#include "ops/pairs/call.h"
#include "ops/ranks/shared_experts.h"
#include "step/adapters.h"
#include "step/rows.h"
#include "step/stack.h"

namespace kt {

// T new tokens of some sequences, sequence by sequence.
struct StepBatch {
  TensorView ids, positions;          // [T] int64
  TensorView slots;                   // [T] int64: slots of the KV pool that take the new tokens' keys and values
  std::vector<KvSequence> sequences;  // keys of the new tokens included
  TensorView states;                  // [B] int64: of each sequence the slot of its state; absent without such layers
  StepAdapters adapters;
  TensorView routes;  // [M, T, top_k] int32, of the M layers with routed experts: takes the ids; may be absent
};

// Tokens of a task that works on one token after another.
inline constexpr int64_t kTokensAtOnce = 8;

inline constexpr int64_t kWidenedAtOnce = 512;  // elements of a row

// Kept from step to step, so that it allocates only while batches grow.
struct StepWork {
  const Stack& stack;
  const DenseEngine engine;
  const StepBatch* batch = nullptr;
  StepRows rows{};
  AdapterWork adapters{};
  AttentionWork attention{};         // all layers share its tasks,
  AttentionWork in_chunks{};         // and all chunked layers these
  std::vector<KvSequence> chunks{};  // the batch's sequences, cut at the ends of chunks; empty: none is longer than one
  AttentionWork among_chosen{};      // and all layers with an indexer these
  std::vector<KvSequence> choices{};  // the batch's sequences, cut where queries choose keys; empty: none has to choose
  int32_t* chosen = nullptr;          // [T, top_k]: of such queries the rows of the keys that the latest indexer chose
  std::vector<DeltaSequence> states{};  // the batch's sequences, for Gated DeltaNet layers
  RoutedCall routed{};                  // of a layer; its slots keep their memory
  SharedExpertsWork shared{};           // of a layer over ranks
  std::vector<uint8_t> is_refused{};    // by token of the batch

  // Frees what is kept, and of it all but the rows.
  void free();
  void free_lists();

  // out [T, out] = x [T, in] times the layer's weight, with its bias and the parts of the batch's adapters.
  void multiply(const StackLinear& layer, const TensorView& x, const TensorView& out) const;
  // The columns of a matrix that this rank computes: with one rank, all.
  TensorView own_columns(const TensorView& matrix) const;
  // `multiply` for a layer whose rows ranks share: each computes its columns of out, and gets those of the others.
  Status multiply_shared(const StackLinear& layer, const TensorView& x, const TensorView& out) const;
  // Each rank has computed its own columns, and gets those of the others.
  Status gather(const TensorView& matrix) const;
  // out = RMSNorm of x. With a residual: residual += x, then out = RMSNorm of the residual. Each [T, cols]; out may be
  // x.
  void normalise(const TensorView& x, const TensorView& weight, const TensorView& out,
                 const TensorView& residual = {}) const;
  // Queries against the pool, into `tensors.out`; `is_chunked`: against the keys of their own chunks.
  void attend(const AttentionTensors& tensors, bool is_chunked = false);
  // Against the keys that the latest indexer chose.
  void attend_chosen(const AttentionTensors& tensors);
  // out[row] = factor * x[row] in float32, rounded once; out may be x.
  void scale_row(const TensorView& x, int64_t row, float factor, const TensorView& out) const;

  // x in float32; a later call overwrites it.
  TensorView widened(const TensorView& x);

  // In a batch with an adapter zeros take the place of new keys or values with NaN or Inf, and the token is refused
  // (sglang_patch/faults/finite_rows.py).
  void refuse_unless_finite(void* keys, int64_t count, int64_t token);

  // The cosines and sines of a token, and its row of a layer's keys or values in the pool.
  const void* angles_of(int64_t token) const { return element_of(stack.angles, integer_at(batch->positions, token)); }
  void* slot_of(const TensorView& pool, int64_t token) const {
    return element_of(pool, integer_at(batch->slots, token));
  }

 private:
  void attend_with(const AttentionWork& work, const AttentionTensors& tensors);
};

}  // namespace kt
