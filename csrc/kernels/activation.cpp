#include "kernels/activation.h"

namespace kt {
namespace {

constexpr struct {
  const char* name;
  ActivationKind kind;
  bool limit, alpha;  // which numbers it has
} kKnown[] = {
    {"silu", ActivationKind::kSilu, false, false},
    {"silu_clamped", ActivationKind::kSiluClamped, true, false},
    {"swigluoai", ActivationKind::kSwigluOai, true, true},
    {"gelu", ActivationKind::kGelu, false, false},
    {"gelu_pytorch_tanh", ActivationKind::kGeluTanh, false, false},
    {"relu2", ActivationKind::kReluSquared, false, false},
};

constexpr float kLargest = 1e30f;

Status check_number(const std::string& activation, const char* what, bool used, float value) {
  if (used ? value > 0 && value < kLargest : value == 0) return {};
  const std::string allowed = used ? "a number above 0 and below 1e30" : "none, because it does not use one";
  return invalid_value("activation '" + activation + "': " + what + " is " + std::to_string(value) + ", expected " +
                       allowed);
}

}  // namespace

Status parse_activation(const std::string& name, float limit, float alpha, Activation* activation) {
  std::string names;
  for (const auto& known : kKnown) {
    names += (names.empty() ? "" : ", ") + std::string(known.name);
    if (name != known.name) continue;
    KT_RETURN_IF_ERROR(check_number(name, "limit", known.limit, limit));
    KT_RETURN_IF_ERROR(check_number(name, "alpha", known.alpha, alpha));
    *activation = {known.kind, limit, alpha};
    return {};
  }
  return {StatusCode::kUnknownName, "unknown activation '" + name + "'; known: " + names};
}

}  // namespace kt
