// The MLP of a layer: a gated MLP, routed experts, or both.
#pragma once

#include "base/status.h"
#include "step/work.h"

namespace kt {

// out [T, H] = MLP of x [T, H]. A token whose x or routing weights are NaN or Inf skips the routed experts, as if they
// had returned zeros: it is noted as refused, and its row of x is overwritten.
Status run_mlp(StepWork& work, const StackLayer& layer, const TensorView& x, const TensorView& out);

}  // namespace kt
