#include "ops/attention/attention.h"

#include <algorithm>
#include <string>

#include "base/scratch.h"

namespace kt {
namespace {

constexpr int kAttend = 0, kMerge = 1;

// Rows of a block: keys are transposed once per block, and its scores of a chunk stay in the L2 cache.
constexpr int64_t kMostRows = 64, kFewestRows = 16;
constexpr int64_t kTasksPerThread = 4;

// Below this many multiply-adds, waking other threads takes longer than the work.
constexpr int64_t kAloneBelow = 1 << 20;

int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

HeadRows rows_of(const TensorView& view) {
  return {.data = view.data,
          .row_stride = view.strides[0],
          .head_stride = view.strides[1],
          .bf16 = view.dtype == DType::kBf16};
}

std::string of_sequence(int64_t index, const std::string& what) {
  return "sequence " + std::to_string(index) + " " + what;
}

// Scores of a block, whole chunks.
int64_t scores_of(const AttentionBlock& block) { return block.rows() * block.chunks() * kChunkKeys; }

bool has_slot_outside(const int32_t* slots, int64_t count, int64_t rows) {
  bool outside = false;
  for (int64_t i = 0; i < count; ++i) outside |= static_cast<int64_t>(static_cast<uint32_t>(slots[i])) >= rows;
  return outside;
}

Status check_keys(const KvSequence& sequence, int64_t index, int64_t key_rows) {
  if (!sequence.slots) {
    const bool fits = sequence.prefix <= key_rows - sequence.queries;
    if (fits && sequence.first_key >= 0 && sequence.first_key <= key_rows - sequence.keys()) return {};
    return invalid_value(of_sequence(
        index, "has " + std::to_string(sequence.prefix) + " + " + std::to_string(sequence.queries) + " keys from row " +
                   std::to_string(sequence.first_key) + " on; there are " + std::to_string(key_rows) + " rows"));
  }
  const int64_t keys = sequence.keys();
  if (!has_slot_outside(sequence.slots, keys, key_rows)) return {};
  const int32_t* slot =
      std::find_if(sequence.slots, sequence.slots + keys, [&](int32_t s) { return s < 0 || s >= key_rows; });
  return invalid_value(of_sequence(index, "has key " + std::to_string(slot - sequence.slots) + " in slot " +
                                              std::to_string(*slot) + "; allowed: 0 to " +
                                              std::to_string(key_rows - 1)));
}

}  // namespace

Status check_sequences(const KvSequence* sequences, int64_t num_sequences, int64_t tokens, int64_t key_rows) {
  int64_t end = 0;
  for (int64_t i = 0; i < num_sequences; ++i) {
    const KvSequence& s = sequences[i];
    if (s.queries < 0) return invalid_value(of_sequence(i, "has " + std::to_string(s.queries) + " queries"));
    if (s.prefix < 0) return invalid_value(of_sequence(i, "has a prefix of " + std::to_string(s.prefix) + " keys"));
    if (s.first_query < end || s.first_query > tokens - s.queries)
      return invalid_value(of_sequence(
          i, "has queries " + std::to_string(s.first_query) + " to " + std::to_string(s.first_query + s.queries - 1) +
                 "; allowed: " + std::to_string(end) + " to " + std::to_string(tokens - 1)));
    end = s.first_query + s.queries;
    if (s.queries > 0) KT_RETURN_IF_ERROR(check_keys(s, i, key_rows));
  }
  return {};
}

AttentionTensors tensors_of(const AttentionCall& call) {
  return {.q = rows_of(call.q),
          .keys = rows_of(call.keys),
          .values = rows_of(call.values),
          .out = rows_of(call.out),
          .log_sums = call.log_sums.present() ? call.log_sums.as<float>() : nullptr,
          .heads = call.q.shape[1],
          .key_heads = call.keys.shape[1],
          .key_size = call.q.shape[2],
          .value_size = call.values.shape[2],
          .scaling = call.scaling,
          .logit_cap = call.logit_cap,
          .sinks = call.sinks.present() ? call.sinks.as<const float>() : nullptr,
          .window = call.window};
}

void AttentionWork::prepare(const AttentionEngine& engine, const AttentionTensors& tensors, const KvSequence* sequences,
                            int64_t num_sequences) {
  kernels_ = &engine.kernels;
  const int64_t wanted = engine.num_threads * kTasksPerThread;
  for (int64_t rows = kMostRows; rows >= kFewestRows; rows /= 2) {
    blocks_.clear();
    for (int64_t i = 0; i < num_sequences; ++i) add_blocks(sequences[i], tensors, rows);
    if (static_cast<int64_t>(blocks_.size()) >= wanted) break;
  }
  int64_t scores = 0, rows = 0;
  for (const Block& block : blocks_) {
    scores += scores_of(block.queries);
    rows = std::max(rows, block.queries.rows());
  }
  num_threads_ = scores * (tensors.key_size + tensors.value_size) < kAloneBelow ? 1 : engine.num_threads;
  workspace_bytes_ = kernels_->workspace_bytes(tensors, rows);
  add_tasks(tensors, num_threads_ == 1 ? scores : scores / wanted);
}

// The last queries first: they see the most keys, and a late long task leaves threads idle.
void AttentionWork::add_blocks(const KvSequence& sequence, const AttentionTensors& tensors, int64_t most_rows) {
  const int64_t group = tensors.group();  // 0: there are no query heads, and so no blocks
  const int64_t heads = std::clamp<int64_t>(group, 1, most_rows), queries = most_rows / heads;
  for (int64_t key_head = 0; key_head < tensors.key_heads; ++key_head) {
    for (int64_t part = parts_of(sequence.queries, queries) - 1; part >= 0; --part) {
      for (int64_t head = 0; head < group; head += heads) {
        const int64_t first = part * queries;
        blocks_.push_back({.queries = {.sequence = sequence,
                                       .key_head = key_head,
                                       .first_query = first,
                                       .queries = std::min(queries, sequence.queries - first),
                                       .first_head = head,
                                       .heads = std::min(heads, group - head)}});
      }
    }
  }
}

// A block with more than `most_scores` scores is cut into runs of chunks.
void AttentionWork::add_tasks(const AttentionTensors& tensors, int64_t most_scores) {
  tasks_.clear();
  cut_blocks_.clear();
  parts_floats_ = 0;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    Block& block = blocks_[i];
    const int64_t index = static_cast<int64_t>(i), chunks = block.queries.chunks(), rows = block.queries.rows();
    const int64_t at_once = std::max<int64_t>(most_scores / (rows * kChunkKeys), 1);
    if (chunks <= at_once) {
      tasks_.push_back({index, 0, 0});
      continue;
    }
    for (int64_t first = 0; first < chunks; first += at_once)
      tasks_.push_back({index, first, std::min(at_once, chunks - first)});
    cut_blocks_.push_back(index);
    block.parts = parts_floats_;
    parts_floats_ += chunks * kernels_->part_floats(tensors, rows);
  }
}

