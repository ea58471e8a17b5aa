// The truth in float64: each formula of a decoder once, for the tests of single operations and of the step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "ops/router/grouped_router.h"
#include "weights/packed.h"

namespace kt_test {

using Row = std::vector<double>;

inline void add(Row& to, const Row& row, double factor = 1) {
  for (size_t i = 0; i < to.size(); ++i) to[i] += factor * row[i];
}

// A sum, and the sum of its terms' magnitudes, which the error of a float32 sum is relative to.
struct Sum {
  double value = 0, scale = 0;

  void add(double term) {
    value += term;
    scale += std::fabs(term);
  }
};

// first + the sum over i < count of a(i) * b(i).
template <class A, class B>
Sum dot(int64_t count, A&& a, B&& b, double first = 0) {
  Sum sum;
  sum.add(first);
  for (int64_t i = 0; i < count; ++i) sum.add(static_cast<double>(a(i)) * static_cast<double>(b(i)));
  return sum;
}

// The products of x with `rows` rows of a matrix, whose first element is values[first]; rows are `stride` apart. In
// four sums: they are added at the same time, where each addition to a single sum waits for the one before.
template <class Values>
Row times(const Values& values, int64_t first, int64_t stride, int64_t rows, const Row& x) {
  const auto size = static_cast<int64_t>(x.size());
  Row y;
  for (int64_t n = 0; n < rows; ++n) {
    const auto term = [&](int64_t k) {
      return static_cast<double>(values[static_cast<size_t>(first + n * stride + k)]) * x[static_cast<size_t>(k)];
    };
    double sums[4] = {};
    int64_t k = 0;
    for (; k + 4 <= size; k += 4) {
      for (int64_t i = 0; i < 4; ++i) sums[i] += term(k + i);
    }
    for (; k < size; ++k) sums[0] += term(k);
    y.push_back((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
  return y;
}

// RMSNorm: 1 / sqrt(mean of x(k)^2 + epsilon) over k < count, and the row times it and a weight.
template <class X>
double inverse_rms(int64_t count, X&& x, double epsilon) {
  return 1 / std::sqrt(dot(count, x, x).value / static_cast<double>(count) + epsilon);
}
inline Row normed(Row x, const Row& weight, double epsilon) {
  const double inverse =
      inverse_rms(static_cast<int64_t>(x.size()), [&](int64_t k) { return x[static_cast<size_t>(k)]; }, epsilon);
  for (size_t i = 0; i < x.size(); ++i) x[i] *= inverse * weight[i];
  return x;
}

// Rotary embedding: pair i is rotated by the angle whose cosine is angles[i] and whose sine angles[half + i]. The pairs
// are i and half + i, or 2 i and 2 i + 1 if `interleaved`.
inline Row rotated(const Row& x, const Row& angles, bool interleaved) {
  const size_t half = x.size() / 2;
  Row y(x.size());
  for (size_t i = 0; i < half; ++i) {
    const size_t a = interleaved ? 2 * i : i, b = interleaved ? a + 1 : half + i;
    y[a] = x[a] * angles[i] - x[b] * angles[half + i];
    y[b] = x[b] * angles[i] + x[a] * angles[half + i];
  }
  return y;
}

// Attention of one query over `keys` keys, with values of `size` columns. score(i): <q, key i> as a Sum, before it is
// scaled; value(i, c). A cap of 0: none.
struct Attended {
  Row out, scale;  // scale: the sum of magnitudes
  double log_sum, largest_score;

  // Keys [first, keys) are seen. `sink`: a score without a value; null: there is none.
  template <class Score, class Value>
  Attended(int64_t keys, int64_t size, double scaling, double cap, Score&& score, Value&& value, int64_t first = 0,
           const float* sink = nullptr)
      : out(static_cast<size_t>(size), 0.0), log_sum(0), largest_score(0) {
    Row scores;
    for (int64_t i = first; i < keys; ++i) {
      const Sum sum = score(i);
      const double scaled = scaling * sum.value;
      scores.push_back(cap > 0 ? cap * std::tanh(scaled / cap) : scaled);
      largest_score = std::fmax(largest_score, scaling * sum.scale);
    }
    double most = *std::max_element(scores.begin(), scores.end());
    if (sink) most = std::fmax(most, *sink), largest_score = std::fmax(largest_score, *sink);
    std::vector<Sum> sums(out.size());
    double total = sink ? std::exp(*sink - most) : 0;
    for (int64_t i = first; i < keys; ++i) {
      const double weight = std::exp(scores[static_cast<size_t>(i - first)] - most);
      total += weight;
      for (size_t c = 0; c < sums.size(); ++c) sums[c].add(weight * value(i, static_cast<int64_t>(c)));
    }
    for (size_t c = 0; c < sums.size(); ++c) {
      out[c] = sums[c].value / total;
      scale.push_back(sums[c].scale / total);
    }
    log_sum = most + std::log(total);
  }
};

template <class T>
T sigmoid(T x) {
  return 1 / (1 + std::exp(-x));
}
template <class T>
T silu(T x) {
  return x * sigmoid(x);
}
// kernels/activation.h.
template <class T>
T activated(const kt::Activation& activation, T gate, T up) {
  using enum kt::ActivationKind;
  const T limit = activation.limit, alpha = activation.alpha, root = std::sqrt(T(2));
  switch (activation.kind) {
    case kSilu:
      return silu(gate) * up;
    case kSiluClamped:
      return silu(std::min(gate, limit)) * std::clamp(up, -limit, limit);
    case kSwigluOai:
      return std::min(gate, limit) * sigmoid(alpha * std::min(gate, limit)) * (std::clamp(up, -limit, limit) + 1);
    case kGelu:
      return gate * (std::erfc(-gate / root) / 2) * up;
    case kGeluTanh: {
      const T inner = std::sqrt(2 / std::acos(T(-1))) * (gate + T(0.044715L) * gate * gate * gate);
      return gate / 2 * (1 + std::tanh(inner)) * up;
    }
    case kReluSquared:
      return std::max(up, T(0)) * std::max(up, T(0));
  }
  return NAN;
}
inline std::vector<kt::Activation> all_activations() {
  using enum kt::ActivationKind;
  return {{kSilu}, {kSiluClamped, 1.1f}, {kSwigluOai, 0.9f, 1.702f}, {kGelu}, {kGeluTanh}, {kReluSquared}};
}
// silu(gate) * up.
inline Row swiglu(const Row& gate, const Row& up) {
  Row h(gate.size());
  for (size_t i = 0; i < h.size(); ++i) h[i] = silu(gate[i]) * up[i];
  return h;
}
// An MLP with a gate: project(projection, x) multiplies x by one of its three matrices.
template <class Project>
Row gated_mlp(const Row& x, Project&& project) {
  const Row gate = project(kt::kGate, x), up = project(kt::kUp, x);
  return project(kt::kDown, swiglu(gate, up));
}

// The indices of the `count` largest values, larger ones first, of equal ones the first.
inline std::vector<size_t> largest(const Row& values, int64_t count) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] > values[b]; });
  order.resize(static_cast<size_t>(count));
  return order;
}

