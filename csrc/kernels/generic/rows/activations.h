// The activations of experts (kernels/activation.h): for each kind one function, of values and derivatives. All row
// loops, of every instruction set, are the two at the end.
//
// A kind with a gate is a product, h = of_gate(gate) * of_up(up); without one h = of_up(up). As in elementwise.h there
// are no branches, infinities give limits, and NaN stays NaN. The derivative of a clamp is that of PyTorch's autograd:
// 1 between the borders, 0 at a border and beyond.
//
// Include only in a kernel's own translation unit.
#pragma once

#include <cstdint>

#include "kernels/activation.h"
#include "kernels/generic/rows/elementwise.h"

namespace kt {
namespace {

struct Factor {
  float value, derivative;
};

inline uint32_t mask_of(bool condition) { return 0u - static_cast<uint32_t>(condition); }

inline Factor clamped(float x, float limit) {
  const uint32_t above = mask_of(x >= limit), below = mask_of(x <= -limit);
  return {select(above, limit, select(below, -limit, x)), select(above | below, 0.0f, 1.0f)};
}

struct Silu {
  static constexpr bool kHasGate = true;
  Factor of_gate(float g) const {
    const Gate s = gate_of(g);
    return {s.silu, s.derivative};
  }
  Factor of_up(float u) const { return {u, 1.0f}; }
};

struct SiluClamped {
  static constexpr bool kHasGate = true;
  float limit;
  Factor of_gate(float g) const {
    const uint32_t above = mask_of(g >= limit);
    const Gate s = gate_of(select(above, limit, g));
    return {s.silu, select(above, 0.0f, s.derivative)};
  }
  Factor of_up(float u) const { return clamped(u, limit); }
};

// g * sigmoid(alpha * g) = silu(alpha * g) / alpha, whose derivative is that of silu at alpha * g.
struct SwigluOai {
  static constexpr bool kHasGate = true;
  float limit, alpha;
  Factor of_gate(float g) const {
    const uint32_t above = mask_of(g >= limit);
    const Gate s = gate_of(alpha * select(above, limit, g));
    return {s.silu / alpha, select(above, 0.0f, s.derivative)};
  }
  Factor of_up(float u) const {
    const Factor up = clamped(u, limit);
    return {up.value + 1.0f, up.derivative};
  }
};

// Beyond +-30 both forms of gelu are 0 or x in float32, so x is cut there where it multiplies something that vanishes.
struct Cut {
  float low, both;  // x, at least -30; and at most 30
};
inline Cut cut(float x) {
  const float low = select(mask_of(x < -30.0f), -30.0f, x);
  return {low, select(mask_of(low > 30.0f), 30.0f, low)};
}

// x * N(x), N the normal distribution. For z = |x|, N(-z) = e^(-z^2 / 2) * t * p(t) with t = 1 / (1 + 0.35 z); the
// polynomial p is fitted for the least relative error, 3.2e-8, on 0 <= z <= 15.
struct Gelu {
  static constexpr bool kHasGate = true;
  Factor of_gate(float x) const {
    const auto [low, c] = cut(x);
    const float z = __builtin_fabsf(c), t = 1.0f / (1.0f + 0.35f * z);
    float p = -0.0291639324f;
    p = p * t + 0.144060835f;
    p = p * t - 0.255901933f;
    p = p * t + 0.159392983f;
    p = p * t - 0.023263881f;
    p = p * t + 0.105574816f;
    p = p * t + 0.119815491f;
    p = p * t + 0.13986434f;
    p = p * t + 0.139621258f;
    const float density = exponential_of(-0.5f * z * z), tail = density * (t * p);  // e^-30^2/2 is 0 in float32
    const float normal = select(mask_of(x < 0.0f), tail, 1.0f - tail);
    return {low * normal, normal + c * (density * 0.39894228f)};  // 1 / sqrt(2 pi)
  }
  Factor of_up(float u) const { return {u, 1.0f}; }
};

// x * (1 + tanh(v / 2)) / 2 = x * sigmoid(v), v = 2 sqrt(2 / pi) (x + 0.044715 x^3).
struct GeluTanh {
  static constexpr bool kHasGate = true;
  Factor of_gate(float x) const {
    const auto [low, c] = cut(x);
    const float square = c * c;
    const Gate s = gate_of(c * (1.59576912f + 0.0713548163f * square));
    return {low * s.sigmoid, s.sigmoid * (1.0f + c * s.complement * (1.59576912f + 0.214064449f * square))};
  }
  Factor of_up(float u) const { return {u, 1.0f}; }
};

struct ReluSquared {
  static constexpr bool kHasGate = false;
  Factor of_up(float u) const {
    const float positive = select(mask_of(u < 0.0f), 0.0f, u);
    return {positive * positive, 2.0f * positive};
  }
};

// use(the kind as one of the types above)
template <class Use>
inline auto with_kind(const Activation& activation, Use&& use) {
  const float limit = activation.limit, alpha = activation.alpha;
  switch (activation.kind) {
    case ActivationKind::kSiluClamped:
      return use(SiluClamped{limit});
    case ActivationKind::kSwigluOai:
      return use(SwigluOai{limit, alpha});
    case ActivationKind::kGelu:
      return use(Gelu{});
    case ActivationKind::kGeluTanh:
      return use(GeluTanh{});
    case ActivationKind::kReluSquared:
      return use(ReluSquared{});
    default:
      return use(Silu{});
  }
}

template <class Kind>
inline void activate_rows(const Kind kind, const float* gate, const float* up, int64_t count, float* h) {
  for (int64_t i = 0; i < count; ++i) {
    if constexpr (Kind::kHasGate) {
      h[i] = kind.of_gate(gate[i]).value * kind.of_up(up[i]).value;
    } else {
      h[i] = kind.of_up(up[i]).value;
    }
  }
}

// tiles.h, activate_backward. The sum: lane l takes the elements l, l + 8, l + 16, ...; then the lanes in order.
template <class Kind>
inline double activate_backward_rows(const Kind kind, float* gate, float* up, const float* dh, float weight,
                                     int64_t count) {
  constexpr int64_t kLanes = 8, kPart = 512;
  double sums[kLanes] = {};
  for (int64_t first = 0; first < count; first += kPart) {
    const int64_t part = count - first < kPart ? count - first : kPart;
    float h[kPart];
    float *gates = Kind::kHasGate ? gate + first : nullptr, *ups = up + first;
    const float* grads = dh + first;
    for (int64_t i = 0; i < part; ++i) {
      const float scaled = weight * grads[i];
      const Factor u = kind.of_up(ups[i]);
      if constexpr (Kind::kHasGate) {
        const Factor g = kind.of_gate(gates[i]);
        h[i] = g.value * u.value;
        ups[i] = scaled * g.value * u.derivative;
        gates[i] = scaled * u.value * g.derivative;
      } else {
        h[i] = u.value;
        ups[i] = scaled * u.derivative;
      }
    }
    int64_t i = 0;
    for (; i + kLanes <= part; i += kLanes) {
      for (int64_t l = 0; l < kLanes; ++l) sums[l] += static_cast<double>(h[i + l]) * static_cast<double>(grads[i + l]);
    }
    for (int64_t l = 0; i + l < part; ++l) sums[l] += static_cast<double>(h[i + l]) * static_cast<double>(grads[i + l]);
  }
  double sum = 0;
  for (const double lane : sums) sum += lane;
  return sum;
}

inline void activate_all(const Activation& activation, const float* gate, const float* up, int64_t count, float* h) {
  with_kind(activation, [&](auto kind) { activate_rows(kind, gate, up, count, h); });
}

inline double activate_backward_all(const Activation& activation, float* gate, float* up, const float* dh, float weight,
                                    int64_t count) {
  return with_kind(activation, [&](auto kind) { return activate_backward_rows(kind, gate, up, dh, weight, count); });
}

}  // namespace
}  // namespace kt
