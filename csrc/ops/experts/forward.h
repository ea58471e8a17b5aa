#pragma once

#include "base/status.h"
#include "ops/experts/retained.h"
#include "ops/pairs/call.h"

namespace kt {

// out[t] = sum over k of weights[t, k] * expert(ids[t, k], x[t]), with the LoRA of the token's slot. Sums in float32,
// rounded once to the type of `out`: that of x, or float32. A token's result depends neither on the rest of the batch
// nor on the threads. `retained`, if given, receives the activations that `backward` needs.
Status forward(const Engine& engine, const RoutedCall& call, const TensorView& out, Retained* retained = nullptr);

// Gradients of x, of the routing weights and of the LoRA tensors, from the gradient of the output. Activations come
// from `retained` (of a forward call with the same arguments), or are recomputed to the same bits. Rounding activations
// to bf16 or int8 counts as identity (a straight-through gradient). Products of a bf16 call are bf16 where the
// instruction set has them, else float32.
Status backward(const Engine& engine, const RoutedCall& call, const TensorView& grad_out,
                const RoutedGradients& gradients, const Retained* retained = nullptr);

}  // namespace kt
