// How the weights of a matrix are encoded. A weight is
//
//   W[row, col] = row_scale[row] * (group_scale[row, col / group] * (level - zero[row, col / group])
//                                   - group_min[row, col / group])
//
// where a factor that a format lacks is 1, a missing minimum is 0, and the zero of fp8 is 0. The level is the code
// itself, but for nibbles that name one (levels_of_nibbles). bf16 has neither scales nor zeros.
#pragma once

#include <cstdint>
#include <string>

namespace kt {

enum class Encoding : uint8_t {
  kBf16,
  kFp8,      // e4m3 (OCP 8-bit floating point, 1.0): no infinities, 0x7f and 0xff are NaN
  kInt8,     // unsigned codes 0..255; zero 128 unless zero points are stored
  kInt4,     // unsigned codes 0..15; zero 8 unless zero points are stored
  kInt5,     // unsigned codes 0..31; zero 16
  kInt6,     // unsigned codes 0..63; zero 32
  kFp4,      // e2m1 (OCP Microscaling formats, 1.0): twice its value and 12 is a level 0..24; zero 12
  kFp4By16,  // the same, in units of 16 columns instead of 32: for groups of 16
  kIq4,      // an index of 16 values (GGUF's "IQ4" types): the value and 127 is a level 0..240; zero 127
};

// How the scales of groups of integer weights are stored.
enum class Scales : uint8_t {
  kHalf,      // a float16 each
  kByte,      // a signed byte each, times a float16 for kSuperGroup columns (GGUF's "K" formats)
  kExponent,  // a byte e each: 2^(e - 127), 0 for e = 0
  kFp8,       // a byte each: e4m3 without a sign
};

constexpr int64_t kSuperGroup = 256;
// The largest e of Scales::kExponent that is read: its scale is the last power of two below 1e30, beyond which a weight
// could overflow float32.
constexpr int kMostExponent = 226;

// Of e2m1 by its code: sign, two bits of exponent, one of mantissa.
constexpr uint8_t kFp4Levels[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
// Of kIq4 (ggml, src/ggml-common.h: kvalues_iq4nl).
constexpr uint8_t kIq4Levels[16] = {0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240};

static constexpr bool is_fp4(Encoding encoding) { return encoding == Encoding::kFp4 || encoding == Encoding::kFp4By16; }
// The levels that nibbles name; null where a code is its level.
static constexpr const uint8_t* levels_of_nibbles(Encoding encoding) {
  return is_fp4(encoding) ? kFp4Levels : encoding == Encoding::kIq4 ? kIq4Levels : nullptr;
}
// The zero of an encoding that stores none.
static constexpr int32_t zero_of(Encoding encoding) {
  constexpr int32_t kZeros[] = {0, 0, 128, 8, 16, 32, 12, 12, 127};
  return kZeros[static_cast<int>(encoding)];
}

struct Format {
  Encoding encoding = Encoding::kBf16;
  // Columns that share a scale, a multiple of 32 (kInt6 and kFp4By16: of 16); 0: one scale a row. For fp8 a scale that
  // is no exponent is shared by a block of 16 rows too.
  int64_t group = 0;
  bool zero_points = false;  // kInt8 and kInt4 with a group: zeros are stored, one byte a row and group
  Scales scales = Scales::kHalf;
  // kInt4 and kInt5 with Scales::kByte: a minimum each group, a byte times a float16 for kSuperGroup columns. The zero
  // is 0 then.
  bool mins = false;

  bool integer() const { return encoding >= Encoding::kInt8; }
  // Each group of columns has one scale, a float32, for all rows of a block.
  bool block_scales() const { return encoding == Encoding::kFp8 && scales != Scales::kExponent; }
  int64_t default_zero() const { return mins ? 0 : zero_of(encoding); }
  friend bool operator==(const Format&, const Format&) = default;
};

// Columns of activations that share a scale where integer weights have one scale a row (elsewhere: the weights' group).
constexpr int64_t kActivationGroup = 32;

// "bf16", "fp8_e4m3", "fp8_e4m3_g128", "int8", "int4_g32", "int4_g128_zp": encoding, group, zero points. "k" after the
// encoding: scales as bytes and perhaps minima, as in GGUF's formats of that name. "mxfp4", "mxfp8", "nvfp4": by their
// groups' scales.
std::string format_name(const Format& format);

}  // namespace kt
