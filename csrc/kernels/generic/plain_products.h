// Products of float32 matrices (tiles.h, PlainProduct), once for all instruction sets. `V` is an ISA's vector
// (portable/vector.h). Register tile: kRows x kVectors accumulators, kVectors of b, one broadcast element of a.
//
// Include only in a kernel's own translation unit, with V in an unnamed namespace: then nothing compiled with that
// unit's flags can be linked into others.
#pragma once

#include <cstdint>

#include "kernels/tiles.h"

namespace kt {
namespace {

// `valid` lanes of the last vector belong to the result.
template <class V, int kRows, int kVectors, bool kPartial>
inline void plain_tile(const PlainProduct& p, int64_t row, int64_t col, int valid) {
  using Reg = typename V::Reg;
  const auto load = [valid](const float* from) { return kPartial ? V::load_partial(from, valid) : V::load(from); };
  Reg sum[kRows][kVectors];
  float* c = p.c.row(row) + col;
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) sum[m][v] = p.accumulate ? load(c + m * p.c.ld + v * V::kLanes) : V::zero();
  }
  const float* a = p.a + row * p.a_row;
  const float* b = p.b.data + col;
  for (int64_t i = 0; i < p.inner; ++i) {
    Reg w[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) w[v] = load(b + i * p.b.ld + v * V::kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Reg x = V::broadcast(a + m * p.a_row + i * p.a_col);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[m][v] = V::fma(x, w[v], sum[m][v]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      if (kPartial) {
        V::store_partial(c + m * p.c.ld + v * V::kLanes, sum[m][v], valid);
      } else {
        V::store(c + m * p.c.ld + v * V::kLanes, sum[m][v]);
      }
    }
  }
}

template <class V, int kRows, int kVectors>
void plain_rows(const PlainProduct& p, int64_t row) {
  int64_t col = 0;
  for (; col + kVectors * V::kLanes <= p.cols; col += kVectors * V::kLanes)
    plain_tile<V, kRows, kVectors, false>(p, row, col, V::kLanes);
  for (; col + V::kLanes <= p.cols; col += V::kLanes) plain_tile<V, kRows, 1, false>(p, row, col, V::kLanes);
  if (col < p.cols) plain_tile<V, kRows, 1, true>(p, row, col, static_cast<int>(p.cols - col));
}

template <class V, int kRows, int kVectors>
void plain_remainder(const PlainProduct& p, int64_t row) {
  if constexpr (kRows > 0) {
    if (p.rows - row == kRows) return plain_rows<V, kRows, kVectors>(p, row);
    plain_remainder<V, kRows - 1, kVectors>(p, row);
  }
}

template <class V, int kMaxRows, int kVectors>
void multiply_plain(const PlainProduct& p) {
  int64_t row = 0;
  for (; row + kMaxRows <= p.rows; row += kMaxRows) plain_rows<V, kMaxRows, kVectors>(p, row);
  plain_remainder<V, kMaxRows - 1, kVectors>(p, row);
}

}  // namespace
}  // namespace kt
