#include "step/work.h"

#include <cstring>

#include "base/scratch.h"
#include "threads/plan.h"

namespace kt {

void StepWork::free() {
  rows.free();
  free_lists();
}

void StepWork::free_lists() {
  adapters = AdapterWork();
  attention = AttentionWork();
  routed = RoutedCall();
  is_refused = std::vector<uint8_t>();
}

void StepWork::multiply(const StackLinear& layer, const TensorView& x, const TensorView& out) const {
  linear(engine, x, layer.weight, layer.bias, out);
  adapters.add(engine, layer.lora, x, out);
}

void StepWork::normalise(const TensorView& x, const TensorView& weight, const TensorView& out,
                         const TensorView& residual) const {
  NormViews views{};
  views.x = x;
  views.residual = views.total = residual;
  views.weight = weight;
  views.out = out;
  views.epsilon = stack.epsilon;
  rms_norm(engine, views);
}

void StepWork::attend(const AttentionTensors& tensors) {
  float* parts = rows.reserve<float>(RowsOf::kAttentionParts, attention.parts_floats());
  const OperationScope scope;
  Plan plan;
  plan.num_threads = attention.num_threads();
  attention.add_stages(&plan, 0);
  run(plan, [&](int step, const Range& range) { attention.run(tensors, parts, step, range); });
}

void StepWork::refuse_unless_finite(void* keys, int64_t count, int64_t token) {
  if (adapters.is_empty() || are_finite(keys, stack.dtype(), count)) return;
  std::memset(keys, 0, static_cast<size_t>(count * dtype_bytes(stack.dtype())));
  is_refused[static_cast<size_t>(token)] = 1;
}

}  // namespace kt
