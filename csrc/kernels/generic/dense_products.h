// Products with row-major matrices (kernels/dense.h), once for all instruction sets.
//
//   struct Arithmetic {  // of a pair of dtypes
//     using X, W;        // uint16_t (bf16) or float
//     using Sum;         // the vector of an element's sums
//     using Operand;     // what `dot` multiplies
//     static constexpr int kStep, kParts;  // columns in a step; operands that make up a step
//     template <int kPart> static Operand of_x(const X*), of_w(const W*);
//     static Sum zero(), dot(Operand, Operand, Sum);
//     static void totals(const Sum*, int count, float*);
//   };
//
// Register tile: kRows x kCols sums, kCols operands of w, one of x. Both matrices are read along their rows, so no tile
// is transposed. Rows of x are the outer loop: a tile's rows of x stay in the L1 cache, and w comes from memory for the
// first of them and from the L2 cache for the rest. Few rows take more columns, which are more streams from memory.
//
// Include only in a kernel's own translation unit.
#pragma once

#include <cstdint>

#include "kernels/dense.h"
#include "kernels/generic/elementwise.h"

namespace kt {
namespace {

// Operands of both matrices as vectors V of floats, bf16 widened.
template <class V, class XType, class WType>
struct WideColumns {
  using X = XType;
  using W = WType;
  using Sum = typename V::Reg;
  using Operand = typename V::Reg;
  static constexpr int kStep = V::kLanes, kParts = 1;

  static Operand wide(const float* from) { return V::load(from); }
  static Operand wide(const uint16_t* from) { return V::widen(from); }
  template <int>
  static Operand of_x(const X* from) {
    return wide(from);
  }
  template <int>
  static Operand of_w(const W* from) {
    return wide(from);
  }
  static Sum zero() { return V::zero(); }
  static Sum dot(Operand a, Operand b, Sum sum) { return V::fma(a, b, sum); }
  static void totals(const Sum* sums, int count, float* to) {
    for (int i = 0; i < count; ++i) to[i] = V::sum(sums[i]);
  }
};

// Both bf16, without an instruction for pairs: the even columns of a step, then the odd ones. A shift or a mask widens
// half of a vector of bf16.
template <class V>
struct EvenOddColumns : WideColumns<V, uint16_t, uint16_t> {
  using Operand = typename V::Reg;
  static constexpr int kStep = 2 * V::kLanes, kParts = 2;

  template <int kPart>
  static Operand of_x(const uint16_t* from) {
    constexpr int kHigh = -65536;
    typename V::Int pairs;
    __builtin_memcpy(&pairs, from, sizeof pairs);
    return (Operand)(kPart == 0 ? pairs << 16 : pairs & kHigh);
  }
  template <int kPart>
  static Operand of_w(const uint16_t* from) {
    return of_x<kPart>(from);
  }
};

// sum[m][n] += x[m] * w[n] over the step that begins at column `k`.
template <class A, int kPart, int kRows, int kCols>
__attribute__((always_inline)) inline void add_step(typename A::Sum (&sum)[kRows][kCols],
                                                    const typename A::X* const (&x)[kRows],
                                                    const typename A::W* const (&w)[kCols], int64_t k) {
  typename A::Operand b[kCols];
#pragma GCC unroll 16
  for (int n = 0; n < kCols; ++n) b[n] = A::template of_w<kPart>(w[n] + k);
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    const typename A::Operand a = A::template of_x<kPart>(x[m] + k);
#pragma GCC unroll 16
    for (int n = 0; n < kCols; ++n) sum[m][n] = A::dot(a, b[n], sum[m][n]);
  }
  if constexpr (kPart + 1 < A::kParts) add_step<A, kPart + 1, kRows, kCols>(sum, x, w, k);
}

// Copies `count` numbers of each row to `to`, with zeros up to a whole step, and sets the rows to the copies.
template <class T, int kCount, int kStep>
inline void pad_step(const T* (&rows)[kCount], int64_t k, int64_t count, T (&to)[kCount][kStep]) {
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
    for (int64_t j = 0; j < kStep; ++j) to[i][j] = j < count ? rows[i][k + j] : T{};
    rows[i] = to[i];
  }
}

// Columns whose sums lie beside the result until they are rounded: whole tiles of every size.
constexpr int kStripCols = 48;

