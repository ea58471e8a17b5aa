#include "weights/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/bf16.h"
#include "base/fp8.h"

namespace kt {
namespace {

// Four numbers, the most that any x86-64 or ARM handles at once.
using Floats = float __attribute__((vector_size(16)));
using Ints = int32_t __attribute__((vector_size(16)));

Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
Floats all(float value) { return Floats{value, value, value, value}; }
Floats larger(Floats a, Floats b) { return a > b ? a : b; }
Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
Floats magnitude(Floats value) { return reinterpret_cast<Floats>(reinterpret_cast<Ints>(value) & 0x7fffffff); }

// Adding and taking it away rounds a float below 2^22 to the nearest integer, ties to even.
constexpr float kRound = 12582912.0f;  // 1.5 * 2^23

// What the largest magnitude of a group is divided by: 7 clips nothing, 8 uses the code -8, more clips the largest.
constexpr float kInt4Divisors[] = {7.0f, 7.5f, 8.0f, 8.75f};

// `count` is a multiple of 4.
float absmax(const float* values, int64_t count) {
  Floats most = all(0.0f);
  for (int64_t i = 0; i < count; i += 4) most = larger(magnitude(load(values + i)), most);
  return std::max(std::max(most[0], most[1]), std::max(most[2], most[3]));
}

// 11 significant bits, as float16 has.
float rounded_scale(float scale) {
  uint32_t bits;
  std::memcpy(&bits, &scale, sizeof bits);
  bits = (bits + 0xfffu + (bits >> 13 & 1u)) & ~uint32_t{0x1fff};
  std::memcpy(&scale, &bits, sizeof scale);
  return scale;
}

// The nearest of the integers from `lowest` to `highest`.
Floats level(Floats value, float lowest, float highest) {
  return smaller(larger(value, all(lowest)), all(highest)) + kRound - kRound;
}

// Four codes: levels with `added` so that they are not negative.
void store_codes(Floats levels, int32_t added, uint8_t* codes) {
  const Ints wide = __builtin_convertvector(levels, Ints) + added;
  for (int i = 0; i < 4; ++i) codes[i] = static_cast<uint8_t>(wide[i]);
}

// Squared error in units of the scale, so that no size of weights overflows.
float int4_error(const float* group, float scale) {
  const float inverse = 1.0f / scale;
  Floats sums = all(0.0f);
  for (int64_t i = 0; i < kInt4Group; i += 4) {
    const Floats value = load(group + i) * inverse, off = value - level(value, -8.0f, 7.0f);
    sums += off * off;
  }
  return sums[0] + sums[1] + sums[2] + sums[3];
}

float best_int4_scale(const float* group) {
  const float largest = absmax(group, kInt4Group);
  float best = 0.0f, least = INFINITY;
  for (const float divisor : kInt4Divisors) {
    const float scale = rounded_scale(largest / divisor);
    if (!(scale >= 0x1p-126f)) continue;  // only zeros, or a scale below the normal numbers
    const float error = int4_error(group, scale) / (divisor * divisor);
    if (error < least) {
      least = error;
      best = scale;
    }
  }
  return best;
}

struct Fp8Values {
  float of[256];
  Fp8Values() {
    for (int bits = 0; bits < 256; ++bits) of[bits] = fp8_to_float(static_cast<uint8_t>(bits));
  }
};

// 2^(exponent - 127); 0 for 0.
float power_of_two(uint8_t exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent) << 23;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Row `row` of a bf16 or fp8 matrix as floats.
void widen_row(const PlainMatrix& matrix, int64_t row, float* values) {
  static const Fp8Values fp8;
  const PackedShape& shape = matrix.shape;
  if (shape.format.encoding == Encoding::kBf16) {
    const uint16_t* from = static_cast<const uint16_t*>(matrix.codes) + row * shape.cols;
    for (int64_t col = 0; col < shape.cols; ++col) values[col] = bf16_to_float(from[col]);
    return;
  }
  const uint8_t* from = static_cast<const uint8_t*>(matrix.codes) + row * shape.cols;
  for (int64_t g = 0; g < shape.groups(); ++g) {
    const int64_t at = row * shape.groups() + g;
    const float scale = matrix.scales ? matrix.scales[at] : power_of_two(matrix.scale_bytes[at]);
    const int64_t end = std::min(shape.cols, (g + 1) * shape.group());
    for (int64_t col = g * shape.group(); col < end; ++col) values[col] = scale * fp8.of[from[col]];
  }
}

}  // namespace

PlainMatrix StripQuantizer::quantized(const PlainMatrix& strip) {
  const PackedShape shape{strip.shape.rows, strip.shape.cols, format_};
  const int64_t padded = shape.padded_cols();
  row_.assign(static_cast<size_t>(padded), 0.0f);
  // A row's padding is overwritten by the next row.
  codes_.resize(static_cast<size_t>((shape.rows - 1) * shape.cols + padded));
  scales_.resize(static_cast<size_t>(shape.rows * shape.groups()));
  for (int64_t row = 0; row < shape.rows; ++row) {
    widen_row(strip, row, row_.data());
    uint8_t* codes = codes_.data() + row * shape.cols;
    float* scales = scales_.data() + row * shape.groups();
    if (format_.encoding == Encoding::kInt8) {
      quantize_int8(row_.data(), padded, codes, scales);
    } else {
      quantize_int4(row_.data(), padded, codes, scales);
    }
  }
  return {shape, codes_.data(), scales_.data(), nullptr};
}

void quantize_int8(const float* row, int64_t cols, uint8_t* codes, float* scale) {
  const float found = absmax(row, cols) / 127.0f;
  *scale = found >= 0x1p-126f ? found : 0.0f;
  const float inverse = *scale > 0.0f ? 1.0f / *scale : 0.0f;
  for (int64_t col = 0; col < cols; col += 4)
    store_codes(level(load(row + col) * inverse, -127.0f, 127.0f), 128, codes + col);
}

void quantize_int4(const float* row, int64_t cols, uint8_t* codes, float* scales) {
  for (int64_t col = 0; col < cols; col += kInt4Group) {
    const float scale = best_int4_scale(row + col), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (int64_t i = col; i < col + kInt4Group; i += 4)
      store_codes(level(load(row + i) * inverse, -8.0f, 7.0f), 8, codes + i);
    scales[col / kInt4Group] = scale;
  }
}

}  // namespace kt
