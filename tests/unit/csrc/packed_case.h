// A random matrix in any format, packed, with the values that it decodes to.
#pragma once

#include "base/fp8.h"
#include "checks.h"
#include "weights/packed.h"

namespace kt_test {

// Formats that kernels are tested with: every encoding, with and without groups and stored zeros.
inline std::vector<kt::Format> all_formats() {
  using enum kt::Encoding;
  return {{kBf16, 0, false},  {kFp8, 128, false}, {kFp8, 0, false},   {kInt8, 0, false},   {kInt8, 32, false},
          {kInt8, 128, true}, {kInt4, 0, false},  {kInt4, 32, false}, {kInt4, 128, false}, {kInt4, 128, true}};
}

class PackedCase {
 public:
  // `size`: about the standard deviation of a weight.
  PackedCase(int64_t rows, int64_t cols, kt::Format format, Random& random, float size = 1.0f)
      : shape{rows, cols, format} {
    using enum kt::Encoding;
    const bool wide = format.encoding == kBf16;
    codes.resize(static_cast<size_t>(rows * cols * (wide ? 2 : 1)));
    const float unit = size / (format.encoding == kFp8 ? 110.0f : format.encoding == kInt8 ? 74.0f : 4.6f);
    for (int64_t i = 0; i < rows * cols; ++i) {
      if (wide) {
        const uint16_t bits = kt::float_to_bf16(size * random.normal());
        std::memcpy(codes.data() + 2 * i, &bits, 2);
      } else {
        codes[static_cast<size_t>(i)] = random_code(format, random);
      }
    }
    if (!wide) {
      for (int64_t i = 0; i < rows * shape.groups(); ++i)
        scales.push_back(kt::bf16_to_float(kt::float_to_bf16(unit * (0.5f + 0.6f * std::fabs(random.normal())))));
    }
    if (format.encoding == kt::Encoding::kFp8 && format.group) {
      for (int64_t i = 0; i < rows * shape.groups(); ++i)
        scales[static_cast<size_t>(i)] =
            scales[static_cast<size_t>(i % shape.groups() + i / shape.groups() / 16 * 16 * shape.groups())];
    }
    for (int64_t i = 0; format.zero_points && i < rows * shape.groups(); ++i)
      zeros.push_back(random_code(format, random));
    data_.resize(static_cast<size_t>(shape.bytes() + 64));
    kt::pack_blocks(plain(), 0, shape.blocks(), data());
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t col = 0; col < cols; ++col) values_.push_back(kt::decode(shape, data(), row, col));
    }
  }

  double at(int64_t row, int64_t col) const {
    return row < shape.rows && col < shape.cols ? values_[static_cast<size_t>(row * shape.cols + col)] : 0.0;
  }
  kt::PlainMatrix plain() const {
    return {shape, codes.data(), scales.empty() ? nullptr : scales.data(), zeros.empty() ? nullptr : zeros.data()};
  }
  kt::PackedBlocks blocks() const { return {shape, data(), shape.blocks()}; }
  const uint8_t* data() const { return aligned(const_cast<uint8_t*>(data_.data())); }
  uint8_t* data() { return aligned(data_.data()); }

  const kt::PackedShape shape;
  std::vector<uint8_t> codes, zeros;
  std::vector<float> scales;

 private:
  static uint8_t random_code(const kt::Format& format, Random& random) {
    const auto code = static_cast<uint8_t>(random.below(256));
    if (format.encoding == kt::Encoding::kInt4) return code & 15;
    if (format.encoding == kt::Encoding::kFp8) return kt::fp8_is_nan(code) ? code & 0x80 : code;
    return code;
  }
  static uint8_t* aligned(uint8_t* from) {
    return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(from) + 63) & ~uintptr_t{63});
  }

  std::vector<uint8_t> data_;
  std::vector<double> values_;
};

// A matrix of one expert in a layer, on every memory node its part.
inline void pack_into(kt::ExpertLayer* layer, const PackedCase& matrix, int64_t expert, kt::Projection projection) {
  for (int node = 0; node < layer->num_nodes(); ++node) {
    const auto piece = layer->piece(expert, projection, node);
    kt::pack_blocks(matrix.plain(), piece.first, piece.blocks.blocks, layer->piece_data(expert, projection, node));
  }
}

}  // namespace kt_test
