#include "weights/packed.h"

#include <algorithm>
#include <cstring>

#include "base/bf16.h"

namespace kt {
namespace {

int64_t first_non_finite(const uint16_t* row, int64_t count) {
  // One pass without branches, which compilers vectorise; a second one only for the rare error.
  unsigned bad = 0;
  for (int64_t i = 0; i < count; ++i) bad |= static_cast<unsigned>((row[i] & 0x7f80u) == 0x7f80u);
  if (!bad) return -1;
  return std::find_if(row, row + count, [](uint16_t bits) { return !bf16_is_finite(bits); }) - row;
}

}  // namespace

int64_t pack_bf16(const uint16_t* rows, int64_t row_stride, PackedShape shape, uint16_t* packed) {
  const int64_t full_pairs = shape.cols / 2;
  for (int64_t block = 0; block < shape.blocks(); ++block) {
    uint16_t* out = packed + block * shape.block_elements();
    const int64_t in_block = std::min(kBlockRows, shape.rows - block * kBlockRows);
    if (in_block < kBlockRows || shape.cols < shape.padded_cols()) {
      std::memset(out, 0, static_cast<size_t>(shape.block_elements()) * sizeof *out);
    }
    for (int64_t i = 0; i < in_block; ++i) {
      const int64_t row = block * kBlockRows + i;
      const uint16_t* from = rows + row * row_stride;
      const int64_t bad = first_non_finite(from, shape.cols);
      if (bad >= 0) return row * shape.cols + bad;
      for (int64_t pair = 0; pair < full_pairs; ++pair) std::memcpy(out + pair * kLine + 2 * i, from + 2 * pair, 4);
      if (shape.cols % 2) out[full_pairs * kLine + 2 * i] = from[shape.cols - 1];
    }
  }
  return -1;
}

void unpack_bf16(const PackedMatrix& matrix, uint16_t* rows) {
  const PackedShape& shape = matrix.shape;
  for (int64_t row = 0; row < shape.rows; ++row) {
    for (int64_t col = 0; col < shape.cols; ++col) rows[row * shape.cols + col] = matrix.data[shape.index(row, col)];
  }
}

ExpertLayer::ExpertLayer(ExpertShape shape) : shape_(shape), data_(static_cast<size_t>(resident_bytes())) {}

}  // namespace kt
