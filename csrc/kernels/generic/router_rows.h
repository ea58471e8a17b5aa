// The choice of experts (kernels/dense.h, RouterRows). Only operations that IEEE 754 defines, none contracted, in one
// order: the bits are the same on every instruction set.
//
// Include only in a kernel's own translation unit.
#pragma once

#include "kernels/dense.h"
#include "kernels/generic/elementwise.h"
#include "kernels/generic/values.h"

namespace kt {
namespace {

constexpr int64_t kRouterLanes = 16;

// e^x for x <= 0; 0 below -130, NaN for NaN.
inline float exponential_of(float x) {
  const uint32_t below = 0u - static_cast<uint32_t>(x < -130.0f);
  const Exponential e = exponential(select(below, -130.0f, x));
  return e.mantissa * e.scale_a * e.scale_b;
}

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

// Inserts each logit into the sorted list of the largest ones so far. NaN is never larger, so that the list is full of
// valid ids for any row.
template <class T>
inline void find_largest(const T* logits, int64_t count, int64_t top_k, float* values, int32_t* ids) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = wide_of(logits[i]);
    if (i >= top_k && !(value > values[top_k - 1])) continue;
    int64_t place = i < top_k ? i : top_k - 1;
    for (; place > 0 && value > values[place - 1]; --place) {
      values[place] = values[place - 1];
      ids[place] = ids[place - 1];
    }
    values[place] = value;
    ids[place] = static_cast<int32_t>(i);
  }
}

template <class T>
void choose_row(const RouterRows& p, int64_t row) {
  const T* logits = p.logits.row<const T>(row);
  float* weights = p.weights + row * p.top_k;
  find_largest(logits, p.experts, p.top_k, weights, p.ids + row * p.top_k);
  const float largest = weights[0], sum = sum_of_exponentials(logits, p.experts, largest);
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