void AttentionWork::add_stages(Plan* plan, int first_step) const {
  plan->stages.push_back(stage_of(first_step + kAttend, static_cast<int64_t>(tasks_.size())));
  if (!cut_blocks_.empty())
    plan->stages.push_back(stage_of(first_step + kMerge, static_cast<int64_t>(cut_blocks_.size())));
}

void AttentionWork::run(const AttentionTensors& tensors, float* parts, int step, const Range& range) const {
  static thread_local Scratch scratch;
  if (step == kMerge) {
    const Block& block = blocks_[static_cast<size_t>(cut_blocks_[static_cast<size_t>(range.item)])];
    return kernels_->merge(tensors, block.queries, parts + block.parts);
  }
  const Task& task = tasks_[static_cast<size_t>(range.item)];
  const Block& block = blocks_[static_cast<size_t>(task.block)];
  uint8_t* workspace = scratch.reserve<uint8_t>(workspace_bytes_);
  if (task.count == 0) return kernels_->attend(tensors, block.queries, workspace);
  kernels_->attend_part(tensors, block.queries, task.first, task.count, parts + block.parts, workspace);
}

void attend(const AttentionEngine& engine, const AttentionCall& call) {
  static thread_local ScratchObject<AttentionWork> kept;
  static thread_local Scratch scratch;
  const OperationScope scope;
  const AttentionTensors tensors = tensors_of(call);
  AttentionWork& work = kept.get();
  work.prepare(engine, tensors, call.sequences, call.num_sequences);
  kept.note_size();
  Plan plan;
  plan.num_threads = work.num_threads();
  work.add_stages(&plan, kAttend);
  float* parts = scratch.reserve<float>(work.parts_floats());
  run(plan, [&](int step, const Range& range) { work.run(tensors, parts, step, range); });
}

}  // namespace kt
