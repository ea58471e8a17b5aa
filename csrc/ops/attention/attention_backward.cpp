#include "ops/attention/attention_backward.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/scratch.h"
#include "threads/plan.h"

namespace kt {
namespace {

constexpr int kHeads = 0, kSums = 1;

// Queries, and keys, in a block: four register tiles of rows. A block's matrices stay in the L2 cache.
constexpr int64_t kBlock = 48;
constexpr int64_t kLanes = 16;
// Query heads of a key head are shared among tasks until there are so many tasks a sequence, while the partial sums of
// a key have at most so many floats.
constexpr int64_t kWantedTasks = 16, kMostFloatsOfKey = 8192;
// Sequences are taken together while their partial sums have at most so many floats: 64 MiB.
constexpr int64_t kMostFloats = 1 << 24;
// Below this many multiply-adds, waking other threads takes longer than the work.
constexpr int64_t kAloneBelow = 1 << 20;

void widen_row(const Tiles& tiles, const TensorView& heads, int64_t row, int64_t head, int64_t count, float* to) {
  const int64_t first = row * heads.strides[0] + head * heads.strides[1];
  if (heads.dtype == DType::kBf16) {
    tiles.widen(heads.as<const uint16_t>() + first, count, to);
  } else {
    std::memcpy(to, heads.as<const float>() + first, static_cast<size_t>(count) * sizeof(float));
  }
}

void narrow_row(const Tiles& tiles, const float* from, int64_t count, const TensorView& heads, int64_t row,
                int64_t head) {
  const int64_t first = row * heads.strides[0] + head * heads.strides[1];
  if (heads.dtype == DType::kBf16) {
    tiles.narrow(from, count, heads.as<uint16_t>() + first);
  } else {
    std::memcpy(heads.as<float>() + first, from, static_cast<size_t>(count) * sizeof(float));
  }
}

float dot(const float* a, const float* b, int64_t count) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] += a[i + l] * b[i + l];
  }
  for (int64_t l = 0; i + l < count; ++l) lanes[l] += a[i + l] * b[i + l];
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

// Some query heads of one key head of a sequence, and the place of their sums for its keys.
struct Task {
  const KvSequence* sequence;
  int64_t key_head, first_head, heads;
  int64_t sums;  // [keys][D + V] floats
};

// The sums of all tasks of a key head of a sequence lie one after another.
struct KeyHead {
  const KvSequence* sequence;
  int64_t key_head, sums, parts;
};

class HeadBackward {
 public:
  HeadBackward(const Tiles& tiles, const AttentionGradients& g, const Task& task, float* sums)
      : tiles_(tiles),
        g_(g),
        sequence_(*task.sequence),
        key_head_(task.key_head),
        key_size_(g.call.q.shape[2]),
        value_size_(g.call.values.shape[2]),
        by_keys_{sums, key_size_ + value_size_},
        by_values_(by_keys_.from(0, key_size_)) {
    static thread_local Scratch scratch;
    const int64_t queries = sequence_.queries, both = key_size_ + value_size_;
    float* next = scratch.reserve<float>(queries * (key_size_ + 1) + kBlock * (3 * key_size_ + 2 * value_size_) +
                                         2 * kBlock * kBlock + both);
    const auto take = [&next](int64_t count) {
      float* taken = next;
      next += count;
      return taken;
    };
    by_q_ = take(queries * key_size_);
    delta_ = take(queries);
    keys_ = take(kBlock * key_size_);
    transposed_keys_ = take(kBlock * key_size_);
    transposed_values_ = take(kBlock * value_size_);
    q_ = take(kBlock * key_size_);
    by_out_ = take(kBlock * value_size_);
    weights_ = take(kBlock * kBlock);
    by_scores_ = take(kBlock * kBlock);
    row_ = take(both);
  }

  void run(int64_t head) {
    head_ = head;
    std::fill(by_q_, by_q_ + sequence_.queries * key_size_, 0.0f);
    find_deltas();
    for (int64_t key = 0; key < sequence_.keys(); key += kBlock) {
      read_keys(key);
      const int64_t first = std::max<int64_t>(key - sequence_.prefix, 0) / kBlock * kBlock;
      for (int64_t query = first; query < sequence_.queries && hidden(query, 0, key) < num_keys_; query += kBlock)
        add_block(query, key);
    }
    for (int64_t t = 0; t < sequence_.queries; ++t) {
      float* row = by_q_ + t * key_size_;
      for (int64_t i = 0; i < key_size_; ++i) row[i] *= g_.call.scaling;
      narrow_row(tiles_, row, key_size_, g_.by_q, sequence_.first_query + t, head_);
    }
  }

 private:
  void find_deltas() {
    for (int64_t t = 0; t < sequence_.queries; ++t) {
      const int64_t row = sequence_.first_query + t;
      widen_row(tiles_, g_.by_out, row, head_, value_size_, by_out_);
      widen_row(tiles_, g_.call.out, row, head_, value_size_, row_);
      delta_[t] = dot(by_out_, row_, value_size_);
    }
  }

