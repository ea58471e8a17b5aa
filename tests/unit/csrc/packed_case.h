// A random matrix in any format, packed, with the values that it decodes to.
#pragma once

#include "base/fp16.h"
#include "base/fp8.h"
#include "checks.h"
#include "remembered.h"
#include "weights/packed.h"

namespace kt_test {

// Formats that kernels are tested with: every encoding, with and without groups and stored zeros.
inline std::vector<kt::Format> all_formats() {
  using enum kt::Encoding;
  return {{kBf16, 0, false},
          {kFp8, 128, false},
          {kFp8, 0, false},
          {kInt8, 0, false},
          {kInt8, 32, false},
          {kInt8, 128, true},
          {kInt4, 0, false},
          {kInt4, 32, false},
          {kInt4, 128, false},
          {kInt4, 128, true},
          {kInt5, 32, false},
          {kFp4, 32, false, kt::Scales::kExponent},
          {kInt4, 32, false, kt::Scales::kByte, true},
          {kInt5, 32, false, kt::Scales::kByte, true},
          {kInt6, 16, false, kt::Scales::kByte},
          {kFp8, 32, false, kt::Scales::kExponent},
          {kFp4By16, 16, false, kt::Scales::kFp8},
          {kIq4, 32, false},
          {kIq4, 32, false, kt::Scales::kByte}};
}

// The codes with the highest and the lowest level, and the level of a code.
inline uint8_t top_code(const kt::Format& format) {
  static constexpr uint8_t kTop[] = {255, 255, 255, 15, 31, 63, 7, 7, 15};
  return kTop[static_cast<int>(format.encoding)];
}
inline uint8_t bottom_code(const kt::Format& format) { return kt::is_fp4(format.encoding) ? 15 : 0; }
inline int level_of(const kt::Format& format, uint8_t code) {
  const uint8_t* levels = kt::levels_of_nibbles(format.encoding);
  return levels ? levels[code] : code;
}

// What a matrix has beside its codes.
struct Factors {
  std::vector<float> scales;
  std::vector<uint8_t> zeros, scale_bytes;
  std::vector<uint16_t> supers, min_supers;
  float factor = 1.0f;  // of the matrix

  // Scales of 1, no minima.
  static Factors units(const kt::PackedShape& shape) {
    const auto groups = static_cast<size_t>(shape.rows * shape.groups());
    const auto supers = static_cast<size_t>(shape.rows * shape.supers());
    const kt::Format& format = shape.format;
    Factors made;
    if (format.scales == kt::Scales::kHalf) made.scales.assign(groups, 1.0f);
    if (format.scales == kt::Scales::kExponent) made.scale_bytes.assign(groups, 127);
    if (format.scales == kt::Scales::kFp8) made.scale_bytes.assign(groups, 7 << 3);
    if (format.scales == kt::Scales::kByte) {
      made.scale_bytes.assign(groups, 1);
      made.supers.assign(supers, kt::float_to_fp16(1.0f));
    }
    if (format.mins) {
      made.zeros.assign(groups, 0);
      made.min_supers.assign(supers, kt::float_to_fp16(1.0f));
    }
    return made;
  }

