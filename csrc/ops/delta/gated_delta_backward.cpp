#include "base/scratch.h"
#include "kernels/dense.h"
#include "ops/delta/delta_rows.h"
#include "ops/delta/gated_delta.h"
#include "threads/pool.h"

namespace kt {
namespace {

// One key head of one sequence. Rows have the width of its channels: query, key, values.
class HeadGradient {
 public:
  HeadGradient(const Tiles& tiles, const DeltaCall& call, const DeltaGradients& gradients,
               const DeltaSequence& sequence, int64_t key_head)
      : tiles_(tiles),
        call_(call),
        gradients_(gradients),
        sequence_(sequence),
        head_(key_head * call.shape.group()),
        channels_(call.shape, key_head),
        taps_(call.filter.shape[1]),
        width_(channels_.width()),
        tokens_(sequence.tokens) {}

  void run() {
    if (tokens_ == 0) return;
    static thread_local Scratch scratch;
    const DeltaShape& shape = call_.shape;
    const int64_t K = shape.key_size, V = shape.value_size, group = shape.group();
    const auto checkpoint = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(tokens_))));
    const int64_t of_rule = delta_workspace_floats(tokens_, K, V, checkpoint);
    filter_ = scratch.reserve<float>(taps_ * width_ + (tokens_ + taps_ - 1) * width_ + 3 * tokens_ * width_ +
                                     2 * width_ + tokens_ * (2 + 4 * group + channels_.values) + of_rule);
    inputs_ = filter_ + taps_ * width_;                    // [W - 1 + tokens][width]
    filtered_ = inputs_ + (tokens_ + taps_ - 1) * width_;  // [tokens][width]: before SiLU
    rows_ = filtered_ + tokens_ * width_;                  // [tokens][width]: what the rule reads
    by_rows_ = rows_ + tokens_ * width_;                   // [tokens][width]: its gradient, then that of `filtered_`
    sigmoids_ = by_rows_ + tokens_ * width_;
    sum_ = sigmoids_ + width_;
    lengths_ = sum_ + width_;          // [tokens][2]: 1 / length of query and key
    decays_ = lengths_ + 2 * tokens_;  // [tokens][group]
    strengths_ = decays_ + tokens_ * group;
    by_decays_ = strengths_ + tokens_ * group;
    by_strengths_ = by_decays_ + tokens_ * group;
    by_out_ = by_strengths_ + tokens_ * group;  // [tokens][values]
    float* workspace = by_out_ + tokens_ * channels_.values;

