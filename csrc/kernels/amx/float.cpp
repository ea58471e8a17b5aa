// bf16 activations times bf16 and fp8 weights: TDPBF16PS.
//
// Step: A = up to 16 rows x 32 columns of activations as they lie, B = 16 packed lines of a block (32 columns x 16 rows
// of weights), C = rows x 16 sums. Blocking 2 x 2 (tile_registers.h); for one tile of rows 1 x 2.
//
// bf16: the tiles of B are loaded from the packed lines, C is stored to the result: no other instruction in the loop.
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

template <int kR, int kB>
inline void dense_tile(const PackedProduct<uint16_t>& p, const RowTiles& rows, int64_t tile, int64_t block) {
  const PackedShape& shape = p.weights.shape;
  TileRun a[kR], w[kB];
  for (int r = 0; r < kR; ++r) a[r] = activations(p, rows.start(tile + r), 0);
  for (int b = 0; b < kB; ++b) w[b] = lines_at(block_at(shape, p.weights.data, block + b).lines);
  zero_sums<kR, kB>();
  if (tile == 0) {
    accumulate<DotBf16, kR, kB, true>(a, w, shape.padded_cols() / kStepCols);
  } else {
    accumulate<DotBf16, kR, kB>(a, w, shape.padded_cols() / kStepCols);
  }
  for_each_sum<kR, kB>([&]<int kTile>(int r, int b) {
    store_tile<kTile>(p.c + rows.start(tile + r) * p.ldc + (block + b) * kBlockRows, p.ldc * 4);
  });
}

void multiply_dense(const PackedProduct<uint16_t>& p, const RowTiles& rows) {
  for (int64_t block = 0; block < p.weights.blocks; block += 2) {
    for (int64_t tile = 0; tile < rows.count; tile += 2) {
      with_blocking(rows.count - tile, p.weights.blocks - block,
                    [&]<int kR, int kB> { dense_tile<kR, kB>(p, rows, tile, block); });
    }
  }
}

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

}  // namespace

void multiply_bf16(const PackedProduct<uint16_t>& p) {
  if (p.rows == 0) return;
  const RowTiles rows(p.rows);
  const TileSession session(config_of(rows, kStepBytes));
  if (p.weights.shape.format.encoding == Encoding::kBf16) return multiply_dense(p, rows);
  for (int64_t block = 0; block < p.weights.blocks; block += 2) {
    const int64_t left = p.weights.blocks - block;
    multiply_fp8_blocks(p, rows, block, left < 2 ? left : 2);
  }
}

}  // namespace kt::amx::inline KT_AMX_BUILD
