// Reads the routed experts of one layer from a checkpoint, straight into the packed copy.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "weights/checkpoint.h"
#include "weights/packed.h"

namespace kt {

// `prefix` is for example "model.layers.3.mlp.experts". Accepts one tensor per expert and projection
// (prefix.E.gate_proj.weight ...) or the fused pair prefix.gate_up_proj [E, 2I, H] and prefix.down_proj [E, H, I].
// Only bfloat16, only finite values. Besides the packed copy it holds one matrix per thread.
Status load_layer(const Checkpoint& checkpoint, const std::string& prefix, ExpertShape shape, int num_threads,
                  std::shared_ptr<ExpertLayer>* layer);

}  // namespace kt
