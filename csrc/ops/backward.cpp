// With g the gradient of the output at a token, and p one of its pairs (expert e, routing weight w):
//
//   d h     = W_down^T g (+ LoRA)        taken without w, so that the gradient of w is <h, d h>
//   d up    = w * d h * silu(gate)
//   d gate  = w * d h * up * silu'(gate)
//   d x     = W_gate^T d gate + W_up^T d up (+ LoRA), summed over the token's pairs in their order
//   d A, B  = products over the pairs of an (expert, slot) group, in token order
#include <algorithm>
#include <cmath>

#include "ops/forward.h"
#include "ops/lora.h"
#include "ops/stages.h"

namespace kt {
namespace {

constexpr int64_t kTaskCols = 64;

// Per-pair arrays of one chunk; reused by the calling thread.
struct BackwardScratch {
  AlignedBuffer x, x_bf16, grad, gate, up, h, dh;
  AlignedBuffer low[kNumProjections], dlow[kNumProjections];
};

struct Rows {
  float *x, *grad, *gate, *up, *h, *dh;
  float *low[kNumProjections], *dlow[kNumProjections];
  int64_t rank;  // row stride of low and dlow
};

class BackwardChunk {
 public:
  BackwardChunk(const Engine& engine, const RoutedCall& call, const Routing& routing, const RoutedGradients& gradients)
      : engine_(engine), call_(call), routing_(routing), gradients_(gradients), strides_(engine.layer) {}

  void run(const TensorView& grad_out) {
    reserve();
    recompute(grad_out);
    down_backward();
    activation_backward();
    input_backward();
    adapter_gradients();
    combine(engine_, routing_, rows_.grad, strides_.hidden, false, gradients_.x);
  }

 private:
  void reserve() {
    static thread_local BackwardScratch scratch;
    const int64_t pairs = routing_.num_pairs();
    rows_.x = scratch.x.reserve<float>(pairs * strides_.hidden);
    rows_.grad = scratch.grad.reserve<float>(pairs * strides_.hidden);
    rows_.gate = scratch.gate.reserve<float>(pairs * strides_.inner);
    rows_.up = scratch.up.reserve<float>(pairs * strides_.inner);
    rows_.h = scratch.h.reserve<float>(pairs * strides_.inner);
    rows_.dh = scratch.dh.reserve<float>(pairs * strides_.inner);
    if (call_.x.dtype == DType::kBf16 && engine_.tiles.multiply_bf16) {
      x_bf16_ = scratch.x_bf16.reserve<uint16_t>(pairs * strides_.hidden);
    }
    rows_.rank = 0;
    for (const Projection part : {kGate, kUp, kDown}) rows_.rank = std::max(rows_.rank, max_rank(call_.slots, part));
    for (int part = 0; part < kNumProjections; ++part) {
      rows_.low[part] = scratch.low[part].reserve<float>(pairs * rows_.rank);
      rows_.dlow[part] = scratch.dlow[part].reserve<float>(pairs * rows_.rank);
    }
  }

  // Through the same steps as forward, so that the activations are the same to the last bit.
  void recompute(const TensorView& grad_out) {
    gather_rows(engine_, routing_, call_.x, strides_.hidden, rows_.x);
    gather_rows(engine_, routing_, grad_out, strides_.hidden, rows_.grad);
    if (x_bf16_) gather_bf16_rows(engine_, routing_, call_.x, strides_.hidden, x_bf16_);
    GateUpInput input{rows_.x, x_bf16_, {rows_.low[kGate], rows_.low[kUp]}, rows_.rank};
    for (const Projection part : {kGate, kUp})
      lora_low(engine_, routing_, call_, part, rows_.x, strides_.hidden, rows_.low[part], rows_.rank);
    gate_up(engine_, routing_, call_, input, rows_.h, rows_.gate, rows_.up);
    lora_low(engine_, routing_, call_, kDown, rows_.h, strides_.inner, rows_.low[kDown], rows_.rank);
  }

  // body(group, slot) for every (expert, slot) group.
  template <class Body>
  void for_each_group(int64_t multiply_adds, Body&& body) {
    for_each_task(engine_, static_cast<int64_t>(routing_.groups.size()), multiply_adds, [&](int64_t g) {
      const PairRange& group = routing_.groups[static_cast<size_t>(g)];
      body(group, call_.slots[static_cast<size_t>(group.slot)]);
    });
  }

