// Products of many rows of bf16 with short sums: heads of absorbed MLA, B of LoRA. The bits are those of the register
// tile in dense.cpp.
//
// A vector of that tile holds the lanes of one element's sum. For a short sum, adding the lanes to one number takes as
// long as the products. Here a vector holds one lane of 16 adjacent columns of the result, so that 15 additions of
// vectors finish 16 elements, lane l + 8 to lane l and so on, in the order of kernels/dense.h. For this 16 rows of w
// are transposed to a panel in the L1 cache, which all rows of x read:
//
//   line p, i: w[col + i, 2 p], w[col + i, 2 p + 1], zeros from `inner` on
//
// Register tile: 6 rows of x and four lanes: 24 sums, one line, one broadcast pair of x. Per line 6 vdpbf16ps and 7
// loads. x is copied, for its rows may lie a power of two apart.
//
// Include only in a kernel's own translation unit.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels/avx512/transpose.h"
#include "kernels/dense.h"
#include "kernels/generic/rows/elementwise.h"

namespace kt {
namespace {

constexpr int kShortRows = 6, kShortLanes = 16;
constexpr int64_t kShortStep = 2 * kShortLanes;       // columns
constexpr int64_t kShortInner = 512, kShortCols = 8;  // the longest sum, the fewest columns that are faster
constexpr int64_t kCopiedBytes = 48 << 10;            // of x at a time; 64 KiB of stack with the panel

struct ShortPanel {
  alignas(64) uint32_t line[kShortInner / 2][kShortLanes];
};

inline bool is_short(const DenseProduct& p) {
  return p.x.bf16 && p.w.bf16 && p.inner > 0 && p.inner <= kShortInner && p.cols >= kShortCols;
}

// The first `count` (1 to 32) of a step's columns, then zeros.
inline __m512i load_pairs(const uint16_t* from, int64_t count) {
  return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << count) - 1), from);
}

inline void pad_pairs(const uint16_t* from, int64_t count, uint16_t* to) {
  _mm512_storeu_si512(to, load_pairs(from, count));
}

inline int64_t columns_of_step(const DenseProduct& p, int64_t k) {
  return p.inner - k < kShortStep ? p.inner - k : kShortStep;
}

// Rows [col, col + count) of w. Lanes from `count` on repeat a row; their results are not written.
inline void pack_lines(const DenseProduct& p, int64_t col, int64_t count, ShortPanel& panel) {
  for (int64_t k = 0; k < p.inner; k += kShortStep) {
    __m512 block[kShortLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kShortLanes; ++i) {
      const uint16_t* row = p.w.row<const uint16_t>(col + (i < count ? i : 0));
      block[i] = _mm512_castsi512_ps(load_pairs(row + k, columns_of_step(p, k)));
    }
    transpose_block(block);
#pragma GCC unroll 16
    for (int i = 0; i < kShortLanes; ++i) _mm512_store_ps(panel.line[k / 2 + i], block[i]);
  }
}

// Rows [row, row + count) of x, each padded to whole steps.
inline void copy_rows(const DenseProduct& p, int64_t row, int64_t count, uint16_t* to) {
  for (int64_t m = row; m < row + count; ++m) {
    for (int64_t k = 0; k < p.inner; k += kShortStep, to += kShortStep)
      pad_pairs(p.x.row<const uint16_t>(m) + k, columns_of_step(p, k), to);
  }
}

inline __m512bh pair_at(const uint16_t* from) {
  int both;
  std::memcpy(&both, from, sizeof both);
  return (__m512bh)_mm512_set1_epi32(both);
}

// Of each row, (lane kFirst + lane kFirst + 8) + (lane kFirst + 4 + lane kFirst + 12).
template <int kFirst, int kRows>
inline void add_lanes(const ShortPanel& panel, const uint16_t* x, int64_t steps, __m512 (&to)[kRows]) {
  const uint16_t* rows[kRows];
  __m512 sum[kRows][4];
#pragma GCC unroll 6
  for (int m = 0; m < kRows; ++m) {
    rows[m] = x + m * steps * kShortStep;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sum[m][i] = _mm512_setzero_ps();
  }
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int lane = kFirst + i % 2 * 8 + i / 2 * 4;
      const __m512bh line = (__m512bh)_mm512_load_si512(panel.line[step * kShortLanes + lane]);
#pragma GCC unroll 6
      for (int m = 0; m < kRows; ++m)
        sum[m][i] = _mm512_dpbf16_ps(sum[m][i], pair_at(rows[m] + step * kShortStep + 2 * lane), line);
    }
  }
