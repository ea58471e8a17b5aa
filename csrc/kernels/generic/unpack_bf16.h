// Packed weights to row-major bf16 (kernels/tiles.h, UnpackedRows), a strip of a block's columns at a time. The strip
// lies in the L1 cache; from there each row is written as one run, since rows of a matrix are often a power of two
// apart, and sixteen half-written ones would push each other out of the cache.
//
// bf16 lines are words of two columns, transposed as they are. Other encodings are decoded to float32 (unpack.h) and
// rounded.
//
// V: as in unpack.h. Include only in a kernel's own translation unit.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/generic/rows/elementwise.h"
#include "kernels/generic/unpack.h"
#include "kernels/tiles.h"

namespace kt {
namespace {

constexpr int64_t kStripColumns = 256;

// strip[r, c] = W(16 * block + r, columns.first + c). Columns in multiples of 32.
template <class V>
inline void unpack_pairs(const Parts& parts, const uint8_t* block, ColumnRange columns, uint16_t* strip) {
  const uint8_t* lines = block + parts.lines + columns.first / 2 * kLineBytes;
  for (int64_t c = 0; c < columns.count; c += 2 * V::kLanes) {
#pragma GCC unroll 4
    for (int v = 0; v < kBlockRows / V::kLanes; ++v) {
      typename V::Reg words[V::kLanes];
#pragma GCC unroll 8
      for (int i = 0; i < V::kLanes; ++i)
        words[i] = (typename V::Reg)load_ints<V>(lines + (c / 2 + i) * kLineBytes + v * 4 * V::kLanes);
      V::transpose(words);
#pragma GCC unroll 8
      for (int i = 0; i < V::kLanes; ++i)
        std::memcpy(strip + (v * V::kLanes + i) * kStripColumns + c, &words[i], sizeof words[i]);
    }
  }
}

// Rows and columns that exist of one strip.
template <class V>
inline void unpack_strip(const Parts& parts, const uint8_t* block, int64_t rows, ColumnRange columns, int64_t real,
                         Rows<uint16_t> out) {
  if (parts.encoding == Encoding::kBf16) {
    alignas(64) uint16_t strip[kBlockRows * kStripColumns];
    unpack_pairs<V>(parts, block, columns, strip);
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(out.row(r), strip + r * kStripColumns, static_cast<size_t>(real) * sizeof(uint16_t));
    return;
  }
  alignas(64) float strip[kBlockRows * kStripColumns];
  unpack_rows<V>(parts, block, columns, {strip, kStripColumns});
  for (int64_t r = 0; r < rows; ++r) narrow_all(strip + r * kStripColumns, real, out.row(r));
}

template <class V>
void unpack_to_bf16(const UnpackedRows& u) {
  const Parts parts(u.weights.shape);
  const int64_t cols = u.weights.shape.cols;
  for (int64_t row = 0; row < u.rows; row += kBlockRows) {
    const uint8_t* block = u.weights.data + row / kBlockRows * parts.block_bytes;
    const int64_t rows = u.rows - row < kBlockRows ? u.rows - row : kBlockRows;
    for (int64_t col = 0; col < cols; col += kStripColumns) {
      const int64_t padded = parts.cols - col < kStripColumns ? parts.cols - col : kStripColumns;
      const int64_t real = cols - col < padded ? cols - col : padded;
      unpack_strip<V>(parts, block, rows, {col, padded}, real, u.out.from(row, col));
    }
  }
}

}  // namespace
}  // namespace kt
