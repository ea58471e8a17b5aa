// Attention of a block of rows (kernels/attention.h), once for all instruction sets.
//
//   struct Scores {      // of a pair of dtypes
//     using Key;         // uint16_t (bf16) or float
//     static constexpr int kUnitCols;  // columns of a unit: 2 where the instruction multiplies pairs of bf16
//     static Reg load(const Key*), load_partial(const Key*, cols);  // kLanes units; fewer columns, then zeros
//     static Reg dot(Reg q, Reg keys, Reg sum);                     // of one unit
//   };
//   struct Values {      // of a dtype
//     using Value;
//     static void load(const Value*, Reg (&)[2]);                   // 2 kLanes adjacent columns
//     static void place(const float*, float*);                      // the sums of these, in the columns' order
//   };
//
// For 2 kLanes keys at a time, their units are transposed into a panel in the L1 cache,
//
//   panel: unit u, key i: u * 2 kLanes + i
//
// and each tile of rows makes its scores from it: kRows x 2 sums, two vectors of keys, a unit of q broadcast. When a
// chunk's scores are complete, they become weights, and each tile of rows makes 2 kLanes columns of its output: kRows x
// 2 sums, the columns of a value as they lie in memory, a weight broadcast. So keys are read once per block and chunk,
// and values once per tile of rows, after the first from the L1 or L2 cache.
//
// Few rows are bound by memory. So with each line of a key, the same line of a later key and of this key's value is
// prefetched, and with each line of a value that of a key of the next chunk.
//
// Include only in a kernel's own translation unit.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/attention.h"
#include "kernels/generic/rows/elementwise.h"
#include "kernels/generic/rows/softmax.h"

namespace kt {
namespace {

inline int64_t rounded_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

// Runs body.template operator()<R>(row) for tiles of R = kMost, kMost / 2, ... 1 rows.
template <int kMost, class Body>
inline void for_tiles(int64_t rows, Body&& body, int64_t row = 0) {
  for (; rows - row >= kMost; row += kMost) body.template operator()<kMost>(row);
  if constexpr (kMost > 1) for_tiles<kMost / 2>(rows, body, row);
}

// How the workspace is cut, and a part: for each row the largest score, the sum of weights, and the sums of the output.
template <class V>
struct BlockSizes {
  static constexpr int64_t kPanelKeys = 2 * V::kLanes, kTileCols = 2 * V::kLanes;
  // Of a row of scores: a line more than its keys, so that the same key of 16 rows lies in 16 sets of the L1 cache.
  static constexpr int64_t kScoresLd = kChunkKeys + 16;

  BlockSizes(const AttentionTensors& t, int64_t rows, int64_t row_unit = 1)
      : rows(rows),
        padded_rows(rounded_up(rows, row_unit)),
        units(rounded_up(t.key_size, V::kLanes)),
        cols(rounded_up(t.value_size, kTileCols)) {}

  int64_t part_floats() const { return rounded_up(2 * rows + padded_rows * cols, kLaneFloats); }
  int64_t queries_floats() const { return rounded_up(padded_rows * units, kLaneFloats); }
  int64_t scores_floats() const { return padded_rows * kScoresLd; }
  int64_t panel_floats() const { return units * kPanelKeys; }
  int64_t last_cols_floats() const { return kChunkKeys * kTileCols; }
  int64_t bytes() const {
    return 4 * (2 * part_floats() + queries_floats() + scores_floats() + panel_floats() + last_cols_floats());
  }

  int64_t rows, padded_rows, units, cols;  // units: of a float, or of a pair of bf16 (then half of them are used)

 private:
  static constexpr int64_t kLaneFloats = 16;  // a cache line
};

// The rows' largest scores, sums of weights and sums of outputs.
struct Part {
  Part(float* at, int64_t rows, int64_t cols) : most(at), sum(at + rows), out(at + 2 * rows), cols(cols) {}
  float* row(int64_t r) const { return out + r * cols; }