  kt::PlainMatrix plain(const kt::PackedShape& shape, const uint8_t* codes) const {
    const auto at = [](const auto& values) { return values.empty() ? nullptr : values.data(); };
    return {shape, codes, at(scales), at(zeros), at(scale_bytes), at(supers), at(min_supers), factor};
  }
};

class PackedCase {
 public:
  // `size`: about the standard deviation of a weight.
  PackedCase(int64_t rows, int64_t cols, kt::Format format, Random& random, float size = 1.0f)
      : shape{rows, cols, format} {
    using enum kt::Encoding;
    const bool wide = format.encoding == kBf16;
    codes.resize(static_cast<size_t>(rows * cols * (wide ? 2 : 1)));
    const float unit = size / (format.encoding == kFp8    ? 110.0f
                               : format.encoding == kInt8 ? 74.0f
                               : format.encoding == kInt5 ? 9.0f
                               : format.encoding == kIq4  ? 65.0f
                                                          : 4.6f);
    for (int64_t i = 0; i < rows * cols; ++i) {
      if (wide) {
        const uint16_t bits = kt::float_to_bf16(size * random.normal());
        std::memcpy(codes.data() + 2 * i, &bits, 2);
      } else {
        codes[static_cast<size_t>(i)] = random_code(format, random);
      }
    }
    if (format.scales != kt::Scales::kHalf) {
      draw_bytes(size, random);
    } else if (!wide) {
      for (int64_t i = 0; i < rows * shape.groups(); ++i)
        factors_.scales.push_back(
            kt::bf16_to_float(kt::float_to_bf16(unit * (0.5f + 0.6f * std::fabs(random.normal())))));
      for (int64_t i = 0; format.encoding == kIq4 && !whole_groups() && i < rows; ++i)
        factors_.scales[static_cast<size_t>((i + 1) * shape.groups() - 1)] = 0.0f;
    }
    if (format.block_scales() && format.group) {
      for (int64_t i = 0; i < rows * shape.groups(); ++i)
        factors_.scales[static_cast<size_t>(i)] =
            factors_.scales[static_cast<size_t>(i % shape.groups() + i / shape.groups() / 16 * 16 * shape.groups())];
    }
    for (int64_t i = 0; format.zero_points && i < rows * shape.groups(); ++i)
      factors_.zeros.push_back(random_code(format, random));
    data_.resize(static_cast<size_t>(shape.bytes() + 64));
    kt::pack_blocks(plain(), 0, shape.blocks(), data());
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t col = 0; col < cols; ++col) values_.push_back(kt::decode(shape, data(), row, col));
    }
  }

  double at(int64_t row, int64_t col) const {
    return row < shape.rows && col < shape.cols ? values_[static_cast<size_t>(row * shape.cols + col)] : 0.0;
  }
  kt::PlainMatrix plain() const { return factors_.plain(shape, codes.data()); }
  kt::PackedBlocks blocks() const { return {shape, data(), shape.blocks()}; }
  const uint8_t* data() const { return aligned(const_cast<uint8_t*>(data_.data())); }
  uint8_t* data() { return aligned(data_.data()); }

  const kt::PackedShape shape;
  std::vector<uint8_t> codes;

 private:
  bool whole_groups() const { return shape.cols % shape.group() == 0; }

  // Bytes with their factors, exponents, or fp8.
  void draw_bytes(float size, Random& random) {
    const kt::Format& format = shape.format;
    for (int64_t i = 0; i < shape.rows * shape.groups(); ++i) {
      const auto drawn = random.below(64);
      if (format.scales == kt::Scales::kExponent) {
        const int middle = format.encoding == kt::Encoding::kFp8 ? 119 : 124;
        factors_.scale_bytes.push_back(static_cast<uint8_t>(middle + std::ilogb(size) + drawn % 3 - 1));
        continue;
      }
      if (format.scales == kt::Scales::kFp8) {  // subnormal ones too
        factors_.scale_bytes.push_back(static_cast<uint8_t>(drawn));
        continue;
      }
      factors_.scale_bytes.push_back(static_cast<uint8_t>(format.mins ? drawn : 2 * drawn - 64));
      // Columns beyond the matrix decode to minus the minimum of their group, and of kIq4 to 1.
      const bool whole = whole_groups() || (i + 1) % shape.groups() != 0;
      if (format.encoding == kt::Encoding::kIq4 && !whole) factors_.scale_bytes.back() = 0;
      if (format.mins) factors_.zeros.push_back(whole ? static_cast<uint8_t>(random.below(64)) : uint8_t{0});
    }
    if (format.scales == kt::Scales::kFp8) factors_.factor = 0.3f * size;
    if (format.scales != kt::Scales::kByte) return;
    const float unit = size / (format.mins ? 40.0f * static_cast<float>(top_code(format)) / 4
                               : format.encoding == kt::Encoding::kIq4 ? 37.0f * 65.0f
                                                                       : 37.0f * 18.0f);
    for (int64_t i = 0; i < shape.rows * shape.supers(); ++i) {
      const auto factor = [&] { return kt::float_to_fp16(unit * (0.5f + 0.6f * std::fabs(random.normal()))); };
      factors_.supers.push_back(factor());
      if (format.mins) factors_.min_supers.push_back(kt::float_to_fp16(size / 40.0f * static_cast<float>(i % 3 + 1)));
    }
  }

  static uint8_t random_code(const kt::Format& format, Random& random) {
    const auto code = static_cast<uint8_t>(random.below(256));
    if (kt::levels_of_nibbles(format.encoding)) return code & 15;
    if (format.integer()) return code & top_code(format);
    if (format.encoding == kt::Encoding::kFp8) return kt::fp8_is_nan(code) ? code & 0x80 : code;
    return code;
  }
  static uint8_t* aligned(uint8_t* from) {
    return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(from) + 63) & ~uintptr_t{63});
  }

  Factors factors_;
  std::vector<uint8_t> data_;
  std::vector<double> values_;
};

// Drawn once for all instruction sets.
inline const PackedCase& packed_case(int64_t rows, int64_t cols, const kt::Format& format, Random& random,
                                     float size = 1.0f) {
  Digest digest;
  digest.add(rows).add(cols).add(format.encoding).add(format.group).add(format.zero_points).add(format.scales);
  return drawn_once(random, digest.add(format.mins).add(size),
                    [&](Random& own) { return PackedCase(rows, cols, format, own, size); });
}

// A matrix of one expert in a layer, on every memory node its part.
inline void pack_into(kt::ExpertLayer* layer, const PackedCase& matrix, int64_t expert, kt::Projection projection) {
  for (int node = 0; node < layer->num_nodes(); ++node) {
    const auto piece = layer->piece(expert, projection, node);
    kt::pack_blocks(matrix.plain(), piece.first, piece.blocks.blocks, layer->piece_data(expert, projection, node));
  }
}

}  // namespace kt_test
