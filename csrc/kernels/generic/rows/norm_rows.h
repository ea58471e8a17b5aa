// RMSNorm of rows (kernels/dense.h, NormRows), as loops that the compiler turns into vectors of each instruction set.
// Only operations that IEEE 754 defines, none contracted, in one order: the bits are the same on every instruction set.
//
// Include only in a kernel's own translation unit.
#pragma once

#include <cstdint>

#include "kernels/dense.h"
#include "kernels/generic/rows/values.h"

namespace kt {
namespace {

constexpr int64_t kNormLanes = 16;

template <class T>
inline float sum_of_squares(const T* row, int64_t cols) {
  float lanes[kNormLanes] = {};
  int64_t k = 0;
  for (; k + kNormLanes <= cols; k += kNormLanes) {
    for (int64_t lane = 0; lane < kNormLanes; ++lane) {
      const float value = wide_of(row[k + lane]);
      lanes[lane] += value * value;
    }
  }
  for (int64_t lane = 0; k + lane < cols; ++lane) {
    const float value = wide_of(row[k + lane]);
    lanes[lane] += value * value;
  }
  for (int64_t half = kNormLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

template <class T>
void normalise_row(const NormRows& p, int64_t row) {
  const T* values = p.x.row<const T>(row);
  if (p.residual.data) {
    const T* residual = p.residual.row<const T>(row);
    T* total = p.total.row<T>(row);
    for (int64_t k = 0; k < p.cols; ++k) total[k] = narrow_of<T>(wide_of(values[k]) + wide_of(residual[k]));
    values = total;
  }
  const float mean = sum_of_squares(values, p.cols) / static_cast<float>(p.cols);
  const float inverse = 1.0f / __builtin_sqrtf(mean + p.epsilon);
  if (p.inverse) p.inverse[row] = inverse;
  const T* weight = static_cast<const T*>(p.weight);
  T* y = p.y.row<T>(row);
  if (p.offset) {
    for (int64_t k = 0; k < p.cols; ++k)
      y[k] = narrow_of<T>((1.0f + wide_of(weight[k])) * (wide_of(values[k]) * inverse));
    return;
  }
  for (int64_t k = 0; k < p.cols; ++k) {
    const float rounded = wide_of(narrow_of<T>(wide_of(values[k]) * inverse));
    y[k] = narrow_of<T>(wide_of(weight[k]) * rounded);
  }
}

inline void normalise_rows(const NormRows& p) {
  for (int64_t row = p.first_row; row < p.first_row + p.rows; ++row) {
    if (p.x.bf16) {
      normalise_row<uint16_t>(p, row);
    } else {
      normalise_row<float>(p, row);
    }
  }
}

}  // namespace
}  // namespace kt
