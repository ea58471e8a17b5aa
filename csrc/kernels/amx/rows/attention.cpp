// Attention (kernels/attention.h) of bf16 queries over bf16 keys and values: TDPBF16PS. Other dtypes are AVX-512's.
//
// Scores: A = 16 rows of q x 32 columns, B = the same columns of 16 keys, from the panel that attention_blocks.h makes.
// Weighted values: A = 16 rows x 32 keys of weights, B = 32 keys x 16 columns of values, pairs of keys interleaved. A
// weight is the sum of three bf16, which differ from it by 2^-25 of it at most. Blocking 2 x 2 (tile_registers.h).
//
// A score's order: per 32 columns TDPBF16PS's. An output's order: TDPBF16PS's for 32 keys after 32, for the largest
// parts of the weights, then for the middle ones, then for the smallest. Keys that a row does not see have weight 0,
// which changes no sum: zeros take the place of NaN and Inf among the values, and those are then added to the rows that
// see them.
#include "kernels/attention.h"

#include "base/bf16.h"
#include "kernels/amx/kernels.h"
#include "kernels/amx/tile_registers.h"
#include "kernels/generic/rows/attention_blocks.h"

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

constexpr int64_t kRowUnit = 16, kStepKeys = 32, kStepCols = 32, kTileBytes = 1024;
constexpr int kParts = 3;                        // of a weight
constexpr int64_t kWeightsLd = kChunkKeys + 32;  // bf16 of a row: a line more than its keys, as kScoresLd

struct PairScores {
  using Key = uint16_t;
  using Reg = PairLanes::Reg;
  static constexpr int kUnitCols = 2;

  static Reg load(const uint16_t* from) { return PairLanes::load_pairs(from); }
  static Reg load_partial(const uint16_t* from, int64_t cols) { return PairLanes::load_some_pairs(from, cols); }
  static void transpose(Reg (&block)[16]) { PairLanes::transpose(block); }
};

struct PairValues {
  using Value = uint16_t;
  static void place(const float* sums, float* to) { std::memcpy(to, sums, 2 * PairLanes::kLanes * sizeof(float)); }
};

bool is_pairs(const AttentionTensors& t) { return t.q.bf16 && t.keys.bf16; }

BlockSizes<PairLanes> sizes_of(const AttentionTensors& t, int64_t rows) { return {t, rows, kRowUnit}; }

// Beside the memory of BlockSizes: the weights' parts. A strip of values lies where other kernels copy last columns.
int64_t own_bytes(int64_t padded_rows) { return kParts * padded_rows * kWeightsLd * 2; }

TileConfig whole_tiles() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, kLineBytes);
  return config;
}

class TileAttention : public BlockAttention<PairLanes, PairScores, PairValues, 1, TileAttention> {
 public:
  TileAttention(const AttentionTensors& t, const AttentionBlock& block)
      : BlockAttention<PairLanes, PairScores, PairValues, 1, TileAttention>(t, block, kRowUnit) {}

  // Zeros where a tile of q or of weights has more rows or columns than the block.
  void begin_own(float* at) {
    auto* weights = reinterpret_cast<uint16_t*>(at);
    for (uint16_t*& part : weights_) {
      part = weights;
      weights += sizes_.padded_rows * kWeightsLd;
      const int64_t rest = (sizes_.padded_rows - sizes_.rows) * kWeightsLd * 2;
      std::memset(part + sizes_.rows * kWeightsLd, 0, static_cast<size_t>(rest));
    }
    strip_ = reinterpret_cast<uint8_t*>(last_cols_);
    const int64_t used = steps() * kLineBytes;
    for (int64_t r = 0; r < sizes_.padded_rows; ++r) {
      const int64_t kept = r < sizes_.rows ? 2 * t_.key_size : 0;
      std::memset(reinterpret_cast<uint8_t*>(queries_ + r * sizes_.units) + kept, 0, static_cast<size_t>(used - kept));
    }
  }

  // Scores of all rows with keys i to i + 31 of chunk c, which the panel holds.
  void make_scores(int64_t c, int64_t i) {
    for_row_tiles([&]<int kR>(int64_t row) {
      if (visible_to_tiles<kR>(row, c) <= i) return;
      TileRun a[kR], b[2];
      for (int r = 0; r < kR; ++r)
        a[r] = {bytes(queries_ + (row + 16 * r) * sizes_.units), 4 * sizes_.units, kLineBytes};
      for (int half = 0; half < 2; ++half) b[half] = {bytes(panel_ + 16 * half), 2 * kLineBytes, 16 * 2 * kLineBytes};
      zero_sums<kR, 2>();
      accumulate<DotBf16, kR, 2>(a, b, steps());
      for_each_sum<kR, 2>([&]<int kTile>(int r, int half) {
        store_tile<kTile>(scores_ + (row + 16 * r) * kScoresLd + i + 16 * half, 4 * kScoresLd);
      });
    });
  }

  void scale(float* scores, int64_t keys) const {
    const PairLanes::Reg factor = PairLanes::set(t_.logit_cap > 0 ? t_.scaling : t_.scaling * kLog2E);
    for (int64_t i = 0; i < keys; i += 16) PairLanes::store(scores + i, PairLanes::load(scores + i) * factor);
  }

  // The weights of row r as three bf16 each, with zeros after the keys that the row sees.
  void take_weights(int64_t r, int64_t keys) {
    const int64_t place = r * kWeightsLd, padded = rounded_up(count_, kStepKeys);
    int64_t i = 0;
    for (; i < keys; i += 16)
      split_floats(scores_ + r * kScoresLd + i, weights_[0] + place + i, weights_[1] + place + i,
                   weights_[2] + place + i);
    for (; i < padded; i += 16) {
      for (uint16_t* part : weights_) std::memset(part + place + i, 0, 32);
    }
  }

