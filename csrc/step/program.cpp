#include "step/program.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <string>

#include "base/bf16.h"
#include "base/scratch.h"
#include "ops/attention.h"
#include "ops/forward.h"
#include "ops/router.h"
#include "threads/pool.h"

namespace kt {
namespace {

constexpr int64_t kTaskTokens = 8;

TensorView view_of(void* data, DType dtype, std::initializer_list<int64_t> shape) {
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.ndim = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape);
  int64_t dense = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    view.strides[i] = dense;
    dense *= view.shape[i];
  }
  return view;
}

// The columns [first, first + count * size) of a matrix, as `count` heads of `size` columns.
TensorView heads_of(const TensorView& matrix, int64_t first, int64_t count, int64_t size) {
  TensorView heads =
      view_of(matrix.as<char>() + first * dtype_bytes(matrix.dtype), matrix.dtype, {matrix.shape[0], count, size});
  heads.strides[0] = matrix.strides[0];
  return heads;
}

void* row_of(const TensorView& matrix, int64_t row) {
  return matrix.as<char>() + row * matrix.strides[0] * dtype_bytes(matrix.dtype);
}

int64_t at(const TensorView& integers, int64_t index) {
  return integers.as<const int64_t>()[index * integers.strides[0]];
}

bool are_finite(const void* data, DType dtype, int64_t count) {
  if (dtype == DType::kBf16) {
    const auto* values = static_cast<const uint16_t*>(data);
    return std::all_of(values, values + count, bf16_is_finite);
  }
  const auto* values = static_cast<const float*>(data);
  return std::all_of(values, values + count, float_is_finite);
}

bool is_finite(const TensorView& matrix, int64_t row) {
  return are_finite(row_of(matrix, row), matrix.dtype, matrix.shape[1]);
}

void clear_row(const TensorView& matrix, int64_t row) {
  std::memset(row_of(matrix, row), 0, static_cast<size_t>(matrix.shape[1] * dtype_bytes(matrix.dtype)));
}

// Each of `integers` is in [0, end).
Status check_all(const char* name, const TensorView& integers, int64_t end) {
  for (int64_t i = 0; i < integers.shape[0]; ++i) {
    const int64_t value = at(integers, i);
    if (value >= 0 && value < end) continue;
    return invalid_value(std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(value) +
                         "; allowed: 0 to " + std::to_string(end - 1));
  }
  return {};
}

}  // namespace

// The activations of a batch, a row for each token.
struct Program::Rows {
  TensorView hidden, residual, normed;  // [T, H]
  TensorView qkv, attended;             // [T, (N + 2 K) D], [T, N D]
  TensorView logits, weights, ids;      // [T, E], [T, top_k]
  int64_t tokens() const { return hidden.shape[0]; }
};

Program::Program(Stack stack, const Tiles& tiles, int num_threads)
    : stack_(std::move(stack)),
      tiles_(tiles),
      engine_{dense_of(tiles), tiles, num_threads},
      attention_engine_{attention_of(tiles), num_threads} {}

int64_t Program::scratch_bytes() const {
  size_t bytes = attention_parts_.bytes() + adapters_.scratch_bytes();
  for (const AlignedBuffer& buffer : buffers_) bytes += buffer.bytes();
  return static_cast<int64_t>(bytes);
}

void Program::free_scratch() {
  buffers_.clear();
  attention_parts_ = AlignedBuffer();
  adapters_.free_scratch();
  room_ = 0;
}

void Program::free_unneeded(int64_t tokens) {
  need_.add(static_cast<size_t>(tokens));
  if (++steps_ % kCallsInWindow == 0) {
    if (room_ > 2 * need_.most()) free_scratch();
    need_.end_window();
  }
  room_ = std::max(room_, static_cast<size_t>(tokens));
}

