// Products with the transposed of packed weights, once for all instruction sets.
//
//   out[m, k] = sum over n of in[m, n] * W(n, k)
//
// Vectors run along k. `in` is broadcast, and stored transposed so that a tile's broadcasts are adjacent. Chunk: 4
// blocks (64 n) x 64 columns; its weights are unpacked once into a panel [n][k] on the stack (16 KiB) and serve all
// tokens. Register tile: kRows x kVectors accumulators, kVectors of weights, one broadcast. sums [96 tokens][64] (24
// KiB) stay on the stack until the next chunk of n, so that each sum is one chain in the order of n. While a chunk is
// unpacked and multiplied, the lines of the next one are prefetched.
//
// An `Op` is one way to multiply:
//   In           element of `in`
//   kUnits       4-byte units of a block in n: 16 floats or 8 pairs of bf16
//   V            portable/vector.h (Reg, kLanes, load, store, broadcast, fma)
//   kTileRows    of a tile two vectors wide; tiles of up to half as many are four wide
//   unpack(parts, block, columns, panel): panel[unit * kPanelCols + k], unit < kUnits
#pragma once

#include <cstdint>

#include "kernels/generic/decoders.h"
#include "kernels/generic/prefetch.h"
#include "kernels/tiles.h"

namespace kt {
namespace {

constexpr int64_t kPanelBlocks = 4, kPanelCols = 64, kPanelTokens = 96, kUnpackTokens = 6;

template <class V, int kVectors, int kRows>
void transposed_tile(const float* panel, int64_t units, const float* in, int64_t ld, float* sums) {
  using Reg = typename V::Reg;
  Reg sum[kRows][kVectors];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sum[m][v] = V::load(sums + m * kPanelCols + v * V::kLanes);
  }
  for (int64_t n = 0; n < units; ++n, in += ld, panel += kPanelCols) {
    Reg w[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) w[v] = V::load(panel + v * V::kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Reg x = V::broadcast(in + m);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sum[m][v] = V::fma(x, w[v], sum[m][v]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) V::store(sums + m * kPanelCols + v * V::kLanes, sum[m][v]);
  }
}

template <class Op>
class TransposedLoop {
 public:
  explicit TransposedLoop(const TransposedProduct<typename Op::In>& p)
      : p_(p), in_(reinterpret_cast<const float*>(p.in)) {}

  void run() {
    const int64_t shares = (p_.rows + kPanelTokens - 1) / kPanelTokens;
    for (int64_t s = 0; s < shares; ++s) {
      const int64_t m = p_.rows * s / shares, end = p_.rows * (s + 1) / shares;
      for (int64_t col = 0; col < p_.cols; col += kPanelCols) columns(m, end - m, col, width(col));
    }
  }

 private:
  using V = typename Op::V;

  // Blocks [block, block + blocks) of a piece, and the first of their units in `in`. None: blocks is 0.
  struct Chunk {
    int64_t piece = 0, block = 0, blocks = 0, unit = 0;
  };

  Chunk after(Chunk chunk) const {
    chunk.unit += chunk.blocks * Op::kUnits;
    chunk.block += chunk.blocks;
    chunk.blocks = 0;
    for (; chunk.piece < p_.num_pieces; ++chunk.piece, chunk.block = 0) {
      const int64_t left = p_.pieces[chunk.piece].blocks - chunk.block;
      if (left > 0) {
        chunk.blocks = left < kPanelBlocks ? left : kPanelBlocks;
        break;
      }
    }
    return chunk;
  }

  int64_t width(int64_t col) const {
    const int64_t left = p_.cols - col;
    return left <= 0 ? 0 : left < kPanelCols ? left : kPanelCols;
  }

  // The lines that are unpacked after a chunk.
  PrefetchCursor ahead_of(const Chunk& chunk, int64_t col) const {
    Chunk next = after(chunk);
    if (next.blocks == 0) {
      next = after({});
      col += kPanelCols;
    }
    const PackedBlocks& piece = p_.pieces[next.piece];
    const uint8_t* packed = piece.data + next.block * piece.shape.block_bytes();
    return prefetch_columns(piece.shape, packed, next.blocks, p_.first_col + col, width(col));
  }

