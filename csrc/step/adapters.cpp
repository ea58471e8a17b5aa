#include "step/adapters.h"

#include <algorithm>
#include <string>

namespace kt {
namespace {

// The use of an adapter by what is called `name`[index].
Status check_use(const Stack& stack, const char* name, size_t index, int64_t slot, int64_t rank, float scaling) {
  const auto fail = [&](const std::string& what) {
    return invalid_value(std::string(name) + "[" + std::to_string(index) + "]" + what);
  };
  if (stack.lora_slots == 0) return fail(" has an adapter; the step has no LoRA pool");
  if (slot < 0 || slot >= stack.lora_slots) {
    return fail(" has slot " + std::to_string(slot) + "; allowed: 0 to " + std::to_string(stack.lora_slots - 1));
  }
  if (rank < 1 || rank > stack.lora_rank) {
    return fail(" has rank " + std::to_string(rank) + "; allowed: 1 to " + std::to_string(stack.lora_rank));
  }
  if (!(scaling - scaling == 0.0f)) return fail(" has a scaling that is not a finite number");
  return {};
}

// Of each expert in a slot of the pool, rows [first, first + rows) and the first `cols` columns.
TensorView part_of(const TensorView& pool, int64_t slot, int64_t first, int64_t rows, int64_t cols) {
  TensorView part;
  part.data = pool.as<char>() + (slot * pool.strides[0] + first * pool.strides[2]) * dtype_bytes(pool.dtype);
  part.dtype = pool.dtype;
  part.ndim = 3;
  part.shape[0] = pool.shape[1];
  part.shape[1] = rows;
  part.shape[2] = cols;
  std::copy_n(pool.strides + 1, 3, part.strides);
  return part;
}

}  // namespace

Status check_adapters(const Stack& stack, const StepAdapters& adapters, int64_t tokens) {
  int64_t next = 0;
  for (size_t i = 0; i < adapters.rows.size(); ++i) {
    const LowRankRows& rows = adapters.rows[i];
    if (rows.first < next || rows.rows < 1 || rows.rows > tokens - rows.first) {
      return invalid_value("adapter_rows[" + std::to_string(i) + "] begins at token " + std::to_string(rows.first) +
                           " and has " + std::to_string(rows.rows) + "; there are " + std::to_string(tokens) +
                           " tokens, and the first " + std::to_string(next) + " are taken");
    }
    next = rows.first + rows.rows;
    KT_RETURN_IF_ERROR(check_use(stack, "adapter_rows", i, rows.slot, rows.rank, rows.scaling));
  }
  const auto uses = static_cast<int64_t>(adapters.experts.size());
  for (size_t i = 0; i < adapters.experts.size(); ++i) {
    const ExpertAdapter& use = adapters.experts[i];
    KT_RETURN_IF_ERROR(check_use(stack, "expert_adapters", i, use.slot, use.rank, use.scaling));
  }
  if (!adapters.token_slots.present()) {
    return uses == 0 ? Status() : invalid_value("token_slots is missing: there are expert_adapters");
  }
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t slot = adapters.token_slots.as<const int32_t>()[t * adapters.token_slots.strides[0]];
    if (slot >= -1 && slot < uses) continue;
    return invalid_value("token_slots[" + std::to_string(t) + "] is " + std::to_string(slot) + "; allowed: -1 to " +
                         std::to_string(uses - 1));
  }
  return {};
}

void AdapterWork::prepare(const Stack& stack, const StepAdapters& adapters, StepRows* rows) {
  adapters_ = &adapters;
  rows_.clear();
  int64_t highest = 0;
  for (LowRankRows some : adapters.rows) {
    highest = std::max(highest, some.rank);
    for (int64_t left = some.rows; left > 0; left -= some.rows, some.first += some.rows) {
      some.rows = std::min(left, kMostLowRankRows);
      rows_.push_back(some);
    }
  }
  if (rows_.empty()) return;
  const int64_t parts = std::max<int64_t>(LowRankPool::kMostParts, stack.heads);
  const TensorView low = rows->matrix(RowsOf::kLowRank, stack.dtype(), parts * highest);
  low_ = contiguous_view(low.data, low.dtype, {rows->tokens(), LowRankPool::kMostParts * highest});
  head_low_ = contiguous_view(low.data, low.dtype, {rows->tokens(), stack.heads, highest});
}

void AdapterWork::add(const DenseEngine& engine, const LowRankPool& pool, const TensorView& x,
                      const TensorView& out) const {
  if (pool.a.present()) add_low_rank(engine, x, pool, rows_, low_, out);
}

void AdapterWork::add_queries(const DenseEngine& engine, const LowRankPool& pool, const TensorView& x,
                              const TensorView& out) const {
  if (pool.a.present()) add_low_rank_queries(engine, x, pool, rows_, head_low_, out);
}

void AdapterWork::add_outputs(const DenseEngine& engine, const LowRankPool& pool, const TensorView& x,
                              const TensorView& out) const {
  if (pool.a.present()) add_low_rank_outputs(engine, x, pool, rows_, head_low_, out);
}

void AdapterWork::set_slots(const RoutedExperts& lora, RoutedCall* call) const {
  const bool is_adapted = lora.gate_up_a.present() && lora.down_a.present();
  call->slots.resize(is_adapted ? adapters_->experts.size() : 0);
  call->token_slots = call->slots.empty() ? TensorView{} : adapters_->token_slots;
  for (size_t i = 0; i < call->slots.size(); ++i) {
    const auto& [slot, rank, scaling] = adapters_->experts[i];
    const int64_t hidden = lora.gate_up_a.shape[3], intermediate = lora.down_a.shape[3];
    const int64_t highest = lora.down_a.shape[2];
    LoraSlot& set = call->slots[i];
    set.pairs[kGate] = {part_of(lora.gate_up_a, slot, 0, rank, hidden),
                        part_of(lora.gate_up_b, slot, 0, intermediate, rank)};
    set.pairs[kUp] = {part_of(lora.gate_up_a, slot, highest, rank, hidden),
                      part_of(lora.gate_up_b, slot, intermediate, intermediate, rank)};
    set.pairs[kDown] = {part_of(lora.down_a, slot, 0, rank, intermediate), part_of(lora.down_b, slot, 0, hidden, rank)};
    set.scaling = scaling;
  }
}

}  // namespace kt
