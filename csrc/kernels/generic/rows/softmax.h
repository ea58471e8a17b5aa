// The arithmetic of softmax on vectors V of floats (kernels/attention.h), once for all instruction sets.
//
// Include only in a kernel's own translation unit.
#pragma once

#include <cstdint>
#include <limits>

namespace kt {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity(), kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// 2^x for x <= 0, within 1.5e-7 of it with fma, 2.5e-7 without; exactly 1 at 0, and 0 below -126.5. NaN for NaN.
// x = n + f, |f| <= 1/2. The polynomial's largest relative error is 1.6e-8 (least squares on Chebyshev's points,
// weighted until the errors at all extremes are equal).
template <class V>
inline typename V::Reg exp2_of(typename V::Reg x) {
  using Int = typename V::Int;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: added and subtracted, leaves the nearest integer
  const auto low = V::set(-127.0f);
  x = x < low ? low : x;
  const auto shifted = x + V::set(kRound), f = x - (shifted - V::set(kRound));
  auto series = V::set(1.53458124e-4f);
  series = V::fma(series, f, V::set(1.33999309e-3f));
  series = V::fma(series, f, V::set(9.61848907e-3f));
  series = V::fma(series, f, V::set(5.55032864e-2f));
  series = V::fma(series, f, V::set(2.40226462e-1f));
  series = V::fma(series, f, V::set(6.93147182e-1f));
  series = V::fma(series, f, V::set(1.0f));
  // n in the low bits of `shifted`; the bits of 2^n, and of zero for n = -127.
  constexpr int kBias = 127 - __builtin_bit_cast(int, kRound);
  return series * (typename V::Reg)(((Int)shifted + kBias) << 23);
}

template <class V>
inline float exp2_of_one(float x) {
  float lanes[V::kLanes];
  V::store(lanes, exp2_of<V>(V::set(x)));
  return lanes[0];
}

// What is subtracted from scores whose largest is `most`: where all are -Inf, their weights are 0 and not NaN.
inline float shift_of(float most) { return most == kLowest ? 0.0f : most; }

// cap * tanh(x / cap). Below 0.625 a continued fraction to x^9 (relative error 1e-8), else 1 - 2 / (1 + e^2x).
template <class V>
inline typename V::Reg capped(typename V::Reg x, float cap) {
  using Reg = typename V::Reg;
  const Reg ratio = x / V::set(cap), one = V::set(1.0f), zero = V::zero();
  const Reg size = ratio < zero ? -ratio : ratio, square = ratio * ratio;
  const Reg above = V::fma(square + V::set(105.0f), square, V::set(945.0f));
  const Reg below = V::fma(V::fma(V::set(15.0f), square, V::set(420.0f)), square, V::set(945.0f));
  const Reg small = exp2_of<V>(size * V::set(-2 * kLog2E));
  const Reg large = (one - small) / (one + small);
  const Reg near = ratio * (above / below), far = ratio < zero ? -large : large;
  const Reg tanh = size < V::set(0.625f) ? near : far;
  return V::set(cap) * (size != size ? ratio : tanh);
}

struct RowSums {
  float most, sum;
};

// Scores, in units of log(2) -> weights 2^(score - most), for the first `count` of `padded`, a multiple of the lanes;
// the rest of the padded is set to 0. A NaN gives a sum of NaN.
template <class V>
inline RowSums weigh(float* scores, int64_t count, int64_t padded) {
  for (int64_t i = count; i < padded; ++i) scores[i] = kLowest;
  typename V::Reg top = V::set(kLowest), sums = V::zero();
  for (int64_t i = 0; i < padded; i += V::kLanes) {
    const typename V::Reg x = V::load(scores + i);
    top = x > top ? x : top;
  }
  float lanes[V::kLanes], most = kLowest;
  V::store(lanes, top);
  for (const float lane : lanes) most = lane > most ? lane : most;
  const typename V::Reg shift = V::set(shift_of(most));
  for (int64_t i = 0; i < padded; i += V::kLanes) {
    const typename V::Reg weight = exp2_of<V>(V::load(scores + i) - shift);
    sums = sums + weight;
    V::store(scores + i, weight);
  }
  return {most, V::sum(sums)};
}

}  // namespace
}  // namespace kt
