// Columns of scaled encodings, for products that sum over the rows of W: 16 rows of a column, scaled in float32 and
// rounded to bf16. Those of bf16 weights need no decoding (transposed.cpp).
#pragma once

#include "kernels/amx/unpacked_lines.h"

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

constexpr int64_t kDecodedCols = 32;  // within one group, as groups are multiples of it; int6, nvfp4: two groups

class ColumnDecoder {
 public:
  ColumnDecoder(const PackedShape& shape, const Block& block, int64_t col)
      : shape_(shape),
        block_(block),
        col_(col),
        lines_(block.lines + shape.lines(col) * kLineBytes),
        row_scale_(load<Floats>(block.row_scales)),
        scale_(row_scale_ * group_scales(shape, block, col / shape.group())),
        zero_(Ints{} + static_cast<int32_t>(shape.format.default_zero())) {
    if (block.zeros) zero_ = ints_of_bytes(block.zeros + col / shape.group() * kBlockRows);
  }

  // Column col + c to out + c * stride, c < 32.
  void decode(uint8_t* out, int64_t stride) const {
    switch (shape_.format.encoding) {
      case Encoding::kFp8:
        return decode_fp8(out, stride);
      case Encoding::kInt4:
        if (decoded_by_unit(shape_.format)) return decode_nibbles<Encoding::kInt4>(out, stride);
        return decode_codes<8>(out, stride);
      case Encoding::kInt5:
        return decode_nibbles<Encoding::kInt5>(out, stride);
      case Encoding::kInt6:
        return decode_nibbles<Encoding::kInt6>(out, stride);
      case Encoding::kFp4:
        return decode_nibbles<Encoding::kFp4>(out, stride);
      case Encoding::kFp4By16:
        return decode_nibbles<Encoding::kFp4By16>(out, stride);
      case Encoding::kIq4:
        return decode_nibbles<Encoding::kIq4>(out, stride);
      default:
        return decode_codes<4>(out, stride);
    }
  }

 private:
  template <int kPerLine>
  void decode_codes(uint8_t* out, int64_t stride) const {
    constexpr int kMask = kPerLine == 8 ? 15 : 255;
    for (int line = 0; line < kDecodedCols / kPerLine; ++line) {
      const auto codes = load<Ints>(lines_ + line * kLineBytes);
#pragma GCC unroll 8
      for (int i = 0; i < kPerLine; ++i, out += stride)
        give(floats_of((codes >> (i % 4 * 8 + i / 4 * 4) & kMask) - zero_), out);
    }
  }

  // (level - zero) * scale - minimum, each step in float32.
  template <Encoding kEncoding>
  void decode_nibbles(uint8_t* out, int64_t stride) const {
    using Unpack = UnpackNibbles<kEncoding>;
    alignas(64) uint8_t lines[Unpack::kColumns / 4][kLineBytes];
    for (int64_t c = 0; c < kDecodedCols; c += Unpack::kColumns) {
      const int64_t g = (col_ + c) / shape_.group();
      const Floats scale = group_scales(shape_, block_, g), least = group_minima(shape_, block_, g);
      Unpack::unit(lines_ + shape_.lines(c) * kLineBytes, zero_, lines[0]);
      for (int64_t i = 0; i < Unpack::kColumns; ++i, out += stride) {
        const Ints levels = load<Ints>(lines[i / 4]) << static_cast<int32_t>(24 - i % 4 * 8) >> 24;
        narrow_to_bf16((floats_of(levels) * scale - least) * row_scale_, out);
      }
    }
  }

  void decode_fp8(uint8_t* out, int64_t stride) const {
    alignas(64) uint8_t pairs[kDecodedCols / 2][kLineBytes];
    for (int c = 0; c < kDecodedCols; c += 4) unpack_fp8_line(lines_ + c / 4 * kLineBytes, pairs[c / 2]);
    for (int c = 0; c < kDecodedCols; c += 2) {
      const auto both = load<Ints>(pairs[c / 2]);
      give((Floats)(both << 16), out + c * stride);
      give((Floats)(both & static_cast<int32_t>(0xffff0000)), out + (c + 1) * stride);
    }
  }

  void give(const Floats& weights, uint8_t* to) const { narrow_to_bf16(weights * scale_, to); }

  const PackedShape& shape_;
  const Block& block_;
  int64_t col_;
  const uint8_t* lines_;
  Floats row_scale_, scale_;
  Ints zero_;
};

}  // namespace
}  // namespace kt::amx::inline KT_AMX_BUILD