#pragma GCC unroll 6
  for (int m = 0; m < kRows; ++m)
    to[m] = _mm512_add_ps(_mm512_add_ps(sum[m][0], sum[m][1]), _mm512_add_ps(sum[m][2], sum[m][3]));
}

// Columns [col, col + cols) of a row of the result; at most 16.
inline void put_columns(const DenseProduct& p, int64_t row, int64_t col, int64_t cols, __m512 sums) {
  const auto mask = static_cast<__mmask16>((1u << cols) - 1u);
  if (p.bias) sums = _mm512_add_ps(sums, _mm512_maskz_loadu_ps(mask, p.bias + col));
  if (!p.y.bf16) return _mm512_mask_storeu_ps(p.y.row<float>(row) + col, mask, sums);
  alignas(64) float wide[kShortLanes];
  _mm512_store_ps(wide, sums);
  uint16_t* to = p.y.row<uint16_t>(row) + col;
  if (cols == kShortLanes) {
    narrow_all(wide, kShortLanes, to);
  } else {
    narrow_all(wide, cols, to);
  }
}

// x: the copies of rows [row, row + kRows).
template <int kRows>
void short_tile(const DenseProduct& p, const ShortPanel& panel, const uint16_t* x, int64_t row, int64_t col,
                int64_t cols) {
  const int64_t steps = (p.inner + kShortStep - 1) / kShortStep;
  __m512 quarter[4][kRows];
  add_lanes<0>(panel, x, steps, quarter[0]);
  add_lanes<1>(panel, x, steps, quarter[1]);
  add_lanes<2>(panel, x, steps, quarter[2]);
  add_lanes<3>(panel, x, steps, quarter[3]);
#pragma GCC unroll 6
  for (int m = 0; m < kRows; ++m) {
    const __m512 even = _mm512_add_ps(quarter[0][m], quarter[2][m]), odd = _mm512_add_ps(quarter[1][m], quarter[3][m]);
    put_columns(p, row + m, col, cols, _mm512_add_ps(even, odd));
  }
}

template <int kRows>
void last_short_tile(const DenseProduct& p, const ShortPanel& panel, const uint16_t* x, int64_t row, int64_t col,
                     int64_t cols, int64_t rows) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return short_tile<kRows>(p, panel, x, row, col, cols);
    last_short_tile<kRows - 1>(p, panel, x, row, col, cols, rows);
  }
}

inline void multiply_short(const DenseProduct& p) {
  alignas(64) uint16_t x[kCopiedBytes / sizeof(uint16_t)];
  ShortPanel panel;
  const int64_t width = (p.inner + kShortStep - 1) / kShortStep * kShortStep;  // of a copied row
  const int64_t at_once = kCopiedBytes / static_cast<int64_t>(sizeof(uint16_t)) / width;
  const int64_t end = p.first_row + p.rows, last = p.first_col + p.cols;
  for (int64_t first = p.first_row; first < end; first += at_once) {
    const int64_t rows = end - first < at_once ? end - first : at_once;
    copy_rows(p, first, rows, x);
    for (int64_t col = p.first_col; col < last; col += kShortLanes) {
      const int64_t cols = last - col < kShortLanes ? last - col : kShortLanes;
      pack_lines(p, col, cols, panel);
      int64_t m = 0;
      for (; m + kShortRows <= rows; m += kShortRows)
        short_tile<kShortRows>(p, panel, x + m * width, first + m, col, cols);
      last_short_tile<kShortRows - 1>(p, panel, x + m * width, first + m, col, cols, rows - m);
    }
  }
}

}  // namespace
}  // namespace kt
