// How the work of a call is cut into tasks for the pool; no choice here changes a result.
#pragma once

#include <algorithm>

#include "ops/call.h"
#include "ops/routing.h"
#include "threads/pool.h"

namespace kt {

// Below this many multiply-adds, waking other threads takes longer than the work.
inline constexpr int64_t kAloneBelow = 1 << 20;

inline int threads_for(const Engine& engine, const Routing& routing) {
  const ExpertShape& shape = engine.layer.shape();
  return routing.num_pairs() * shape.hidden * shape.intermediate * 3 < kAloneBelow ? 1 : engine.num_threads;
}

// With many experts for each thread, one task does everything for an expert: its intermediates stay in that core's
// cache, and there is nothing to wait for. Else the matrices of an expert are cut between threads, and on several
// memory nodes always, so that each node reads its own weights.
inline bool expert_tasks(const Engine& engine, const Routing& routing, int num_threads) {
  constexpr int64_t kExpertsPerThread = 16;
  return num_threads == 1 || (engine.layer.num_nodes() == 1 &&
                              static_cast<int64_t>(routing.experts.size()) >= kExpertsPerThread * num_threads);
}

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

// Ranges of a projection's blocks, node by node: the tasks of one phase, where experts are cut between threads.
class BlockRanges {
 public:
  BlockRanges(const ExpertLayer& layer, Projection part, const Routing& routing, int num_threads)
      : layer_(layer), part_(part), at_once_(blocks_at_once(layer, part, routing, num_threads)) {
    for (int node = 0; node < layer.num_nodes(); ++node) {
      ranges_[node] = (layer.piece(0, part, node).blocks.blocks + at_once_ - 1) / at_once_;
      num_tasks_[node] = ranges_[node] * static_cast<int64_t>(routing.experts.size());
    }
  }
  const int64_t* num_tasks() const { return num_tasks_; }

  // body(expert index, first block, blocks)
  template <class Body>
  void visit(int node, int64_t task, Body&& body) const {
    const auto piece = layer_.piece(0, part_, node);
    const int64_t first = (task % ranges_[node]) * at_once_;
    body(task / ranges_[node], piece.first + first, std::min(at_once_, piece.blocks.blocks - first));
  }

 private:
  // Equal shares in fours, as kernels take them; enough tasks for each thread that one which comes late matters little.
  static int64_t blocks_at_once(const ExpertLayer& layer, Projection part, const Routing& routing, int num_threads) {
    constexpr int64_t kUnit = 4, kMost = 64, kTasksPerThread = 8;
    if (routing.experts.empty() || !few_rows(routing.typical_pairs())) return kUnit;
    const int64_t blocks = layer.shape_of(part).blocks(), piece = (blocks + layer.num_nodes() - 1) / layer.num_nodes();
    const int64_t all = blocks * static_cast<int64_t>(routing.experts.size());
    const int64_t wanted = std::clamp(all / (num_threads * kTasksPerThread), kUnit, kMost);
    const int64_t ranges = (piece + wanted - 1) / wanted;
    return round_up((piece + ranges - 1) / ranges, kUnit);
  }

  const ExpertLayer& layer_;
  const Projection part_;
  const int64_t at_once_;
  int64_t ranges_[kMaxNodes] = {}, num_tasks_[kMaxNodes] = {};
};

}  // namespace kt
