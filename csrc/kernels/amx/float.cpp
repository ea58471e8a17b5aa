// bf16 activations times bf16 and fp8 weights: TDPBF16PS.
//
// Step: A = up to 16 rows x 32 columns of activations as they lie, B = 16 packed lines of a block (32 columns x 16 rows
// of weights), C = rows x 16 sums. Blocking 2 x 2 (tile_registers.h); for up to 16 rows 1 x 4 (FewRows).
//
// bf16: the tiles of B are loaded from the packed lines, C is stored to the result. More rows than 16: DenseTiles.
// fp8: up to 128 columns of a group are unpacked to bf16 lines on the stack (2 blocks x 4 KiB), which all rows then
// use; each such sum is scaled once: total = fma(group scale, sum, total), and the result is total * row scale.
#include "kernels/amx/fp8_lines.h"
#include "kernels/amx/tile_registers.h"
#include "kernels/amx/vectors.h"

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

constexpr int64_t kStepCols = 32, kStepBytes = 64, kPanelCols = 128;

inline TileRun activations(const PackedProduct<uint16_t>& p, int64_t row, int64_t col) {
  return {reinterpret_cast<const uint8_t*>(p.a + row * p.lda + col), p.lda * 2, kStepBytes};
}

inline TileRun lines_at(const uint8_t* lines) { return {lines, kLineBytes, 16 * kLineBytes}; }

// Products with bf16 weights, for more rows than one tile: up to 128 rows with 8 blocks, 256 columns at a time, so that
// the activations of these columns stay in the first-level cache while blocks pass by. Sums wait on the stack (64 KiB).
class DenseTiles {
 public:
  DenseTiles(const PackedProduct<uint16_t>& p, const RowTiles& rows)
      : p_(p), rows_(rows), cols_(p.weights.shape.padded_cols()) {}

  void run() {
    for (int64_t block = 0; block < p_.weights.blocks; block += kBlocksAtOnce) {
      for (int64_t tile = 0; tile < rows_.count; tile += kTilesAtOnce) run_part(block, tile);
    }
  }

 private:
  static constexpr int64_t kBlocksAtOnce = 8, kTilesAtOnce = 8, kChunkCols = 256;

  void run_part(int64_t first, int64_t first_tile) {
    const int64_t end = least(first + kBlocksAtOnce, p_.weights.blocks);
    const int64_t end_tile = least(first_tile + kTilesAtOnce, rows_.count);
    for (int64_t col = 0; col < cols_; col += kChunkCols) {
      for (int64_t block = first; block < end; block += Fetch::kBlocks) {
        // Later rows find the weights in the second-level cache.
        Fetch fetch = first_tile == 0 ? fetch_after(first, block, end, col, (end_tile + 1) / 2) : Fetch{};
        for (int64_t pair = block; pair < least(block + Fetch::kBlocks, end); pair += 2) {
          for (int64_t tile = first_tile; tile < end_tile; tile += 2) {
            with_blocking(end_tile - tile, end - pair, [&]<int kR, int kB> {
              run_tile<kR, kB>(tile, pair, col, &sums_[pair - first][tile - first_tile], fetch);
            });
          }
        }
      }
    }
  }

  static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

  const uint8_t* lines(int64_t block, int64_t col) const {
    return block_at(p_.weights.shape, p_.weights.data, block).lines + col / 2 * kLineBytes;
  }

  // What is read after these columns of these blocks: by the last call's end, what a next one begins with.
  Fetch fetch_after(int64_t first, int64_t block, int64_t end, int64_t col, int64_t passes) const {
    constexpr int64_t kSteps = 2 * kChunkCols / kStepCols;  // of each pass over four blocks
    block += Fetch::kBlocks;
    if (block >= end) {
      block = first;
      col += kChunkCols;
    }
    if (col >= cols_) {
      block = end;
      col = 0;
    }
    const int64_t num_lines = kChunkCols / 2, steps = kSteps * passes;
    return {lines(block, col), p_.weights.shape.block_bytes(), (num_lines + steps - 1) / steps};
  }

  using Sum = float[16 * kBlockRows];

