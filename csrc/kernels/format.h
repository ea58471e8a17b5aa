// How the weights of a matrix are encoded. A weight is
//
//   W[row, col] = row_scale[row] * (group_scale[row, col / group] * (level - zero[row, col / group])
//                                   - group_min[row, col / group])
//
// where a factor that a format lacks is 1, a missing minimum is 0, and the zero of fp8 is 0. The level is the code
// itself, but for kFp4 (kFp4Levels). bf16 has neither scales nor zeros.
#pragma once

#include <cstdint>
#include <string>

namespace kt {

enum class Encoding : uint8_t {
  kBf16,
  kFp8,   // e4m3 (OCP 8-bit floating point, 1.0): no infinities, 0x7f and 0xff are NaN
  kInt8,  // unsigned codes 0..255; zero 128 unless zero points are stored
  kInt4,  // unsigned codes 0..15; zero 8 unless zero points are stored
  kInt5,  // unsigned codes 0..31; zero 16
  kInt6,  // unsigned codes 0..63; zero 32
  kFp4,   // e2m1 (OCP Microscaling formats, 1.0): twice its value and 12 is a level 0..24; zero 12
};

// How the scales of groups of integer weights are stored.
enum class Scales : uint8_t {
  kHalf,      // a float16 each
  kByte,      // a signed byte each, times a float16 for kSuperGroup columns (GGUF's "K" formats)
  kExponent,  // a byte e each: 2^(e - 127), 0 for e = 0
};

constexpr int64_t kSuperGroup = 256;

// Of kFp4 by its code: sign, two bits of exponent, one of mantissa.
constexpr uint8_t kFp4Levels[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

struct Format {
  Encoding encoding = Encoding::kBf16;
  // Columns that share a scale, a multiple of 32 (kInt6: of 16); 0: one scale a row. For fp8 a scale is shared by a
  // block of 16 rows too.
  int64_t group = 0;
  bool zero_points = false;  // kInt8 and kInt4 with a group: zeros are stored, one byte a row and group
  Scales scales = Scales::kHalf;
  // kInt4 and kInt5 with Scales::kByte: a minimum each group, a byte times a float16 for kSuperGroup columns. The zero
  // is 0 then.
  bool mins = false;

  bool integer() const { return encoding >= Encoding::kInt8; }
  int64_t default_zero() const {
    constexpr int64_t kZeros[] = {0, 0, 128, 8, 16, 32, 12};
    return mins ? 0 : kZeros[static_cast<int>(encoding)];
  }
  friend bool operator==(const Format&, const Format&) = default;
};

// Columns of activations that share a scale where integer weights have one scale a row (elsewhere: the weights' group).
constexpr int64_t kActivationGroup = 32;

// "bf16", "fp8_e4m3", "fp8_e4m3_g128", "int8", "int4_g32", "int4_g128_zp": encoding, group, zero points. "k" after the
// encoding: scales as bytes and perhaps minima, as in GGUF's formats of that name.
std::string format_name(const Format& format);

}  // namespace kt
