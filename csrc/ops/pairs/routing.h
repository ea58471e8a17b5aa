// Groups the (token, position) pairs of a batch by expert, and within an expert by adapter slot.
#pragma once

#include <cstdint>
#include <vector>

#include "base/scratch.h"
#include "base/status.h"
#include "ops/pairs/call.h"

namespace kt {

struct PairRange {
  int64_t expert;
  int64_t slot;  // -1: the base, or the range covers all slots
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// Pairs in the order expert, slot, token, position. Every per-pair array of a call is in this order.
struct Routing {
  int64_t first_token = 0, num_tokens = 0, top_k = 0;
  std::vector<int64_t> token;        // of each pair
  std::vector<float> weight;         // of each pair
  std::vector<int64_t> pair_of;      // [num_tokens, top_k] -> pair, or -1
  std::vector<PairRange> experts;    // one per expert with pairs, in the order of their numbers
  std::vector<int64_t> by_size;      // indices into `experts`, most pairs first
  std::vector<PairRange> groups;     // one per expert and slot (>= 0) with pairs: the LoRA work
  std::vector<int64_t> first_group;  // index into `groups` of each entry of `experts`, plus an end

  int64_t most_pairs = 0;  // of one expert

  size_t held_bytes() const { return held_bytes_of(token, weight, pair_of, experts, by_size, groups, first_group); }
  size_t needed_bytes() const { return needed_bytes_of(token, weight, pair_of, experts, by_size, groups, first_group); }
  int64_t num_pairs() const { return static_cast<int64_t>(token.size()); }
  // Pairs of the median expert. Requires at least one expert.
  int64_t typical_pairs() const { return experts[static_cast<size_t>(by_size[by_size.size() / 2])].size(); }
};

// body(group, row) for the groups of experts[index]; `row`: the group's first pair, counted from the expert's first.
template <class Body>
void for_each_group(const Routing& routing, int64_t index, Body&& body) {
  const auto at = static_cast<size_t>(index);
  for (int64_t g = routing.first_group[at]; g < routing.first_group[at + 1]; ++g) {
    const PairRange& group = routing.groups[static_cast<size_t>(g)];
    body(group, group.begin - routing.experts[at].begin);
  }
}

int64_t id_at(const TensorView& ids, int64_t token, int64_t position);
// -1 where the call has no token_slots.
int64_t slot_at(const RoutedCall& call, int64_t token);

// Fills `routing` and reuses the memory of its vectors.
void route(const ExpertShape& shape, const RoutedCall& call, int64_t first_token, int64_t num_tokens, Routing* routing);

// Refuses ids outside [-1, E), slots outside [-1, S), and NaN or Inf among routing weights. finite.h checks x.
Status check_call(const ExpertShape& shape, const RoutedCall& call);

}  // namespace kt
