// Rotary embedding of heads (kernels/dense.h, RotaryRows), as loops that the compiler turns into vectors.
//
// Include only in a kernel's own translation unit.
#pragma once

#include "kernels/dense.h"
#include "kernels/generic/rows/values.h"

namespace kt {
namespace {

template <class T>
float rounded(float value) {
  return wide_of(narrow_of<T>(value));
}

template <class T, bool kInterleaved>
void rotate_heads(const RotaryRows& p) {
  const T *cosines = static_cast<const T*>(p.angles), *sines = cosines + p.half;
  for (int64_t head = 0; head < p.heads; ++head) {
    T* x = p.x.row<T>(head);
    for (int64_t i = 0; i < p.half; ++i) {
      T &first = x[kInterleaved ? 2 * i : i], &second = x[kInterleaved ? 2 * i + 1 : p.half + i];
      const float a = wide_of(first), b = wide_of(second), cosine = wide_of(cosines[i]), sine = wide_of(sines[i]);
      first = narrow_of<T>(rounded<T>(a * cosine) - rounded<T>(b * sine));
      second = narrow_of<T>(rounded<T>(b * cosine) + rounded<T>(a * sine));
    }
  }
}

template <class T>
void rotate_rows_of(const RotaryRows& p) {
  p.interleaved ? rotate_heads<T, true>(p) : rotate_heads<T, false>(p);
}

inline void rotate_rows(const RotaryRows& p) { p.x.bf16 ? rotate_rows_of<uint16_t>(p) : rotate_rows_of<float>(p); }

}  // namespace
}  // namespace kt
