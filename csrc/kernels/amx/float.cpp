// bf16 activations times bf16 and fp8 weights: TDPBF16PS.
//
// Step: A = up to 16 rows x 32 columns of activations as they lie, B = 16 packed lines of a block (32 columns x 16 rows
// of weights), C = rows x 16 sums. Blocking 2 x 2 (tile_registers.h); for up to 16 rows 1 x 4 (few_rows.h).
//
// bf16: the tiles of B are loaded from the packed lines, C is stored to the result (dense.h).
// fp8: up to 128 columns of a group are unpacked to bf16 lines on the stack (2 blocks x 4 KiB), which all rows then
// use; each such sum is scaled once: total = fma(group scale, sum, total), and the result is total * row scale. Up to
// 16 rows unpack 32 columns of 4 blocks at a time; their sums run over the same 128.
#include "kernels/amx/dense.h"
#include "kernels/amx/unpacked_lines.h"

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

constexpr int64_t kStepCols = 32, kStepBytes = 64, kPanelCols = 128;

inline TileRun activations(const PackedProduct<uint16_t>& p, int64_t row, int64_t col) {
  return {reinterpret_cast<const uint8_t*>(p.a.row(row) + col), p.a.ld * 2, kStepBytes};
}

inline TileRun lines_at(const uint8_t* lines) { return {lines, kLineBytes, 16 * kLineBytes}; }

struct Bf16Rows {
  using Dot = DotBf16;
  using Sum = float;

  explicit Bf16Rows(const PackedProduct<uint16_t>& p) : product(p), tiles(p.rows) {}

  TileRun a(int64_t tile, int64_t byte) const { return activations(product, tiles.start(tile), byte / 2); }

  template <int kTile>
  void finish(int64_t tile, int64_t block, float*) const {
    store_tile<kTile>(product.c.row(tiles.start(tile)) + block * kBlockRows, product.c.ld * 4);
  }

  const PackedProduct<uint16_t>& product;
  const RowTiles tiles;
  static constexpr int64_t step_bytes = kStepBytes;
};

// Columns [col, col + cols) of two blocks, of one group.
struct Span {
  int64_t col, cols;
  bool first, last;  // of the row
  Floats scale[2];
  const float* row_scales[2];
};