  float *most, *sum, *out;
  int64_t cols;
};

// Own: a class derived of this one that computes scores and weighted values in another way; void: none.
template <class V, class Scores, class Values, int kMostRows, class Own = void>
class BlockAttention {
  using Reg = typename V::Reg;
  using Key = typename Scores::Key;
  using Value = typename Values::Value;
  static constexpr int kLanes = V::kLanes;
  static constexpr int64_t kPanelKeys = BlockSizes<V>::kPanelKeys, kTileCols = BlockSizes<V>::kTileCols;
  static constexpr int64_t kLineKeys = 64 / sizeof(Key), kLineValues = 64 / sizeof(Value);
  static constexpr int64_t kKeysAhead = 2 * kPanelKeys;
  static constexpr bool kHasOwn = !std::is_void_v<Own>;

 public:
  BlockAttention(const AttentionTensors& t, const AttentionBlock& block, int64_t row_unit = 1)
      : t_(t),
        block_(block),
        sizes_(t, block.rows(), row_unit),
        units_((t.key_size + Scores::kUnitCols - 1) / Scores::kUnitCols) {}

  void attend(void* workspace) {
    begin(workspace);
    const int64_t first = block_.first_chunk(t_.window);
    chunk(first, state_);
    for (int64_t c = first + 1; c < block_.chunks(); ++c) {
      chunk(c, part_);
      add_part(c, part_, state_);
    }
    finish(state_);
  }

  void attend_part(int64_t first, int64_t count, float* parts, void* workspace) {
    const int64_t end = first + count, seen = block_.first_chunk(t_.window);
    if (end <= seen) return;
    begin(workspace);
    for (int64_t c = first > seen ? first : seen; c < end; ++c) chunk(c, parts + c * sizes_.part_floats());
  }

  void merge(float* parts) {
    const int64_t first = block_.first_chunk(t_.window);
    float* all = parts + first * sizes_.part_floats();
    for (int64_t c = first + 1; c < block_.chunks(); ++c) add_part(c, parts + c * sizes_.part_floats(), all);
    finish(all);
  }

 protected:
  static constexpr int64_t kScoresLd = BlockSizes<V>::kScoresLd;

  Part part_of(float* at) const { return {at, sizes_.rows, sizes_.cols}; }
  int64_t query_of(int64_t row) const { return block_.first_query + row / block_.heads; }
  int64_t head_of(int64_t row) const { return block_.key_head * t_.group() + block_.first_head + row % block_.heads; }
  // Keys of chunk c up to the last one that a row sees.
  int64_t visible(int64_t row, int64_t c) const { return in_chunk(block_.sequence.prefix + query_of(row) + 1, c); }
  // Those of them that its window hides.
  int64_t hidden(int64_t row, int64_t c) const {
    return t_.window == 0 ? 0 : in_chunk(block_.sequence.prefix + query_of(row) + 1 - t_.window, c);
  }
  // Of the first `keys` keys those in chunk c.
  static int64_t in_chunk(int64_t keys, int64_t c) {
    keys -= c * kChunkKeys;
    return keys < 0 ? 0 : keys < kChunkKeys ? keys : kChunkKeys;
  }
  bool sees_nothing(int64_t row, int64_t c) const { return visible(row, c) <= hidden(row, c); }
  const Key* key(int64_t index) const {
    return t_.keys.template at<const Key>(block_.sequence.row_of(index), block_.key_head);
  }
  const Value* value(int64_t index) const {
    return t_.values.template at<const Value>(block_.sequence.row_of(index), block_.key_head);
  }

