// The function between the two products of an expert, as data: h = f(gate, up), element by element. The arithmetic, one
// function of values and derivatives for each kind, is in generic/rows/activations.h.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"

namespace kt {

enum class ActivationKind : uint8_t {
  kSilu,         // silu(gate) * up
  kSiluClamped,  // silu(min(gate, limit)) * clamp(up, -limit, limit)
  kSwigluOai,    // g * sigmoid(alpha * g) * (clamp(up, -limit, limit) + 1), g = min(gate, limit)
  kGelu,         // gelu(gate) * up, by the error function
  kGeluTanh,     // gelu(gate) * up, by its approximation with tanh
  kReluSquared,  // max(up, 0)^2: experts without a gate
};

// A limit or alpha that the kind does not use is 0.
struct Activation {
  ActivationKind kind = ActivationKind::kSilu;
  float limit = 0, alpha = 0;

  bool has_gate() const { return kind != ActivationKind::kReluSquared; }
};

// `name`: "silu", "silu_clamped", "swigluoai", "gelu", "gelu_pytorch_tanh" or "relu2". An unknown name is an error that
// lists these; so is a limit or an alpha that is not a positive number, and one that the activation does not use (the
// value for that is 0).
Status parse_activation(const std::string& name, float limit, float alpha, Activation* activation);

}  // namespace kt
