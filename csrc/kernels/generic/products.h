// The tile loops, once for all instruction sets. `V` is an ISA's vector of floats:
//
//   Reg, kLanes (divides 16), kMaxRows (rows of a register tile)
//   zero, load, load_partial, store, store_partial, broadcast, fma(a, b, c) = a * b + c
//   even(line), odd(line): kLanes floats, the even or odd columns of a packed line (layout.h)
//
// Register tile: kRows x kVectors accumulators, one vector of weights, one broadcast activation. Few rows take several
// blocks at once, so that there are enough independent chains to hide the latency of fma.
//
// Include only in a kernel's own translation unit, with V in an unnamed namespace: then nothing compiled with that
// unit's flags can be linked into others.
#pragma once

#include <cstdint>

#include "kernels/layout.h"
#include "kernels/tiles.h"

namespace kt {
namespace {

constexpr int64_t kPairsAtOnce = 256;  // a block's part of this length (16 KiB) stays in the first-level cache

template <class V, int kRows, int kBlocks>
inline void packed_tile(const PackedProduct<float>& p, int64_t row, int64_t block, int64_t first_pair,
                        int64_t end_pair) {
  constexpr int kPerBlock = 16 / V::kLanes;
  constexpr int kVectors = kBlocks * kPerBlock;
  using Reg = typename V::Reg;
  Reg sum[kRows][kVectors];
  float* c = p.c + row * p.ldc + block * kBlockRows;
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sum[m][v] = first_pair ? V::load(c + m * p.ldc + v * V::kLanes) : V::zero();
  }
  const float* a = p.a + row * p.lda;
  const uint16_t* weights = p.weights + block * p.pairs * kLine;
  for (int64_t pair = first_pair; pair < end_pair; ++pair) {
    Reg w[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v)
      w[v] = V::even(weights + ((v / kPerBlock) * p.pairs + pair) * kLine + (v % kPerBlock) * 2 * V::kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Reg x = V::broadcast(a[m * p.lda + 2 * pair]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[m][v] = V::fma(x, w[v], sum[m][v]);
    }
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v)
      w[v] = V::odd(weights + ((v / kPerBlock) * p.pairs + pair) * kLine + (v % kPerBlock) * 2 * V::kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Reg x = V::broadcast(a[m * p.lda + 2 * pair + 1]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[m][v] = V::fma(x, w[v], sum[m][v]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) V::store(c + m * p.ldc + v * V::kLanes, sum[m][v]);
  }
}

// All blocks for kRows rows from `row` on.
template <class V, int kRows>
void packed_rows(const PackedProduct<float>& p, int64_t row, int64_t block, int64_t end_block, int64_t first_pair,
                 int64_t end_pair) {
  constexpr int kFit = V::kMaxSums / (kRows * (16 / V::kLanes));
  constexpr int kBlocks = kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  for (; block + kBlocks <= end_block; block += kBlocks)
    packed_tile<V, kRows, kBlocks>(p, row, block, first_pair, end_pair);
  for (; block < end_block; ++block) packed_tile<V, kRows, 1>(p, row, block, first_pair, end_pair);
}

template <class V, int kRows>
void packed_remainder(const PackedProduct<float>& p, int64_t row, int64_t left, int64_t block, int64_t end_block,
                      int64_t first_pair, int64_t end_pair) {
  if constexpr (kRows > 0) {
    if (left == kRows) return packed_rows<V, kRows>(p, row, block, end_block, first_pair, end_pair);
    packed_remainder<V, kRows - 1>(p, row, left, block, end_block, first_pair, end_pair);
  }
}

template <class V>
void multiply_packed(const PackedProduct<float>& p) {
  const bool few = p.rows <= V::kMaxRows;
  const int64_t pair_step = few ? p.pairs : kPairsAtOnce;
  const int64_t block_step = few ? p.blocks : V::kBlocksAtOnce;
  for (int64_t first = 0; first < p.pairs; first += pair_step) {
    const int64_t end = first + pair_step < p.pairs ? first + pair_step : p.pairs;
    for (int64_t block = 0; block < p.blocks; block += block_step) {
      const int64_t end_block = block + block_step < p.blocks ? block + block_step : p.blocks;
      int64_t row = 0;
      for (; row + V::kMaxRows <= p.rows; row += V::kMaxRows)
        packed_rows<V, V::kMaxRows>(p, row, block, end_block, first, end);
      packed_remainder<V, V::kMaxRows - 1>(p, row, p.rows - row, block, end_block, first, end);
    }
  }
}

// `valid` lanes of the last vector belong to the result.
template <class V, int kRows, int kVectors, bool kPartial>
inline void plain_tile(const PlainProduct& p, int64_t row, int64_t col, int valid) {
  using Reg = typename V::Reg;
  const auto load = [valid](const float* from) { return kPartial ? V::load_partial(from, valid) : V::load(from); };
  Reg sum[kRows][kVectors];
  float* c = p.c + row * p.ldc + col;
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sum[m][v] = p.accumulate ? load(c + m * p.ldc + v * V::kLanes) : V::zero();
  }
  const float* a = p.a + row * p.a_row;
  const float* b = p.b + col;
  for (int64_t i = 0; i < p.inner; ++i) {
    Reg w[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) w[v] = load(b + i * p.ldb + v * V::kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Reg x = V::broadcast(a[m * p.a_row + i * p.a_col]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[m][v] = V::fma(x, w[v], sum[m][v]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      if (kPartial) {
        V::store_partial(c + m * p.ldc + v * V::kLanes, sum[m][v], valid);
      } else {
        V::store(c + m * p.ldc + v * V::kLanes, sum[m][v]);
      }
    }
  }
}

template <class V, int kRows>
void plain_rows(const PlainProduct& p, int64_t row) {
  int64_t col = 0;
  for (; col + V::kPlainVectors * V::kLanes <= p.cols; col += V::kPlainVectors * V::kLanes)
    plain_tile<V, kRows, V::kPlainVectors, false>(p, row, col, V::kLanes);
  for (; col + V::kLanes <= p.cols; col += V::kLanes) plain_tile<V, kRows, 1, false>(p, row, col, V::kLanes);
  if (col < p.cols) plain_tile<V, kRows, 1, true>(p, row, col, static_cast<int>(p.cols - col));
}

template <class V, int kRows>
void plain_remainder(const PlainProduct& p, int64_t row) {
  if constexpr (kRows > 0) {
    if (p.rows - row == kRows) return plain_rows<V, kRows>(p, row);
    plain_remainder<V, kRows - 1>(p, row);
  }
}

template <class V>
void multiply_plain(const PlainProduct& p) {
  int64_t row = 0;
  for (; row + V::kMaxRows <= p.rows; row += V::kMaxRows) plain_rows<V, V::kMaxRows>(p, row);
  plain_remainder<V, V::kMaxRows - 1>(p, row);
}

}  // namespace
}  // namespace kt