  // body(index into experts, first column, padded number of columns), cut into tasks.
  template <class Body>
  void for_each_columns(int64_t padded_cols, int64_t inner, Body&& body) {
    const int64_t ranges = (padded_cols + kTaskCols - 1) / kTaskCols;
    const int64_t num_tasks = static_cast<int64_t>(routing_.experts.size()) * ranges;
    for_each_task(engine_, num_tasks, routing_.num_pairs() * padded_cols * inner, [&](int64_t task) {
      const int64_t first = (task % ranges) * kTaskCols;
      body(task / ranges, first, std::min(kTaskCols, padded_cols - first));
    });
  }

  // Adds A^T dlow to columns of `out` for the groups of one expert.
  void add_adapter_columns(int64_t index, Projection part, int64_t first, int64_t count, float* out, int64_t ld) {
    const auto at = static_cast<size_t>(index);
    for (int64_t g = routing_.first_group[at]; g < routing_.first_group[at + 1]; ++g) {
      const PairRange& group = routing_.groups[static_cast<size_t>(g)];
      lora_down_backward(engine_.tiles, call_.slots[static_cast<size_t>(group.slot)], part, group.expert, group.size(),
                         rows_.dlow[part] + group.begin * rows_.rank, rows_.rank, first, count,
                         out + group.begin * ld + first, ld);
    }
  }

  void down_backward() {
    const int64_t hidden = engine_.layer.shape().hidden, inner = engine_.layer.shape().intermediate;
    for_each_group(routing_.num_pairs() * hidden * rows_.rank, [&](const PairRange& group, const LoraSlot& slot) {
      lora_up_backward(engine_.tiles, slot, kDown, group.expert, group.size(),
                       rows_.grad + group.begin * strides_.hidden, strides_.hidden,
                       rows_.dlow[kDown] + group.begin * rows_.rank, rows_.rank);
    });
    for_each_columns(engine_.layer.out_shape().padded_cols(), hidden, [&](int64_t index, int64_t first, int64_t count) {
      const PairRange& run = routing_.experts[static_cast<size_t>(index)];
      multiply_transposed(engine_.tiles, engine_.layer.down(run.expert), run.size(),
                          rows_.grad + run.begin * strides_.hidden, strides_.hidden, first, count,
                          rows_.dh + run.begin * strides_.inner + first, strides_.inner, false);
      add_adapter_columns(index, kDown, first, std::min(count, inner - first), rows_.dh, strides_.inner);
    });
  }

  // dh becomes w * dh; gate and up become their gradients; low and dlow of down are scaled by w for adapter_gradients.
  void activation_backward() {
    const int64_t inner = engine_.layer.shape().intermediate;
    weight_grad_.resize(static_cast<size_t>(routing_.num_pairs()));
    for_each_task(engine_, routing_.num_pairs(), routing_.num_pairs() * inner * 8, [&](int64_t pair) {
      const float weight = routing_.weight[static_cast<size_t>(pair)];
      float *gate = rows_.gate + pair * strides_.inner, *up = rows_.up + pair * strides_.inner;
      const float *h = rows_.h + pair * strides_.inner, *dh = rows_.dh + pair * strides_.inner;
      double weight_grad = 0.0;
      for (int64_t i = 0; i < inner; ++i) {
        weight_grad += static_cast<double>(h[i]) * static_cast<double>(dh[i]);
        const float sigmoid = 1.0f / (1.0f + std::exp(-gate[i])), scaled = weight * dh[i];
        const float up_grad = scaled * gate[i] * sigmoid;
        gate[i] = scaled * up[i] * sigmoid * (1.0f + gate[i] * (1.0f - sigmoid));
        up[i] = up_grad;
      }
      weight_grad_[static_cast<size_t>(pair)] = static_cast<float>(weight_grad);
      for (int64_t r = 0; r < rows_.rank; ++r) {
        rows_.low[kDown][pair * rows_.rank + r] *= weight;
        rows_.dlow[kDown][pair * rows_.rank + r] *= weight;
      }
    });
    for (int64_t flat = 0; flat < routing_.num_tokens * routing_.top_k; ++flat) {
      const int64_t pair = routing_.pair_of[static_cast<size_t>(flat)],
                    token = routing_.first_token + flat / routing_.top_k;
      gradients_.weights.as<float>()[token * gradients_.weights.strides[0] + flat % routing_.top_k] =
          pair < 0 ? 0.0f : weight_grad_[static_cast<size_t>(pair)];
    }
  }

