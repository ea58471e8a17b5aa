// Products with weights that tiles load in their packed form: bf16 (float.cpp), and int8 with one scale a row
// (planes.cpp). In both formats a line of weights holds 4 bytes of each of its rows, so the loops count in bytes of a
// row.
//
//   struct Activations {
//     using Dot, Sum;  // the instruction; float or int32_t
//     RowTiles tiles;  // of A
//     int64_t step_bytes;  // of a row of A: 64, or 32 where the rows' length requires it
//     TileRun a(int64_t tile, int64_t byte) const;
//     // C in register kTile is complete. `scratch`: memory for 16 x 16 of them.
//     template <int kTile> void finish(int64_t tile, int64_t block, Sum* scratch) const;
//   };
#pragma once

#include "kernels/amx/few_rows.h"

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

constexpr int64_t bytes_of_row(const PackedShape& shape) {
  return (shape.block_bytes() - shape.line_offset()) / kBlockRows;
}

// Multiplies up to 8 tiles of activations by 8 blocks, 512 bytes of a row at a time (256 columns of bf16, 512 of int8).
// The operand that is read again (activations of few rows, or weights for many rows) then stays in the L1 cache.
// Partial sums lie on the stack (64 KiB).
template <class Activations>
class DenseTiles {
 public:
  DenseTiles(const Activations& rows, const PackedBlocks& weights)
      : rows_(rows), weights_(weights), row_bytes_(bytes_of_row(weights.shape)) {}

  void run() {
    const TileSession session(config_of(rows_.tiles, rows_.step_bytes));
    for (int64_t block = 0; block < weights_.blocks; block += kBlocksAtOnce) {
      for (int64_t tile = 0; tile < rows_.tiles.count; tile += kTilesAtOnce) run_part(block, tile);
    }
  }

 private:
  static constexpr int64_t kBlocksAtOnce = 8, kTilesAtOnce = 8, kChunkBytes = 512, kFetchBlocks = 4;
  using Fetch = FetchEachStep<kFetchBlocks>;  // weights of four blocks that later calls of `accumulate` will read

  void run_part(int64_t first, int64_t first_tile) {
    const int64_t end = least(first + kBlocksAtOnce, weights_.blocks);
    const int64_t end_tile = least(first_tile + kTilesAtOnce, rows_.tiles.count);
    for (int64_t byte = 0; byte < row_bytes_; byte += kChunkBytes) {
      for (int64_t block = first; block < end; block += kFetchBlocks) {
        Fetch fetch;  // of nothing: later rows find the weights in the L2 cache
        if (first_tile == 0) fetch = fetch_after(first, block, end, byte, (end_tile + 1) / 2);
        for (int64_t pair = block; pair < least(block + kFetchBlocks, end); pair += 2) {
          for (int64_t tile = first_tile; tile < end_tile; tile += 2) {
            with_blocking(end_tile - tile, end - pair, [&]<int kR, int kB> {
              run_tile<kR, kB>(tile, pair, byte, &sums_[pair - first], tile - first_tile, fetch);
            });
          }
        }
      }
    }
  }

  static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

  const uint8_t* lines(int64_t block, int64_t byte) const {
    return block_at(weights_.shape, weights_.data, block).lines + byte * kBlockRows;
  }

  // The lines that are read after these bytes of these blocks, in equal shares; after the last blocks, the first lines
  // of a next call.
  Fetch fetch_after(int64_t first, int64_t block, int64_t end, int64_t byte, int64_t passes) const {
    const int64_t pairs = (least(end - block, kFetchBlocks) + 1) / 2;
    const int64_t steps = least(row_bytes_ - byte, kChunkBytes) / rows_.step_bytes * pairs * passes;
    block += kFetchBlocks;
    if (block >= end) {
      block = first;
      byte += kChunkBytes;
    }
    if (byte >= row_bytes_) {
      block = end;
      byte = 0;
    }
    const int64_t num_lines = least(row_bytes_ - byte, kChunkBytes) / 4;
    return {{.at = lines(block, byte), .stride = weights_.shape.block_bytes(), .left = num_lines},
            (num_lines + steps - 1) / steps};
  }

