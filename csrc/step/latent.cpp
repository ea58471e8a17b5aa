#include <cstring>

#include "ops/dense/heads.h"
#include "ops/router/indexer.h"
#include "step/attention.h"
#include "threads/pool.h"

namespace kt {
namespace {

// What a layer computes in between, a row for each token.
struct LatentRows {
  TensorView compressed;  // queries [rank], latent [latent], rotary key [rope]
  TensorView queries;     // N heads of [nope], [rope]
  TensorView absorbed;    // N heads of [latent], [rope]
  TensorView attended;    // N heads of [latent]
  TensorView outputs;     // the heads of all ranks, of [value]

  LatentRows(StepWork& work, const Latent& layer) {
    const int64_t heads = layer.heads();
    const auto made = [&](RowsOf name, int64_t cols) { return work.rows.matrix(name, work.stack.dtype(), cols); };
    compressed = made(RowsOf::kProjected, layer.rank() + layer.latent() + layer.rope());
    queries = made(RowsOf::kQueries, heads * (layer.nope() + layer.rope()));
    absorbed = made(RowsOf::kAbsorbed, heads * (layer.latent() + layer.rope()));
    attended = made(RowsOf::kAttended, heads * layer.latent());
    outputs = made(RowsOf::kOutputs, layer.out.weight.shape[1]);
  }
};

void make_queries(const StepWork& work, const Latent& layer, const TensorView& x, const LatentRows& rows) {
  if (layer.rank() == 0) return work.multiply(layer.query, x, rows.queries);
  const TensorView compressed = columns_of(rows.compressed, 0, layer.rank());
  work.normalise(compressed, layer.query_norm, compressed);
  work.multiply(layer.query, compressed, rows.queries);
}

// Norms each token's latent, rotates its key and queries, and copies latent and key to the token's slot. The rotated
// part of the queries goes behind the absorbed one.
void place_heads(StepWork& work, const Latent& layer, const LatentRows& rows) {
  const int64_t heads = layer.heads(), latent = layer.latent(), nope = layer.nope(), rope = layer.rope();
  const DType dtype = work.stack.dtype();
  const bool bf16 = dtype == DType::kBf16;
  const auto rope_bytes = static_cast<size_t>(rope * dtype_bytes(dtype));
  const auto key_bytes = static_cast<size_t>((latent + rope) * dtype_bytes(dtype));
  const Dense& kernels = work.engine.kernels();
  const auto rotate = [&](void* first, int64_t count, int64_t t) {
    kernels.rotate({.heads = count,
                    .half = rope / 2,
                    .x = {first, nope + rope, bf16},
                    .angles = work.angles_of(t),
                    .interleaved = work.stack.interleaved});
  };
  run_ranges(rows.queries.shape[0], kTokensAtOnce, work.engine.num_threads, [&](int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
      const RowMajor key{element_of(rows.compressed, t, layer.rank()), latent, bf16};
      kernels.normalise({.first_row = 0,
                         .rows = 1,
                         .cols = latent,
                         .x = key,
                         .residual = {},
                         .total = {},
                         .y = key,
                         .weight = layer.latent_norm.data,
                         .epsilon = work.stack.epsilon,
                         .inverse = nullptr});
      rotate(element_of(rows.compressed, t, layer.rank() + latent), 1, t);
      work.refuse_unless_finite(key.data, latent + rope, t);
      std::memcpy(work.slot_of(layer.keys, t), key.data, key_bytes);
      rotate(element_of(rows.queries, t, nope), heads, t);
      for (int64_t head = 0; head < heads; ++head) {
        std::memcpy(element_of(rows.absorbed, t, head * (latent + rope) + latent),
                    element_of(rows.queries, t, head * (nope + rope) + nope), rope_bytes);
      }
    }
  });
}

// Writes the index keys of the new tokens to their slots. The queries with more than `top_k` visible keys choose.
void choose_keys(StepWork& work, const Latent& layer, const TensorView& x, const LatentRows& rows) {
  const Indexer& indexer = layer.indexer;
  const int64_t heads = indexer.heads(), size = indexer.size();
  const DType dtype = work.stack.dtype();
  const TensorView queries = work.rows.matrix(RowsOf::kIndexQueries, dtype, heads * size);
  const TensorView keys = work.rows.matrix(RowsOf::kIndexKeys, dtype, size);
  linear(work.engine, columns_of(rows.compressed, 0, layer.rank()), indexer.query, {}, queries);
  linear(work.engine, x, indexer.key, {}, keys);
  IndexRows made{};
  made.q = heads_of(queries, 0, heads, size, size);
  made.k = keys;
  made.norm_weight = indexer.norm_weight;
  made.norm_bias = indexer.norm_bias;
  made.angles = work.stack.angles;
  made.positions = work.batch->positions;
  made.interleaved = indexer.interleaved;
  prepare_index_rows(work.engine, made);
  const auto bytes = static_cast<size_t>(size * dtype_bytes(dtype));
  for (int64_t t = 0; t < keys.shape[0]; ++t) {
    work.refuse_unless_finite(element_of(keys, t), size, t);
    std::memcpy(work.slot_of(indexer.keys, t), element_of(keys, t), bytes);
  }
  if (work.choices.empty()) return;
  Selection selection{};
  selection.q = made.q;
  selection.weights = work.rows.matrix(RowsOf::kIndexWeights, DType::kF32, heads);
  linear(work.engine, work.widened(x), indexer.weights, {}, selection.weights);
  selection.keys = indexer.keys;
  selection.scaling = index_scaling(heads, size);
  selection.sequences = work.batch->sequences.data();
  selection.num_sequences = static_cast<int64_t>(work.batch->sequences.size());
  selection.chosen = contiguous_view(work.chosen, DType::kI32, {x.shape[0], indexer.top_k});
  select_keys(work.engine, selection);
}

AttentionTensors tensors_between(const StepWork& work, const Latent& layer, const LatentRows& rows) {
  const int64_t heads = layer.heads(), latent = layer.latent(), key = layer.keys.shape[2];
  AttentionCall call;
  call.q = heads_of(rows.absorbed, 0, heads, key, key);
  call.keys = call.values = layer.keys;
  call.values.shape[2] = latent;
  call.out = heads_of(rows.attended, 0, heads, latent, latent);
  call.scaling = work.stack.scaling;
  return tensors_of(call);
}

}  // namespace