  template <int kR, int kB>
  void run_tile(int64_t tile, int64_t block, int64_t col, Sum* sums, Fetch& fetch) {
    const int64_t cols = least(cols_ - col, kChunkCols);
    TileRun a[kR], w[kB];
    for (int r = 0; r < kR; ++r) a[r] = activations(p_, rows_.start(tile + r), col);
    for (int b = 0; b < kB; ++b) w[b] = lines_at(lines(block + b, col));
    const auto sum = [&](int r, int b) { return sums[b * kTilesAtOnce + r]; };
    if (col == 0) {
      zero_sums<kR, kB>();
    } else {
      for_each_sum<kR, kB>(
          [&]<int kTile>(int r, int b) { load_tile<kTile>(reinterpret_cast<const uint8_t*>(sum(r, b)), kLineBytes); });
    }
    accumulate<DotBf16, kR, kB>(a, w, cols / kStepCols, fetch);
    if (col + cols < cols_) {
      for_each_sum<kR, kB>([&]<int kTile>(int r, int b) { store_tile<kTile>(sum(r, b), kLineBytes); });
    } else {
      for_each_sum<kR, kB>([&]<int kTile>(int r, int b) {
        store_tile<kTile>(p_.c + rows_.start(tile + r) * p_.ldc + (block + b) * kBlockRows, p_.ldc * 4);
      });
    }
  }

  const PackedProduct<uint16_t>& p_;
  const RowTiles& rows_;
  const int64_t cols_;
  alignas(64) Sum sums_[kBlocksAtOnce][kTilesAtOnce];
};

// Columns [col, col + cols) of two blocks, of one group.
struct Span {
  int64_t col, cols;
  bool first, last;  // of the row
  float scale[2];
  const float* row_scales[2];
};

// Adds the sums of a tile of rows, kB blocks of 16 x 16, to their totals, which lie in the result until the last
// columns.
template <int kB>
inline void finish(const PackedProduct<uint16_t>& p, const RowTiles& rows, int64_t tile, int64_t block,
                   const Span& span, const float* sums) {
  const int64_t ldc = p.ldc, end = rows.height;
  float* c = p.c + rows.start(tile) * ldc + block * kBlockRows;
  Floats scale[kB], row_scale[kB];
  for (int b = 0; b < kB; ++b) {
    scale[b] = Floats{} + span.scale[b];
    row_scale[b] = span.last ? load<Floats>(span.row_scales[b]) : Floats{} + 1.0f;
  }
  const bool first = span.first;
  for (int64_t i = rows.repeated(tile); i < end; ++i) {
    for (int b = 0; b < kB; ++b) {
      float* total = c + i * ldc + b * kBlockRows;
      const Floats before = first ? Floats{} : load<Floats>(total);
      store(fused(scale[b], load<Floats>(sums + (b * 16 + i) * kBlockRows), before) * row_scale[b], total);
    }
  }
}

using Fp8Panel = uint8_t[2][kPanelCols / 2 * kLineBytes];

template <int kR, int kB>
inline void scaled_tile(const PackedProduct<uint16_t>& p, const RowTiles& rows, int64_t tile, int64_t block,
                        const Span& span, const Fp8Panel& panel) {
  TileRun a[kR], w[kB];
  for (int r = 0; r < kR; ++r) a[r] = activations(p, rows.start(tile + r), span.col);
  for (int b = 0; b < kB; ++b) w[b] = lines_at(panel[b]);
  zero_sums<kR, kB>();
  accumulate<DotBf16, kR, kB>(a, w, span.cols / kStepCols);
  alignas(64) float sums[4][16 * kBlockRows];
  for_each_sum<kR, kB>([&]<int kTile>(int, int) { store_tile<kTile>(sums[kTile], kLineBytes); });
  for (int r = 0; r < kR; ++r) finish<kB>(p, rows, tile + r, block, span, sums[2 * r]);
}

void multiply_fp8_blocks(const PackedProduct<uint16_t>& p, const RowTiles& rows, int64_t block, int64_t blocks) {
  const PackedShape& shape = p.weights.shape;
  alignas(64) Fp8Panel panel;
  Span span{};
  for (span.col = 0; span.col < shape.padded_cols(); span.col += span.cols) {
    const int64_t group = span.col / shape.group(), end = (group + 1) * shape.group();
    const int64_t left = (end < shape.padded_cols() ? end : shape.padded_cols()) - span.col;
    span.cols = left < kPanelCols ? left : kPanelCols;
    span.first = span.col == 0;
    span.last = span.col + span.cols == shape.padded_cols();
    for (int64_t b = 0; b < blocks; ++b) {
      const Block from = block_at(shape, p.weights.data, block + b);
      unpack_fp8(from.lines + span.col / 4 * kLineBytes, span.cols, panel[b]);
      span.scale[b] = from.group_scales ? static_cast<const float*>(from.group_scales)[group] : 1.0f;
      span.row_scales[b] = from.row_scales;
    }
    for (int64_t tile = 0; tile < rows.count; tile += 2) {
      with_blocking(rows.count - tile, blocks,
                    [&]<int kR, int kB> { scaled_tile<kR, kB>(p, rows, tile, block, span, panel); });
    }
  }
}