  void columns(int64_t m, int64_t tokens, int64_t col, int64_t cols) {
    alignas(64) float panel[kPanelBlocks * Op::kUnits * kPanelCols], sums[kPanelTokens * kPanelCols];
    for (int64_t i = 0; i < tokens * kPanelCols; ++i) sums[i] = 0.0f;
    for (int64_t row = 0; p_.resume && row < tokens; ++row) {
      for (int64_t k = 0; k < cols; ++k) sums[row * kPanelCols + k] = p_.out.row(m + row)[col + k];
    }
    for (Chunk chunk = after({}); chunk.blocks > 0; chunk = after(chunk)) {
      const PackedBlocks& piece = p_.pieces[chunk.piece];
      const Parts parts(piece.shape);
      PrefetchCursor ahead = ahead_of(chunk, col);
      // Unpacking a block takes about as long as multiplying it with kUnpackTokens.
      const int64_t lines = ahead.left * kUnpackTokens / (kUnpackTokens + tokens) / chunk.blocks;
      for (int64_t b = 0; b < chunk.blocks; ++b) {
        ahead.fetch<1>(lines);
        Op::unpack(parts, piece.data + (chunk.block + b) * parts.block_bytes, {p_.first_col + col, cols},
                   panel + b * Op::kUnits * kPanelCols);
      }
      const Panel unpacked{
          .weights = panel, .units = chunk.blocks * Op::kUnits, .cols = cols, .in = in_ + chunk.unit * p_.ld + m};
      multiply(unpacked, tokens, sums, ahead);
    }
    write(m, tokens, col, cols, sums);
  }

  // Unpacked weights [units][kPanelCols] of a chunk, of which `cols` columns are used, and its units of `in`.
  struct Panel {
    const float* weights;
    int64_t units, cols;
    const float* in;
  };

  // Tiles of nearly equal height over the tokens.
  void multiply(const Panel& panel, int64_t tokens, float* sums, PrefetchCursor& ahead) const {
    const int64_t tiles = (tokens + Op::kTileRows - 1) / Op::kTileRows;
    for (int64_t t = 0, m = 0; t < tiles; ++t) {
      const int64_t rows = (tokens - m + tiles - t - 1) / (tiles - t);
      const int64_t lines = ahead.left / (tiles - t);
      if (rows <= Op::kTileRows / 2 && panel.cols % (4 * V::kLanes) == 0) {
        tile_row<4, Op::kTileRows / 2>(panel, m, rows, sums + m * kPanelCols, ahead, lines);
      } else {
        tile_row<2, Op::kTileRows>(panel, m, rows, sums + m * kPanelCols, ahead, lines);
      }
      m += rows;
    }
  }

  // Tokens [m, m + rows), with prefetches of `lines` lines.
  template <int kVectors, int kRows>
  void tile_row(const Panel& panel, int64_t m, int64_t rows, float* sums, PrefetchCursor& ahead, int64_t lines) const {
    if constexpr (kRows > 0) {
      if (rows != kRows) return tile_row<kVectors, kRows - 1>(panel, m, rows, sums, ahead, lines);
      constexpr int64_t kCols = kVectors * V::kLanes;
      for (int64_t k = 0; k < panel.cols; k += kCols) {
        ahead.fetch<1>((lines * kCols + panel.cols - 1) / panel.cols);
        transposed_tile<V, kVectors, kRows>(panel.weights + k, panel.units, panel.in + m, p_.ld, sums + k);
      }
    }
  }

  void write(int64_t m, int64_t tokens, int64_t col, int64_t cols, const float* sums) const {
    for (int64_t row = 0; row < tokens; ++row) {
      float* out = p_.out.row(m + row) + col;
      const float* sum = sums + row * kPanelCols;
      if (p_.accumulate) {
        for (int64_t k = 0; k < cols; ++k) out[k] += sum[k];
      } else {
        for (int64_t k = 0; k < cols; ++k) out[k] = sum[k];
      }
    }
  }

  const TransposedProduct<typename Op::In>& p_;
  const float* in_;
};

}  // namespace
}  // namespace kt