  void adapter_gradients() {
    // Two passes: the gradients of down need the output's gradient, whose rows input_backward overwrites.
    for_each_group(
        4 * routing_.num_pairs() * strides_.hidden * rows_.rank, [&](const PairRange& group, const LoraSlot&) {
          const LoraSlot& into = gradients_.slots[static_cast<size_t>(group.slot)];
          for (const Projection part : {kGate, kUp}) {
            const float* grad = part == kGate ? rows_.gate : rows_.up;
            lora_weight_gradients(
                engine_.tiles, into.pairs[part], group.expert, group.size(), rows_.x + group.begin * strides_.hidden,
                strides_.hidden, grad + group.begin * strides_.inner, strides_.inner,
                rows_.low[part] + group.begin * rows_.rank, rows_.dlow[part] + group.begin * rows_.rank, rows_.rank);
          }
        });
  }

  void down_adapter_gradients() {
    for_each_group(
        2 * routing_.num_pairs() * strides_.hidden * rows_.rank, [&](const PairRange& group, const LoraSlot&) {
          lora_weight_gradients(engine_.tiles, gradients_.slots[static_cast<size_t>(group.slot)].pairs[kDown],
                                group.expert, group.size(), rows_.h + group.begin * strides_.inner, strides_.inner,
                                rows_.grad + group.begin * strides_.hidden, strides_.hidden,
                                rows_.low[kDown] + group.begin * rows_.rank,
                                rows_.dlow[kDown] + group.begin * rows_.rank, rows_.rank);
        });
  }

  void input_backward() {
    down_adapter_gradients();
    const int64_t hidden = engine_.layer.shape().hidden, inner = engine_.layer.shape().intermediate;
    for_each_group(2 * routing_.num_pairs() * inner * rows_.rank, [&](const PairRange& group, const LoraSlot& slot) {
      for (const Projection part : {kGate, kUp}) {
        const float* grad = part == kGate ? rows_.gate : rows_.up;
        lora_up_backward(engine_.tiles, slot, part, group.expert, group.size(), grad + group.begin * strides_.inner,
                         strides_.inner, rows_.dlow[part] + group.begin * rows_.rank, rows_.rank);
      }
    });
    for_each_columns(
        engine_.layer.in_shape().padded_cols(), 2 * inner, [&](int64_t index, int64_t first, int64_t count) {
          const PairRange& run = routing_.experts[static_cast<size_t>(index)];
          float* out = rows_.grad + run.begin * strides_.hidden + first;
          const int64_t at = run.begin * strides_.inner;
          multiply_transposed(engine_.tiles, engine_.layer.gate(run.expert), run.size(), rows_.gate + at,
                              strides_.inner, first, count, out, strides_.hidden, false);
          multiply_transposed(engine_.tiles, engine_.layer.up(run.expert), run.size(), rows_.up + at, strides_.inner,
                              first, count, out, strides_.hidden, true);
          for (const Projection part : {kGate, kUp})
            add_adapter_columns(index, part, first, std::min(count, hidden - first), rows_.grad, strides_.hidden);
        });
  }

  const Engine& engine_;
  const RoutedCall& call_;
  const Routing& routing_;
  const RoutedGradients& gradients_;
  const Strides strides_;
  Rows rows_{};
  uint16_t* x_bf16_ = nullptr;
  std::vector<float> weight_grad_;
};

}  // namespace

Status backward(const Engine& engine, const RoutedCall& call, const TensorView& grad_out,
                const RoutedGradients& gradients) {
  KT_RETURN_IF_ERROR(check_call(engine.layer.shape(), call));
  KT_RETURN_IF_ERROR(check_finite(grad_out, "grad_out"));
  const Strides strides(engine.layer);
  const int64_t num_tokens = call.x.shape[0];
  const int64_t step = tokens_at_once(call, 2 * strides.hidden + 4 * strides.inner);
  Routing routing;
  for (int64_t first = 0; first < num_tokens; first += step) {
    route(engine.layer.shape(), call, first, std::min(step, num_tokens - first), &routing);
    BackwardChunk(engine, call, routing, gradients).run(grad_out);
  }
  return {};
}

}  // namespace kt