Program::Rows Program::reserve(int64_t tokens) {
  free_unneeded(tokens);
  const int64_t hidden = stack_.hidden(), top_k = stack_.top_k;
  const int64_t experts = stack_.layers[0].gate.shape[0];
  size_t next = 0;
  buffers_.resize(8);
  const auto made = [&](DType dtype, int64_t cols) {
    const int64_t bytes = std::max<int64_t>(tokens * cols * dtype_bytes(dtype), 1);
    return view_of(buffers_[next++].reserve<uint8_t>(bytes), dtype, {tokens, cols});
  };
  const DType dtype = stack_.dtype();
  Rows rows;
  rows.hidden = made(dtype, hidden);
  rows.residual = made(dtype, hidden);
  rows.normed = made(dtype, hidden);
  rows.qkv = made(dtype, stack_.qkv_cols());
  rows.attended = made(dtype, stack_.heads * stack_.head_size);
  rows.logits = made(dtype, experts);
  rows.weights = made(DType::kF32, top_k);
  rows.ids = made(DType::kI32, top_k);
  return rows;
}

Status Program::check(const StepBatch& batch) const {
  KT_RETURN_IF_ERROR(check_all("ids", batch.ids, stack_.embedding.shape[0]));
  KT_RETURN_IF_ERROR(check_all("positions", batch.positions, stack_.angles.shape[0]));
  KT_RETURN_IF_ERROR(check_all("slots", batch.slots, stack_.num_slots()));
  const int64_t tokens = batch.ids.shape[0];
  KT_RETURN_IF_ERROR(check_adapters(stack_, batch.adapters, tokens));
  int64_t queries = 0;
  for (const KvSequence& sequence : batch.sequences) queries += sequence.queries;
  if (queries != tokens) {
    return invalid_value("the sequences have " + std::to_string(queries) + " new tokens; there are " +
                         std::to_string(tokens) + " ids");
  }
  return check_sequences(batch.sequences.data(), static_cast<int64_t>(batch.sequences.size()), tokens,
                         stack_.num_slots());
}

void Program::embed(const StepBatch& batch, const TensorView& to) const {
  const auto bytes = static_cast<size_t>(stack_.hidden() * dtype_bytes(stack_.dtype()));
  for (int64_t t = 0; t < to.shape[0]; ++t)
    std::memcpy(row_of(to, t), row_of(stack_.embedding, at(batch.ids, t)), bytes);
}

// Norms and rotates each token's queries and keys, and copies keys and values to the token's slot. In a batch with an
// adapter zeros take the place of keys or values with NaN or Inf (sglang_patch/faults/finite_rows.py), and the token is
// refused.
void Program::place_heads(const StackLayer& layer, const StepBatch& batch, const Rows& rows) {
  const int64_t size = stack_.head_size, element = dtype_bytes(stack_.dtype());
  const bool bf16 = stack_.dtype() == DType::kBf16;
  const auto kv_bytes = static_cast<size_t>(stack_.key_heads * size * element);
  run_ranges(rows.tokens(), kTaskTokens, engine_.num_threads, [&](int64_t first, int64_t count) {
    for (int64_t t = first; t < first + count; ++t) {
      char* queries = static_cast<char*>(row_of(rows.qkv, t));
      char* keys = queries + stack_.heads * size * element;
      const RowMajor query_rows{queries, size, bf16}, key_rows{keys, size, bf16};
      const void* angles = row_of(stack_.angles, at(batch.positions, t));
      const auto normalise = [&](const RowMajor& heads, int64_t num_heads, const TensorView& weight) {
        engine_.kernels.normalise({.first_row = 0,
                                   .rows = num_heads,
                                   .cols = size,
                                   .x = heads,
                                   .residual = {},
                                   .total = {},
                                   .y = heads,
                                   .weight = weight.data,
                                   .epsilon = stack_.epsilon,
                                   .inverse = nullptr});
        engine_.kernels.rotate({.heads = num_heads, .half = size / 2, .x = heads, .angles = angles});
      };
      normalise(query_rows, stack_.heads, layer.query_norm);
      normalise(key_rows, stack_.key_heads, layer.key_norm);
      const int64_t slot = at(batch.slots, t);
      for (char* heads : {keys, keys + kv_bytes}) {
        if (adapters_.is_empty() || are_finite(heads, stack_.dtype(), stack_.key_heads * size)) continue;
        std::memset(heads, 0, kv_bytes);
        is_refused_[static_cast<size_t>(t)] = 1;
      }
      std::memcpy(row_of(layer.keys, slot), keys, kv_bytes);
      std::memcpy(row_of(layer.values, slot), keys + kv_bytes, kv_bytes);
    }
  });
}