  void weigh_values(int64_t c, const Part& part) {
    const int64_t padded = rounded_up(count_, kStepKeys);
    for (int64_t col = 0; col < t_.value_size; col += kStepCols) {
      const bool is_bad = make_strip(col, padded);
      for_row_tiles([&]<int kR>(int64_t row) {
        const int64_t groups = (visible_to_tiles<kR>(row, c) + kStepKeys - 1) / kStepKeys;
        zero_sums<kR, 2>();
        for (const uint16_t* weights : weights_) {
          TileRun a[kR], b[2];
          for (int r = 0; r < kR; ++r)
            a[r] = {bytes(weights + (row + 16 * r) * kWeightsLd), 2 * kWeightsLd, kLineBytes};
          for (int half = 0; half < 2; ++half) b[half] = {strip_ + half * kTileBytes, kLineBytes, 2 * kTileBytes};
          accumulate<DotBf16, kR, 2>(a, b, groups);
        }
        for_each_sum<kR, 2>([&]<int kTile>(int r, int half) {
          store_tile<kTile>(part.row(row + 16 * r) + col + 16 * half, 4 * sizes_.cols);
        });
      });
      if (is_bad) add_bad_values(c, col, part);
    }
  }

 private:
  static const uint8_t* bytes(const void* at) { return static_cast<const uint8_t*>(at); }
  int64_t steps() const { return (t_.key_size + kStepCols - 1) / kStepCols; }

  // Keys of chunk c that the last row of kR tiles sees, which sees the most.
  template <int kR>
  int64_t visible_to_tiles(int64_t row, int64_t c) const {
    const int64_t last = row + 16 * kR < sizes_.rows ? row + 16 * kR : sizes_.rows;
    return visible(last - 1, c);
  }

  template <class Work>
  void for_row_tiles(Work work) {
    int64_t row = 0;
    for (; row + 32 <= sizes_.padded_rows; row += 32) work.template operator()<2>(row);
    if (row < sizes_.padded_rows) work.template operator()<1>(row);
  }

  // Columns [col, col + 32) of the chunk's values as B, with zeros up to `padded` keys. Whether there is NaN or Inf.
  bool make_strip(int64_t col, int64_t padded) {
    alignas(64) static constexpr uint16_t kZeros[kStepCols] = {};
    const int64_t rest = t_.value_size - col, cols = rest < kStepCols ? rest : kStepCols;
    const bool fetches = is_followed_ && col < t_.key_size;
    bool is_bad = false;
    for (int64_t i = 0; i < padded; i += 2) {
      const uint16_t* first = i < count_ ? values_[i] + col : kZeros;
      const uint16_t* second = i + 1 < count_ ? values_[i + 1] + col : kZeros;
      if (fetches) {
        if (i < count_) __builtin_prefetch(next_keys_[i] + col, 0, 2);
        if (i + 1 < count_) __builtin_prefetch(next_keys_[i + 1] + col, 0, 2);
      }
      uint8_t* line = strip_ + i / kStepKeys * 2 * kTileBytes + i % kStepKeys / 2 * kLineBytes;
      is_bad |= interleave_finite(first, second, cols, line, line + kTileBytes);
    }
    return is_bad;
  }

  void add_bad_values(int64_t c, int64_t col, const Part& part) {
    for (int64_t i = 0; i < count_; ++i) {
      for (int64_t j = 0; j < kStepCols && col + j < t_.value_size; ++j) {
        const uint16_t value = values_[i][col + j];
        if ((value & 0x7f80) != 0x7f80) continue;
        for (int64_t r = 0; r < sizes_.rows; ++r) {
          if (visible(r, c) > i && hidden(r, c) <= i)
            part.row(r)[col + j] += scores_[r * kScoresLd + i] * bf16_to_float(value);
        }
      }
    }
  }

  uint16_t* weights_[kParts] = {};  // each [padded_rows][kWeightsLd], larger parts first
  uint8_t* strip_ = nullptr;        // for 32 keys after 32, two tiles of B
};

int64_t workspace_bytes(const AttentionTensors& t, int64_t rows) {
  if (!is_pairs(t)) return base::kAttention.workspace_bytes(t, rows);
  const BlockSizes<PairLanes> sizes = sizes_of(t, rows);
  return sizes.bytes() + own_bytes(sizes.padded_rows);
}

int64_t part_floats(const AttentionTensors& t, int64_t rows) {
  return is_pairs(t) ? sizes_of(t, rows).part_floats() : base::kAttention.part_floats(t, rows);
}

void attend(const AttentionTensors& t, const AttentionBlock& block, void* workspace) {
  if (!is_pairs(t)) return base::kAttention.attend(t, block, workspace);
  const TileSession session(whole_tiles());
  TileAttention(t, block).attend(workspace);
}

void attend_part(const AttentionTensors& t, const AttentionBlock& block, int64_t first, int64_t count, float* parts,
                 void* workspace) {
  if (!is_pairs(t)) return base::kAttention.attend_part(t, block, first, count, parts, workspace);
  const TileSession session(whole_tiles());
  TileAttention(t, block).attend_part(first, count, parts, workspace);
}

void merge(const AttentionTensors& t, const AttentionBlock& block, float* parts) {
  if (!is_pairs(t)) return base::kAttention.merge(t, block, parts);
  TileAttention(t, block).merge(parts);
}

}  // namespace

const Attention kAttention = {.workspace_bytes = workspace_bytes,
                              .attend = attend,
                              .part_floats = part_floats,
                              .attend_part = attend_part,
                              .merge = merge};

}  // namespace kt::amx::inline KT_AMX_BUILD
