// The gated delta rule (kernels/delta.h). V is a vector of GCC's extension, as wide as the instruction set's; products
// and sums are not contracted, and each lane is a column of the state, so its width changes no bit of the forward pass.
// The gradients' sums over columns have one lane for each 16th column on every instruction set.
//
// Include only in a kernel's own translation unit.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/delta.h"

namespace kt {
namespace {

template <class V>
inline V delta_load(const float* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class V>
inline void delta_store(float* to, V value) {
  std::memcpy(to, &value, sizeof value);
}

// kVectors * lanes columns of the state from `col` on, in registers for each token's two passes over the rows.
template <class V, int kVectors>
inline void delta_columns(const DeltaRule& p, int64_t col) {
  constexpr int64_t kLanes = sizeof(V) / sizeof(float);
  for (int64_t t = 0; t < p.tokens; ++t) {
    const float *keys = p.keys + t * p.key_stride, *queries = p.queries + t * p.key_stride;
    const float decay = p.decays[t * p.gate_stride], strength = p.strengths[t * p.gate_stride];
    V found[kVectors], change[kVectors], result[kVectors];
    for (int i = 0; i < kVectors; ++i) found[i] = result[i] = V{};
    float* row = p.state + col;
    for (int64_t k = 0; k < p.key_size; ++k, row += p.value_size) {
      for (int i = 0; i < kVectors; ++i) {
        const V kept = delta_load<V>(row + i * kLanes) * decay;
        delta_store(row + i * kLanes, kept);
        found[i] = found[i] + kept * keys[k];
      }
    }
    const float* values = p.values + t * p.value_stride + col;
    for (int i = 0; i < kVectors; ++i) change[i] = (delta_load<V>(values + i * kLanes) - found[i]) * strength;
    row = p.state + col;
    for (int64_t k = 0; k < p.key_size; ++k, row += p.value_size) {
      for (int i = 0; i < kVectors; ++i) {
        const V written = delta_load<V>(row + i * kLanes) + change[i] * keys[k];
        delta_store(row + i * kLanes, written);
        result[i] = result[i] + written * queries[k];
      }
    }
    if (p.out == nullptr) continue;
    for (int i = 0; i < kVectors; ++i) delta_store(p.out + t * p.out_stride + col + i * kLanes, result[i]);
  }
}

template <class V>
inline void delta_forward(const DeltaRule& p) {
  constexpr int64_t kLanes = sizeof(V) / sizeof(float);
  int64_t col = 0;
  for (; col + 4 * kLanes <= p.value_size; col += 4 * kLanes) delta_columns<V, 4>(p, col);
  for (; col + kLanes <= p.value_size; col += kLanes) delta_columns<V, 1>(p, col);
  for (; col < p.value_size; ++col) delta_columns<float, 1>(p, col);
}

constexpr int64_t kDeltaLanes = 16;

struct DeltaSum {
  float lanes[kDeltaLanes] = {};

  float total() {
    for (int64_t half = kDeltaLanes / 2; half > 0; half /= 2) {
      for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    }
    return lanes[0];
  }
};

// body(column, lane) for all columns, 16 adjacent ones at a time.
template <class Body>
inline void delta_each(int64_t columns, Body&& body) {
  int64_t c = 0;
  for (; c + kDeltaLanes <= columns; c += kDeltaLanes) {
    for (int64_t l = 0; l < kDeltaLanes; ++l) body(c + l, l);
  }
  for (int64_t l = 0; c + l < columns; ++l) body(c + l, l);
}

// One token backwards. `before`: the state before it. `by_state`: the gradient of the state behind it, then of the one
// before it. `found`, `change`, `by_change`: [V], scratch.
inline void delta_token_backward(const DeltaGradient& g, int64_t t, const float* before, float* by_state, float* found,
                                 float* change, float* by_change) {
  const DeltaRule& p = g.rule;
  const int64_t K = p.key_size, V = p.value_size;
  const float *keys = p.keys + t * p.key_stride, *queries = p.queries + t * p.key_stride;
  const float *values = p.values + t * p.value_stride, *by_out = g.by_out + t * p.out_stride;
  const float decay = p.decays[t * p.gate_stride], strength = p.strengths[t * p.gate_stride];
  float *by_keys = g.by_keys + t * p.key_stride, *by_queries = g.by_queries + t * p.key_stride;
  for (int64_t c = 0; c < V; ++c) found[c] = by_change[c] = 0.0f;
  for (int64_t k = 0; k < K; ++k) {
    const float *row = before + k * V, key = keys[k];
    for (int64_t c = 0; c < V; ++c) found[c] += row[c] * decay * key;
  }
  for (int64_t c = 0; c < V; ++c) {
    found[c] = values[c] - found[c];
    change[c] = found[c] * strength;
  }
  for (int64_t k = 0; k < K; ++k) {
    const float *row = before + k * V, key = keys[k], query = queries[k];
    float* by_row = by_state + k * V;
    DeltaSum sum;
    delta_each(V, [&](int64_t c, int64_t l) {
      sum.lanes[l] += (row[c] * decay + change[c] * key) * by_out[c];
      by_row[c] += query * by_out[c];
      by_change[c] += by_row[c] * key;
    });
    by_queries[k] += sum.total();
  }
  DeltaSum by_strength;
  float* by_values = g.by_values + t * p.value_stride;
  delta_each(V, [&](int64_t c, int64_t l) {
    by_strength.lanes[l] += by_change[c] * found[c];
    by_change[c] *= strength;
    by_values[c] += by_change[c];
  });
  g.by_strengths[t * p.gate_stride] += by_strength.total();
  DeltaSum by_decay;
  for (int64_t k = 0; k < K; ++k) {
    const float *row = before + k * V, key = keys[k];
    float* by_row = by_state + k * V;
    DeltaSum sum;
    delta_each(V, [&](int64_t c, int64_t l) {
      sum.lanes[l] += by_row[c] * change[c] - row[c] * decay * by_change[c];
      const float by_kept = by_row[c] - key * by_change[c];
      by_decay.lanes[l] += by_kept * row[c];
      by_row[c] = by_kept * decay;
    });
    by_keys[k] += sum.total();
  }
  g.by_decays[t * p.gate_stride] += by_decay.total();
}

// The rule for `count` tokens from `first` on, without results.
inline DeltaRule delta_part(const DeltaRule& rule, int64_t first, int64_t count, float* state) {
  DeltaRule part = rule;
  part.tokens = count;
  part.queries += first * rule.key_stride;
  part.keys += first * rule.key_stride;
  part.values += first * rule.value_stride;
  part.decays += first * rule.gate_stride;
  part.strengths += first * rule.gate_stride;
  part.state = state;
  part.out = nullptr;
  return part;
}

template <class V>
inline void delta_backward(const DeltaGradient& g) {
  const int64_t floats = g.state_floats(), tokens = g.rule.tokens, step = g.checkpoint;
  const auto bytes = static_cast<size_t>(floats) * sizeof(float);
  const int64_t checkpoints = (tokens + step - 1) / step;
  float *kept = g.workspace, *states = kept + checkpoints * floats, *by_state = states + (step + 1) * floats;
  float *found = by_state + floats, *change = found + g.rule.value_size, *by_change = change + g.rule.value_size;
  std::memset(by_state, 0, bytes);
  std::memset(states, 0, bytes);
  for (int64_t i = 0; i < checkpoints; ++i) {
    std::memcpy(kept + i * floats, states, bytes);
    if (i + 1 < checkpoints) delta_forward<V>(delta_part(g.rule, i * step, step, states));
  }
  for (int64_t i = checkpoints - 1; i >= 0; --i) {
    const int64_t first = i * step, count = tokens - first < step ? tokens - first : step;
    std::memcpy(states, kept + i * floats, bytes);
    for (int64_t t = 0; t + 1 < count; ++t) {
      float* next = states + (t + 1) * floats;
      std::memcpy(next, states + t * floats, bytes);
      delta_forward<V>(delta_part(g.rule, first + t, 1, next));
    }
    for (int64_t t = count - 1; t >= 0; --t)
      delta_token_backward(g, first + t, states + t * floats, by_state, found, change, by_change);
  }
}

}  // namespace
}  // namespace kt