AttentionTensors attention_tensors(StepWork& work, const Latent& layer) {
  return tensors_between(work, layer, LatentRows(work, layer));
}

Status attend(StepWork& work, const Latent& layer, const TensorView& x, const TensorView& out) {
  const int64_t heads = layer.heads(), latent = layer.latent(), nope = layer.nope(), rope = layer.rope();
  const LatentRows rows(work, layer);
  work.multiply(layer.compress, x, rows.compressed);
  make_queries(work, layer, x, rows);
  if (layer.indexer.present()) choose_keys(work, layer, x, rows);
  place_heads(work, layer, rows);

  const TensorView queries = heads_of(rows.queries, 0, heads, nope, nope + rope);
  const TensorView absorbed = heads_of(rows.absorbed, 0, heads, latent, latent + rope);
  linear_heads(work.engine, queries, layer.key_heads, absorbed);
  work.adapters.add_queries(work.engine, layer.heads_lora, queries, absorbed);
  layer.top_k > 0 ? work.attend_chosen(tensors_between(work, layer, rows))
                  : work.attend(tensors_between(work, layer, rows));

  const TensorView attended = heads_of(rows.attended, 0, heads, latent, latent);
  const TensorView outputs = heads_of(work.own_columns(rows.outputs), 0, heads, layer.value(), layer.value());
  linear_heads(work.engine, attended, layer.value_heads, outputs);
  work.adapters.add_outputs(work.engine, layer.heads_lora, attended, outputs);
  KT_RETURN_IF_ERROR(work.gather(rows.outputs));
  return work.multiply_shared(layer.out, rows.outputs, out);
}

}  // namespace kt