  // Cuts the workspace, and writes the units of q, in rows of sizes_.units floats.
  void begin(void* workspace) {
    auto* at = static_cast<float*>(workspace);
    const auto take = [&at](int64_t floats) {
      float* part = at;
      at += floats;
      return part;
    };
    state_ = take(sizes_.part_floats());
    part_ = take(sizes_.part_floats());
    queries_ = take(sizes_.queries_floats());
    scores_ = take(sizes_.scores_floats());
    panel_ = take(sizes_.panel_floats());
    last_cols_ = reinterpret_cast<Value*>(take(sizes_.last_cols_floats()));
    for (int64_t r = 0; r < sizes_.rows; ++r) {
      const int64_t row = block_.sequence.first_query + query_of(r), head = head_of(r), cols = t_.key_size;
      float* to = queries_ + r * sizes_.units;
      if (!t_.q.bf16) {
        std::memcpy(to, t_.q.at<const float>(row, head), static_cast<size_t>(cols) * sizeof(float));
      } else if constexpr (Scores::kUnitCols == 1) {
        widen_all(t_.q.at<const uint16_t>(row, head), cols, to);
      } else {
        if (units_ > 0) to[units_ - 1] = 0;
        std::memcpy(to, t_.q.at<const uint16_t>(row, head), static_cast<size_t>(cols) * sizeof(uint16_t));
      }
    }
    if constexpr (kHasOwn) own().begin_own(at);
  }

  // Chunk c of the keys -> a part.
  void chunk(int64_t c, float* to) {
    const Part part = part_of(to);
    first_ = c * kChunkKeys;
    count_ = block_.keys() - first_;
    if (count_ > kChunkKeys) count_ = kChunkKeys;
    for (int64_t i = 0; i < count_; ++i) values_[i] = value(first_ + i);
    for (int64_t i = 0; i < count_; i += kPanelKeys) {
      make_panel(i);
      if constexpr (kHasOwn) {
        own().make_scores(c, i);
      } else {
        for_tiles<kMostRows>(sizes_.rows, [&]<int kRows>(int64_t row) {
          if (visible(row + kRows - 1, c) > i && hidden(row, c) < i + kPanelKeys) score_tile<kRows>(row, i);
        });
      }
    }
    for (int64_t r = 0; r < sizes_.rows; ++r) {
      const int64_t keys = visible(r, c);
      float* scores = scores_ + r * kScoresLd;
      if constexpr (kHasOwn) own().scale(scores, keys);
      if (t_.logit_cap > 0) cap(scores, keys);
      for (int64_t i = 0; i < hidden(r, c); ++i) scores[i] = kLowest;
      const RowSums sums = weigh<V>(scores, keys, rounded_up(keys, kLanes));
      part.most[r] = sums.most;
      part.sum[r] = sums.sum;
      if constexpr (kHasOwn) own().take_weights(r, keys);
    }
    find_next_keys();
    if constexpr (kHasOwn) {
      own().weigh_values(c, part);
    } else {
      weighted_values(c, part);
    }
  }

  // The keys of the next chunk, for prefetches; without one, none is followed.
  void find_next_keys() {
    is_followed_ = first_ + count_ < block_.keys();
    for (int64_t i = 0; i < count_ && is_followed_; ++i) {
      const int64_t next = first_ + kChunkKeys + i, last = block_.keys() - 1;
      next_keys_[i] = key(next < last ? next : last);
    }
  }

  // Keys i to i + kPanelKeys of the chunk, transposed. Beyond the last key, that key again.
  void make_panel(int64_t i) {
    const int64_t last = block_.keys() - 1;
    const auto index = [last](int64_t key) { return key < last ? key : last; };
    for (int64_t half = 0; half < 2; ++half, i += kLanes) {
      const Key *rows[kLanes], *later[kLanes];
      const Value* values[kLanes];
      for (int64_t l = 0; l < kLanes; ++l) {
        rows[l] = key(index(first_ + i + l));
        later[l] = key(index(first_ + i + l + kKeysAhead));
        values[l] = values_[i + l < count_ ? i + l : count_ - 1];
      }
      constexpr int64_t kCols = kLanes * Scores::kUnitCols;
      for (int64_t col = 0; col < t_.key_size; col += kCols) {
        Reg block[kLanes];
        const int64_t rest = t_.key_size - col;
#pragma GCC unroll 16
        for (int l = 0; l < kLanes; ++l) {
          block[l] = rest >= kCols ? Scores::load(rows[l] + col) : Scores::load_partial(rows[l] + col, rest);
          if (col % kLineKeys == 0) __builtin_prefetch(later[l] + col, 0, 2);
          if (col % kLineKeys == 0 && col < t_.value_size) __builtin_prefetch(values[l] + col, 0, 2);
        }
        Scores::transpose(block);
        float* to = panel_ + col / Scores::kUnitCols * kPanelKeys + half * kLanes;
#pragma GCC unroll 16
        for (int l = 0; l < kLanes; ++l) V::store(to + l * kPanelKeys, block[l]);
      }
    }
  }

