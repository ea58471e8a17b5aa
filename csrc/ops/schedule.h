// How the work of a call is cut into tasks for the pool; no choice here changes a result.
#pragma once

#include "ops/call.h"
#include "ops/routing.h"
#include "threads/plan.h"

namespace kt {

// What a stage of a call does. Items are experts (entries of Routing::experts) unless said otherwise.
enum Step {
  kCheck,        // items: parts of what must be finite (finite.h)
  kPrepare,      // items: tokens, whose activations are quantized
  kWholeExpert,  // everything for an expert; items: entries of Routing::by_size
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

// What follows from the call and the number of threads alone: without kernels, and without the contents of weights.
// Blocks of weights are given to the node that holds them, in forward and backward.
Plan forward_plan(const ExpertLayer& layer, const Routing& routing, int num_threads, const ForwardWork& work);
Plan backward_plan(const ExpertLayer& layer, const Routing& routing, int num_threads, int64_t parts_to_check);

// The longest run of tokens whose per-pair rows stay within a budget; at least one. The budget grows with the layer, so
// that a large model's weights are not read again for every few tokens; it is large for small layers too, as weights in
// few bits take long to decode. The calling thread keeps the memory for the next call.
inline int64_t tokens_at_once(const ExpertLayer& layer, const RoutedCall& call, int64_t bytes_per_pair) {
  constexpr int64_t kLeast = int64_t{512} << 20, kMost = int64_t{1} << 30;
  const int64_t budget = std::clamp(layer.resident_bytes() / 4, kLeast, kMost);
  return std::max<int64_t>(1, budget / (std::max<int64_t>(1, call.ids.shape[1]) * bytes_per_pair));
}

// So few rows wait for their weights, which come at full speed only some thousand bytes after the start of a run of
// blocks: they want long runs. More rows want what they multiply to stay in a cache.
inline bool few_rows(int64_t rows) { return rows <= 16; }

}  // namespace kt