  // Keys [key, key + num_keys_) and their values, also transposed.
  void read_keys(int64_t key) {
    num_keys_ = std::min(kBlock, sequence_.keys() - key);
    for (int64_t n = 0; n < num_keys_; ++n) {
      const int64_t row = sequence_.first_key + key + n;
      widen_row(tiles_, g_.call.keys, row, key_head_, key_size_, keys_ + n * key_size_);
      for (int64_t i = 0; i < key_size_; ++i) transposed_keys_[i * kBlock + n] = keys_[n * key_size_ + i];
      widen_row(tiles_, g_.call.values, row, key_head_, value_size_, row_);
      for (int64_t i = 0; i < value_size_; ++i) transposed_values_[i * kBlock + n] = row_[i];
    }
  }

  void read_queries(int64_t query) {
    num_queries_ = std::min(kBlock, sequence_.queries - query);
    for (int64_t m = 0; m < num_queries_; ++m) {
      const int64_t row = sequence_.first_query + query + m;
      float* q = q_ + m * key_size_;
      widen_row(tiles_, g_.call.q, row, head_, key_size_, q);
      for (int64_t i = 0; i < key_size_; ++i) q[i] *= g_.call.scaling;
      widen_row(tiles_, g_.by_out, row, head_, value_size_, by_out_ + m * value_size_);
    }
  }

  // Of the block's keys from `key` on, those that query m of the block from `query` on sees.
  int64_t visible(int64_t query, int64_t m, int64_t key) const {
    return std::clamp<int64_t>(sequence_.prefix + query + m - key + 1, 0, num_keys_);
  }
  // Of these, those that its window hides: the first ones.
  int64_t hidden(int64_t query, int64_t m, int64_t key) const {
    if (g_.call.window == 0) return 0;
    return std::clamp<int64_t>(sequence_.prefix + query + m - key + 1 - g_.call.window, 0, num_keys_);
  }

  void add_block(int64_t query, int64_t key) {
    read_queries(query);
    multiply(num_queries_, num_keys_, key_size_, q_, key_size_, 1, {transposed_keys_, kBlock}, {weights_, kBlock},
             false);
    const float* log_sums = g_.call.log_sums.as<const float>() + head_;
    const int64_t heads = g_.call.q.shape[1];
    for (int64_t m = 0; m < num_queries_; ++m) {
      float* row = weights_ + m * kBlock;
      const int64_t first = hidden(query, m, key), end = visible(query, m, key);
      tiles_.exponential(row + first, log_sums[(sequence_.first_query + query + m) * heads], end - first, row + first);
      clear_unseen(row, first, end);
      clear_unchosen(row, query + m, key);
    }
    multiply(num_keys_, value_size_, num_queries_, weights_, 1, kBlock, {by_out_, value_size_}, by_values_.from(key),
             true);
    multiply(num_queries_, num_keys_, value_size_, by_out_, value_size_, 1, {transposed_values_, kBlock},
             {by_scores_, kBlock}, false);
    for (int64_t m = 0; m < num_queries_; ++m) {
      const int64_t first = hidden(query, m, key), end = visible(query, m, key);
      float* row = by_scores_ + m * kBlock;
      const float *weights = weights_ + m * kBlock, delta = delta_[query + m];
      for (int64_t n = first; n < end; ++n) row[n] = weights[n] * (row[n] - delta);
      clear_unseen(row, first, end);
    }
    multiply(num_keys_, key_size_, num_queries_, by_scores_, 1, kBlock, {q_, key_size_}, by_keys_.from(key), true);
    multiply(num_queries_, key_size_, num_keys_, by_scores_, kBlock, 1, {keys_, key_size_},
             {by_q_ + query * key_size_, key_size_}, true);
  }

  void clear_unseen(float* row, int64_t first, int64_t end) const {
    std::fill(row, row + first, 0.0f);
    std::fill(row + end, row + num_keys_, 0.0f);
  }

  // Of the weights of the block's keys from `key` on, those of keys that the query's indexer has not chosen become
  // zero, and with them their part in every gradient.
  void clear_unchosen(float* weights, int64_t query, int64_t key) const {
    const TensorView& chosen = g_.call.chosen;
    if (!chosen.present() || sequence_.prefix + query < chosen.shape[1]) return;
    const int32_t* rows = chosen.as<const int32_t>() + (sequence_.first_query + query) * chosen.shape[1];
    const int64_t first = sequence_.first_key + key;
    const int32_t* next = std::lower_bound(rows, rows + chosen.shape[1], first);
    for (int64_t n = 0; n < num_keys_; ++n) {
      if (next != rows + chosen.shape[1] && *next == first + n) {
        ++next;
      } else {
        weights[n] = 0.0f;
      }
    }
  }

