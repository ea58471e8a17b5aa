// Columns of scaled encodings, for products that sum over the rows of W: 16 rows of a column, scaled in float32 and
// rounded to bf16. Those of bf16 weights need no decoding (transposed.cpp).
#pragma once

#include "kernels/amx/fp8_lines.h"

namespace kt::amx::inline KT_AMX_BUILD {
namespace {

constexpr int64_t kDecodedCols = 32;  // within one group, as groups are multiples of it

class ColumnDecoder {
 public:
  ColumnDecoder(const PackedShape& shape, const Block& block, int64_t col)
      : encoding_(shape.format.encoding),
        lines_(block.lines + col / shape.columns_per_line() * kLineBytes),
        scale_(load<Floats>(block.row_scales)),
        zero_(Ints{} + static_cast<int32_t>(shape.format.default_zero())) {
    const int64_t g = col / shape.group();
    if (block.zeros) zero_ = ints_of_bytes(block.zeros + g * kBlockRows);
    if (block.group_scales == nullptr) return;
    scale_ *= encoding_ == Encoding::kFp8
                  ? Floats{} + static_cast<const float*>(block.group_scales)[g]
                  : floats_of_halves(static_cast<const uint16_t*>(block.group_scales) + g * kBlockRows);
  }

  // Column col + c to out + c * stride, c < 32.
  void decode(uint8_t* out, int64_t stride) const {
    if (encoding_ == Encoding::kFp8) return decode_fp8(out, stride);
    encoding_ == Encoding::kInt4 ? decode_codes<8>(out, stride) : decode_codes<4>(out, stride);
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

  Encoding encoding_;
  const uint8_t* lines_;
  Floats scale_;
  Ints zero_;
};

}  // namespace
}  // namespace kt::amx::inline KT_AMX_BUILD