// Adds the sums of a tile of rows, kB blocks of 16 x 16, to their totals, which lie in the result until the last
// columns.
template <int kB>
inline void finish(const PackedProduct<uint16_t>& p, const RowTiles& rows, int64_t tile, int64_t block,
                   const Span& span, const float* sums) {
  const int64_t ldc = p.c.ld, end = rows.height;
  float* c = p.c.row(rows.start(tile)) + block * kBlockRows;
  Floats scale[kB], row_scale[kB];
  for (int b = 0; b < kB; ++b) {
    scale[b] = span.scale[b];
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
  constexpr int64_t kAhead = 2 * kPanelCols / 4;  // lines of two panels
  const uint8_t* lines = block_at(shape, p.weights.data, block).lines;
  PrefetchCursor fetch = prefetch_ahead(shape, lines, blocks, kAhead, shape.line_offset());
  alignas(64) Fp8Panel panel;
  Span span{};
  for (span.col = 0; span.col < shape.padded_cols(); span.col += span.cols) {
    const int64_t group = span.col / shape.group(), end = (group + 1) * shape.group();
    const int64_t left = (end < shape.padded_cols() ? end : shape.padded_cols()) - span.col;
    span.cols = left < kPanelCols ? left : kPanelCols;
    span.first = span.col == 0;
    span.last = span.col + span.cols == shape.padded_cols();
    const int64_t offset = span.col / 4 * kLineBytes, distance = fetch.take(span.cols / 4) - (lines + offset);
    for (int64_t b = 0; b < blocks; ++b) {
      const Block from = block_at(shape, p.weights.data, block + b);
      unpack_fp8(from.lines + offset, span.cols, panel[b], distance);
      span.scale[b] = group_scales(shape, from, group);
      span.row_scales[b] = from.row_scales;
    }
    for (int64_t tile = 0; tile < rows.count; tile += 2) {
      with_blocking(rows.count - tile, blocks,
                    [&]<int kR, int kB> { scaled_tile<kR, kB>(p, rows, tile, block, span, panel); });
    }
  }
}

// Few rows (few_rows.h) with fp8 weights.
class FewFp8Rows {
 public:
  explicit FewFp8Rows(const PackedProduct<uint16_t>& p) : p_(p), shape_(p.weights.shape) {}

  void run() {
    const TileSession session(config_of_few(p_.rows, kStepBytes));
    by_four_blocks(p_.weights.blocks, [&]<int kB>(int64_t block) { run_blocks<kB>(block); });
  }

 private:
  // The next columns are unpacked before these are multiplied, so that a tile's lines have left the store buffer long
  // before the tile is loaded.
  template <int kB>
  void run_blocks(int64_t block) {
    const int64_t cols = shape_.padded_cols(), group = shape_.group();
    PrefetchCursor fetch = prefetch_few<kB>(p_.weights, block);
    Block from[kB];
    for (int b = 0; b < kB; ++b) from[b] = block_at(shape_, p_.weights.data, block + b);
    const auto unpack = [&](int64_t col, int side) {
      const int64_t offset = col / 4 * kLineBytes;
      const int64_t distance = fetch.take(kStepCols / 4) - (from[0].lines + offset);
      for (int b = 0; b < kB; ++b) unpack_fp8(from[b].lines + offset, kStepCols, panel_[side][b], distance);
    };
    int side = 0;
    unpack(0, side);
    int64_t g = 0, within = 0;  // of the group
    for (int64_t col = 0; col < cols; side ^= 1) {
      if (col + kStepCols < cols) unpack(col + kStepCols, side ^ 1);
      const uint8_t* w[kB];
      for (int b = 0; b < kB; ++b) w[b] = panel_[side][b];
      if (within % kPanelCols == 0) zero_few<kB>();
      multiply_few<DotBf16, kB>(activations(p_, 0, col), w);
      col += kStepCols;
      within += kStepCols;
      const bool last = col == cols, group_ends = within == group;
      if (last || group_ends || within % kPanelCols == 0) {
        for_each_few<kB>([&]<int kTile>() { store_tile<kTile>(sums_[kTile], kLineBytes); });
        const bool first = col <= kPanelCols && g == 0;
        for (int b = 0; b < kB; ++b) finish(from[b], block + b, g, first, last, sums_[b]);
      }
      if (group_ends) {
        ++g;
        within = 0;
      }
    }
  }

  void finish(const Block& from, int64_t block, int64_t group, bool first, bool last, const float* sums) const {
    const Floats scale = group_scales(shape_, from, group);
    const Floats row_scale = last ? load<Floats>(from.row_scales) : Floats{} + 1.0f;
    for (int64_t i = 0; i < p_.rows; ++i) {
      float* total = p_.c.row(i) + block * kBlockRows;
      const Floats before = first ? Floats{} : load<Floats>(total);
      store(fused(scale, load<Floats>(sums + i * kBlockRows), before) * row_scale, total);
    }
  }

  const PackedProduct<uint16_t>& p_;
  const PackedShape& shape_;
  alignas(64) uint8_t panel_[2][4][kStepCols / 2 * kLineBytes];
  alignas(64) float sums_[4][16 * kBlockRows];
};

}  // namespace

void multiply_bf16(const PackedProduct<uint16_t>& p) {
  if (p.rows == 0) return;
  if (p.weights.shape.format.encoding == Encoding::kBf16) return multiply_dense(Bf16Rows(p), p.weights);
  const RowTiles rows(p.rows);
  if (rows.count == 1) return FewFp8Rows(p).run();
  const TileSession session(config_of(rows, kStepBytes));
  for (int64_t block = 0; block < p.weights.blocks; block += 2) {
    const int64_t left = p.weights.blocks - block;
    multiply_fp8_blocks(p, rows, block, left < 2 ? left : 2);
  }
}

}  // namespace kt::amx::inline KT_AMX_BUILD
