#include "ops/pairs/routing.h"

#include <algorithm>
#include <span>

#include "base/scratch.h"
#include "ops/pairs/finite.h"

namespace kt {
int64_t id_at(const TensorView& ids, int64_t token, int64_t position) {
  const int64_t at = token * ids.strides[0] + position;
  return ids.dtype == DType::kI32 ? ids.as<int32_t>()[at] : ids.as<int64_t>()[at];
}

int64_t slot_at(const RoutedCall& call, int64_t token) {
  return call.token_slots.present() ? call.token_slots.as<int32_t>()[token * call.token_slots.strides[0]] : -1;
}

Status check_call(const ExpertShape& shape, const RoutedCall& call) {
  for (int64_t token = 0; token < call.ids.shape[0]; ++token) {
    for (int64_t position = 0; position < call.ids.shape[1]; ++position) {
      const int64_t id = id_at(call.ids, token, position);
      if (id >= -1 && id < shape.num_experts) continue;
      return invalid_value("ids[" + std::to_string(token) + ", " + std::to_string(position) + "] is " +
                           std::to_string(id) + "; allowed: 0 to " + std::to_string(shape.num_experts - 1) +
                           ", or -1 for not routed");
    }
  }
  const int64_t num_slots = static_cast<int64_t>(call.slots.size());
  for (int64_t token = 0; call.token_slots.present() && token < call.token_slots.shape[0]; ++token) {
    const int64_t slot = slot_at(call, token);
    if (slot >= -1 && slot < num_slots) continue;
    return invalid_value(
        "token_slots[" + std::to_string(token) + "] is " + std::to_string(slot) + "; allowed: -1 for the base" +
        (num_slots ? ", or 0 to " + std::to_string(num_slots - 1) : std::string(" only: the call has no slots")));
  }
  return check_finite(call.weights, "weights");
}

void route(const ExpertShape& shape, const RoutedCall& call, int64_t first_token, int64_t num_tokens,
           Routing* routing) {
  struct Item {
    int64_t slot, flat;
  };
  static thread_local Scratch offset_memory, next_memory, items_memory;
  const int64_t top_k = call.ids.shape[1];
  routing->token.clear();
  routing->weight.clear();
  routing->experts.clear();
  routing->by_size.clear();
  routing->groups.clear();
  routing->first_group.clear();
  routing->most_pairs = 0;
  routing->first_token = first_token;
  routing->num_tokens = num_tokens;
  routing->top_k = top_k;
  routing->pair_of.assign(static_cast<size_t>(num_tokens * top_k), -1);

  const std::span offset(offset_memory.reserve<int64_t>(shape.num_experts + 1),
                         static_cast<size_t>(shape.num_experts) + 1);
  std::fill(offset.begin(), offset.end(), 0);
  for (int64_t flat = 0; flat < num_tokens * top_k; ++flat) {
    const int64_t id = id_at(call.ids, first_token + flat / top_k, flat % top_k);
    if (id >= 0) ++offset[static_cast<size_t>(id) + 1];
  }
  for (size_t e = 1; e < offset.size(); ++e) offset[e] += offset[e - 1];
  const std::span items(items_memory.reserve<Item>(offset.back()), static_cast<size_t>(offset.back()));
  int64_t* const next = next_memory.reserve<int64_t>(shape.num_experts);
  std::copy(offset.begin(), offset.end() - 1, next);
  for (int64_t flat = 0; flat < num_tokens * top_k; ++flat) {
    const int64_t token = first_token + flat / top_k, id = id_at(call.ids, token, flat % top_k);
    if (id < 0) continue;
    items[static_cast<size_t>(next[id]++)] = {slot_at(call, token), flat};
  }

  for (int64_t expert = 0; expert < shape.num_experts; ++expert) {
    const int64_t begin = offset[static_cast<size_t>(expert)], end = offset[static_cast<size_t>(expert) + 1];
    if (begin == end) continue;
    if (!call.slots.empty()) {
      std::sort(items.begin() + begin, items.begin() + end,
                [](const Item& a, const Item& b) { return a.slot != b.slot ? a.slot < b.slot : a.flat < b.flat; });
    }
    routing->by_size.push_back(static_cast<int64_t>(routing->experts.size()));
    routing->experts.push_back({expert, -1, begin, end});
    routing->most_pairs = std::max(routing->most_pairs, end - begin);
    routing->first_group.push_back(static_cast<int64_t>(routing->groups.size()));
    for (int64_t pair = begin; pair < end; ++pair) {
      const Item& item = items[static_cast<size_t>(pair)];
      if (item.slot < 0) continue;
      if (pair == begin || items[static_cast<size_t>(pair) - 1].slot != item.slot) {
        routing->groups.push_back({expert, item.slot, pair, pair});
      }
      routing->groups.back().end = pair + 1;
    }
  }
  routing->first_group.push_back(static_cast<int64_t>(routing->groups.size()));
  std::sort(routing->by_size.begin(), routing->by_size.end(), [&](int64_t a, int64_t b) {
    const int64_t more =
        routing->experts[static_cast<size_t>(a)].size() - routing->experts[static_cast<size_t>(b)].size();
    return more != 0 ? more > 0 : a < b;
  });

  for (size_t pair = 0; pair < items.size(); ++pair) {
    const int64_t flat = items[pair].flat, token = first_token + flat / top_k;
    routing->pair_of[static_cast<size_t>(flat)] = static_cast<int64_t>(pair);
    routing->token.push_back(token);
    routing->weight.push_back(call.weights.as<float>()[token * call.weights.strides[0] + flat % top_k]);
  }
}

}  // namespace kt
