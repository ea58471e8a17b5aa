// The choice of experts (kernels/dense.h, RouterRows). Only operations that IEEE 754 defines, none contracted, in one
// order: the bits are the same on every instruction set.
//
// Include only in a kernel's own translation unit.
#pragma once

#include "base/largest.h"
#include "kernels/dense.h"
#include "kernels/generic/rows/elementwise.h"
#include "kernels/generic/rows/values.h"

namespace kt {
namespace {

constexpr int64_t kRouterLanes = 16;

template <class T>
inline float sum_of_exponentials(const T* logits, int64_t count, float largest) {
  float lanes[kRouterLanes] = {};
  int64_t i = 0;
  for (; i + kRouterLanes <= count; i += kRouterLanes) {
    for (int64_t lane = 0; lane < kRouterLanes; ++lane)
      lanes[lane] += exponential_of(wide_of(logits[i + lane]) - largest);
  }
  for (int64_t lane = 0; i + lane < count; ++lane) lanes[lane] += exponential_of(wide_of(logits[i + lane]) - largest);
  for (int64_t half = kRouterLanes / 2; half > 0; half /= 2) {
    for (int64_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// Of equal logits the first comes first.
template <class T>
inline void find_largest(const T* logits, int64_t count, int64_t top_k, float* values, int32_t* ids) {
  for (int64_t i = 0; i < count; ++i)
    insert_by_size(wide_of(logits[i]), static_cast<int32_t>(i), i, top_k, values, ids);
}

// The values of given experts, in their order; returns the row's largest value.
template <class T>
inline float take_given(const T* logits, int64_t count, int64_t top_k, const int32_t* ids, float* values) {
  float largest = wide_of(logits[0]);
  for (int64_t i = 1; i < count; ++i) {
    if (wide_of(logits[i]) > largest) largest = wide_of(logits[i]);
  }
  for (int64_t k = 0; k < top_k; ++k) values[k] = wide_of(logits[ids[k]]);
  return largest;
}

template <class T>
void choose_row(const RouterRows& p, int64_t row) {
  const T* logits = p.logits.row<const T>(row);
  float* weights = p.weights + row * p.top_k;
  int32_t* ids = p.ids + row * p.top_k;
  float largest;
  if (p.given) {
    largest = take_given(logits, p.experts, p.top_k, ids, weights);
  } else {
    find_largest(logits, p.experts, p.top_k, weights, ids);
    largest = weights[0];
  }
  const float sum = sum_of_exponentials(logits, p.experts, largest);
  float chosen = 0.0f;
  for (int64_t k = 0; k < p.top_k; ++k) {
    weights[k] = exponential_of(weights[k] - largest) / sum;
    chosen += weights[k];
  }
  if (!p.normalises) return;
  for (int64_t k = 0; k < p.top_k; ++k) weights[k] /= chosen;
}

inline void choose_for_rows(const RouterRows& p) {
  for (int64_t row = p.first_row; row < p.first_row + p.rows; ++row) {
    if (p.logits.bf16) {
      choose_row<uint16_t>(p, row);
    } else {
      choose_row<float>(p, row);
    }
  }
}

}  // namespace
}  // namespace kt
