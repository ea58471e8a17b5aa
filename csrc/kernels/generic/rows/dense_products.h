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
// Register tile: kRows x kCols sums, kCols operands of w, one of x. A row of x and a row of w are both read along their
// columns: nothing is transposed. The tile's rows of x are copied to a panel, in the order in which they are read, so
// that they stay in the L1 cache; w is read in place, from memory for the first rows of x and from the L2 cache for the
// others. Where the columns do not fit into a panel, sums lie in memory between panels, as they were in registers. Few
// rows take more columns, which are more streams from memory.
//
// Include only in a kernel's own translation unit.
#pragma once

#include <cstdint>

#include "kernels/dense.h"
#include "kernels/generic/rows/elementwise.h"

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

// sum[m][n] += x[m] * w[n] over one step. x: the step of a panel; w: rows of the matrix, from column k.
template <class A, int kPart, int kRows, int kCols>
__attribute__((always_inline)) inline void add_step(typename A::Sum (&sum)[kRows][kCols], const typename A::X* x,
                                                    const typename A::W* const (&w)[kCols], int64_t k) {
  typename A::Operand b[kCols];
#pragma GCC unroll 16
  for (int n = 0; n < kCols; ++n) b[n] = A::template of_w<kPart>(w[n] + k);
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
    const typename A::Operand a = A::template of_x<kPart>(x + m * A::kStep);
#pragma GCC unroll 16
    for (int n = 0; n < kCols; ++n) sum[m][n] = A::dot(a, b[n], sum[m][n]);
  }
  if constexpr (kPart + 1 < A::kParts) add_step<A, kPart + 1, kRows, kCols>(sum, x, w, k);
}

// A step's columns of a row, with zeros from `count` on. An arithmetic may have a faster `pad`.
template <class A, class T>
inline void pad_step(const T* from, int64_t count, T* to) {
  if constexpr (requires { A::pad(from, count, to); }) {
    A::pad(from, count, to);
  } else {
    for (int64_t j = 0; j < A::kStep; ++j) to[j] = j < count ? from[j] : T{};
  }
}

// Some rows of x for columns [k, end), as the tiles read them: [step][row][column of the step], zeros from `inner` on.
template <class A, int kRows>
void pack_rows(const DenseProduct& p, int64_t row, int64_t k, int64_t end, typename A::X* panel) {
  for (int m = 0; m < kRows; ++m) {
    const typename A::X* from = p.x.template row<const typename A::X>(row + m);
    typename A::X* to = panel + m * A::kStep;
    int64_t i = k;
    for (; i + A::kStep <= end; i += A::kStep, to += kRows * A::kStep)
      __builtin_memcpy(to, from + i, sizeof(typename A::X) * A::kStep);
    if (i < end) pad_step<A>(from + i, end - i, to);
  }
}

// Columns whose sums lie beside the result until they are rounded: whole tiles of every size.
constexpr int kStripCols = 48;
// Between the column that is read and the one that is prefetched: at least these many.
constexpr int64_t kAheadCols = 8;
// Of a panel, which the L1 cache holds beside the rows of w.
constexpr int64_t kPanelBytes = 32 << 10;

// What a tile adds: columns [k, end) of the sums of the result's columns from `col`. `ahead`: elements of w from here
// to where the next tile reads.
struct TilePart {
  int64_t col, k, end, ahead;
};

