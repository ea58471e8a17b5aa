// Elementwise kernels as loops without branches, which the compiler turns into vectors of each instruction set. Only
// additions, multiplications, divisions and conversions that IEEE 754 defines, none contracted. An element's result is
// therefore the same in a vector, in the remainder after the last vector, and on every instruction set.
//
// Include only in a kernel's own translation unit.
#pragma once

#include <cstdint>

#include "base/bf16.h"

namespace kt {
namespace {

inline void widen_all(const uint16_t* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = __builtin_bit_cast(float, static_cast<uint32_t>(from[i]) << 16);
}

inline void narrow_all(const float* from, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = __builtin_bit_cast(uint32_t, from[i]);
    const uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16, quiet = bits >> 16 | 0x40u;
    to[i] = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : nearest);
  }
}

inline void add_scaled_all(const float* from, float factor, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] += factor * from[i];
}

// e^x = mantissa * scale_a * scale_b for -130 <= x <= 0; two scales, because 2^-188 is not a float. NaN for NaN.
// x = n ln 2 + r, |r| <= ln(2) / 2, and e^r by its Taylor series to r^7 (the rest is below 1e-8 of it).
struct Exponential {
  float mantissa, scale_a, scale_b;
};

inline Exponential exponential(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: added and subtracted, leaves the nearest integer
  const float shifted = x * 1.44269504f + kRound, n = shifted - kRound;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts, the first product is exact
  float series = 1.0f / 5040;
  series = series * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  // n from the low bits of `shifted`; halves that add up to n, both in the range of normal exponents.
  const auto whole = static_cast<int32_t>(__builtin_bit_cast(uint32_t, shifted) - __builtin_bit_cast(uint32_t, kRound));
  const auto half = static_cast<uint32_t>(whole >> 1), rest = static_cast<uint32_t>(whole) - half;
  return {1.0f + (r + r * r * series), __builtin_bit_cast(float, (half + 127u) << 23),
          __builtin_bit_cast(float, (rest + 127u) << 23)};
}

// Where all bits of `mask` are set `a`, where none is `b`. Not a condition: the compiler would move the computation of
// one side under it, and then find no vector form.
inline float select(uint32_t mask, float a, float b) {
  const auto from_a = __builtin_bit_cast(uint32_t, a) & mask, from_b = __builtin_bit_cast(uint32_t, b) & ~mask;
  return __builtin_bit_cast(float, from_a | from_b);
}

// e^x for x <= 0; 0 below -130, NaN for NaN.
inline float exponential_of(float x) {
  const uint32_t below = 0u - static_cast<uint32_t>(x < -130.0f);
  const Exponential e = exponential(select(below, -130.0f, x));
  return e.mantissa * e.scale_a * e.scale_b;
}

// What SiLU and its derivative need of a gate g. Beyond +-130 both are at their limits in float32, so g is cut there
// where it multiplies something that vanishes: then infinities give the limits instead of NaN. NaN stays NaN.
struct Gate {
  float silu;        // g / (1 + e^-g)
  float sigmoid;     // 1 / (1 + e^-g)
  float derivative;  // sigmoid * (1 + g * (1 - sigmoid))
  float complement;  // 1 - sigmoid
};

inline Gate gate_of(float g) {
  constexpr uint32_t kLimit = 0x43020000u, kInfinity = 0x7f800000u;  // 130 and infinity
  const uint32_t bits = __builtin_bit_cast(uint32_t, g), magnitude = bits & 0x7fffffffu;
  const uint32_t beyond = 0u - static_cast<uint32_t>(magnitude - kLimit <= kInfinity - kLimit);  // not for NaN
  const float cut = select(beyond, 130.0f, __builtin_fabsf(g));
  const Exponential e = exponential(-cut);
  const float small = e.mantissa * e.scale_a * e.scale_b, denominator = 1.0f + small;  // small = e^-|g|
  // For g < 0 the scale of e^-|g| comes last, so that a result below the normal numbers is rounded once.
  const uint32_t negative = 0u - (bits >> 31);
  const float silu = select(negative, -cut * e.mantissa, g) / denominator * select(negative, e.scale_a, 1.0f) *
                     select(negative, e.scale_b, 1.0f);
  const float near = 1.0f / denominator, far = small * near;
  const float sigmoid = select(negative, far, near), complement = select(negative, near, far);
  return {silu, sigmoid, sigmoid * (1.0f + select(negative, -cut, cut) * complement), complement};
}

inline void sigmoid_all(const float* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = gate_of(from[i]).sigmoid;
}

inline void exponential_all(const float* from, float largest, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = exponential_of(from[i] - largest);
}

}  // namespace
}  // namespace kt
