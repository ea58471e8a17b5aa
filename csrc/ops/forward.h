#pragma once

#include "base/status.h"
#include "ops/call.h"

namespace kt {

// out[t] = sum over k of weights[t, k] * expert(ids[t, k], x[t]), with the LoRA of the token's slot. Sums in float32,
// rounded once to the type of x. A token's result does not depend on the rest of the batch nor on the threads.
Status forward(const Engine& engine, const RoutedCall& call, const TensorView& out);

// Gradients of x, of the routing weights and of the LoRA tensors, from the gradient of the output. Activations are
// computed again. float32 throughout.
Status backward(const Engine& engine, const RoutedCall& call, const TensorView& grad_out,
                const RoutedGradients& gradients);

}  // namespace kt
