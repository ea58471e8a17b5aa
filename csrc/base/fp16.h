// IEEE binary16 as its 16 bits. Widening is exact; narrowing rounds to nearest, ties to even.
// `static inline`: see bf16.h.
#pragma once

#include <cstdint>
#include <cstring>

namespace kt {

static inline float fp16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, rest = bits & 0x7fff;
  float value;
  if (rest < 0x400) {  // no leading one: a multiple of 2^-24
    value = static_cast<float>(rest) * 0x1p-24f;
  } else {
    const uint32_t wide = (rest << 13) + (rest < 0x7c00 ? 112u << 23 : 224u << 23);  // exponents 15 and 127, 31 and 255
    std::memcpy(&value, &wide, sizeof value);
  }
  uint32_t wide;
  std::memcpy(&wide, &value, sizeof wide);
  wide |= sign;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// Beyond 65504 (from 65520 on) becomes infinite.
static inline uint16_t float_to_fp16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);  // NaN
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 113u << 23) {  // below 2^-14: the last bit is 2^-24, as in floats of [0.5, 1)
    float small;
    std::memcpy(&small, &magnitude, sizeof small);
    small += 0.5f;
    std::memcpy(&bits, &small, sizeof bits);
    return static_cast<uint16_t>(sign | (bits - (126u << 23)));
  }
  // A carry out of the mantissa moves into the exponent by itself.
  return static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13));
}

}  // namespace kt
