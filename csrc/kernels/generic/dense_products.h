// Products with row-major matrices (kernels/dense.h), once for all instruction sets.
//
//   struct Arithmetic {  // of a pair of dtypes
//     using X, W;        // uint16_t (bf16) or float
//     using Sum;         // the vector of an element's sums
//     using Operand;     // what `dot` multiplies
//     static constexpr int kStep, kParts;  // columns in a step; operands that make up a step
//     template <int kPart> static Operand of_x(const X*), of_w(const W*);
//     static Sum zero(), dot(Operand, Operand, Sum);
//     static float total(Sum);
//   };
//
// Register tile: kRows x kCols sums, kCols operands of w, one of x. Both matrices are read along their rows, so no tile
// is transposed. Rows of x are the outer loop: a tile's rows of x stay in the L1 cache, and w comes from memory for the
// first of them and from the L2 cache for the rest. Few rows take more columns, which are more streams from memory.
//
// Include only in a kernel's own translation unit.
#pragma once

#include <cstdint>

#include "base/bf16.h"
#include "kernels/dense.h"

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
  static float total(Sum sum) { return V::sum(sum); }
};

// Both bf16, without an instruction for pairs: the even columns of a step, then the odd ones. A shift or a mask widens
// half of a vector of bf16.
template <class V>
struct EvenOddColumns : WideColumns<V, uint16_t, uint16_t> {
  using Operand = typename V::Reg;
  using Words = uint32_t __attribute__((vector_size(sizeof(Operand))));
  static constexpr int kStep = 2 * V::kLanes, kParts = 2;

  template <int kPart>
  static Operand of_x(const uint16_t* from) {
    Words pairs;
    __builtin_memcpy(&pairs, from, sizeof pairs);
    return (Operand)(kPart == 0 ? pairs << 16 : pairs & 0xffff0000u);
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
  for (int i = 0; i < kCount; ++i) {
    for (int64_t j = 0; j < kStep; ++j) to[i][j] = j < count ? rows[i][k + j] : T{};
    rows[i] = to[i];
  }
}

inline void put_rounded(const RowMajor& y, int64_t row, int64_t col, float value) {
  if (y.bf16) {
    y.row<uint16_t>(row)[col] = float_to_bf16(value);
  } else {
    y.row<float>(row)[col] = value;
  }
}

template <class A, int kRows, int kCols>
void dense_tile(const DenseProduct& p, int64_t row, int64_t col) {
  const typename A::X* x[kRows];
  const typename A::W* w[kCols];
  for (int m = 0; m < kRows; ++m) x[m] = p.x.template row<const typename A::X>(row + m);
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
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
    for (int n = 0; n < kCols; ++n) {
      const float value = A::total(sum[m][n]);
      put_rounded(p.y, row + m, col + n, p.bias ? value + p.bias[col + n] : value);
    }
  }
}

template <class A, class Tile, int kRows>
void dense_rows(const DenseProduct& p, int64_t row) {
  constexpr int kCols = Tile::kSums / kRows < Tile::kCols ? Tile::kSums / kRows : Tile::kCols;
  const int64_t end = p.first_col + p.cols;
  int64_t col = p.first_col;
  for (; col + kCols <= end; col += kCols) dense_tile<A, kRows, kCols>(p, row, col);
  for (; col < end; ++col) dense_tile<A, kRows, 1>(p, row, col);
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

// Pairs: the arithmetic of two bf16 matrices.
template <class V, class Pairs, class Tile>
void multiply_dense_of(const DenseProduct& p) {
  if (p.x.bf16 && p.w.bf16) return multiply_dense<Pairs, Tile>(p);
  if (p.x.bf16) return multiply_dense<WideColumns<V, uint16_t, float>, Tile>(p);
  if (p.w.bf16) return multiply_dense<WideColumns<V, float, uint16_t>, Tile>(p);
  multiply_dense<WideColumns<V, float, float>, Tile>(p);
}

}  // namespace
}  // namespace kt