AttentionTensors Program::tensors_of(const StackLayer& layer, const Rows& rows) const {
  AttentionCall call;
  call.q = heads_of(rows.qkv, 0, stack_.heads, stack_.head_size);
  call.keys = layer.keys;
  call.values = layer.values;
  call.out = heads_of(rows.attended, 0, stack_.heads, stack_.head_size);
  call.scaling = stack_.scaling;
  return kt::tensors_of(call);
}

void Program::attend(const StackLayer& layer, const StepBatch& batch, const Rows& rows) {
  linear(engine_, rows.normed, layer.qkv, layer.qkv_bias, rows.qkv);
  adapters_.add(engine_, layer.lora.qkv, rows.normed, rows.qkv);
  place_heads(layer, batch, rows);
  run_attention(layer, rows);
  linear(engine_, rows.attended, layer.out, layer.out_bias, rows.hidden);
  adapters_.add(engine_, layer.lora.out, rows.attended, rows.hidden);
}

void Program::run_attention(const StackLayer& layer, const Rows& rows) {
  const AttentionTensors tensors = tensors_of(layer, rows);
  float* parts = attention_parts_.reserve<float>(attention_.parts_floats());
  const ScratchUse in_use;
  Plan plan;
  plan.num_threads = attention_.num_threads();
  attention_.add_stages(&plan, 0);
  kt::run(plan, [&](int step, const Range& range) { attention_.run(tensors, parts, step, range); });
}

// A token with NaN or Inf skips the experts, as in SGLang's modules (sglang_patch/cpu/moe.py).
void Program::mask_rows(const Rows& rows) {
  for (int64_t t = 0; t < rows.tokens(); ++t) {
    if (is_finite(rows.normed, t) && is_finite(rows.weights, t)) continue;
    is_refused_[static_cast<size_t>(t)] = 1;
    clear_row(rows.normed, t);
    clear_row(rows.weights, t);
    auto* ids = static_cast<int32_t*>(row_of(rows.ids, t));
    std::fill(ids, ids + stack_.top_k, -1);
  }
}

Status Program::run_experts(const StackLayer& layer, const Rows& rows) {
  linear(engine_, rows.normed, layer.gate, {}, rows.logits);
  choose_experts(engine_, rows.logits, stack_.normalises, rows.weights, rows.ids);
  const Engine engine{*layer.experts, tiles_, engine_.num_threads};
  routed_.x = rows.normed;
  routed_.ids = rows.ids;
  routed_.weights = rows.weights;
  adapters_.set_slots(layer.lora, &routed_);
  const Status status = forward(engine, routed_, rows.hidden);
  if (status.code() != StatusCode::kNumerics) return status;
  mask_rows(rows);
  return forward(engine, routed_, rows.hidden);
}

Status Program::run(const StepBatch& batch, const TensorView& out, std::vector<int64_t>* refused) {
  KT_RETURN_IF_ERROR(check(batch));
  if (batch.ids.shape[0] == 0) return {};
  const Rows rows = reserve(batch.ids.shape[0]);
  const ThreadPool::Awake awake;
  attention_.prepare(attention_engine_, tensors_of(stack_.layers[0], rows), batch.sequences.data(),
                     static_cast<int64_t>(batch.sequences.size()));
  adapters_.prepare(stack_, batch.adapters, rows.tokens());
  is_refused_.assign(static_cast<size_t>(rows.tokens()), 0);
  // residual += x, where there is an x yet; to = RMSNorm of residual.
  const auto normalise = [&](const TensorView& x, const TensorView& weight, const TensorView& to) {
    NormViews views{};
    views.x = x.present() ? x : rows.residual;
    if (x.present()) views.residual = views.total = rows.residual;
    views.weight = weight;
    views.out = to;
    views.epsilon = stack_.epsilon;
    rms_norm(engine_, views);
  };
  embed(batch, rows.residual);
  TensorView added;
  for (const StackLayer& layer : stack_.layers) {
    normalise(added, layer.input_norm, rows.normed);
    attend(layer, batch, rows);
    normalise(rows.hidden, layer.post_norm, rows.normed);
    KT_RETURN_IF_ERROR(run_experts(layer, rows));
    added = rows.hidden;
  }
  normalise(added, stack_.final_norm, out);
  for (int64_t t = 0; t < rows.tokens(); ++t) {
    if (is_refused_[static_cast<size_t>(t)]) refused->push_back(t);
  }
  return {};
}

}  // namespace kt