  // Scores of kRows rows with the panel, scaled; in units of log(2) where no cap follows.
  template <int kRows>
  void score_tile(int64_t row, int64_t i) {
    const float* q = queries_ + row * sizes_.units;
    const int64_t ld = sizes_.units;
    Reg sum[kRows][2];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = V::zero();
    for (int64_t u = 0; u < units_; ++u) {
      const Reg left = V::load(panel_ + u * kPanelKeys), right = V::load(panel_ + u * kPanelKeys + kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Reg unit = V::broadcast(q + r * ld + u);
        sum[r][0] = Scores::dot(unit, left, sum[r][0]);
        sum[r][1] = Scores::dot(unit, right, sum[r][1]);
      }
    }
    const Reg factor = V::set(t_.logit_cap > 0 ? t_.scaling : t_.scaling * kLog2E);
    float* to = scores_ + row * kScoresLd + i;
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      V::store(to + r * kScoresLd, sum[r][0] * factor);
      V::store(to + r * kScoresLd + kLanes, sum[r][1] * factor);
    }
  }

  void cap(float* scores, int64_t count) const {
    for (int64_t i = 0; i < count; i += kLanes) {
      V::store(scores + i, capped<V>(V::load(scores + i), t_.logit_cap) * V::set(kLog2E));
    }
  }

  void weighted_values(int64_t c, const Part& part) {
    const Value* last_cols[kChunkKeys];
    for (int64_t col = 0; col < t_.value_size; col += kTileCols) {
      const Value* const* rows = values_;
      int64_t offset = col;
      if (t_.value_size - col < kTileCols) {
        copy_last_columns(col, last_cols);
        rows = last_cols;
        offset = 0;
      }
      for_tiles<kMostRows>(sizes_.rows, [&]<int kRows>(int64_t row) {
        float* to = part.row(row) + col;
        if (row == 0 && is_followed_ && col < t_.key_size) {
          value_tile<kRows, true>(row, c, rows, offset, col, to);
        } else {
          value_tile<kRows, false>(row, c, rows, offset, col, to);
        }
      });
    }
  }

  // Columns [col, value_size) of the chunk's values, with zeros up to a whole tile.
  void copy_last_columns(int64_t col, const Value** rows) {
    const auto count = static_cast<size_t>(t_.value_size - col);
    for (int64_t i = 0; i < count_; ++i) {
      Value* to = last_cols_ + i * kTileCols;
      std::memset(to, 0, kTileCols * sizeof(Value));
      std::memcpy(to, values_[i] + col, count * sizeof(Value));
      rows[i] = to;
    }
  }

  // Adds the value of key i, which some of kRows rows see.
  template <int kRows>
  void some_rows(int64_t row, int64_t c, int64_t i, const Value* const* rows, int64_t col, Reg (&sum)[kRows][2]) {
    const float* weights = scores_ + row * kScoresLd;
    Reg value[2];
    Values::load(rows[i] + col, value);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      if (visible(row + r, c) <= i || hidden(row + r, c) > i) continue;
      const Reg weight = V::broadcast(weights + r * kScoresLd + i);
      sum[r][0] = V::fma(weight, value[0], sum[r][0]);
      sum[r][1] = V::fma(weight, value[1], sum[r][1]);
    }
  }