  void multiply(int64_t rows, int64_t cols, int64_t inner, const float* a, int64_t a_row, int64_t a_col,
                Rows<const float> b, Rows<float> c, bool accumulate) const {
    tiles_.product({.rows = rows,
                    .cols = cols,
                    .inner = inner,
                    .a = a,
                    .a_row = a_row,
                    .a_col = a_col,
                    .b = b,
                    .c = c,
                    .accumulate = accumulate});
  }

  const Tiles& tiles_;
  const AttentionGradients& g_;
  const KvSequence& sequence_;
  const int64_t key_head_, key_size_, value_size_;
  const Rows<float> by_keys_, by_values_;  // sums for the sequence's keys
  int64_t head_ = 0, num_keys_ = 0, num_queries_ = 0;
  float *by_q_, *delta_, *keys_, *transposed_keys_, *transposed_values_, *q_, *by_out_, *weights_, *by_scores_, *row_;
};

int64_t sizes_of(const AttentionCall& call) { return call.q.shape[2] + call.values.shape[2]; }

// Tasks that share the query heads of a key head.
int64_t parts_of_group(const AttentionCall& call) {
  const int64_t key_heads = call.keys.shape[1], group = call.q.shape[1] / key_heads;
  // One at least: without query heads the gradients of keys are zeros.
  int64_t parts = std::max<int64_t>(std::min(group, kWantedTasks / key_heads), 1);
  while (parts > 1 && key_heads * parts * sizes_of(call) > kMostFloatsOfKey) parts /= 2;
  return parts;
}

void add_sums(const Tiles& tiles, const AttentionGradients& g, const KeyHead& item, float* sums) {
  const int64_t key_size = g.call.q.shape[2], both = key_size + g.call.values.shape[2];
  const int64_t size = item.sequence->keys() * both;
  for (int64_t key = 0; key < item.sequence->keys(); ++key) {
    float* row = sums + item.sums + key * both;
    for (int64_t part = 1; part < item.parts; ++part) tiles.add_scaled(row + part * size, 1.0f, both, row);
    const int64_t place = item.sequence->first_key + key;
    narrow_row(tiles, row, key_size, g.by_keys, place, item.key_head);
    narrow_row(tiles, row + key_size, both - key_size, g.by_values, place, item.key_head);
  }
}

// Sequences [first_sequence, end_sequence).
void attend_some(const Tiles& tiles, int num_threads, const AttentionGradients& g, int64_t first_sequence,
                 int64_t end_sequence) {
  static thread_local Scratch scratch;
  const int64_t key_heads = g.call.keys.shape[1], group = g.call.q.shape[1] / key_heads;
  const int64_t both = sizes_of(g.call), parts = parts_of_group(g.call);
  std::vector<Task> tasks;
  std::vector<KeyHead> key_head_sums;
  int64_t floats = 0, products = 0;
  for (int64_t i = first_sequence; i < end_sequence; ++i) {
    const KvSequence& sequence = g.call.sequences[i];
    products += sequence.queries * sequence.keys() * g.call.q.shape[1] * both;
    for (int64_t key_head = 0; key_head < key_heads; ++key_head) {
      key_head_sums.push_back({&sequence, key_head, floats, parts});
      for (int64_t part = 0; part < parts; ++part, floats += sequence.keys() * both) {
        const int64_t first = group * part / parts, end = group * (part + 1) / parts;
        tasks.push_back({&sequence, key_head, key_head * group + first, end - first, floats});
      }
    }
  }
  float* sums = scratch.reserve<float>(floats);
  Plan plan;
  plan.num_threads = products < kAloneBelow ? 1 : num_threads;
  plan.stages.push_back(stage_of(kHeads, static_cast<int64_t>(tasks.size())));
  plan.stages.push_back(stage_of(kSums, static_cast<int64_t>(key_head_sums.size())));
  run(plan, [&](int step, const Range& range) {
    if (step == kSums) return add_sums(tiles, g, key_head_sums[static_cast<size_t>(range.item)], sums);
    const Task& task = tasks[static_cast<size_t>(range.item)];
    std::fill(sums + task.sums, sums + task.sums + task.sequence->keys() * both, 0.0f);
    HeadBackward backward(tiles, g, task, sums + task.sums);
    for (int64_t head = 0; head < task.heads; ++head) backward.run(task.first_head + head);
  });
}

}  // namespace

void attend_backward(const Tiles& tiles, int num_threads, const AttentionGradients& g) {
  const OperationScope scope;
  const int64_t floats_of_key = g.call.keys.shape[1] * parts_of_group(g.call) * sizes_of(g.call);
  for (int64_t first = 0, next = 0; first < g.call.num_sequences; first = next) {
    int64_t keys = 0;
    do keys += g.call.sequences[next++].keys();
    while (next < g.call.num_sequences && (keys + g.call.sequences[next].keys()) * floats_of_key <= kMostFloats);
    attend_some(tiles, num_threads, g, first, next);
  }
}

}  // namespace kt
