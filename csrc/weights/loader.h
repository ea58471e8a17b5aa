// Reads the routed experts of one layer from a checkpoint, straight into the packed copy.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "threads/plan.h"
#include "weights/checkpoint/checkpoint.h"
#include "weights/packed.h"
#include "weights/scheme.h"

namespace kt {

struct LoadOptions {
  int num_threads = 1;
  int num_nodes = 1;   // memory nodes that the matrices are cut for
  std::string format;  // "int8" or "int4": quantize a bf16 or fp8 checkpoint while loading; empty: as it is stored
  // The layer's experts are [first_expert, first_expert + num_experts) of the table's; num_experts 0: all of them.
  int64_t first_expert = 0, num_experts = 0;
};

// One stage, whose items are the matrices (expert by expert: gate, up, down) and whose units are the nodes' pieces of a
// matrix. A thread of its node packs a piece, and therefore touches the piece's pages first.
Plan loading_plan(int64_t num_experts, const LoadOptions& options);

// `prefix` is for example "model.layers.3.mlp.experts", in a GGUF file "blk.3" (gguf_layer.h). The checkpoint
// determines the format, the table what the experts compute (scheme.h). Names, types and shapes of all tensors are
// checked before one is read, values while reading. Besides the packed copy at most one matrix per thread is held.
Status load_layer(const Checkpoint& checkpoint, const std::string& prefix, const ExpertTable& table,
                  const LoadOptions& options, std::shared_ptr<ExpertLayer>* layer);

}  // namespace kt
