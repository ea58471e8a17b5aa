#include "ops/router/indexer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/scratch.h"
#include "threads/pool.h"

namespace kt {
namespace {

constexpr float kNormEpsilon = 1e-6f;  // of Hugging Face's and SGLang's LayerNorm
constexpr int64_t kRowsAtOnce = 8;
// Keys that a product takes at once, and a task; queries of a task.
constexpr int64_t kBlock = 48, kKeysOfTask = 16 * kBlock, kQueriesOfTask = 8;
// Queries are taken together while their scores have at most so many floats: 64 MiB.
constexpr int64_t kMostScores = 1 << 24;

char* row_of(const TensorView& view, int64_t row, int64_t head = 0) {
  const int64_t offset = row * view.strides[0] + (view.ndim > 2 ? head * view.strides[1] : 0);
  return view.as<char>() + offset * dtype_bytes(view.dtype);
}

void widen(const Tiles& tiles, const void* from, DType dtype, int64_t count, float* to) {
  if (dtype == DType::kBf16) return tiles.widen(static_cast<const uint16_t*>(from), count, to);
  std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
}

void narrow(const Tiles& tiles, const float* from, DType dtype, int64_t count, void* to) {
  if (dtype == DType::kBf16) return tiles.narrow(from, count, static_cast<uint16_t*>(to));
  std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
}

void layer_norm(const float* weight, const float* bias, int64_t count, float* x) {
  double sum = 0, squares = 0;
  for (int64_t i = 0; i < count; ++i) sum += x[i];
  const double mean = sum / static_cast<double>(count);
  for (int64_t i = 0; i < count; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const double inverse = 1 / std::sqrt(squares / static_cast<double>(count) + kNormEpsilon);
  for (int64_t i = 0; i < count; ++i) x[i] = static_cast<float>((x[i] - mean) * inverse) * weight[i] + bias[i];
}

// Some queries of one sequence, and the place of their scores: a row of `stride` floats for each.
struct Queries {
  const KvSequence* sequence;
  int64_t first, count;  // among the sequence's queries
  int64_t scores, stride;

  int64_t visible(int64_t query) const { return sequence->prefix + first + query + 1; }
  int64_t row(int64_t query) const { return sequence->first_query + first + query; }
};

class Selecting {
 public:
  Selecting(const DenseEngine& engine, const Selection& selection) : engine_(engine), s_(selection) {}

  // The scores of the keys [first_key, first_key + kKeysOfTask) that one of the queries sees.
  void score(const Queries& queries, int64_t first_key, float* scores) const {
    static thread_local Scratch scratch;
    const int64_t heads = s_.q.shape[1], size = s_.q.shape[2], end = queries.visible(queries.count - 1);
    float* q = scratch.reserve<float>(queries.count * heads * size + (size + heads) * kBlock + size);
    float *keys = q + queries.count * heads * size, *products = keys + size * kBlock, *key = products + heads * kBlock;
    for (int64_t t = 0; t < queries.count; ++t) {
      for (int64_t head = 0; head < heads; ++head) {
        widen(engine_.tiles, row_of(s_.q, queries.row(t), head), s_.q.dtype, size, q + (t * heads + head) * size);
      }
    }
    for (int64_t first = first_key; first < std::min(first_key + kKeysOfTask, end); first += kBlock) {
      const int64_t count = std::min(kBlock, end - first);
      for (int64_t n = 0; n < count; ++n) {
        widen(engine_.tiles, row_of(s_.keys, queries.sequence->row_of(first + n)), s_.keys.dtype, size, key);
        for (int64_t i = 0; i < size; ++i) keys[i * kBlock + n] = key[i];
      }
      for (int64_t t = 0; t < queries.count; ++t) {
        engine_.tiles.product({.rows = heads,
                               .cols = count,
                               .inner = size,
                               .a = q + t * heads * size,
                               .a_row = size,
                               .a_col = 1,
                               .b = {keys, kBlock},
                               .c = {products, kBlock}});
        add_heads(reinterpret_cast<const float*>(row_of(s_.weights, queries.row(t))), products, count,
                  scores + queries.scores + t * queries.stride + first);
      }
    }
  }

  void choose(const Queries& queries, int64_t query, const float* scores) const {
    static thread_local Scratch scratch;
    const int64_t visible = queries.visible(query), top_k = s_.chosen.shape[1];
    const float* row = scores + queries.scores + query * queries.stride;
    auto* places = scratch.reserve<int32_t>(visible);
    std::iota(places, places + visible, 0);
    std::nth_element(places, places + top_k, places + visible,
                     [row](int32_t a, int32_t b) { return row[a] > row[b] || (row[a] == row[b] && a < b); });
    std::sort(places, places + top_k);
    int32_t* chosen = s_.chosen.as<int32_t>() + queries.row(query) * top_k;
    for (int64_t i = 0; i < top_k; ++i) chosen[i] = static_cast<int32_t>(queries.sequence->row_of(places[i]));
  }

 private:
  void add_heads(const float* weights, const float* products, int64_t count, float* scores) const {
    std::fill(scores, scores + count, 0.0f);
    for (int64_t head = 0; head < s_.q.shape[1]; ++head) {
      const float weight = weights[head] * s_.scaling;
      const float* row = products + head * kBlock;
      for (int64_t n = 0; n < count; ++n) scores[n] += weight * (row[n] > 0 ? row[n] : row[n] * 0.0f);
    }
    for (int64_t n = 0; n < count; ++n)
      if (std::isnan(scores[n])) scores[n] = -std::numeric_limits<float>::infinity();
  }

  const DenseEngine& engine_;
  const Selection& s_;
};

// The queries of a batch that choose, in groups whose scores have at most kMostScores floats, or one block.
std::vector<std::vector<Queries>> groups_of(const Selection& selection) {
  const int64_t top_k = selection.chosen.shape[1];
  std::vector<std::vector<Queries>> groups;
  int64_t floats = 0;
  for (int64_t i = 0; i < selection.num_sequences; ++i) {
    const KvSequence& sequence = selection.sequences[i];
    for (int64_t t = std::max<int64_t>(top_k - sequence.prefix, 0); t < sequence.queries; t += kQueriesOfTask) {
      Queries queries{&sequence, t, std::min(kQueriesOfTask, sequence.queries - t), 0, 0};
      queries.stride = queries.visible(queries.count - 1);
      const int64_t needed = queries.count * queries.stride;
      if (groups.empty() || floats + needed > kMostScores) {
        groups.emplace_back();
        floats = 0;
      }
      queries.scores = floats;
      floats += needed;
      groups.back().push_back(queries);
    }
  }
  return groups;
}

struct ScoreTask {
  const Queries* queries;
  int64_t first_key;
};

}  // namespace

void prepare_index_rows(const DenseEngine& engine, const IndexRows& rows) {
  const OperationScope scope;
  const int64_t heads = rows.q.shape[1], size = rows.k.shape[1], rotated = rows.angles.shape[1];
  const DType dtype = rows.q.dtype;
  const bool bf16 = dtype == DType::kBf16;
  run_ranges(rows.q.shape[0], kRowsAtOnce, engine.num_threads, [&](int64_t first, int64_t count) {
    static thread_local Scratch scratch;
    float* wide = scratch.reserve<float>(size);
    for (int64_t t = first; t < first + count; ++t) {
      const int64_t position = rows.positions.as<const int64_t>()[t * rows.positions.strides[0]];
      const void* angles = row_of(rows.angles, position);
      const auto rotate = [&](void* data, int64_t stride, int64_t num_heads) {
        engine.kernels().rotate({.heads = num_heads,
                                 .half = rotated / 2,
                                 .x = {.data = data, .stride = stride, .bf16 = bf16},
                                 .angles = angles,
                                 .interleaved = rows.interleaved});
      };
      char* key = row_of(rows.k, t);
      widen(engine.tiles, key, dtype, size, wide);
      layer_norm(rows.norm_weight.as<const float>(), rows.norm_bias.as<const float>(), size, wide);
      narrow(engine.tiles, wide, dtype, size, key);
      rotate(key, size, 1);
      rotate(row_of(rows.q, t), rows.q.strides[1], heads);
    }
  });
}

float index_scaling(int64_t heads, int64_t size) {
  return static_cast<float>(1 / std::sqrt(static_cast<double>(heads * size)));
}

bool needs_selection(const std::vector<KvSequence>& sequences, int64_t top_k) {
  return std::any_of(sequences.begin(), sequences.end(),
                     [top_k](const KvSequence& sequence) { return sequence.queries > 0 && sequence.keys() > top_k; });
}

void select_keys(const DenseEngine& engine, const Selection& selection) {
  static thread_local Scratch scratch;
  const OperationScope scope;
  const Selecting selecting(engine, selection);
  for (const std::vector<Queries>& group : groups_of(selection)) {
    std::vector<ScoreTask> tasks;
    for (const Queries& queries : group) {
      for (int64_t key = 0; key < queries.stride; key += kKeysOfTask) tasks.push_back({&queries, key});
    }
    const Queries& last = group.back();
    float* scores = scratch.reserve<float>(last.scores + last.count * last.stride);
    run_ranges(static_cast<int64_t>(tasks.size()), 1, engine.num_threads, [&](int64_t task, int64_t) {
      const ScoreTask& own = tasks[static_cast<size_t>(task)];
      selecting.score(*own.queries, own.first_key, scores);
    });
    run_ranges(static_cast<int64_t>(group.size()), 1, engine.num_threads, [&](int64_t index, int64_t) {
      const Queries& queries = group[static_cast<size_t>(index)];
      for (int64_t t = 0; t < queries.count; ++t) selecting.choose(queries, t, scores);
    });
  }
}

void cut_at_chosen(const std::vector<KvSequence>& sequences, const int32_t* chosen, int64_t top_k,
                   std::vector<KvSequence>* parts) {
  parts->clear();
  for (const KvSequence& whole : sequences) {
    KvSequence part = whole;
    part.queries = std::clamp<int64_t>(top_k - whole.prefix, 0, whole.queries);
    if (part.queries > 0) parts->push_back(part);
    for (int64_t t = part.queries; t < whole.queries; ++t) {
      const int64_t row = whole.first_query + t;
      parts->push_back(
          {.first_query = row, .queries = 1, .prefix = top_k - 1, .slots = chosen + row * top_k, .first_key = 0});
    }
  }
}

}  // namespace kt
