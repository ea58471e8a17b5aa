#include "ops/delta/gated_delta.h"

#include "base/scratch.h"
#include "kernels/dense.h"
#include "ops/delta/delta_rows.h"
#include "threads/pool.h"

namespace kt {
namespace {

constexpr int64_t kBlockTokens = 32;

// One key head of one sequence.
class HeadRun {
 public:
  HeadRun(const Tiles& tiles, const DeltaCall& call, const DeltaStates& kept, const TensorView& out,
          const DeltaSequence& sequence, int64_t key_head)
      : tiles_(tiles),
        call_(call),
        kept_(kept),
        out_(out),
        sequence_(sequence),
        head_(key_head * call.shape.group()),
        channels_(call.shape, key_head),
        taps_(call.filter.shape[1]),
        width_(channels_.width()) {}

  void run() {
    static thread_local Scratch scratch;
    const DeltaShape& shape = call_.shape;
    const int64_t group = shape.group(), values = channels_.values;
    const int64_t of_states = kept_.states.present() ? 0 : group * shape.key_size * shape.value_size;
    filter_ = scratch.reserve<float>(taps_ * width_ + (kBlockTokens + taps_) * width_ + kBlockTokens * width_ + width_ +
                                     kBlockTokens * (values + 2 * group) + of_states);
    inputs_ = filter_ + taps_ * width_;                 // [W - 1 + tokens][width]
    rows_ = inputs_ + (kBlockTokens + taps_) * width_;  // [tokens][width]: filtered
    sigmoids_ = rows_ + kBlockTokens * width_;
    results_ = sigmoids_ + width_;                    // [tokens][values]
    decays_ = results_ + kBlockTokens * values;       // [tokens][group]
    strengths_ = decays_ + kBlockTokens * group;      // [tokens][group]
    own_states_ = strengths_ + kBlockTokens * group;  // [group][K][V]
    load_filter(call_, channels_, filter_);
    begin();
    for (int64_t first = 0; first < sequence_.tokens; first += kBlockTokens)
      block(sequence_.first + first, std::min(kBlockTokens, sequence_.tokens - first));
    if (kept_.inputs.present()) keep_inputs();
  }

 private:
  float* state_of(int64_t i) {
    const DeltaShape& shape = call_.shape;
    if (!kept_.states.present()) return own_states_ + i * shape.key_size * shape.value_size;
    return kept_.states.as<float>() + sequence_.slot * kept_.states.strides[0] + (head_ + i) * kept_.states.strides[1];
  }

  // The inputs before the first token, and zeros for states that do not continue.
  void begin() {
    const DeltaShape& shape = call_.shape;
    if (sequence_.continues) {
      each_kept(
          [&](int64_t at, int64_t j, int64_t offset) { inputs_[j * width_ + at] = element(kept_.inputs, offset); });
      return;
    }
    std::fill_n(inputs_, (taps_ - 1) * width_, 0.0f);
    for (int64_t i = 0; i < shape.group(); ++i) std::fill_n(state_of(i), shape.key_size * shape.value_size, 0.0f);
  }

  // use(column of a row, tap, place in `inputs`)
  template <class Use>
  void each_kept(Use&& use) {
    const TensorView& kept = kept_.inputs;
    channels_.each([&](int64_t channel, int64_t count, int64_t at) {
      for (int64_t c = 0; c < count; ++c) {
        const int64_t offset = sequence_.slot * kept.strides[0] + (channel + c) * kept.strides[1];
        for (int64_t j = 0; j < taps_ - 1; ++j) use(at + c, j, offset + j * kept.strides[2]);
      }
    });
  }

  void keep_inputs() {  // `inputs_` begins with the last W - 1 rows
    each_kept([&](int64_t at, int64_t j, int64_t offset) {
      store_floats(tiles_, inputs_ + j * width_ + at, 1, kept_.inputs, offset);
    });
  }

  void block(int64_t first, int64_t tokens) {
    const DeltaShape& shape = call_.shape;
    const int64_t K = shape.key_size, V = shape.value_size, group = shape.group();
    for (int64_t t = 0; t < tokens; ++t) {
      load_input(tiles_, call_, channels_, first + t, inputs_ + (taps_ - 1 + t) * width_);
      float* row = rows_ + t * width_;
      prepare_row(tiles_, channels_, filter_, inputs_ + t * width_, taps_, row, sigmoids_, row);
      load_gates(call_, first + t, head_, group, decays_ + t * group, strengths_ + t * group);
    }
    for (int64_t i = 0; i < group; ++i) {
      tiles_.dense->delta_rule({.tokens = tokens,
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
                                .state = state_of(i),
                                .out = results_ + i * V,
                                .out_stride = group * V});
    }
    for (int64_t t = 0; t < tokens; ++t) {
      store_floats(tiles_, results_ + t * group * V, group * V, out_, (first + t) * out_.strides[0] + head_ * V);
    }
    std::copy(inputs_ + tokens * width_, inputs_ + (tokens + taps_ - 1) * width_, inputs_);
  }

  const Tiles& tiles_;
  const DeltaCall& call_;
  const DeltaStates& kept_;
  const TensorView& out_;
  const DeltaSequence& sequence_;
  const int64_t head_;  // the first value head
  const DeltaChannels channels_;
  const int64_t taps_, width_;
  float *filter_ = nullptr, *inputs_ = nullptr, *rows_ = nullptr, *sigmoids_ = nullptr, *results_ = nullptr;
  float *decays_ = nullptr, *strengths_ = nullptr, *own_states_ = nullptr;
};

}  // namespace

void gated_delta(const Tiles& tiles, int num_threads, const DeltaCall& call, const DeltaStates& kept,
                 const TensorView& out) {
  const OperationScope scope;
  const int64_t heads = call.shape.key_heads;
  run_ranges(call.num_sequences * heads, 1, num_threads, [&](int64_t task, int64_t) {
    HeadRun(tiles, call, kept, out, call.sequences[task / heads], task % heads).run();
  });
}

}  // namespace kt