// `to`: the sums of the tile, rows kStripCols apart.
template <class A, int kRows, int kCols>
void dense_tile(const DenseProduct& p, int64_t row, int64_t col, float* to) {
  const typename A::X* x[kRows];
  const typename A::W* w[kCols];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) x[m] = p.x.template row<const typename A::X>(row + m);
#pragma GCC unroll 16
  for (int n = 0; n < kCols; ++n) w[n] = p.w.template row<const typename A::W>(col + n);
  typename A::Sum sum[kRows][kCols];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
    for (int n = 0; n < kCols; ++n) sum[m][n] = A::zero();
  }
  const int64_t next = kCols * p.w.stride;  // the same columns of the tile that follows
  int64_t k = 0;
  for (; k + A::kStep <= p.inner; k += A::kStep) {
#pragma GCC unroll 16
    for (int n = 0; n < kCols; ++n) __builtin_prefetch(w[n] + k + next, 0, 2);
    add_step<A, 0, kRows, kCols>(sum, x, w, k);
  }
  if (k < p.inner) {
    typename A::X x_rest[kRows][A::kStep];
    typename A::W w_rest[kCols][A::kStep];
    pad_step(x, k, p.inner - k, x_rest);
    pad_step(w, k, p.inner - k, w_rest);
    add_step<A, 0, kRows, kCols>(sum, x, w, 0);
  }
  typename A::Sum all[kRows * kCols];  // a copy: `sum` stays in registers, for its indices are constants
#pragma GCC unroll 24
  for (int i = 0; i < kRows * kCols; ++i) all[i] = sum[i / kCols][i % kCols];
  float totals[kRows * kCols];
  A::totals(all, kRows * kCols, totals);
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kCols; ++n) to[m * kStripCols + n] = totals[m * kCols + n];
  }
}

inline void put_row(const DenseProduct& p, int64_t row, int64_t col, int64_t cols, float* sums) {
  if (p.bias) {
    for (int64_t n = 0; n < cols; ++n) sums[n] += p.bias[col + n];
  }
  if (p.y.bf16) {
    narrow_all(sums, cols, p.y.row<uint16_t>(row) + col);
  } else {
    __builtin_memcpy(p.y.row<float>(row) + col, sums, static_cast<size_t>(cols) * sizeof(float));
  }
}

template <class A, class Tile, int kRows>
void dense_rows(const DenseProduct& p, int64_t row) {
  constexpr int kCols = Tile::kSums / kRows < Tile::kCols ? Tile::kSums / kRows : Tile::kCols;
  static_assert(kStripCols % kCols == 0);
  float strip[kRows][kStripCols];
  const int64_t end = p.first_col + p.cols;
  for (int64_t first = p.first_col; first < end; first += kStripCols) {
    const int64_t cols = end - first < kStripCols ? end - first : kStripCols;
    int64_t n = 0;
    for (; n + kCols <= cols; n += kCols) dense_tile<A, kRows, kCols>(p, row, first + n, &strip[0][n]);
    for (; n < cols; ++n) dense_tile<A, kRows, 1>(p, row, first + n, &strip[0][n]);
    for (int m = 0; m < kRows; ++m) put_row(p, row + m, first, cols, strip[m]);
  }
}

template <class A, class Tile, int kRows = Tile::kRows>
void dense_some_rows(const DenseProduct& p, int64_t row, int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return dense_some_rows<A, Tile, kRows - 1>(p, row, rows);
  }
  dense_rows<A, Tile, kRows>(p, row);
}

// Tile: kRows at most, kSums registers for sums, kCols at most. Rows in groups of about equal size.
template <class A, class Tile>
void multiply_dense(const DenseProduct& p) {
  const int64_t groups = (p.rows + Tile::kRows - 1) / Tile::kRows;
  int64_t row = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t end = p.rows * (group + 1) / groups;
    dense_some_rows<A, Tile>(p, p.first_row + row, end - row);
    row = end;
  }
}

// Wide<X, W>: the arithmetic of other pairs of dtypes than two bf16, Pairs: that of two bf16.
template <template <class, class> class Wide, class Pairs, class Tile>
void multiply_dense_of(const DenseProduct& p) {
  if (p.x.bf16 && p.w.bf16) return multiply_dense<Pairs, Tile>(p);
  if (p.x.bf16) return multiply_dense<Wide<uint16_t, float>, Tile>(p);
  if (p.w.bf16) return multiply_dense<Wide<float, uint16_t>, Tile>(p);
  multiply_dense<Wide<float, float>, Tile>(p);
}

}  // namespace
}  // namespace kt
