// The attention of a layer, of each kind (step/stack.h).
#pragma once

#include "step/work.h"

namespace kt {

// out [T, H] = attention of x [T, H]. Writes the keys and values of the new tokens to the batch's slots.
Status attend(StepWork& work, const GroupedQuery& layer, const TensorView& x, const TensorView& out);
Status attend(StepWork& work, const Latent& layer, const TensorView& x, const TensorView& out);
// Changes the states of the batch's sequences instead.
Status attend(StepWork& work, const GatedDelta& layer, const TensorView& x, const TensorView& out);

// What a layer's queries, keys and values are, and where results go: of the same sizes in all layers with keys.
AttentionTensors attention_tensors(StepWork& work, const GroupedQuery& layer);
AttentionTensors attention_tensors(StepWork& work, const Latent& layer);

}  // namespace kt
