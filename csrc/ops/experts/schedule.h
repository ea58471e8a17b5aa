// The Plan of a call (threads/plan.h): how its work is split into tasks. No choice here changes a result.
#pragma once

#include "ops/pairs/call.h"
#include "ops/pairs/routing.h"
#include "threads/plan.h"

namespace kt {

// The operation of a stage. Items are experts (entries of Routing::experts) unless stated otherwise.
enum Step {
  kCheck,        // items: parts of the search for NaN and Inf (finite.h)
  kPrepare,      // items: tokens, whose activations are quantized
  kWholeExpert,  // all operations of one expert; items: entries of Routing::by_size
  kLoad,
  kGateUp,              // units: blocks of gate and up
  kFinish,              // h is complete
  kDownForward,         // units: blocks of down
  kSum,                 // items: tokens, whose pairs are added up
  kDownBackward,        // units: columns of down, kColumnsInTask each
  kActivationBackward,  // of an expert, when dh is complete
  kInputBackward,       // units: columns of gate and up
};

inline constexpr int64_t kColumnsInTask = 64;

struct ForwardWork {
  int64_t parts_to_check = 0;
  bool quantized = false;  // activations are int8
  bool with_out = true;    // else only what a backward pass needs
};

// A plan depends only on the call and the number of threads, not on kernels or values of weights. In forward and
// backward, a block of weights is assigned to the node that holds the block.
Plan forward_plan(const ExpertLayer& layer, const Routing& routing, int num_threads, const ForwardWork& work);
Plan backward_plan(const ExpertLayer& layer, const Routing& routing, int num_threads, int64_t parts_to_check);

// The longest run of tokens whose per-pair rows fit a budget; at least one. The budget grows with the layer, so that a
// large model's weights are not read again for every few tokens. Small layers have a large budget too, because weights
// in few bits take long to decode. The calling thread keeps the memory for its next call.
inline int64_t tokens_at_once(const ExpertLayer& layer, const RoutedCall& call, int64_t bytes_per_pair) {
  constexpr int64_t kLeast = int64_t{512} << 20, kMost = int64_t{1} << 30;
  const int64_t budget = std::clamp(layer.resident_bytes() / 4, kLeast, kMost);
  return std::max<int64_t>(1, budget / (std::max<int64_t>(1, call.ids.shape[1]) * bytes_per_pair));
}

// True for products that are bound by memory. Reads reach full speed only some thousand bytes after the start of a run
// of blocks, so few rows take long runs. Many rows take short runs, so that the weights stay in a cache.
inline bool few_rows(int64_t rows) { return rows <= 16; }

}  // namespace kt
