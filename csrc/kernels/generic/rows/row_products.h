// Dot products of rows (tiles.h, RowProduct), once for all instruction sets. `V` is an ISA's vector
// (portable/vector.h).
//
// Register tile: kRows x kCols accumulators, one for each pair of rows, kRows vectors of a, one of b. Lane l of a sum
// takes the elements l, l + kLanes, l + 2 kLanes, ... in this order, with zeros beyond the end; then the lanes are
// added as V::sum does. So a pair's result is the same in every tile.
//
// Include only in a kernel's own translation unit.
#pragma once

#include <cstdint>

#include "kernels/tiles.h"

namespace kt {
namespace {

template <class V, bool kWide>
inline typename V::Reg load_b(const RowProduct& p, int64_t at) {
  return kWide ? V::load(p.b.data + at) : V::widen(p.b_bf16.data + at);
}

template <class V, bool kWide>
inline typename V::Reg load_b_partial(const RowProduct& p, int64_t at, int count) {
  return kWide ? V::load_partial(p.b.data + at, count) : V::widen_partial(p.b_bf16.data + at, count);
}

template <class V, bool kWide, int kRows, int kCols>
void row_tile(const RowProduct& p, int64_t row, int64_t col) {
  using Reg = typename V::Reg;
  Reg sum[kRows][kCols];
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kCols; ++n) sum[m][n] = V::zero();
  }
  const float* a = p.a.row(row);
  const int64_t ldb = kWide ? p.b.ld : p.b_bf16.ld;
  const auto step = [&](auto load_a, auto load_b) {
    Reg x[kRows];
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) x[m] = load_a(a + m * p.a.ld);
#pragma GCC unroll 8
    for (int n = 0; n < kCols; ++n) {
      const Reg y = load_b((col + n) * ldb);
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) sum[m][n] = V::fma(x[m], y, sum[m][n]);
    }
  };
  int64_t i = 0;
  for (; i + V::kLanes <= p.inner; i += V::kLanes) {
    step([i](const float* from) { return V::load(from + i); },
         [&p, i](int64_t at) { return load_b<V, kWide>(p, at + i); });
  }
  if (i < p.inner) {
    const int count = static_cast<int>(p.inner - i);
    step([i, count](const float* from) { return V::load_partial(from + i, count); },
         [&p, i, count](int64_t at) { return load_b_partial<V, kWide>(p, at + i, count); });
  }
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kCols; ++n) p.c.row(row + m)[col + n] = p.factor * V::sum(sum[m][n]);
  }
}

template <class V, bool kWide, int kRows, int kCols>
void row_tile_columns(const RowProduct& p, int64_t row, int64_t col) {
  for (; col + kCols <= p.cols; col += kCols) row_tile<V, kWide, kRows, kCols>(p, row, col);
  if constexpr (kCols > 1) row_tile_columns<V, kWide, kRows, kCols / 2>(p, row, col);
}

template <class V, bool kWide, int kRows, int kCols>
void row_tile_rows(const RowProduct& p, int64_t row) {
  for (; row + kRows <= p.rows; row += kRows) row_tile_columns<V, kWide, kRows, kCols>(p, row, 0);
  if constexpr (kRows > 1) row_tile_rows<V, kWide, kRows - 1, kRows == 2 ? 2 * kCols : kCols>(p, row);
}

template <class V, int kRows, int kCols>
void multiply_rows(const RowProduct& p) {
  if (p.b_bf16.data) {
    row_tile_rows<V, false, kRows, kCols>(p, 0);
  } else {
    row_tile_rows<V, true, kRows, kCols>(p, 0);
  }
}

}  // namespace
}  // namespace kt
