#include "step/mlp.h"

#include <algorithm>
#include <cstring>

#include "ops/dense/activation.h"
#include "ops/experts/forward.h"
#include "ops/router/router.h"
#include "threads/pool.h"

namespace kt {
namespace {

bool is_finite(const TensorView& matrix, int64_t row) {
  return are_finite(element_of(matrix, row), matrix.dtype, matrix.shape[1]);
}

void clear_row(const TensorView& matrix, int64_t row) {
  std::memset(element_of(matrix, row), 0, static_cast<size_t>(matrix.shape[1] * dtype_bytes(matrix.dtype)));
}

template <class Body>
void for_each_row(const StepWork& work, Body&& body) {
  run_ranges(work.rows.tokens(), kTokensAtOnce, work.engine.num_threads, [&](int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) body(t);
  });
}

Status run_gated(StepWork& work, const GatedMlp& mlp, const TensorView& x, const TensorView& out) {
  const TensorView gated = work.rows.matrix(RowsOf::kGated, x.dtype, mlp.down.weight.shape[1]);
  const int64_t own = gated.shape[1] / work.stack.ranks();
  const TensorView gate_up = work.rows.matrix(RowsOf::kGateUp, x.dtype, 2 * own);
  work.multiply(mlp.gate_up, x, gate_up);
  silu_and_multiply(work.engine, columns_of(gate_up, 0, own), columns_of(gate_up, own, own), work.own_columns(gated));
  KT_RETURN_IF_ERROR(work.gather(gated));
  KT_RETURN_IF_ERROR(work.multiply_shared(mlp.down, gated, out));
  if (!mlp.gate.present()) return {};
  const TensorView gate = work.rows.matrix(RowsOf::kSharedGate, x.dtype, 1);
  linear(work.engine, x, mlp.gate, {}, gate);
  sigmoid_and_multiply(work.engine, gate, out, out);
  return {};
}

// Takes the ids of a layer's experts.
TensorView rows_of_ids(StepWork& work, const RoutedExperts& experts) {
  const TensorView& routes = work.batch->routes;
  if (!routes.present()) return work.rows.matrix(RowsOf::kIds, DType::kI32, work.stack.top_k);
  const int64_t tokens = routes.shape[1], top_k = routes.shape[2];
  return contiguous_view(routes.as<int32_t>() + experts.place * tokens * top_k, DType::kI32, {tokens, top_k});
}

// The experts of each token, and their weights.
void choose(StepWork& work, const RoutedExperts& experts, const TensorView& x) {
  const Stack& stack = work.stack;
  const TensorView ids = rows_of_ids(work, experts);
  const TensorView weights = work.rows.matrix(RowsOf::kWeights, DType::kF32, stack.top_k);
  const DType dtype = stack.groups ? DType::kF32 : stack.dtype();
  const TensorView logits = work.rows.matrix(RowsOf::kLogits, dtype, experts.gate.shape[0]);
  linear(work.engine, stack.groups ? work.widened(x) : x, experts.gate, experts.gate_bias, logits);
  if (stack.groups) {
    choose_from_groups(work.engine, *stack.groups, logits, experts.bias, weights, ids);
  } else {
    choose_experts(work.engine, logits, stack.normalises, weights, ids);
  }
  work.routed.ids = ids;
  work.routed.weights = weights;
}

// A token with NaN or Inf skips the experts, as in SGLang's modules (sglang_patch/cpu/moe.py).
void mask_rows(StepWork& work) {
  const RoutedCall& call = work.routed;
  for (int64_t t = 0; t < work.rows.tokens(); ++t) {
    if (is_finite(call.x, t) && is_finite(call.weights, t)) continue;
    work.is_refused[static_cast<size_t>(t)] = 1;
    clear_row(call.x, t);
    clear_row(call.weights, t);
    std::fill_n(static_cast<int32_t*>(element_of(call.ids, t)), call.ids.shape[1], -1);
  }
}

// x times the routing weight of each token's one expert, in rows of their own; the weights become 1.
TensorView weighed(StepWork& work, const TensorView& x) {
  const TensorView rows = work.rows.matrix(RowsOf::kWeighed, x.dtype, x.shape[1]);
  for_each_row(work, [&](int64_t t) {
    auto* weight = static_cast<float*>(element_of(work.routed.weights, t));
    work.scale_row(x, t, *weight, rows);
    *weight = 1.0f;
  });
  return rows;
}

Status run_experts(StepWork& work, const RoutedExperts& experts, const TensorView& x, const TensorView& out) {
  choose(work, experts, x);
  work.routed.x = work.stack.weighs_input ? weighed(work, x) : x;
  work.adapters.set_slots(experts, &work.routed);
  const Engine engine{*experts.layer, work.engine.tiles, work.engine.num_threads};
  const auto run = [&] {
    Exchange* exchange = work.stack.exchange.get();
    return exchange ? forward_over_ranks(engine, *exchange, work.routed, out, &work.shared)
                    : forward(engine, work.routed, out);
  };
  const Status status = run();
  if (status.code() != StatusCode::kNumerics) return status;
  mask_rows(work);
  return run();
}

// out += x, rounded once.
void add_rows(const StepWork& work, const TensorView& x, const TensorView& out) {
  const Tiles& tiles = work.engine.tiles;
  const int64_t cols = out.shape[1];
  for_each_row(work, [&](int64_t t) {
    if (out.dtype == DType::kF32) {
      const auto* from = static_cast<const float*>(element_of(x, t));
      auto* to = static_cast<float*>(element_of(out, t));
      for (int64_t i = 0; i < cols; ++i) to[i] += from[i];
      return;
    }
    float total[kWidenedAtOnce], added[kWidenedAtOnce];
    for (int64_t first = 0; first < cols; first += kWidenedAtOnce) {
      const int64_t count = std::min(kWidenedAtOnce, cols - first);
      auto* to = static_cast<uint16_t*>(element_of(out, t, first));
      tiles.widen(to, count, total);
      tiles.widen(static_cast<const uint16_t*>(element_of(x, t, first)), count, added);
      for (int64_t i = 0; i < count; ++i) total[i] += added[i];
      tiles.narrow(total, count, to);
    }
  });
}

}  // namespace

Status run_mlp(StepWork& work, const StackLayer& layer, const TensorView& x, const TensorView& out) {
  if (!layer.routed.present()) return run_gated(work, layer.mlp, x, out);
  if (!layer.mlp.present()) return run_experts(work, layer.routed, x, out);
  const TensorView shared = work.rows.matrix(RowsOf::kShared, x.dtype, out.shape[1]);
  // First: the experts overwrite rows of x that are not finite.
  KT_RETURN_IF_ERROR(run_gated(work, layer.mlp, x, shared));
  KT_RETURN_IF_ERROR(run_experts(work, layer.routed, x, out));
  add_rows(work, shared, out);
  return {};
}

}  // namespace kt
