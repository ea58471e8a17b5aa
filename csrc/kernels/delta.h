// The gated delta rule (Yang et al. 2024, arXiv:2412.06464) of one value head, token after token. S is the head's state
// [K][V]; for each token, with its decay g and write strength beta:
//
//   S = g * S                  m = S^T k                  u = beta * (v - m)
//   S = S + k u^T              out = S^T q
//
// All arithmetic is float32; every product and sum is rounded, and sums over K are one chain in ascending order. A
// column of S depends on no other column. So neither the instruction set nor the cut of a sequence into calls changes a
// bit, if the state is kept between them.
#pragma once

#include <cstdint>

namespace kt {

// Rows of consecutive tokens are `*_stride` elements apart.
struct DeltaRule {
  int64_t tokens, key_size, value_size;
  const float* queries;  // [tokens][K], with the scaling of the scores
  const float* keys;     // [tokens][K]
  int64_t key_stride;
  const float* values;  // [tokens][V]
  int64_t value_stride;
  const float* decays;     // [tokens], in (0, 1]
  const float* strengths;  // [tokens], in (0, 1)
  int64_t gate_stride;
  float* state;  // [K][V], before the first token; then behind the last one
  float* out;    // [tokens][V], or null
  int64_t out_stride;
};

// The gradients of a sequence that begins with a state of zeros, and whose last state has no gradient. States are kept
// every `checkpoint` tokens and computed again between. `rule.state` and `rule.out` are not used. The gradients are
// added to what the arrays hold; they have the strides of what they are gradients of.
struct DeltaGradient {
  DeltaRule rule;
  const float* by_out;  // [tokens][V], rows rule.out_stride apart
  float *by_queries, *by_keys, *by_values, *by_decays, *by_strengths;
  int64_t checkpoint;
  float* workspace;  // delta_workspace_floats

  int64_t state_floats() const { return rule.key_size * rule.value_size; }
};

inline int64_t delta_workspace_floats(int64_t tokens, int64_t key_size, int64_t value_size, int64_t checkpoint) {
  const int64_t checkpoints = (tokens + checkpoint - 1) / checkpoint;
  return (checkpoints + checkpoint + 2) * key_size * value_size + 3 * value_size;
}

}  // namespace kt
