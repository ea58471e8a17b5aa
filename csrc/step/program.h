// The native step: one call computes the whole decoder stack for a batch, from token ids to normalised hidden states.
//
// It runs the operations of csrc/ops in the order of SGLang's modules, each with the rounding that serving's and
// training's single operations have, so the results have the same bits. A token's result depends on its own id, its
// position, its adapter, and the keys before it only.
#pragma once

#include <cstdint>
#include <vector>

#include "base/memory.h"
#include "base/scratch.h"
#include "base/status.h"
#include "ops/attention.h"
#include "ops/dense.h"
#include "step/adapters.h"
#include "step/stack.h"

namespace kt {

// T new tokens of some sequences, sequence by sequence.
struct StepBatch {
  TensorView ids, positions;          // [T] int64
  TensorView slots;                   // [T] int64: slots of the KV pool that take the new tokens' keys and values
  std::vector<KvSequence> sequences;  // keys of the new tokens included
  StepAdapters adapters;
};

// Not thread-safe: scratch for the largest batch of recent steps belongs to the program. As other scratch, it is freed
// after two to three windows of steps (base/scratch.h) that needed less than half of it.
class Program {
 public:
  Program(Stack stack, const Tiles& tiles, int num_threads);

  // out [T, H]: hidden states after the final norm. Appends to `refused` the tokens whose activations or routing
  // weights were NaN or Inf in some layer: such a token skips that layer's experts, as if they had returned zeros. In a
  // batch with an adapter also those whose keys or values were: zeros are written to their slots. An id, position,
  // slot, length or adapter out of range is an error; nothing has been written then.
  Status run(const StepBatch& batch, const TensorView& out, std::vector<int64_t>* refused);

  DType dtype() const { return stack_.dtype(); }
  int64_t hidden() const { return stack_.hidden(); }
  int64_t scratch_bytes() const;
  void free_scratch();

 private:
  struct Rows;

  Status check(const StepBatch& batch) const;
  void embed(const StepBatch& batch, const TensorView& to) const;
  AttentionTensors tensors_of(const StackLayer& layer, const Rows& rows) const;
  void attend(const StackLayer& layer, const StepBatch& batch, const Rows& rows);
  void run_attention(const StackLayer& layer, const Rows& rows);
  void place_heads(const StackLayer& layer, const StepBatch& batch, const Rows& rows);
  Status run_experts(const StackLayer& layer, const Rows& rows);
  void mask_rows(const Rows& rows);
  Rows reserve(int64_t tokens);
  void free_unneeded(int64_t tokens);

  const Stack stack_;
  const Tiles& tiles_;
  const DenseEngine engine_;
  const AttentionEngine attention_engine_;
  AttentionWork attention_;  // of the batch
  AdapterWork adapters_;     // of the batch
  RoutedCall routed_;        // of a layer; its slots keep their memory
  std::vector<AlignedBuffer> buffers_;
  AlignedBuffer attention_parts_;
  RecentNeed need_;  // of tokens, by step
  size_t room_ = 0;  // most tokens since the buffers were made
  int64_t steps_ = 0;
  std::vector<uint8_t> is_refused_;  // by token of the batch
};

}  // namespace kt
