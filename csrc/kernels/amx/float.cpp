// bf16 activations times bf16 and fp8 weights: TDPBF16PS.
//
// Step: A = up to 16 rows x 32 columns of activations as they lie, B = 16 packed lines of a block (32 columns x 16 rows
// of weights), C = rows x 16 sums. Blocking 2 x 2 (tile_registers.h); for up to 16 rows 1 x 4 (FewRows).
//
// bf16: the tiles of B are loaded from the packed lines, C is stored to the result. More rows than 16: DenseTiles.
// fp8: up to 128 columns of a group are unpacked to bf16 lines on the stack (2 blocks x 4 KiB), which all rows then
// use; each such sum is scaled once: total = fma(group scale, sum, total), and the result is total * row scale. Up to
// 16 rows unpack 32 columns of 4 blocks at a time; their sums run over the same 128.
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

// Weights that later calls of `accumulate` will read, of four blocks: some lines of each a step, to the second-level
// cache.
struct BlocksFetch {
  static constexpr int kBlocks = 4;

  void step() {
    for (int64_t i = 0; i < lines; ++i, at += kLineBytes) {
      for (int b = 0; b < kBlocks; ++b) __builtin_prefetch(at + b * stride, 0, 2);
    }
  }

  const uint8_t* at = nullptr;
  int64_t stride = 0, lines = 0;
};

