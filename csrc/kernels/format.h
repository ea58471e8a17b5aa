// How the weights of a matrix are encoded. A weight is
//
//   W[row, col] = row_scale[row] * group_scale[row, col / group] * (code - zero[row, col / group])
//
// where a factor that a format lacks is 1 and the zero of fp8 is 0. bf16 has neither scales nor zeros.
#pragma once

#include <cstdint>
#include <string>

namespace kt {

enum class Encoding : uint8_t {
  kBf16,
  kFp8,   // e4m3 (OCP 8-bit floating point, 1.0): no infinities, 0x7f and 0xff are NaN
  kInt8,  // unsigned codes 0..255; zero 128 unless zero points are stored
  kInt4,  // unsigned codes 0..15; zero 8 unless zero points are stored
};

struct Format {
  Encoding encoding = Encoding::kBf16;
  // Columns that share a scale, a multiple of 32; 0: one scale a row. For fp8 a scale is shared by a block of 16 rows
  // too.
  int64_t group = 0;
  bool zero_points = false;  // kInt8 and kInt4 with a group: zeros are stored, one byte a row and group

  bool integer() const { return encoding == Encoding::kInt8 || encoding == Encoding::kInt4; }
  int64_t default_zero() const { return encoding == Encoding::kInt8 ? 128 : encoding == Encoding::kInt4 ? 8 : 0; }
  friend bool operator==(const Format&, const Format&) = default;
};

// Columns of activations that share a scale where integer weights have one scale a row (elsewhere: the weights' group).
constexpr int64_t kActivationGroup = 32;

// "bf16", "fp8_e4m3", "fp8_e4m3_g128", "int8", "int4_g32", "int4_g128_zp": encoding, group, zero points.
std::string format_name(const Format& format);

}  // namespace kt
