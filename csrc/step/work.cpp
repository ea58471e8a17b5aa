#include "step/work.h"

#include <algorithm>
#include <cstring>

#include "base/scratch.h"
#include "ops/packed/linear.h"
#include "threads/plan.h"
#include "threads/pool.h"

namespace kt {

void StepWork::free() {
  rows.free();
  free_lists();
}

void StepWork::free_lists() {
  adapters = AdapterWork();
  attention = AttentionWork();
  in_chunks = AttentionWork();
  chunks = std::vector<KvSequence>();
  among_chosen = AttentionWork();
  choices = std::vector<KvSequence>();
  chosen = nullptr;
  states = std::vector<DeltaSequence>();
  routed = RoutedCall();
  shared = SharedExpertsWork();
  is_refused = std::vector<uint8_t>();
}

void StepWork::multiply(const StackLinear& layer, const TensorView& x, const TensorView& out) const {
  if (layer.packed) {
    linear(engine, x, *layer.packed, layer.bias, out);
  } else {
    linear(engine, x, layer.weight, layer.bias, out);
  }
  adapters.add(engine, layer.lora, x, out);
}

TensorView StepWork::own_columns(const TensorView& matrix) const {
  const int64_t count = matrix.shape[1] / stack.ranks();
  return columns_of(matrix, stack.exchange ? stack.exchange->rank() * count : 0, count);
}

Status StepWork::gather(const TensorView& matrix) const {
  return stack.exchange ? stack.exchange->gather_columns(matrix) : Status();
}

Status StepWork::multiply_shared(const StackLinear& layer, const TensorView& x, const TensorView& out) const {
  multiply(layer, x, own_columns(out));
  return gather(out);
}

void StepWork::normalise(const TensorView& x, const TensorView& weight, const TensorView& out,
                         const TensorView& residual) const {
  NormViews views{};
  views.x = x;
  views.residual = views.total = residual;
  views.weight = weight;
  views.out = out;
  views.epsilon = stack.epsilon;
  views.offset = stack.offset_norms;
  rms_norm(engine, views);
}

void StepWork::attend(const AttentionTensors& tensors, bool is_chunked) {
  attend_with(is_chunked && !chunks.empty() ? in_chunks : attention, tensors);
}

void StepWork::attend_chosen(const AttentionTensors& tensors) {
  attend_with(choices.empty() ? attention : among_chosen, tensors);
}

void StepWork::attend_with(const AttentionWork& work, const AttentionTensors& tensors) {
  float* parts = rows.reserve<float>(RowsOf::kAttentionParts, work.parts_floats());
  const OperationScope scope;
  Plan plan;
  plan.num_threads = work.num_threads();
  work.add_stages(&plan, 0);
  run(plan, [&](int step, const Range& range) { work.run(tensors, parts, step, range); });
}

void StepWork::scale_row(const TensorView& x, int64_t row, float factor, const TensorView& out) const {
  const int64_t cols = x.shape[1];
  if (x.dtype == DType::kF32) {
    const auto* from = static_cast<const float*>(element_of(x, row));
    auto* to = static_cast<float*>(element_of(out, row));
    for (int64_t i = 0; i < cols; ++i) to[i] = from[i] * factor;
    return;
  }
  float wide[kWidenedAtOnce];
  for (int64_t first = 0; first < cols; first += kWidenedAtOnce) {
    const int64_t count = std::min(kWidenedAtOnce, cols - first);
    engine.tiles.widen(static_cast<const uint16_t*>(element_of(x, row, first)), count, wide);
    for (int64_t i = 0; i < count; ++i) wide[i] *= factor;
    engine.tiles.narrow(wide, count, static_cast<uint16_t*>(element_of(out, row, first)));
  }
}

TensorView StepWork::widened(const TensorView& x) {
  if (x.dtype == DType::kF32) return x;
  const TensorView wide = rows.matrix(RowsOf::kWide, DType::kF32, x.shape[1]);
  run_ranges(x.shape[0], kTokensAtOnce, engine.num_threads, [&](int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
      engine.tiles.widen(static_cast<const uint16_t*>(element_of(x, t)), x.shape[1],
                         static_cast<float*>(element_of(wide, t)));
    }
  });
  return wide;
}

void StepWork::refuse_unless_finite(void* keys, int64_t count, int64_t token) {
  if (adapters.is_empty() || are_finite(keys, stack.dtype(), count)) return;
  std::memset(keys, 0, static_cast<size_t>(count * dtype_bytes(stack.dtype())));
  is_refused[static_cast<size_t>(token)] = 1;
}

}  // namespace kt
