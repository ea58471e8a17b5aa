// Batches for the tests of the step: sequences with their slots and adapters, cut into runs of a program.
#pragma once

#include "step/program.h"
#include "step_model.h"

namespace kt_test {

// A prompt and its answer, the slots of their keys and of its state, and the row of its first token among those of all
// sequences.
struct Sequence {
  std::vector<int64_t> ids;
  int64_t adapter;
  std::vector<int32_t> slots;
  int64_t first_row;
  int64_t state = 0;

  int64_t tokens() const { return static_cast<int64_t>(ids.size()); }
};

inline void draw_slots(std::vector<Sequence>& sequences, unsigned seed) {
  std::vector<int32_t> free(kKvSlots);
  std::iota(free.begin(), free.end(), 0);
  std::mt19937 engine(seed);
  std::shuffle(free.begin(), free.end(), engine);
  for (Sequence& sequence : sequences) {
    sequence.slots.assign(free.end() - sequence.tokens(), free.end());
    free.resize(free.size() - sequence.slots.size());
  }
  std::vector<int64_t> states(kStates);
  std::iota(states.begin(), states.end(), 0);
  std::shuffle(states.begin(), states.end(), engine);
  for (size_t i = 0; i < sequences.size(); ++i) sequences[i].state = states[i];
}

// Of these lengths and adapters, in drawn slots.
inline std::vector<Sequence> drawn_sequences(const std::vector<std::pair<int64_t, int64_t>>& lengths, Random& random) {
  std::vector<Sequence> sequences;
  int64_t row = 0;
  for (const auto& [length, adapter] : lengths) {
    sequences.push_back({{}, adapter, {}, row, 0});
    for (int64_t t = 0; t < length; ++t) sequences.back().ids.push_back(random.below(kNanId));
    row += length;
  }
  draw_slots(sequences, 7);
  return sequences;
}

inline int64_t count_tokens(const std::vector<Sequence>& sequences) {
  return sequences.back().first_row + sequences.back().tokens();
}

// The next counts[i] tokens of sequence i, of which done[i] are in the KV pool.
struct Batch {
  // `order`: of the sequences in the batch; empty: as they are. `moved_by`: Model::moved_by. `has_states`: of a hybrid.
  Batch(const std::vector<Sequence>& all, const std::vector<int64_t>& done, const std::vector<int64_t>& counts,
        std::vector<size_t> order, int64_t moved_by, bool has_states)
      : moved_by_(moved_by), has_states_(has_states) {
    if (order.empty()) {
      order.resize(all.size());
      std::iota(order.begin(), order.end(), size_t{0});
    }
    for (const size_t i : order) {
      if (counts[i] > 0) add(all[i], done[i], counts[i]);
    }
  }

  kt::StepBatch step() const {
    kt::StepBatch batch;
    const auto view = [](const auto& values, kt::DType dtype) {
      return tensor_view(values.data(), dtype, {static_cast<int64_t>(values.size())});
    };
    batch.ids = view(ids, kt::DType::kI64);
    batch.positions = view(positions, kt::DType::kI64);
    batch.slots = view(slots, kt::DType::kI64);
    batch.sequences = sequences;
    if (has_states_) batch.states = view(states, kt::DType::kI64);
    batch.adapters = {.rows = adapter_rows, .experts = experts, .token_slots = {}};
    if (!token_slots.empty()) batch.adapters.token_slots = view(token_slots, kt::DType::kI32);
    return batch;
  }
  int64_t tokens() const { return static_cast<int64_t>(ids.size()); }

  std::vector<int64_t> ids, positions, slots;
  std::vector<int64_t> rows;  // of each token among those of all sequences
  std::vector<kt::KvSequence> sequences;
  std::vector<int64_t> states;
  std::vector<kt::LowRankRows> adapter_rows;
  std::vector<kt::ExpertAdapter> experts;
  std::vector<int32_t> token_slots;  // empty: there are no adapters

 private:
  void add(const Sequence& sequence, int64_t done, int64_t count) {
    const int32_t expert = sequence.adapter < 0 ? -1 : expert_of(sequence.adapter);
    if (expert >= 0) {
      const auto& [rank, scaling] = kAdapters[sequence.adapter];
      adapter_rows.push_back(
          {.first = tokens(), .rows = count, .slot = slot_of(sequence.adapter), .rank = rank, .scaling = scaling});
      token_slots.resize(ids.size(), -1);
    }
    sequences.push_back(
        {.first_query = tokens(), .queries = count, .prefix = done, .slots = sequence.slots.data(), .first_key = 0});
    states.push_back(sequence.state);
    for (int64_t t = done; t < done + count; ++t) {
      ids.push_back(sequence.ids[static_cast<size_t>(t)]);
      positions.push_back(t);
      slots.push_back(sequence.slots[static_cast<size_t>(t)]);
      rows.push_back(sequence.first_row + t);
      if (!experts.empty()) token_slots.push_back(expert);
    }
  }
  int64_t slot_of(int64_t adapter) const { return (adapter + moved_by_) % kLoraSlots; }
  // The place of an adapter among those of the batch's experts: in the order in which they appear.
  int32_t expert_of(int64_t adapter) {
    const int64_t slot = slot_of(adapter);
    const auto found =
        std::find_if(experts.begin(), experts.end(), [&](const kt::ExpertAdapter& use) { return use.slot == slot; });
    const auto place = static_cast<int32_t>(found - experts.begin());
    if (found == experts.end())
      experts.push_back({.slot = slot, .rank = kAdapters[adapter].rank, .scaling = kAdapters[adapter].scaling});
    return place;
  }

