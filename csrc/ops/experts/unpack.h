// Experts of a layer as plain matrices, for a device that computes them: all threads, each with blocks of its own
// memory node.
#pragma once

#include "ops/pairs/call.h"
#include "threads/plan.h"

namespace kt {

// Experts [first, first + count) of the layer.
struct ExpertRange {
  int64_t first, count;
};

// `gate_up` [count, 2I, H]: the rows of gate, then those of up; `down` [count, H, I]. Contiguous bf16. A bf16 weight
// is itself, another one its float32 value rounded once.
struct UnpackedExperts {
  TensorView gate_up, down;
};

// Two stages, gate and up, then down; items are the matrices, units their blocks.
Plan unpacking_plan(const ExpertLayer& layer, ExpertRange experts, int num_threads);

void unpack(const Engine& engine, ExpertRange experts, const UnpackedExperts& out);

}  // namespace kt