// `partial`: the tile's sums before and after, unless the part is the first or the last. `to`: its results, if the part
// is the last, in rows kStripCols apart.
template <class A, int kRows, int kCols>
void dense_tile(const DenseProduct& p, const TilePart& part, const typename A::X* panel, typename A::Sum* partial,
                float* to) {
  const typename A::W* w[kCols];
#pragma GCC unroll 16
  for (int n = 0; n < kCols; ++n) w[n] = p.w.template row<const typename A::W>(part.col + n);
  typename A::Sum sum[kRows][kCols];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
    for (int n = 0; n < kCols; ++n) sum[m][n] = part.k == 0 ? A::zero() : partial[m * kCols + n];
  }
  int64_t k = part.k;
  for (; k + A::kStep <= part.end; k += A::kStep, panel += kRows * A::kStep) {
#pragma GCC unroll 16
    for (int n = 0; n < kCols; ++n) __builtin_prefetch(w[n] + k + part.ahead, 0, 2);
    add_step<A, 0, kRows, kCols>(sum, panel, w, k);
  }
  if (part.end < p.inner) {
#pragma GCC unroll 24
    for (int i = 0; i < kRows * kCols; ++i) partial[i] = sum[i / kCols][i % kCols];
    return;
  }
  if (k < p.inner) {
    typename A::W rest[kCols][A::kStep];
#pragma GCC unroll 16
    for (int n = 0; n < kCols; ++n) {
      pad_step<A>(w[n] + k, p.inner - k, rest[n]);
      w[n] = rest[n];
    }
    add_step<A, 0, kRows, kCols>(sum, panel, w, 0);
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

// The tiles of a strip of `cols` columns from `first`, each over columns [k, end) of the sums.
template <class A, int kRows, int kCols>
void dense_strip(const DenseProduct& p, int64_t first, int64_t cols, int64_t k, int64_t end, const typename A::X* panel,
                 typename A::Sum* partial, float* to) {
  constexpr int64_t kAhead = (kAheadCols + kCols - 1) / kCols * kCols;
  const int64_t same = kAhead * p.w.stride;
  const int64_t beyond = end < p.inner ? same - cols * p.w.stride + end - k : same - k;
  const auto part = [&](int64_t n) -> TilePart { return {first + n, k, end, n + kAhead < cols ? same : beyond}; };
  int64_t n = 0;
  for (; n + kCols <= cols; n += kCols) dense_tile<A, kRows, kCols>(p, part(n), panel, partial + n * kRows, to + n);
  for (; n < cols; ++n) dense_tile<A, kRows, 1>(p, part(n), panel, partial + n * kRows, to + n);
}

template <class A, class Tile, int kRows>
void dense_rows(const DenseProduct& p, int64_t row) {
  constexpr int kCols = Tile::kSums / kRows < Tile::kCols ? Tile::kSums / kRows : Tile::kCols;
  static_assert(kStripCols % kCols == 0);
  constexpr int64_t kSteps = kPanelBytes / static_cast<int64_t>(kRows * A::kStep * sizeof(typename A::X));
  alignas(64) typename A::X panel[kSteps * kRows * A::kStep];
  typename A::Sum partial[kRows * kStripCols];
  float strip[kRows][kStripCols];
  const int64_t steps = (p.inner + A::kStep - 1) / A::kStep,
                parts = steps <= kSteps ? 1 : (steps + kSteps - 1) / kSteps;
  const int64_t last = p.first_col + p.cols;
  for (int64_t first = p.first_col; first < last; first += kStripCols) {
    const int64_t cols = last - first < kStripCols ? last - first : kStripCols;
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t k = steps * i / parts * A::kStep, next = steps * (i + 1) / parts * A::kStep;
      const int64_t end = next < p.inner ? next : p.inner;
      if (parts > 1 || first == p.first_col) pack_rows<A, kRows>(p, row, k, end, panel);
      dense_strip<A, kRows, kCols>(p, first, cols, k, end, panel, partial, strip[0]);
    }
    for (int m = 0; m < kRows; ++m) put_row(p, row + m, first, cols, strip[m]);
  }
}

template <class A, class Tile, int kRows>
void dense_some_rows(const DenseProduct& p, int64_t row, int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return dense_some_rows<A, Tile, kRows - 1>(p, row, rows);
  }
  dense_rows<A, Tile, kRows>(p, row);
}

// Tile: kRows at most, kSums registers for sums, kCols at most. Rows in groups of about equal size; up to kFewRows are
// one group, so that w is read once.
template <class A, class Tile>
void multiply_dense(const DenseProduct& p) {
  if (p.rows <= Tile::kFewRows) return dense_some_rows<A, Tile, Tile::kFewRows>(p, p.first_row, p.rows);
  const int64_t groups = (p.rows + Tile::kRows - 1) / Tile::kRows;
  int64_t row = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t end = p.rows * (group + 1) / groups;
    dense_some_rows<A, Tile, Tile::kRows>(p, p.first_row + row, end - row);
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