  int64_t moved_by_;
  bool has_states_;
};

// A program with a KV pool of its own, and the results of all tokens so far.
class Server {
 public:
  Server(const Model& model, const std::vector<Sequence>& sequences, const kt::Tiles& tiles, int num_threads,
         bool with_lora = true, int num_nodes = 1)
      : pool(model.kind, model.layers.size()),
        program(model.stack(pool, with_lora, num_nodes), tiles, num_threads),
        out({count_tokens(sequences), kHidden}, model.kind.bf16, NAN),
        refused(static_cast<size_t>(count_tokens(sequences))),
        sequences_(sequences),
        bf16_(model.kind.bf16),
        moved_by_(model.moved_by),
        has_states_(model.kind.is_hybrid),
        done_(sequences.size()) {}

  Batch batch(const std::vector<int64_t>& counts, std::vector<size_t> order = {}) const {
    return {sequences_, done_, counts, std::move(order), moved_by_, has_states_};
  }
  // Of each sequence the tokens that are left, at most at_once[i].
  std::vector<int64_t> left(const std::vector<int64_t>& at_once) const {
    std::vector<int64_t> counts;
    for (size_t i = 0; i < sequences_.size(); ++i)
      counts.push_back(std::min(at_once[i], sequences_[i].tokens() - done_[i]));
    return counts;
  }

  kt::Status run(const Batch& batch, Tensor* rows, std::vector<int64_t>* refused_rows) {
    *rows = Tensor({batch.tokens(), kHidden}, bf16_, NAN);
    return program.run(batch.step(), rows->view(), refused_rows);
  }
  // The next counts[i] tokens of sequence i.
  void run(const std::vector<int64_t>& counts, Report& report, std::vector<size_t> order = {}) {
    const Batch next = batch(counts, std::move(order));
    Tensor rows;
    std::vector<int64_t> refused_rows;
    const kt::Status status = run(next, &rows, &refused_rows);
    if (!status.ok()) report.fail("step: " + status.message());
    for (int64_t t = 0; t < next.tokens(); ++t) out.copy_row(next.rows[static_cast<size_t>(t)], rows, t);
    for (const int64_t row : refused_rows) refused[static_cast<size_t>(next.rows[static_cast<size_t>(row)])] = true;
    for (size_t i = 0; i < counts.size(); ++i) done_[i] += counts[i];
  }
  // All that is left, in batches.
  void run_all(const std::vector<int64_t>& at_once, Report& report) {
    for (std::vector<int64_t> counts = left(at_once); *std::max_element(counts.begin(), counts.end()) > 0;
         counts = left(at_once))
      run(counts, report);
  }

  // The same results of every token, and the same keys and values, in each server's own slots.
  bool same(const Server& other) const {
    bool same_slots = true;
    for (size_t i = 0; i < sequences_.size(); ++i) {
      same_slots &=
          sequences_[i].slots == other.sequences_[i].slots && sequences_[i].state == other.sequences_[i].state;
    }
    return out == other.out && refused == other.refused && has_same_rows(pool.keys, other, other.pool.keys) &&
           has_same_rows(pool.values, other, other.pool.values) && has_same_states(other) &&
           (!same_slots || pool == other.pool);
  }

  KvPool pool;
  kt::Program program;
  Tensor out;                 // by row of all sequences
  std::vector<bool> refused;  // the same

 private:
  bool has_same_rows(const std::vector<Tensor>& layers, const Server& other, const std::vector<Tensor>& others) const {
    for (size_t layer = 0; layer < layers.size() && layers[layer].present(); ++layer) {
      const int64_t heads = layers[layer].count() / layers[layer].cols() / kKvSlots;
      for (size_t i = 0; i < sequences_.size(); ++i) {
        for (size_t t = 0; t < sequences_[i].slots.size(); ++t) {
          for (int64_t head = 0; head < heads; ++head) {
            const int64_t row = sequences_[i].slots[t] * heads + head;
            const int64_t other_row = other.sequences_[i].slots[t] * heads + head;
            if (!layers[layer].same_row(row, others[layer], other_row)) return false;
          }
        }
      }
    }
    return true;
  }

  bool has_same_states(const Server& other) const {
    for (size_t i = 0; has_states_ && i < sequences_.size(); ++i) {
      const int64_t slot = sequences_[i].state, other_slot = other.sequences_[i].state;
      for (int64_t c = 0; c < kChannels; ++c) {
        if (!pool.inputs.same_row(slot * kChannels + c, other.pool.inputs, other_slot * kChannels + c)) return false;
      }
      constexpr int64_t kRows = kDeltaHeads * kDeltaKey;
      for (int64_t k = 0; k < kRows; ++k) {
        if (!pool.states.same_row(slot * kRows + k, other.pool.states, other_slot * kRows + k)) return false;
      }
    }
    return true;
  }

  const std::vector<Sequence>& sequences_;
  const bool bf16_;
  const int64_t moved_by_;
  const bool has_states_;
  std::vector<int64_t> done_;
};

}  // namespace kt_test
