// The native step: one call computes the whole decoder stack for a batch, from token ids to normalised hidden states.
//
// It runs the operations of csrc/ops in the order of SGLang's modules, each with the rounding that serving's and
// training's single operations have, so the results have the same bits. A token's result depends on its own id, its
// position, its adapter, and the keys before it only.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "step/work.h"

namespace kt {

// Not thread-safe: memory for the largest batch of recent steps belongs to the program (step/rows.h).
class Program {
 public:
  Program(Stack stack, const Tiles& tiles, int num_threads);
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // out [T, H]: hidden states after the final norm. Appends to `refused` the tokens whose activations or routing
  // weights were NaN or Inf in some layer: such a token skips that layer's experts, as if they had returned zeros. In a
  // batch with an adapter also those whose keys or values were: zeros are written to their slots. An id, position,
  // slot, state, length or adapter out of range is an error; nothing has been written then. The routes of a refused
  // token have -1 in such a layer. A sequence without keys before its new tokens begins with a state of zeros.
  // With ranks all run the same batches, each with its own slots' tensors; tokens are refused for keys or values by the
  // rank that has them. After any other error than those no rank can run another batch.
  Status run(const StepBatch& batch, const TensorView& out, std::vector<int64_t>* refused);

  DType dtype() const { return stack_.dtype(); }
  int64_t hidden() const { return stack_.hidden(); }
  int64_t top_k() const { return stack_.top_k; }
  int64_t routed_layers() const { return stack_.routed_layers(); }
  int64_t scratch_bytes() const { return work_.rows.bytes(); }
  void free_scratch() { work_.free(); }

 private:
  Status check(const StepBatch& batch) const;
  Status check_states(const StepBatch& batch) const;
  void prepare(const StepBatch& batch);
  void prepare_states(const StepBatch& batch);
  void prepare_choices(const StepBatch& batch, const AttentionTensors& tensors);
  Status embed(const TensorView& to);
  Status embed_over_ranks(const TensorView& to);
  Status run_layers(const TensorView& out);

  const Stack stack_;
  const AttentionEngine attention_engine_;
  StepWork work_;
};

}  // namespace kt