  using Sum = typename Activations::Sum;
  using Sums = Sum[kTilesAtOnce][16 * kBlockRows];  // of a block

  template <int kR, int kB>
  void run_tile(int64_t tile, int64_t block, int64_t byte, Sums* sums, int64_t slot, Fetch& fetch) {
    const int64_t bytes = least(row_bytes_ - byte, kChunkBytes), step = rows_.step_bytes;
    TileRun a[kR], w[kB];
    for (int r = 0; r < kR; ++r) a[r] = rows_.a(tile + r, byte);
    for (int b = 0; b < kB; ++b) w[b] = {lines(block + b, byte), kLineBytes, step * kBlockRows};
    const auto sum = [&](int r, int b) { return sums[b][slot + r]; };
    if (byte == 0) {
      zero_sums<kR, kB>();
    } else {
      for_each_sum<kR, kB>(
          [&]<int kTile>(int r, int b) { load_tile<kTile>(reinterpret_cast<const uint8_t*>(sum(r, b)), kLineBytes); });
    }
    accumulate<typename Activations::Dot, kR, kB>(a, w, bytes / step, fetch);
    const bool last = byte + bytes == row_bytes_;
    for_each_sum<kR, kB>([&]<int kTile>(int r, int b) {
      last ? rows_.template finish<kTile>(tile + r, block + b, sum(r, b)) : store_tile<kTile>(sum(r, b), kLineBytes);
    });
  }

  const Activations& rows_;
  const PackedBlocks& weights_;
  const int64_t row_bytes_;
  alignas(64) Sums sums_[kBlocksAtOnce];
};

// The same for rows that fit one tile (few_rows.h).
template <class Activations>
class FewDenseRows {
 public:
  FewDenseRows(const Activations& rows, const PackedBlocks& weights) : rows_(rows), weights_(weights) {}

  void run() {
    const TileSession session(config_of_few(rows_.tiles.height, rows_.step_bytes));
    by_four_blocks(weights_.blocks, [&]<int kB>(int64_t block) { run_blocks<kB>(block); });
  }

 private:
  template <int kB>
  void run_blocks(int64_t block) const {
    const int64_t step_bytes = rows_.step_bytes, steps = bytes_of_row(weights_.shape) / step_bytes;
    PrefetchCursor fetch = prefetch_few<kB>(weights_, block);
    const uint8_t* w[kB];
    for (int b = 0; b < kB; ++b) w[b] = block_at(weights_.shape, weights_.data, block + b).lines;
    TileRun a = rows_.a(0, 0);
    zero_few<kB>();
    for (int64_t step = 0; step < steps; ++step, a.at += a.step) {
      const int64_t distance = fetch.take(step_bytes / 4) - w[0];
      for (int64_t line = 0; line < step_bytes * kBlockRows; line += kLineBytes) {
        for (int b = 0; b < kB; ++b) __builtin_prefetch(w[b] + distance + line);
      }
      multiply_few<typename Activations::Dot, kB>(a, w);
      for (int b = 0; b < kB; ++b) w[b] += step_bytes * kBlockRows;
    }
    alignas(64) typename Activations::Sum scratch[16 * kBlockRows];
    for_each_few<kB>([&]<int kTile>() { rows_.template finish<kTile>(0, block + kTile, scratch); });
  }

  const Activations& rows_;
  const PackedBlocks& weights_;
};

template <class Activations>
inline void multiply_dense(const Activations& rows, const PackedBlocks& weights) {
  if (rows.tiles.count == 1) {
    FewDenseRows(rows, weights).run();
  } else {
    DenseTiles(rows, weights).run();
  }
}

}  // namespace
}  // namespace kt::amx::inline KT_AMX_BUILD
