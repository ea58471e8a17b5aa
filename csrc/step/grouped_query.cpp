#include <cstring>

#include "ops/dense/activation.h"
#include "step/attention.h"
#include "threads/pool.h"

namespace kt {
namespace {

TensorView queries_keys_values(StepWork& work, const GroupedQuery& layer) {
  return work.rows.matrix(RowsOf::kProjected, work.stack.dtype(), layer.qkv.weight.shape[0]);
}

// Of the heads of all ranks.
TensorView attended_by(StepWork& work, const GroupedQuery& layer) {
  return work.rows.matrix(RowsOf::kAttended, work.stack.dtype(), layer.out.weight.shape[1]);
}

// From one head's query to that of the next: gates lie between them.
int64_t query_distance(const GroupedQuery& layer) { return layer.keys.shape[2] * (layer.is_gated ? 2 : 1); }

TensorView output_gates(StepWork& work, const GroupedQuery& layer) {
  return work.rows.matrix(RowsOf::kOutputGates, work.stack.dtype(), work.stack.heads * layer.keys.shape[2]);
}

void copy_rows(const StepWork& work, const TensorView& from, const TensorView& to) {
  const auto bytes = static_cast<size_t>(from.shape[1] * dtype_bytes(from.dtype));
  run_ranges(from.shape[0], kTokensAtOnce, work.engine.num_threads, [&](int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) std::memcpy(element_of(to, t), element_of(from, t), bytes);
  });
}

// A norm as wide as the heads of all ranks.
bool is_of_all_ranks(const StepWork& work, const TensorView& norm, int64_t size) {
  return work.stack.ranks() > 1 && norm.present() && norm.shape[0] != size;
}

// It sees the heads of all ranks as one row. `heads` [T, cols]: this rank's.
Status normalise_over_ranks(StepWork& work, const TensorView& norm, const TensorView& heads) {
  const TensorView all = work.rows.matrix(RowsOf::kAllHeads, heads.dtype, norm.shape[0]);
  const TensorView own = work.own_columns(all);
  copy_rows(work, heads, own);
  KT_RETURN_IF_ERROR(work.gather(all));
  work.normalise(all, norm, all);
  copy_rows(work, own, heads);
  return {};
}

// Norms and rotates each token's queries and keys, and copies keys and values to the token's slot, gates to rows of
// their own. A norm as wide as all heads together sees them as one row. Of a head, the elements behind the rotary
// embedding's stay as they are.
void place_heads(StepWork& work, const GroupedQuery& layer, const TensorView& qkv) {
  const int64_t heads = work.stack.heads, key_heads = layer.keys.shape[1], size = layer.keys.shape[2];
  const int64_t rotated = work.stack.angles.shape[1], distance = query_distance(layer);
  const TensorView gates = layer.is_gated ? output_gates(work, layer) : TensorView{};
  const auto head_bytes = static_cast<size_t>(size * dtype_bytes(qkv.dtype));
  const bool bf16 = qkv.dtype == DType::kBf16;
  const auto kv_bytes = static_cast<size_t>(key_heads * size * dtype_bytes(qkv.dtype));
  const Dense& kernels = work.engine.kernels();
  run_ranges(qkv.shape[0], kTokensAtOnce, work.engine.num_threads, [&](int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
      void* keys = element_of(qkv, t, heads * distance);
      const auto normalise = [&](void* rows, int64_t num_heads, int64_t stride, const TensorView& weight) {
        if (weight.present() && !is_of_all_ranks(work, weight, size)) {
          const int64_t cols = weight.shape[0];
          const RowMajor x{rows, cols == size ? stride : cols, bf16};
          kernels.normalise({.first_row = 0,
                             .rows = num_heads * size / cols,
                             .cols = cols,
                             .x = x,
                             .residual = {},
                             .total = {},
                             .y = x,
                             .weight = weight.data,
                             .epsilon = work.stack.epsilon,
                             .inverse = nullptr,
                             .offset = work.stack.offset_norms});
        }
      };
      const auto norm_and_rotate = [&](void* rows, int64_t num_heads, int64_t stride, const TensorView& weight) {
        if (!layer.norms_last) normalise(rows, num_heads, stride, weight);
        if (layer.rotates) {
          kernels.rotate({.heads = num_heads,
                          .half = rotated / 2,
                          .x = {rows, stride, bf16},
                          .angles = work.angles_of(t),
                          .interleaved = work.stack.interleaved});
        }
        if (layer.norms_last) normalise(rows, num_heads, stride, weight);
      };
      norm_and_rotate(element_of(qkv, t), heads, distance, layer.query_norm);
      norm_and_rotate(keys, key_heads, size, layer.key_norm);
      for (int64_t head = 0; layer.is_gated && head < heads; ++head)
        std::memcpy(element_of(gates, t, head * size), element_of(qkv, t, head * distance + size), head_bytes);
      if (layer.temperatures.present()) {
        const int64_t place = (integer_at(work.batch->positions, t) + 1) / layer.temperature_every;
        const TensorView queries = columns_of(qkv, 0, heads * size);
        work.scale_row(queries, t, layer.temperatures.as<const float>()[place], queries);
      }
      void* values = element_of(qkv, t, heads * distance + key_heads * size);
      work.refuse_unless_finite(keys, key_heads * size, t);
      work.refuse_unless_finite(values, key_heads * size, t);
      std::memcpy(work.slot_of(layer.keys, t), keys, kv_bytes);
      std::memcpy(work.slot_of(layer.values, t), values, kv_bytes);
    }
  });
}

}  // namespace

AttentionTensors attention_tensors(StepWork& work, const GroupedQuery& layer) {
  const int64_t heads = work.stack.heads, size = layer.keys.shape[2];
  AttentionCall call;
  call.q = heads_of(queries_keys_values(work, layer), 0, heads, size, query_distance(layer));
  call.keys = layer.keys;
  call.values = layer.values;
  call.out = heads_of(work.own_columns(attended_by(work, layer)), 0, heads, size, size);
  call.scaling = work.stack.scaling;
  call.sinks = layer.sinks;
  call.window = layer.window;
  return tensors_of(call);
}

Status attend(StepWork& work, const GroupedQuery& layer, const TensorView& x, const TensorView& out) {
  const TensorView qkv = queries_keys_values(work, layer);
  work.multiply(layer.qkv, x, qkv);
  const int64_t size = layer.keys.shape[2], queries = work.stack.heads * size;
  if (is_of_all_ranks(work, layer.query_norm, size))
    KT_RETURN_IF_ERROR(normalise_over_ranks(work, layer.query_norm, columns_of(qkv, 0, queries)));
  if (is_of_all_ranks(work, layer.key_norm, size)) {
    const TensorView keys = columns_of(qkv, queries, layer.keys.shape[1] * size);
    KT_RETURN_IF_ERROR(normalise_over_ranks(work, layer.key_norm, keys));
  }
  place_heads(work, layer, qkv);
  work.attend(attention_tensors(work, layer), layer.is_chunked);
  const TensorView attended = attended_by(work, layer), own = work.own_columns(attended);
  if (layer.is_gated) sigmoid_and_multiply(work.engine, output_gates(work, layer), own, own);
  KT_RETURN_IF_ERROR(work.gather(attended));
  return work.multiply_shared(layer.out, attended, out);
}

}  // namespace kt
