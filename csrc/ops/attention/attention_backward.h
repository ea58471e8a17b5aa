// Gradients of attention (kernels/attention.h) from the log of sums that the forward pass has kept, without ever
// holding all scores (FlashAttention-2, Dao 2023, arXiv:2307.08691, algorithm 2). For training: contiguous keys, no
// cap.
//
// With p = e^(score - log_sum), grad = the gradient of out and delta = <grad, out>, for each query and visible key:
//
//   by_value += p * grad        ds = p * (<grad, value> - delta)
//   by_key += ds * scaling * q  by_q += scaling * ds * key
//
// Where an indexer has chosen keys (ops/router/indexer.h), the weights of all others are zero. The choice has no
// gradient.
//
// A head's sink is part of its log_sum, and has no gradient of its own: it is frozen.
//
// All arithmetic is float32; a result is rounded once. Keys and queries are taken in blocks of fixed size, in ascending
// order. The query heads of a key head are shared among a number of tasks that depends on the shapes only; their sums
// for keys and values are added in order. So the bits do not depend on the number of threads, nor on other sequences.
#pragma once

#include "ops/attention/attention.h"

namespace kt {

struct AttentionGradients {
  AttentionCall call;             // of the forward pass, with its float32 `out` and `log_sums`; no slots, no cap
  TensorView by_out;              // [T, N, V], float32 or bf16
  TensorView by_q;                // [T, N, D], q's dtype
  TensorView by_keys, by_values;  // [rows, K, D] and [rows, K, V], the keys' dtype
};

// `tiles` and the call's attention are of one instruction set. Each row of q and of keys lies in exactly one sequence,
// in ascending order (checked in bind).
void attend_backward(const Tiles& tiles, int num_threads, const AttentionGradients& gradients);

}  // namespace kt
