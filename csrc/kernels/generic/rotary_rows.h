// Rotary embedding of heads (kernels/dense.h, RotaryRows), as loops that the compiler turns into vectors.
//
// Include only in a kernel's own translation unit.
#pragma once

#include "kernels/dense.h"
#include "kernels/generic/values.h"

namespace kt {
namespace {

template <class T>
float rounded(float value) {
  return wide_of(narrow_of<T>(value));
}

template <class T>
void rotate_heads(const RotaryRows& p) {
  const T *cosines = static_cast<const T*>(p.angles), *sines = cosines + p.half;
  for (int64_t head = 0; head < p.heads; ++head) {
    T *first = p.x.row<T>(head), *second = first + p.half;
    for (int64_t i = 0; i < p.half; ++i) {
      const float a = wide_of(first[i]), b = wide_of(second[i]), cosine = wide_of(cosines[i]), sine = wide_of(sines[i]);
      first[i] = narrow_of<T>(rounded<T>(a * cosine) - rounded<T>(b * sine));
      second[i] = narrow_of<T>(rounded<T>(b * cosine) + rounded<T>(a * sine));
    }
  }
}

inline void rotate_rows(const RotaryRows& p) {
  if (p.x.bf16) {
    rotate_heads<uint16_t>(p);
  } else {
    rotate_heads<float>(p);
  }
}

}  // namespace
}  // namespace kt
