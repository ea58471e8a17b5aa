#include "step/program.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "ops/attention/chunked.h"
#include "ops/router/indexer.h"
#include "step/attention.h"
#include "step/mlp.h"
#include "threads/pool.h"

namespace kt {
namespace {

// Each of `integers` is in [0, end).
Status check_all(const char* name, const TensorView& integers, int64_t end) {
  for (int64_t i = 0; i < integers.shape[0]; ++i) {
    const int64_t value = integer_at(integers, i);
    if (value >= 0 && value < end) continue;
    return invalid_value(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(value) +
                         "; allowed: 0 to " + std::to_string(end - 1));
  }
  return {};
}

}  // namespace

Program::Program(Stack stack, const Tiles& tiles, int num_threads)
    : stack_(std::move(stack)),
      attention_engine_{*tiles.attention, num_threads},
      work_{.stack = stack_, .engine = {tiles, num_threads}} {}

Status Program::check(const StepBatch& batch) const {
  KT_RETURN_IF_ERROR(check_all("ids", batch.ids, stack_.num_ids()));
  KT_RETURN_IF_ERROR(check_all("positions", batch.positions, stack_.angles.shape[0]));
  KT_RETURN_IF_ERROR(check_all("slots", batch.slots, stack_.keys().shape[0]));
  const int64_t tokens = batch.ids.shape[0];
  KT_RETURN_IF_ERROR(check_adapters(stack_, batch.adapters, tokens));
  int64_t queries = 0;
  for (const KvSequence& sequence : batch.sequences) queries += sequence.queries;
  if (queries != tokens) {
    return invalid_value("the sequences have " + std::to_string(queries) + " new tokens; there are " +
                         std::to_string(tokens) + " ids");
  }
  KT_RETURN_IF_ERROR(check_sequences(batch.sequences.data(), static_cast<int64_t>(batch.sequences.size()), tokens,
                                     stack_.keys().shape[0]));
  return check_states(batch);
}

Status Program::check_states(const StepBatch& batch) const {
  const GatedDelta* delta = stack_.delta();
  if (!delta && batch.states.present())
    return invalid_value("states is given; the step has no layers that keep states");
  if (!delta || batch.sequences.empty()) return {};
  if (!batch.states.present()) return invalid_value("states is missing: the step has layers that keep states");
  if (batch.states.shape[0] != static_cast<int64_t>(batch.sequences.size())) {
    return invalid_value("states has " + std::to_string(batch.states.shape[0]) + " slots; there are " +
                         std::to_string(batch.sequences.size()) + " sequences");
  }
  KT_RETURN_IF_ERROR(check_all("states", batch.states, delta->kept.states.shape[0]));
  static thread_local std::vector<int64_t> sorted;
  sorted.clear();
  for (int64_t i = 0; i < batch.states.shape[0]; ++i) sorted.push_back(integer_at(batch.states, i));
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice == sorted.end()) return {};
  return invalid_value("states has slot " + std::to_string(*twice) + " twice: a sequence has a state of its own");
}

void Program::prepare(const StepBatch& batch) {
  const int64_t tokens = batch.ids.shape[0];
  work_.batch = &batch;
  if (work_.rows.begin(tokens)) work_.free_lists();
  work_.adapters.prepare(stack_, batch.adapters, &work_.rows);
  work_.is_refused.assign(static_cast<size_t>(tokens), 0);
  prepare_states(batch);
  const auto& attention = stack_.attending()->attention;
  const auto* grouped = std::get_if<GroupedQuery>(&attention);
  const AttentionTensors tensors =
      grouped ? attention_tensors(work_, *grouped) : attention_tensors(work_, std::get<Latent>(attention));
  work_.attention.prepare(attention_engine_, tensors, batch.sequences.data(),
                          static_cast<int64_t>(batch.sequences.size()));
  prepare_choices(batch, tensors);
  work_.chunks.clear();
  if (stack_.chunk == 0 || !cut_at_chunks(batch.sequences, stack_.chunk, &work_.chunks)) return;
  work_.in_chunks.prepare(attention_engine_, tensors, work_.chunks.data(), static_cast<int64_t>(work_.chunks.size()));
}

void Program::prepare_states(const StepBatch& batch) {
  work_.states.clear();
  for (size_t i = 0; batch.states.present() && i < batch.sequences.size(); ++i) {
    const KvSequence& sequence = batch.sequences[i];
    work_.states.push_back({.first = sequence.first_query,
                            .tokens = sequence.queries,
                            .slot = integer_at(batch.states, static_cast<int64_t>(i)),
                            .continues = sequence.prefix > 0});
  }
}

