// Quantizing activations to int8, shared by all instruction sets: plain loops that the compiler vectorises for the unit
// that includes this. Include only in a kernel's own translation unit.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/tiles.h"

namespace kt {
namespace {

constexpr int64_t kQuantizeUnit = kColumnUnit;  // groups are multiples of it, or half of it

// The largest magnitude. Compared as integers, which orders floats of one sign, and a NaN above all of them.
inline float largest_magnitude(const float* x, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7fffffff;
    largest = largest < bits ? bits : largest;
  }
  float value;
  std::memcpy(&value, &largest, sizeof value);
  return value;
}

// To nearest even, for magnitudes below 2^22. Adding 1.5 * 2^23 leaves the rounded integer in the low bits, defined for
// any input and without a conversion that traps or saturates.
inline int32_t rounded(float value) {
  const float shifted = value + 12582912.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  return static_cast<int32_t>(bits - 0x4b400000u);
}

// codes[i] = x[i] * factor, |x[i] * factor| < 127.5, rounded; the sum of them.
template <int64_t kCount = kQuantizeUnit>
inline int32_t round_codes(const float* x, float factor, int8_t* codes) {
  int32_t sum = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    const auto code = static_cast<int8_t>(rounded(x[i] * factor));
    codes[i] = code;
    sum += code;
  }
  return sum;
}

// use(col, values) for the units of kQuantizeUnit columns in [begin, end) of a row; zeros beyond shape.cols.
template <class Use>
inline void for_each_unit(const PackedShape& shape, const float* row, int64_t begin, int64_t end, Use use) {
  for (int64_t col = begin; col < end; col += kQuantizeUnit) {
    if (col + kQuantizeUnit <= shape.cols) {
      use(col, row + col);
    } else {
      float tail[kQuantizeUnit] = {};
      std::memcpy(tail, row + col, static_cast<size_t>(shape.cols - col) * sizeof(float));
      use(col, static_cast<const float*>(tail));
    }
  }
}

// One cache line more than the codes take: see activation_stride (ops/experts/operand.h).
inline QuantizedSize grouped_size(const PackedShape& shape, int64_t code_bytes) {
  return {round_up(shape.padded_cols() * code_bytes, kLineBytes) + kLineBytes, shape.activation_groups()};
}

// The scale of a group, and what its values are multiplied by.
struct ActivationScale {
  float scale, factor;

  ActivationScale(const float* x, int64_t count) {
    const float largest = largest_magnitude(x, count);
    const bool zero = largest < 4e-37f;
    factor = zero ? 0.0f : 127.0f / largest;
    scale = zero ? 0.0f : largest / 127.0f;
  }
};

// Two groups a unit.
template <class Store>
inline void quantize_halves(const PackedShape& shape, const float* row, float* scales, int32_t* sums, Store store) {
  constexpr int64_t kHalf = kQuantizeUnit / 2;
  for_each_unit(shape, row, 0, shape.padded_cols(), [&](int64_t col, const float* from) {
    alignas(64) int8_t codes[kQuantizeUnit];
    for (int64_t i = 0; i < 2; ++i) {
      const ActivationScale group(from + i * kHalf, kHalf);
      scales[col / kHalf + i] = group.scale;
      sums[col / kHalf + i] = round_codes<kHalf>(from + i * kHalf, group.factor, codes + i * kHalf);
    }
    store(col / kQuantizeUnit, codes);
  });
}

// `store(unit, codes)` writes kQuantizeUnit codes where the kernel wants them. Groups whose largest magnitude is too
// small for its inverse (below 4e-37) count as zero. A group with NaN or infinity gets a scale that is not finite.
template <class Store>
inline void quantize_row(const PackedShape& shape, const float* row, float* scales, int32_t* sums, Store store) {
  const int64_t group = shape.activation_group(), padded = shape.padded_cols();
  if (group == kQuantizeUnit / 2) return quantize_halves(shape, row, scales, sums, store);
  for (int64_t g = 0; g < shape.activation_groups(); ++g) {
    const int64_t begin = g * group, end = begin + group < padded ? begin + group : padded;
    const int64_t real = end < shape.cols ? end : shape.cols;
    const ActivationScale of_group(row + begin, real - begin);
    scales[g] = of_group.scale;
    int32_t sum = 0;
    for_each_unit(shape, row, begin, end, [&](int64_t col, const float* from) {
      alignas(64) int8_t codes[kQuantizeUnit];
      sum += round_codes(from, of_group.factor, codes);
      store(col / kQuantizeUnit, codes);
    });
    sums[g] = sum;
  }
}

// Codes of a byte each, in the order of their columns.
inline QuantizedSize size_in_bytes(const PackedShape& shape) { return grouped_size(shape, 1); }

inline void quantize_to_bytes(const PackedShape& shape, const float* row, uint8_t* values, float* scales,
                              int32_t* sums) {
  quantize_row(shape, row, scales, sums, [&](int64_t unit, const int8_t* codes) {
    std::memcpy(values + unit * kQuantizeUnit, codes, kQuantizeUnit);
  });
}

}  // namespace
}  // namespace kt