  // kTileCols columns of the output of kRows rows, from their weights. kFetch: with column `fetched` of the next keys.
  template <int kRows, bool kFetch>
  void value_tile(int64_t row, int64_t c, const Value* const* rows, int64_t col, int64_t fetched, float* to) {
    const float* weights = scores_ + row * kScoresLd;
    // A later row sees no fewer keys at the end, and no more at the beginning.
    const int64_t common = visible(row, c), most = visible(row + kRows - 1, c);
    const int64_t least_hidden = hidden(row, c), most_hidden = hidden(row + kRows - 1, c);
    Reg sum[kRows][2];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = V::zero();
    for (int64_t i = least_hidden; i < most_hidden && i < most; ++i) some_rows<kRows>(row, c, i, rows, col, sum);
    for (int64_t i = most_hidden; i < common; ++i) {
      Reg value[2];
      Values::load(rows[i] + col, value);
      if constexpr (kFetch) __builtin_prefetch(next_keys_[i] + fetched, 0, 2);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Reg weight = V::broadcast(weights + r * kScoresLd + i);
        sum[r][0] = V::fma(weight, value[0], sum[r][0]);
        sum[r][1] = V::fma(weight, value[1], sum[r][1]);
      }
    }
    for (int64_t i = common > most_hidden ? common : most_hidden; i < most; ++i)
      some_rows<kRows>(row, c, i, rows, col, sum);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      V::store(to + r * sizes_.cols, sum[r][0]);
      V::store(to + r * sizes_.cols + kLanes, sum[r][1]);
    }
  }

  // Adds the part of chunk c to the sums of the chunks before it.
  void add_part(int64_t c, float* from, float* to) const {
    const Part part = part_of(from), all = part_of(to);
    for (int64_t r = 0; r < sizes_.rows; ++r) {
      if (sees_nothing(r, c)) continue;
      const float most = part.most[r] > all.most[r] ? part.most[r] : all.most[r], shift = shift_of(most);
      const float by_all = exp2_of_one<V>(all.most[r] - shift), by_part = exp2_of_one<V>(part.most[r] - shift);
      all.most[r] = most;
      all.sum[r] = all.sum[r] * by_all + part.sum[r] * by_part;
      for (int64_t i = 0; i < sizes_.cols; i += kLanes) {
        const Reg scaled = V::load(all.row(r) + i) * V::set(by_all);
        V::store(all.row(r) + i, V::fma(V::load(part.row(r) + i), V::set(by_part), scaled));
      }
    }
  }

  // A sink, in units of log(2), joins a row's largest score and sum of weights. What the outputs are scaled by.
  static float add_sink(float sink, float* most, float* sum) {
    const float larger = sink > *most ? sink : *most, by_keys = exp2_of_one<V>(*most - larger);
    *sum = *sum * by_keys + exp2_of_one<V>(sink - larger);
    *most = larger;
    return by_keys;
  }

  void finish(float* sums) const {
    const Part all = part_of(sums);
    for (int64_t r = 0; r < sizes_.rows; ++r) {
      const int64_t row = block_.sequence.first_query + query_of(r), head = head_of(r);
      float most = all.most[r], sum = all.sum[r], factor = 1.0f;  // the result is factor / sum of all.row(r)
      if (t_.sinks) factor = add_sink(t_.sinks[head] * kLog2E, &most, &sum);
      if (t_.log_sums) {
        const double log2_sum = static_cast<double>(most) + std::log2(static_cast<double>(sum));
        t_.log_sums[row * t_.heads + head] = static_cast<float>(log2_sum * 0.693147180559945309);
      }
      const float inverse = factor / sum;
      for (int64_t col = 0; col < t_.value_size; col += kTileCols) {
        float result[kTileCols];
        Values::place(all.row(r) + col, result);
        for (float& x : result) x *= inverse;
        const int64_t rest = t_.value_size - col, cols = rest < kTileCols ? rest : kTileCols;
        if (t_.out.bf16) {
          narrow_all(result, cols, t_.out.at<uint16_t>(row, head) + col);
        } else {
          std::memcpy(t_.out.at<float>(row, head) + col, result, static_cast<size_t>(cols) * sizeof(float));
        }
      }
    }
  }

  const AttentionTensors& t_;
  const AttentionBlock& block_;
  const BlockSizes<V> sizes_;
  const int64_t units_;  // of a row of q, without padding
  float *state_ = nullptr, *part_ = nullptr, *queries_ = nullptr, *scores_ = nullptr, *panel_ = nullptr;
  Value* last_cols_ = nullptr;
  int64_t first_ = 0, count_ = 0;  // the present chunk's keys
  const Value* values_[kChunkKeys];
  const Key* next_keys_[kChunkKeys];
  bool is_followed_ = false;

 private:
  auto& own() { return static_cast<std::conditional_t<kHasOwn, Own, BlockAttention>&>(*this); }
};