    load_filter(call_, channels_, filter_);
    forward();
    std::fill_n(by_rows_, tokens_ * width_, 0.0f);
    std::fill_n(by_decays_, 2 * tokens_ * group, 0.0f);
    for (int64_t i = 0; i < group; ++i) rule_backward(i, checkpoint, workspace);
    for (int64_t t = 0; t < tokens_; ++t) token_backward(t);
    for (int64_t t = 0; t < tokens_; ++t) input_backward(t);
  }

 private:
  void forward() {
    const int64_t group = call_.shape.group();
    std::fill_n(inputs_, (taps_ - 1) * width_, 0.0f);
    for (int64_t t = 0; t < tokens_; ++t) {
      const int64_t row_of_x = sequence_.first + t;
      load_input(tiles_, call_, channels_, row_of_x, inputs_ + (taps_ - 1 + t) * width_);
      const InverseLengths inverse = prepare_row(tiles_, channels_, filter_, inputs_ + t * width_, taps_,
                                                 filtered_ + t * width_, sigmoids_, rows_ + t * width_);
      lengths_[2 * t] = inverse.query;
      lengths_[2 * t + 1] = inverse.key;
      load_gates(call_, row_of_x, head_, group, decays_ + t * group, strengths_ + t * group);
      load_floats(tiles_, gradients_.by_out, row_of_x * gradients_.by_out.strides[0] + head_ * call_.shape.value_size,
                  channels_.values, by_out_ + t * channels_.values);
    }
  }

  void rule_backward(int64_t i, int64_t checkpoint, float* workspace) {
    const int64_t K = call_.shape.key_size, V = call_.shape.value_size, group = call_.shape.group();
    const DeltaRule rule{.tokens = tokens_,
                         .key_size = K,
                         .value_size = V,
                         .queries = rows_,
                         .keys = rows_ + K,
                         .key_stride = width_,
                         .values = rows_ + 2 * K + i * V,
                         .value_stride = width_,
                         .decays = decays_ + i,
                         .strengths = strengths_ + i,
                         .gate_stride = group,
                         .state = nullptr,
                         .out = nullptr,
                         .out_stride = group * V};
    tiles_.dense->delta_rule_backward({.rule = rule,
                                       .by_out = by_out_ + i * V,
                                       .by_queries = by_rows_,
                                       .by_keys = by_rows_ + K,
                                       .by_values = by_rows_ + 2 * K + i * V,
                                       .by_decays = by_decays_ + i,
                                       .by_strengths = by_strengths_ + i,
                                       .checkpoint = checkpoint,
                                       .workspace = workspace});
  }

  // Through the gates, the lengths and SiLU: `by_rows_` becomes the gradient of `filtered_`.
  void token_backward(int64_t t) {
    const int64_t K = call_.shape.key_size, group = call_.shape.group(), row_of_x = sequence_.first + t;
    for (int64_t i = 0; i < group; ++i) {
      const DeltaGates gates = gates_of(call_, row_of_x, head_ + i);
      const double strength = gates.strength;
      const auto by_a = static_cast<float>(by_decays_[t * group + i] * gates.by_a);
      const auto by_b = static_cast<float>(by_strengths_[t * group + i] * strength * (1.0 - strength));
      store_floats(tiles_, &by_a, 1, gradients_.by_a, row_of_x * gradients_.by_a.strides[0] + head_ + i);
      store_floats(tiles_, &by_b, 1, gradients_.by_b, row_of_x * gradients_.by_b.strides[0] + head_ + i);
    }
    float *row = rows_ + t * width_, *by_row = by_rows_ + t * width_;
    through_length(row, by_row, K, lengths_[2 * t], score_scaling(K));
    through_length(row + K, by_row + K, K, lengths_[2 * t + 1], 1.0f);
    const float* filtered = filtered_ + t * width_;
    tiles_.sigmoid(filtered, width_, sigmoids_);
    for (int64_t c = 0; c < width_; ++c) by_row[c] *= sigmoids_[c] * (1.0f + filtered[c] * (1.0f - sigmoids_[c]));
  }

  // row = y * inverse * scale with inverse = 1 / |y|: its gradient becomes y's.
  static void through_length(const float* row, float* by_row, int64_t count, float inverse, float scale) {
    double sum = 0;
    for (int64_t k = 0; k < count; ++k) sum += static_cast<double>(row[k]) * by_row[k];
    const auto along = static_cast<float>(sum);
    for (int64_t k = 0; k < count; ++k) by_row[k] = (by_row[k] * scale - row[k] / scale * along) * inverse;
  }

  // Of x at t: from the tokens t to t + W - 1, whose filters read it.
  void input_backward(int64_t t) {
    std::fill_n(sum_, width_, 0.0f);
    for (int64_t later = 0; later < taps_ && t + later < tokens_; ++later) {
      const float *by_row = by_rows_ + (t + later) * width_, *tap = filter_ + (taps_ - 1 - later) * width_;
      for (int64_t c = 0; c < width_; ++c) sum_[c] += tap[c] * by_row[c];
    }
    channels_.each([&](int64_t channel, int64_t count, int64_t at) {
      store_floats(tiles_, sum_ + at, count, gradients_.by_x,
                   (sequence_.first + t) * gradients_.by_x.strides[0] + channel);
    });
  }

  const Tiles& tiles_;
  const DeltaCall& call_;
  const DeltaGradients& gradients_;
  const DeltaSequence& sequence_;
  const int64_t head_;
  const DeltaChannels channels_;
  const int64_t taps_, width_, tokens_;
  float *filter_ = nullptr, *inputs_ = nullptr, *filtered_ = nullptr, *rows_ = nullptr, *by_rows_ = nullptr;
  float *sigmoids_ = nullptr, *sum_ = nullptr, *lengths_ = nullptr, *decays_ = nullptr, *strengths_ = nullptr;
  float *by_decays_ = nullptr, *by_strengths_ = nullptr, *by_out_ = nullptr;
};

}  // namespace

void gated_delta_backward(const Tiles& tiles, int num_threads, const DeltaCall& call, const DeltaGradients& gradients) {
  const OperationScope scope;
  const int64_t heads = call.shape.key_heads;
  run_ranges(call.num_sequences * heads, 1, num_threads, [&](int64_t task, int64_t) {
    HeadGradient(tiles, call, gradients, call.sequences[task / heads], task % heads).run();
  });
}

}  // namespace kt