inline Row softmax(const Row& logits) {
  const double most = *std::max_element(logits.begin(), logits.end());
  Row p;
  for (const double logit : logits) p.push_back(std::exp(logit - most));
  const double total = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& value : p) value /= total;
  return p;
}

// The experts of a token, and their weights.
struct Chosen {
  std::vector<size_t> experts;
  Row weights;

  // The experts' scores, divided by their sum if `normalises`.
  Chosen(std::vector<size_t> experts_, const Row& scores, bool normalises) : experts(std::move(experts_)) {
    for (const size_t e : experts) weights.push_back(scores[e]);
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    for (double& weight : weights) weight /= normalises ? sum : 1;
  }
};

// By the softmax of all experts.
inline Chosen chosen_by_softmax(const Row& logits, int64_t top_k, bool normalises) {
  return {largest(logits, top_k), softmax(logits), normalises};
}

// ops/router/grouped_router.h; an empty bias: none.
inline Chosen chosen_from_groups(const Row& logits, const Row& bias, const kt::GroupedRouting& routing, int64_t top_k) {
  Row scores = logits;
  if (routing.score == kt::RouterScore::kSoftmax) {
    scores = softmax(logits);
  } else {
    for (double& score : scores) score = sigmoid(score);
  }
  Row ranks = scores;
  if (!bias.empty()) add(ranks, bias);
  const size_t size = ranks.size() / static_cast<size_t>(routing.groups);
  Row group_ranks;
  for (size_t first = 0; first < ranks.size(); first += size) {
    Row group(ranks.begin() + static_cast<std::ptrdiff_t>(first),
              ranks.begin() + static_cast<std::ptrdiff_t>(first + size));
    std::sort(group.rbegin(), group.rend());
    group_ranks.push_back(group[0] + (bias.empty() || size == 1 ? 0 : group[1]));
  }
  const std::vector<size_t> open = largest(group_ranks, routing.top_groups);
  Row allowed(ranks.size(), -std::numeric_limits<double>::infinity());
  for (const size_t group : open) {
    for (size_t e = group * size; e < (group + 1) * size; ++e) allowed[e] = ranks[e];
  }
  Chosen chosen(largest(allowed, top_k), scores, routing.normalises);
  for (double& weight : chosen.weights) weight *= static_cast<double>(routing.scaling);
  return chosen;
}

}  // namespace kt_test
