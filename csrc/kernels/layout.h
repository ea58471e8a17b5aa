// The packed layout of a weight matrix W [rows, cols], shared by every instruction set.
//
// Rows in blocks of 16, columns in pairs, a pair of 16 rows in one cache line. As an index expression (units: bf16):
//
//   packed[((row / 16) * pairs + col / 2) * 32 + (row % 16) * 2 + col % 2]  =  W[row, col]
//
// pairs = cols rounded up to a multiple of 32, divided by 2. Rows and columns beyond the matrix hold zero. One line is
// the second operand of vdpbf16ps; 16 lines are one AMX B tile; the even (odd) columns of a line widen to 16 floats
// by a shift (a mask). Reading a block's lines in order is one forward stream.
#pragma once

#include <cstdint>

namespace kt {

inline constexpr int64_t kBlockRows = 16;
inline constexpr int64_t kColumnUnit = 32;
inline constexpr int64_t kLine = 2 * kBlockRows;  // elements in one line

struct PackedShape {
  int64_t rows = 0, cols = 0;

  constexpr int64_t blocks() const { return (rows + kBlockRows - 1) / kBlockRows; }
  constexpr int64_t padded_rows() const { return blocks() * kBlockRows; }
  constexpr int64_t padded_cols() const { return (cols + kColumnUnit - 1) / kColumnUnit * kColumnUnit; }
  constexpr int64_t pairs() const { return padded_cols() / 2; }
  constexpr int64_t block_elements() const { return pairs() * kLine; }
  constexpr int64_t elements() const { return blocks() * block_elements(); }
  constexpr int64_t index(int64_t row, int64_t col) const {
    return ((row / kBlockRows) * pairs() + col / 2) * kLine + (row % kBlockRows) * 2 + col % 2;
  }
};

}  // namespace kt