void Program::prepare_choices(const StepBatch& batch, const AttentionTensors& tensors) {
  work_.choices.clear();
  const int64_t top_k = stack_.top_keys();
  if (top_k == 0 || !needs_selection(batch.sequences, top_k)) return;
  work_.chosen = work_.rows.reserve<int32_t>(RowsOf::kChosen, batch.ids.shape[0] * top_k);
  cut_at_chosen(batch.sequences, work_.chosen, top_k, &work_.choices);
  work_.among_chosen.prepare(attention_engine_, tensors, work_.choices.data(),
                             static_cast<int64_t>(work_.choices.size()));
}

Status Program::embed(const TensorView& to) {
  if (stack_.exchange) return embed_over_ranks(to);
  const auto bytes = static_cast<size_t>(stack_.hidden() * dtype_bytes(stack_.dtype()));
  for (int64_t t = 0; t < to.shape[0]; ++t)
    std::memcpy(element_of(to, t), element_of(stack_.embedding, integer_at(work_.batch->ids, t)), bytes);
  return {};
}

// Each rank sends the rows of its own ids, in the tokens' order.
Status Program::embed_over_ranks(const TensorView& to) {
  Exchange& exchange = *stack_.exchange;
  const auto bytes = static_cast<size_t>(stack_.hidden() * dtype_bytes(stack_.dtype()));
  const auto owner_of = [&](int64_t t) {
    return static_cast<size_t>(integer_at(work_.batch->ids, t) / stack_.ids_per_rank);
  };
  std::vector<int64_t> counts(static_cast<size_t>(exchange.num_ranks()), 0);
  for (int64_t t = 0; t < to.shape[0]; ++t) ++counts[owner_of(t)];
  const auto rank = static_cast<size_t>(exchange.rank());
  TensorView own = work_.rows.matrix(RowsOf::kOwnEmbedded, stack_.dtype(), stack_.hidden());
  own.shape[0] = 0;
  for (int64_t t = 0; t < to.shape[0]; ++t) {
    if (owner_of(t) != rank) continue;
    const int64_t row = integer_at(work_.batch->ids, t) - exchange.rank() * stack_.ids_per_rank;
    std::memcpy(element_of(own, own.shape[0]++), element_of(stack_.embedding, row), bytes);
  }
  const TensorView all = work_.rows.matrix(RowsOf::kEmbedded, stack_.dtype(), stack_.hidden());
  KT_RETURN_IF_ERROR(exchange.gather_rows(own, counts, all));
  std::vector<int64_t> next(counts.size(), 0);  // row of each rank's next token
  for (size_t i = 1; i < next.size(); ++i) next[i] = next[i - 1] + counts[i - 1];
  for (int64_t t = 0; t < to.shape[0]; ++t) std::memcpy(element_of(to, t), element_of(all, next[owner_of(t)]++), bytes);
  return {};
}

Status Program::run_layers(const TensorView& out) {
  const auto made = [&](RowsOf name) { return work_.rows.matrix(name, stack_.dtype(), stack_.hidden()); };
  const TensorView hidden = made(RowsOf::kHidden), residual = made(RowsOf::kResidual), normed = made(RowsOf::kNormed);
  KT_RETURN_IF_ERROR(embed(residual));
  for (const StackLayer& layer : stack_.layers) {
    if (&layer == &stack_.layers[0]) {
      work_.normalise(residual, layer.input_norm, normed);
    } else {
      work_.normalise(hidden, layer.input_norm, normed, residual);
    }
    KT_RETURN_IF_ERROR(
        std::visit([&](const auto& attention) { return attend(work_, attention, normed, hidden); }, layer.attention));
    work_.normalise(hidden, layer.post_norm, normed, residual);
    KT_RETURN_IF_ERROR(run_mlp(work_, layer, normed, hidden));
  }
  work_.normalise(hidden, stack_.final_norm, out, residual);
  return {};
}

Status Program::run(const StepBatch& batch, const TensorView& out, std::vector<int64_t>* refused) {
  KT_RETURN_IF_ERROR(check(batch));
  if (batch.ids.shape[0] == 0) return {};
  const ThreadPool::Awake awake;
  prepare(batch);
  if (const Status status = run_layers(out); !status.ok()) {
    if (stack_.exchange) stack_.exchange->give_up();
    return status;
  }
  for (int64_t t = 0; t < batch.ids.shape[0]; ++t) {
    if (work_.is_refused[static_cast<size_t>(t)]) refused->push_back(t);
  }
  return {};
}

}  // namespace kt
