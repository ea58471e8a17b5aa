// Lines of packed weights as an ISA's vectors, in registers: one struct an encoding, for any vector of floats `V`
// (float_products.h says what V has). A source S<V> has
//
//   kColumns       columns of a 64-byte line
//   kUnitLines     lines that a tile's inner loop takes at once
//   kSums, kBlocks accumulators that leave enough registers to decode in, and blocks at once at most
//   kFewRows       rows up to which decoding in registers beats unpacking a panel
//   Group          what all columns of a group share, for one vector of a block's rows
//   group(parts, block, g, v)       makes it for group g
//   weights(line, step, v, group)   columns [step * V::kDepth, (step + 1) * V::kDepth) of a line, for the rows of
//                  vector v of the block, as code - zero: exact
//
// step and v are constants after unrolling; loads that steps share are made once by the compiler.
#pragma once

#include <cstdint>

#include "kernels/layout.h"

namespace kt {
namespace {

// Offsets of the parts of every block of a matrix, in bytes from the block's beginning; computed once a call.
struct Parts {
  explicit Parts(const PackedShape& shape)
      : format(shape.format),
        encoding(shape.format.encoding),
        group(shape.format.group),
        cols(shape.padded_cols()),
        block_bytes(shape.block_bytes()),
        group_scales(shape.row_scale_bytes()),
        zeros(group_scales + shape.group_scale_bytes()),
        supers(zeros + shape.zero_bytes()),
        min_supers(supers + shape.super_bytes()),
        lines(shape.line_offset()),
        row_scaled(shape.row_scale_bytes() > 0),
        stored_zeros(shape.format.zero_points),
        zero(static_cast<float>(shape.format.default_zero())) {}

  Format format;
  Encoding encoding;
  int64_t group;  // 0: none
  int64_t cols, block_bytes, group_scales, zeros, supers, min_supers, lines;
  bool row_scaled, stored_zeros;
  float zero;  // where zeros are not stored
};

// 2^(e - 127) of bytes e; 0 for 0.
template <class V>
inline typename V::Reg exponents(const uint8_t* from) {
  return (typename V::Reg)(__builtin_convertvector(V::bytes(from), typename V::Int) << 23);
}

template <class V>
inline typename V::Int load_ints(const uint8_t* from) {
  typename V::Int value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

// The scales of group g for the rows of vector v, of a format whose lines this file decodes.
template <class V>
inline typename V::Reg group_scales(const Parts& parts, const uint8_t* block, int64_t g, int v) {
  const uint8_t* scales = block + parts.group_scales;
  if (parts.format.block_scales()) return V::set(reinterpret_cast<const float*>(scales)[g]);
  const int64_t at = g * kBlockRows + v * V::kLanes;
  if (parts.format.scales == Scales::kExponent) return exponents<V>(scales + at);
  return V::halves(reinterpret_cast<const uint16_t*>(scales) + at);
}

struct NoGroup {};

// An unpacked panel: a line is one column of 16 float32.
template <class V>
struct FloatLines {
  static constexpr int kColumns = 1, kUnitLines = 4, kSums = V::kSums, kBlocks = 4, kFewRows = V::kFewRows;
  using Group = NoGroup;
  static Group group(const Parts&, const uint8_t*, int64_t, int) { return {}; }
  static typename V::Reg weights(const uint8_t* line, int, int v, Group) {
    return V::load(reinterpret_cast<const float*>(line) + v * V::kLanes);
  }
};

template <class V>
struct Bf16Lines {
  static constexpr int kColumns = 2, kUnitLines = 1, kSums = V::kSums, kBlocks = 4, kFewRows = V::kFewRows;
  using Group = NoGroup;
  static Group group(const Parts&, const uint8_t*, int64_t, int) { return {}; }
  static typename V::Reg weights(const uint8_t* line, int step, int v, Group) {
    const typename V::Int pair = load_ints<V>(line + v * 4 * V::kLanes);
    return (typename V::Reg)(step == 0 ? pair << 16 : pair & static_cast<int32_t>(0xffff0000));
  }
};

// A code's bits, moved to where a bf16 has them, are the value times 2^-120 (the biases differ by that), subnormals
// too.
template <class V>
struct Fp8Lines {
  static constexpr int kColumns = 4, kUnitLines = 1, kSums = V::kDecodeSums, kBlocks = 2, kFewRows = V::kDecodeRows;
  using Group = NoGroup;
  static Group group(const Parts&, const uint8_t*, int64_t, int) { return {}; }
  static typename V::Reg weights(const uint8_t* line, int step, int v, Group) {
    const auto codes = (typename V::Short)V::high_bytes(line + v * 4 * V::kLanes, step / 2);
    const auto pair = (typename V::Int)(codes >> 4);
    const typename V::Int bits = (step % 2 == 0 ? pair << 16 : pair) & static_cast<int32_t>(0x87f00000);
    return (typename V::Reg)bits * 0x1p120f;
  }
};

// Integer codes become floats without a conversion: a code in bits [s, s + 8) of the mantissa of 2^(23 - s) adds
// exactly itself. One subtraction removes that power and the zero.
template <class V>
inline typename V::Reg code_on_power(typename V::Int bits, int mask, int s) {
  return (typename V::Reg)((bits & (mask << s)) | ((127 + 23 - s) << 23));
}

template <class V>
inline typename V::Reg zeros_of(const Parts& parts, const uint8_t* block, int64_t g, int v) {
  return parts.stored_zeros ? V::bytes(block + parts.zeros + g * kBlockRows + v * V::kLanes) : V::set(parts.zero);
}

template <class V>
struct Int8Lines {
  static constexpr int kColumns = 4, kUnitLines = 1, kSums = V::kDecodeSums, kBlocks = 2, kFewRows = V::kDecodeRows;
  struct Group {
    typename V::Reg minus[2];  // for codes at bit 0 and 8
  };
  static Group group(const Parts& parts, const uint8_t* block, int64_t g, int v) {
    const typename V::Reg zero = zeros_of<V>(parts, block, g, v);
    return {{zero + 0x1p23f, zero + 0x1p15f}};
  }
  static typename V::Reg weights(const uint8_t* line, int step, int v, const Group& group) {
    typename V::Int codes = load_ints<V>(line + v * 4 * V::kLanes);
    if (step >= 2) codes >>= 16;
    return code_on_power<V>(codes, 255, step % 2 * 8) - group.minus[step % 2];
  }
};

template <class V>
struct Int4Lines {
  static constexpr int kColumns = 8, kUnitLines = 1, kSums = V::kDecodeSums, kBlocks = 2, kFewRows = V::kDecodeRows;
  struct Group {
    typename V::Reg minus[4];  // for codes at bit 0, 4, 8 and 12
  };
  static Group group(const Parts& parts, const uint8_t* block, int64_t g, int v) {
    const typename V::Reg zero = zeros_of<V>(parts, block, g, v);
    return {{zero + 0x1p23f, zero + 0x1p19f, zero + 0x1p15f, zero + 0x1p11f}};
  }
  static typename V::Reg weights(const uint8_t* line, int step, int v, const Group& group) {
    const int bit = step % 4 * 8 + step / 4 * 4;
    typename V::Int codes = load_ints<V>(line + v * 4 * V::kLanes);
    if (bit >= 16) codes >>= 16;
    return code_on_power<V>(codes, 15, bit % 16) - group.minus[bit % 16 / 4];
  }
};

}  // namespace
}  // namespace kt
