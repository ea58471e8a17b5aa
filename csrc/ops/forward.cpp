#include "ops/forward.h"

#include <algorithm>

#include "ops/lora.h"
#include "ops/stages.h"

namespace kt {
namespace {

// Kept by the calling thread between calls, so that a call of the same size allocates nothing.
struct ForwardScratch {
  AlignedBuffer x, x_bf16, h, low_gate, low_up, low_down;
};

void forward_chunk(const Engine& engine, const RoutedCall& call, const Routing& routing, const TensorView& out) {
  static thread_local ForwardScratch scratch;
  const Strides strides(engine.layer);
  const int64_t pairs = routing.num_pairs();
  const int64_t ld_in = std::max(max_rank(call.slots, kGate), max_rank(call.slots, kUp));
  const int64_t ld_down = max_rank(call.slots, kDown);

  float* x = scratch.x.reserve<float>(pairs * strides.hidden);
  GateUpInput input;
  if (call.x.dtype == DType::kBf16 && engine.tiles.multiply_bf16) {
    uint16_t* rows = scratch.x_bf16.reserve<uint16_t>(pairs * strides.hidden);
    gather_bf16_rows(engine, routing, call.x, strides.hidden, rows);
    input.x_bf16 = rows;
  }
  if (!input.x_bf16 || ld_in > 0) gather_rows(engine, routing, call.x, strides.hidden, x);
  input.x = x;
  input.ld_low = ld_in;
  float* low[2] = {scratch.low_gate.reserve<float>(pairs * ld_in), scratch.low_up.reserve<float>(pairs * ld_in)};
  for (const Projection part : {kGate, kUp}) {
    lora_low(engine, routing, call, part, x, strides.hidden, low[part], ld_in);
    input.low[part] = low[part];
  }
  float* h = scratch.h.reserve<float>(pairs * strides.inner);
  gate_up(engine, routing, call, input, h, nullptr, nullptr);

  float* low_down = scratch.low_down.reserve<float>(pairs * ld_down);
  lora_low(engine, routing, call, kDown, h, strides.inner, low_down, ld_down);
  float* y = x;  // the input rows are no longer needed
  down(engine, routing, call, h, low_down, ld_down, y);
  combine(engine, routing, y, strides.hidden, true, out);
}

}  // namespace

Status forward(const Engine& engine, const RoutedCall& call, const TensorView& out) {
  KT_RETURN_IF_ERROR(check_call(engine.layer.shape(), call));
  const Strides strides(engine.layer);
  const int64_t num_tokens = call.x.shape[0];
  const int64_t step = tokens_at_once(call, 2 * strides.hidden + strides.inner);
  Routing routing;
  for (int64_t first = 0; first < num_tokens; first += step) {
    route(engine.layer.shape(), call, first, std::min(step, num_tokens - first), &routing);
    forward_chunk(engine, call, routing, out);
  }
  return {};
}

}  // namespace kt
