// Activations of a forward call that its backward needs, so that it does not have to compute them again.
#pragma once

#include <vector>

#include "base/memory.h"
#include "ops/routing.h"

namespace kt {

// One run of tokens of a call. Per pair: gate and up before the activation function [pairs, ld], and scaling * A x of
// each projection [pairs, rank] (rank: the largest of all slots and projections).
struct RetainedChunk {
  Routing routing;
  AlignedBuffer gate, up, low[kNumProjections];
  int64_t rank = 0;

  void reserve(const ExpertLayer& layer, const RoutedCall& call);
  float* gate_rows() const { return static_cast<float*>(gate.data()); }
  float* up_rows() const { return static_cast<float*>(up.data()); }
  float* low_rows(Projection part) const { return static_cast<float*>(low[part].data()); }
};

// The memory is kept for the next calls, as much as was in use at once, until `free_spare`: the kernel clears fresh
// pages, which takes as long as a third of a forward pass.
struct Retained {
  Retained() = default;
  ~Retained();
  Retained(const Retained&) = delete;
  Retained& operator=(const Retained&) = delete;

  static void free_spare();
  RetainedChunk& add_chunk();
  int64_t bytes() const;
  std::vector<RetainedChunk> chunks;
};

}  // namespace kt