// Scores with keys of one dtype, widened to floats where they are bf16.
template <class V, class T>
struct WideScores {
  using Key = T;
  using Reg = typename V::Reg;
  static constexpr int kUnitCols = 1;

  static Reg load(const float* from) { return V::load(from); }
  static Reg load(const uint16_t* from) { return V::widen(from); }
  static Reg load_partial(const float* from, int64_t cols) { return V::load_partial(from, static_cast<int>(cols)); }
  static Reg load_partial(const uint16_t* from, int64_t cols) { return V::widen_partial(from, static_cast<int>(cols)); }
  static Reg dot(Reg q, Reg keys, Reg sum) { return V::fma(q, keys, sum); }
  static void transpose(Reg (&block)[V::kLanes]) { V::transpose(block); }
};

template <class V, class T>
struct WideValues;

template <class V>
struct WideValues<V, float> {
  using Value = float;
  static void load(const float* from, typename V::Reg (&to)[2]) {
    to[0] = V::load(from);
    to[1] = V::load(from + V::kLanes);
  }
  static void place(const float* sums, float* to) { std::memcpy(to, sums, 2 * V::kLanes * sizeof(float)); }
};

// The even columns, then the odd ones: a shift or a mask widens half of a vector of bf16.
template <class V>
struct WideValues<V, uint16_t> {
  using Value = uint16_t;
  static void load(const uint16_t* from, typename V::Reg (&to)[2]) {
    constexpr int kHigh = -65536;
    typename V::Int pairs;
    __builtin_memcpy(&pairs, from, sizeof pairs);
    to[0] = (typename V::Reg)(pairs << 16);
    to[1] = (typename V::Reg)(pairs & kHigh);
  }
  static void place(const float* sums, float* to) {
    for (int l = 0; l < V::kLanes; ++l) {
      to[2 * l] = sums[l];
      to[2 * l + 1] = sums[V::kLanes + l];
    }
  }
};

// The functions of an instruction set. PairScores: the scores where q and keys are bf16. kRows: of a register tile.
template <class V, class PairScores, int kRows>
struct AttentionKernels {
  template <class Body>
  static void with(const AttentionTensors& t, const AttentionBlock& block, Body&& body) {
    if (!t.keys.bf16) {
      body(BlockAttention<V, WideScores<V, float>, WideValues<V, float>, kRows>(t, block));
    } else if (!t.q.bf16) {
      body(BlockAttention<V, WideScores<V, uint16_t>, WideValues<V, uint16_t>, kRows>(t, block));
    } else {
      body(BlockAttention<V, PairScores, WideValues<V, uint16_t>, kRows>(t, block));
    }
  }
  static int64_t workspace_bytes(const AttentionTensors& t, int64_t rows) { return BlockSizes<V>(t, rows).bytes(); }
  static int64_t part_floats(const AttentionTensors& t, int64_t rows) { return BlockSizes<V>(t, rows).part_floats(); }
  static void attend(const AttentionTensors& t, const AttentionBlock& block, void* workspace) {
    with(t, block, [&](auto&& attention) { attention.attend(workspace); });
  }
  static void attend_part(const AttentionTensors& t, const AttentionBlock& block, int64_t first, int64_t count,
                          float* parts, void* workspace) {
    with(t, block, [&](auto&& attention) { attention.attend_part(first, count, parts, workspace); });
  }
  static void merge(const AttentionTensors& t, const AttentionBlock& block, float* parts) {
    with(t, block, [&](auto&& attention) { attention.merge(parts); });
  }

  static constexpr Attention table() {
    return {.workspace_bytes = workspace_bytes,
            .attend = attend,
            .part_floats = part_floats,
            .attend_part = attend_part,
            .merge = merge};
  }
};

}  // namespace
}  // namespace kt