// Rows that fit one tile: bound by memory, so that what counts is how steadily weights are read.
class FewRows {
 public:
  explicit FewRows(const PackedProduct<uint16_t>& p) : p_(p), shape_(p.weights.shape) {}

  void run() {
    const TileSession session(config_of_few(p_.rows, kStepBytes));
    by_four(p_.weights.blocks, [&]<int kB>(int64_t block) {
      if (shape_.format.encoding == Encoding::kBf16) {
        dense<kB>(block);
      } else {
        fp8<kB>(block);
      }
    });
  }

 private:
  template <int kB>
  void dense(int64_t block) const {
    TileRun w[kB];
    for (int b = 0; b < kB; ++b) w[b] = lines_at(block_at(shape_, p_.weights.data, block + b).lines);
    for_each_few<kB>([]<int kTile>() { zero_tile<kTile>(); });
    accumulate_few<DotBf16, kB>(activations(p_, 0, 0), w, shape_.padded_cols() / kStepCols, ahead<kB>());
    for_each_few<kB>([&]<int kTile>() { store_tile<kTile>(p_.c + (block + kTile) * kBlockRows, p_.ldc * 4); });
  }

  // The next columns are unpacked before these are multiplied: a tile is loaded from lines that have long left the
  // store buffer.
  template <int kB>
  void fp8(int64_t block) {
    Block from[kB];
    for (int b = 0; b < kB; ++b) from[b] = block_at(shape_, p_.weights.data, block + b);
    const int64_t cols = shape_.padded_cols();
    int side = 0;
    for (int b = 0; b < kB; ++b) unpack<kB>(from[b], b, 0, side);
    for (int64_t col = 0; col < cols; col += kCols, side ^= 1) {
      for (int b = 0; b < kB && col + kCols < cols; ++b) unpack<kB>(from[b], b, col + kCols, side ^ 1);
      TileRun w[kB];
      for (int b = 0; b < kB; ++b) w[b] = lines_at(panel_[side][b]);
      const int64_t group = col / shape_.group(), within = col % shape_.group(), next = col + kCols;
      if (within % kPanelCols == 0) for_each_few<kB>([]<int kTile>() { zero_tile<kTile>(); });
      accumulate_few<DotBf16, kB>(activations(p_, 0, col), w, 1, NoFetch{});
      if (next < cols && next % shape_.group() % kPanelCols != 0) continue;
      for_each_few<kB>([&]<int kTile>() { store_tile<kTile>(sums_[kTile], kLineBytes); });
      const bool first = next <= kPanelCols && group == 0;
      for (int b = 0; b < kB; ++b) finish(from[b], block + b, group, first, next == cols, sums_[b]);
    }
  }

  template <int kB>
  Ahead ahead() const {
    return {shape_.block_bytes(), kB, shape_.block_bytes() - shape_.line_offset()};
  }

  template <int kB>
  void unpack(const Block& from, int b, int64_t col, int side) {
    const int64_t offset = col / 4 * kLineBytes;
    unpack_fp8(from.lines + offset, kCols, panel_[side][b], ahead<kB>().distance(offset));
  }

  void finish(const Block& from, int64_t block, int64_t group, bool first, bool last, const float* sums) const {
    const Floats scale = Floats{} + (from.group_scales ? static_cast<const float*>(from.group_scales)[group] : 1.0f);
    const Floats row_scale = last ? load<Floats>(from.row_scales) : Floats{} + 1.0f;
    for (int64_t i = 0; i < p_.rows; ++i) {
      float* total = p_.c + i * p_.ldc + block * kBlockRows;
      const Floats before = first ? Floats{} : load<Floats>(total);
      store(fused(scale, load<Floats>(sums + i * kBlockRows), before) * row_scale, total);
    }
  }

  static constexpr int64_t kCols = kStepCols;

  const PackedProduct<uint16_t>& p_;
  const PackedShape& shape_;
  alignas(64) uint8_t panel_[2][4][kCols / 2 * kLineBytes];
  alignas(64) float sums_[4][16 * kBlockRows];
};

}  // namespace

void multiply_bf16(const PackedProduct<uint16_t>& p) {
  if (p.rows == 0) return;
  const RowTiles rows(p.rows);
  if (rows.count == 1) return FewRows(p).run();
  const TileSession session(config_of(rows, kStepBytes));
  if (p.weights.shape.format.encoding == Encoding::kBf16) return DenseTiles(p, rows).run();
  for (int64_t block = 0; block < p.weights.blocks; block += 2) {
    const int64_t left = p.weights.blocks - block;
    multiply_fp8_blocks(p, rows, block, left < 2 ? left : 2);
  }
}

}  // namespace kt::amx::inline KT_AMX_BUILD
