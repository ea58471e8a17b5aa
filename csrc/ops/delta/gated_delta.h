// The middle of a Gated DeltaNet layer (Yang et al. 2024, arXiv:2412.06464), as Qwen3-Next and Qwen3.5 have it: a short
// causal convolution with SiLU over queries, keys and values, queries and keys of length 1, decay and write strength of
// each value head, and the gated delta rule (kernels/delta.h).
//
//   y[t, c]  = silu(sum over j < W of filter[c, j] * x[t - W + 1 + j, c])
//   q, k     = y / sqrt(sum of y^2 + 1e-6) by head; q also / sqrt(K).  Value head h reads key head h / (HV / HK)
//   decay    = exp(-exp(log_rate[h]) * softplus(a[t, h] + bias[h])),    strength = sigmoid(b[t, h])
//
// Serving and training call the same function. A token's result depends on its sequence up to it alone: not on the
// other sequences, on how the sequence is cut into calls, on threads or on the instruction set. Sums are float32 in one
// order; decays and strengths are computed in float64; a result is rounded once.
#pragma once

#include "base/views.h"
#include "kernels/tiles.h"

namespace kt {

// HK key heads of K elements, HV value heads of V; C = 2 HK K + HV V channels; W taps of the filter.
struct DeltaShape {
  int64_t key_heads, value_heads, key_size, value_size;

  int64_t channels() const { return 2 * key_heads * key_size + value_heads * value_size; }
  int64_t group() const { return value_heads / key_heads; }
};

// Rows [first, first + tokens) of x. `slot`: where its state lies; `continues`: it has one, else it begins with zeros.
struct DeltaSequence {
  int64_t first, tokens, slot;
  bool continues;
};

struct DeltaCall {
  DeltaShape shape;
  TensorView x;         // [T, C] float32 or bf16: of each row queries, keys, values
  TensorView a, b;      // [T, HV] of x's dtype
  TensorView filter;    // [C, W] of x's dtype
  TensorView log_rate;  // [HV] float32 or bf16
  TensorView bias;      // [HV] float32 or bf16
  const DeltaSequence* sequences;
  int64_t num_sequences;
};

// What a sequence keeps between calls, by slot; absent: nothing is kept. `inputs` [S, C, W - 1] of x's dtype: the last
// inputs of the filter, the newest last. `states` [S, HV, K, V] float32. A slot is in at most one sequence of a call.
struct DeltaStates {
  TensorView inputs, states;
};

// out [T, HV * V] of x's dtype. Rows of no sequence are not written.
void gated_delta(const Tiles& tiles, int num_threads, const DeltaCall& call, const DeltaStates& kept,
                 const TensorView& out);

// The gradients for x, a and b, of their dtypes, of sequences that begin with zeros: by_out [T, HV * V]. Rows of no
// sequence are not written. The bits do not depend on the number of threads or on the instruction set.
struct DeltaGradients {
  TensorView by_out, by_x, by_a, by_b;
};
void gated_delta_backward(const Tiles& tiles, int num_threads, const DeltaCall& call, const DeltaGradients& gradients);

}  // namespace kt
