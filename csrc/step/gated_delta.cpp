#include "ops/delta/gated_delta.h"

#include <cstring>

#include "ops/dense/activation.h"
#include "step/attention.h"
#include "threads/pool.h"

namespace kt {
namespace {

// What the projections give of each token.
struct Projected {
  TensorView mixed;              // [T, C]: queries, keys, values
  TensorView output_gates;       // [T, HV V]
  TensorView strengths, decays;  // [T, HV]
};

// Columns of `inputs` and `gates`, which are ordered by these parts.
Projected parts_of(const GatedDelta& layer, const TensorView& inputs, const TensorView& gates) {
  const int64_t channels = layer.shape.channels(), heads = layer.shape.value_heads;
  return {.mixed = columns_of(inputs, 0, channels),
          .output_gates = columns_of(inputs, channels, layer.results()),
          .strengths = columns_of(gates, 0, heads),
          .decays = columns_of(gates, heads, heads)};
}

// The same where both are ordered by key head: of each its query, its key, its values and their gates; and of each the
// strengths and the decays of its value heads.
Projected parts_by_key_head(StepWork& work, const GatedDelta& layer, const TensorView& inputs,
                            const TensorView& gates) {
  const DeltaShape& shape = layer.shape;
  const int64_t K = shape.key_size, values = shape.group() * shape.value_size, heads = shape.key_heads;
  const int64_t keys = heads * K, group = shape.group(), channels = shape.channels();
  const TensorView rows =
      work.rows.matrix(RowsOf::kDeltaRows, work.stack.dtype(), channels + layer.results() + 2 * shape.value_heads);
  const int64_t first_gate = channels + layer.results();
  const auto bytes_of = [&](int64_t count) { return static_cast<size_t>(count * dtype_bytes(work.stack.dtype())); };
  run_ranges(rows.shape[0], kTokensAtOnce, work.engine.num_threads, [&](int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
      for (int64_t head = 0; head < heads; ++head) {
        int64_t from = head * 2 * (K + values);
        const auto move = [&](int64_t to, int64_t size) {
          std::memcpy(element_of(rows, t, to), element_of(inputs, t, from), bytes_of(size));
          from += size;
        };
        move(head * K, K);
        move(keys + head * K, K);
        move(2 * keys + head * values, values);
        move(channels + head * values, values);
        const auto move_gates = [&](int64_t part) {
          std::memcpy(element_of(rows, t, first_gate + part * shape.value_heads + head * group),
                      element_of(gates, t, (2 * head + part) * group), bytes_of(group));
        };
        move_gates(0);
        move_gates(1);
      }
    }
  });
  return parts_of(layer, rows, columns_of(rows, first_gate, 2 * shape.value_heads));
}

// Each value head of each row.
void normalise_heads(const StepWork& work, const GatedDelta& layer, const TensorView& rows) {
  const int64_t size = layer.shape.value_size;
  run_ranges(rows.shape[0], kTokensAtOnce, work.engine.num_threads, [&](int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
      const RowMajor x{element_of(rows, t), size, rows.dtype == DType::kBf16};
      work.engine.kernels().normalise({.first_row = 0,
                                       .rows = layer.shape.value_heads,
                                       .cols = size,
                                       .x = x,
                                       .residual = {},
                                       .total = {},
                                       .y = x,
                                       .weight = layer.norm.data,
                                       .epsilon = work.stack.epsilon,
                                       .inverse = nullptr});
    }
  });
}

}  // namespace

Status attend(StepWork& work, const GatedDelta& layer, const TensorView& x, const TensorView& out) {
  const DType dtype = work.stack.dtype();
  const TensorView inputs = work.rows.matrix(RowsOf::kProjected, dtype, layer.inputs.weight.shape[0]);
  const TensorView gates = work.rows.matrix(RowsOf::kDeltaGates, dtype, layer.gates.weight.shape[0]);
  work.multiply(layer.inputs, x, inputs);
  work.multiply(layer.gates, x, gates);
  const Projected made =
      layer.by_key_head ? parts_by_key_head(work, layer, inputs, gates) : parts_of(layer, inputs, gates);

  const TensorView of_all = work.rows.matrix(RowsOf::kAttended, dtype, layer.out.weight.shape[1]);
  const TensorView results = work.own_columns(of_all);
  const DeltaCall call{.shape = layer.shape,
                       .x = made.mixed,
                       .a = made.decays,
                       .b = made.strengths,
                       .filter = layer.filter,
                       .log_rate = layer.log_rate,
                       .bias = layer.bias,
                       .sequences = work.states.data(),
                       .num_sequences = static_cast<int64_t>(work.states.size())};
  gated_delta(work.engine.tiles, work.engine.num_threads, call, layer.kept, results);
  normalise_heads(work, layer, results);
  silu_and_multiply(work.engine, made.output_gates, results, results);
  KT_RETURN_IF_ERROR(work.gather(of_all));
  return work.multiply_shared(layer.out, of_all, out);
}

}  // namespace kt
