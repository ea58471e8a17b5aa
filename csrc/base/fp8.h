// fp8 e4m3 (OCP 8-bit floating point, 1.0): sign, 4 exponent bits (bias 7), 3 mantissa bits; 0x7f and 0xff are NaN,
// there is no infinity. Every value is also a bf16. `static inline`: see bf16.h.
#pragma once

#include <cmath>
#include <cstdint>

namespace kt {

static inline bool fp8_is_nan(uint8_t bits) { return (bits & 0x7f) == 0x7f; }

static inline float fp8_to_float(uint8_t bits) {
  const int exponent = (bits >> 3) & 15, mantissa = bits & 7;
  if (fp8_is_nan(bits)) return NAN;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                        : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

}  // namespace kt