// Products with bf16 weights, for more rows than one tile: up to 128 rows with 8 blocks, 256 columns at a time, so that
// what is read again, the activations of few rows or the weights under many, stays in the first-level cache. Sums wait
// on the stack (64 KiB).
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
      for (int64_t block = first; block < end; block += BlocksFetch::kBlocks) {
        // Later rows find the weights in the second-level cache.
        BlocksFetch fetch = first_tile == 0 ? fetch_after(first, block, end, col, (end_tile + 1) / 2) : BlocksFetch{};
        for (int64_t pair = block; pair < least(block + BlocksFetch::kBlocks, end); pair += 2) {
          for (int64_t tile = first_tile; tile < end_tile; tile += 2) {
            with_blocking(end_tile - tile, end - pair, [&]<int kR, int kB> {
              run_tile<kR, kB>(tile, pair, col, &sums_[pair - first], tile - first_tile, fetch);
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

  // What is read after these columns of these blocks, in equal shares; after the last ones, what a next call begins
  // with.
  BlocksFetch fetch_after(int64_t first, int64_t block, int64_t end, int64_t col, int64_t passes) const {
    const int64_t pairs = (least(end - block, BlocksFetch::kBlocks) + 1) / 2;
    const int64_t steps = least(cols_ - col, kChunkCols) / kStepCols * pairs * passes;
    block += BlocksFetch::kBlocks;
    if (block >= end) {
      block = first;
      col += kChunkCols;
    }
    if (col >= cols_) {
      block = end;
      col = 0;
    }
    const int64_t num_lines = least(cols_ - col, kChunkCols) / 2;
    return {lines(block, col), p_.weights.shape.block_bytes(), (num_lines + steps - 1) / steps};
  }

  using Sums = float[kTilesAtOnce][16 * kBlockRows];  // of a block

  template <int kR, int kB>
  void run_tile(int64_t tile, int64_t block, int64_t col, Sums* sums, int64_t slot, BlocksFetch& fetch) {
    const int64_t cols = least(cols_ - col, kChunkCols);
    TileRun a[kR], w[kB];
    for (int r = 0; r < kR; ++r) a[r] = activations(p_, rows_.start(tile + r), col);
    for (int b = 0; b < kB; ++b) w[b] = lines_at(lines(block + b, col));
    const auto sum = [&](int r, int b) { return sums[b][slot + r]; };
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
  alignas(64) Sums sums_[kBlocksAtOnce];
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
  constexpr int64_t kAhead = 4096;  // two panels
  const int64_t lines_bytes = shape.block_bytes() - shape.line_offset();
  alignas(64) Fp8Panel panel;
  Span span{};
  for (span.col = 0; span.col < shape.padded_cols(); span.col += span.cols) {
    const int64_t group = span.col / shape.group(), end = (group + 1) * shape.group();
    const int64_t left = (end < shape.padded_cols() ? end : shape.padded_cols()) - span.col;
    span.cols = left < kPanelCols ? left : kPanelCols;
    span.first = span.col == 0;
    span.last = span.col + span.cols == shape.padded_cols();
    // Beyond the ends of these blocks: the next ones' lines.
    const int64_t offset = span.col / 4 * kLineBytes;
    const int64_t turn = offset + kAhead < lines_bytes ? 0 : (blocks - 1) * shape.block_bytes() + shape.line_offset();
    for (int64_t b = 0; b < blocks; ++b) {
      const Block from = block_at(shape, p.weights.data, block + b);
      unpack_fp8(from.lines + offset, span.cols, panel[b], kAhead + turn);
      span.scale[b] = from.group_scales ? static_cast<const float*>(from.group_scales)[group] : 1.0f;
      span.row_scales[b] = from.row_scales;
    }
    for (int64_t tile = 0; tile < rows.count; tile += 2) {
      with_blocking(rows.count - tile, blocks,
                    [&]<int kR, int kB> { scaled_tile<kR, kB>(p, rows, tile, block, span, panel); });
    }
  }
}

// Rows that fit one tile against up to four blocks side by side: bound by memory, which one stream of weights does not
// keep busy. C[b] = tile b, A = tile 4, B = tiles 5, 6, 7 in turn.
class FewRows {
 public:
  explicit FewRows(const PackedProduct<uint16_t>& p) : p_(p), shape_(p.weights.shape) {}

  void run() {
    TileConfig config;
    for (int tile = 0; tile < 4; ++tile) config.set(tile, p_.rows, kLineBytes);
    config.set(4, p_.rows, kStepBytes);
    for (int tile = 5; tile < 8; ++tile) config.set(tile, kStepBytes / 4, kLineBytes);
    const TileSession session(config);
    int64_t block = 0;
    for (; p_.weights.blocks - block >= 4; block += 4) run_blocks<4>(block);
    const int64_t left = p_.weights.blocks - block;
    if (left == 3) run_blocks<3>(block);
    if (left == 2) run_blocks<2>(block);
    if (left == 1) run_blocks<1>(block);
  }

 private:
  // Beyond the last blocks of a call nothing is fetched but what is near already: what is read next is not known.
  template <int kB>
  Ahead ahead_of(int64_t block) const {
    Ahead ahead(shape_, kB);
    if (block + kB == p_.weights.blocks) ahead.turn = -kBlockAhead;
    return ahead;
  }

  template <int kB>
  void run_blocks(int64_t block) {
    if (shape_.format.encoding == Encoding::kBf16) {
      dense<kB>(block);
    } else {
      fp8<kB>(block);
    }
  }

  template <int kB>
  void dense(int64_t block) const {
    const int64_t steps = shape_.padded_cols() / kStepCols, step_bytes = kStepCols / 2 * kLineBytes;
    const Ahead ahead = ahead_of<kB>(block);
    const uint8_t* w[kB];
    for (int b = 0; b < kB; ++b) w[b] = block_at(shape_, p_.weights.data, block + b).lines;
    TileRun a = activations(p_, 0, 0);
    zero<kB>();
    for (int64_t step = 0; step < steps; ++step, a.at += a.step) {
      const int64_t distance = ahead.at(step * step_bytes);
      for (int64_t line = 0; line < step_bytes; line += kLineBytes) {
        for (int b = 0; b < kB; ++b) __builtin_prefetch(w[b] + distance + line);
      }
      multiply<kB>(a, w);
      for (int b = 0; b < kB; ++b) w[b] += step_bytes;
    }
    for_each<kB>([&]<int kTile>() { store_tile<kTile>(p_.c + (block + kTile) * kBlockRows, p_.ldc * 4); });
  }

  // The next columns are unpacked before these are multiplied: a tile is loaded from lines that have long left the
  // store buffer.
  template <int kB>
  void fp8(int64_t block) {
    const int64_t cols = shape_.padded_cols(), group = shape_.group();
    const Ahead ahead = ahead_of<kB>(block);
    Block from[kB];
    for (int b = 0; b < kB; ++b) from[b] = block_at(shape_, p_.weights.data, block + b);
    const auto unpack = [&](int64_t col, int side) {
      const int64_t offset = col / 4 * kLineBytes, distance = ahead.at(offset);
      for (int b = 0; b < kB; ++b) unpack_fp8(from[b].lines + offset, kStepCols, panel_[side][b], distance);
    };
    int side = 0;
    unpack(0, side);
    int64_t g = 0, within = 0;  // of the group
    for (int64_t col = 0; col < cols; side ^= 1) {
      if (col + kStepCols < cols) unpack(col + kStepCols, side ^ 1);
      const uint8_t* w[kB];
      for (int b = 0; b < kB; ++b) w[b] = panel_[side][b];
      if (within % kPanelCols == 0) zero<kB>();
      multiply<kB>(activations(p_, 0, col), w);
      col += kStepCols;
      within += kStepCols;
      const bool last = col == cols, group_ends = within == group;
      if (last || group_ends || within % kPanelCols == 0) {
        for_each<kB>([&]<int kTile>() { store_tile<kTile>(sums_[kTile], kLineBytes); });
        const bool first = col <= kPanelCols && g == 0;
        for (int b = 0; b < kB; ++b) finish(from[b], block + b, g, first, last, sums_[b]);
      }
      if (group_ends) {
        ++g;
        within = 0;
      }
    }
  }

  template <int kB>
  static void multiply(const TileRun& a, const uint8_t* const* w) {
    load_tile<4>(a.at, a.stride);
    load_tile<5>(w[0], kLineBytes);
    DotBf16::run<0, 4, 5>();
    if constexpr (kB > 1) {
      load_tile<6>(w[1], kLineBytes);
      DotBf16::run<1, 4, 6>();
    }
    if constexpr (kB > 2) {
      load_tile<7>(w[2], kLineBytes);
      DotBf16::run<2, 4, 7>();
    }
    if constexpr (kB > 3) {
      load_tile<5>(w[3], kLineBytes);
      DotBf16::run<3, 4, 5>();
    }
  }

  // each.template operator()<tile>() for the C[b] in use.
  template <int kB, class Each>
  static void for_each(Each each) {
    each.template operator()<0>();
    if constexpr (kB > 1) each.template operator()<1>();
    if constexpr (kB > 2) each.template operator()<2>();
    if constexpr (kB > 3) each.template operator()<3>();
  }

  template <int kB>
  static void zero() {
    for_each<kB>([]<int kTile>() { zero_tile<kTile>(); });
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

  const PackedProduct<uint16_t>& p_;
  const PackedShape& shape_;
  alignas(64) uint8_t panel_[2][4][kStepCols / 2 * kLineBytes];
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
