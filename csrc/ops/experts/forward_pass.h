// The forward pass of one run of tokens: the steps, and two ways to order them (schedule.h).
#pragma once

#include "ops/experts/operand.h"
#include "ops/experts/retained.h"
#include "ops/experts/schedule.h"
#include "ops/pairs/finite.h"
#include "ops/pairs/token_rows.h"

namespace kt {

class ForwardPass {
 public:
  // `keep` receives gate, up and the low-rank products for backward; null: they are not kept.
  ForwardPass(const Engine& engine, const RoutedCall& call, const Routing& routing, RetainedChunk* keep);

  // The whole pass. The same job first runs the check `finite`, if not null. Throws NotFinite before anything is
  // written to `out`.
  void run(const TensorView& out, const FiniteCheck* finite);
  // Computes only what `keep` receives, for a backward pass without retained activations.
  void run_kept(const FiniteCheck* finite);

  // Bytes per pair of the rows that live until the end of a pass.
  static int64_t bytes_per_pair(const Engine& engine);

 private:
  // Per-pair arrays: of all pairs, or of one expert's pairs in the scratch of the thread that computes the expert.
  struct Activations {
    Operand x, h;
    Rows<float> low[kNumProjections];
  };
  struct Buffers;
  // A block of an entry of Routing::experts, at which a thread probably goes on; -1: not known.
  struct Place {
    int64_t index = -1, block = 0;
  };

  const PairRange& run_of(int64_t index) const { return routing_.experts[static_cast<size_t>(index)]; }
  Activations reserve(Buffers* buffers, int64_t pairs) const;
  Activations of_run(const PairRange& run) const;
  Activations own() const;
  Rows<float> low_of(const Activations& arrays, const PairRange& run, Projection part) const;

  void prepare_token(int64_t token);
  void load(const PairRange& run, const Activations& arrays) const;
  void load_expert(int64_t index, const Activations& arrays) const;
  void low(int64_t index, Projection part, const Operand& input, const Activations& arrays) const;
  const uint8_t* address_of(const Place& place, Projection part, int node) const;
  void multiply(int64_t index, Projection part, const Operand& input, const Span& blocks, const Place& next,
                Rows<float> to) const;
  void add_bias(const PairRange& run, Projection part, const Span& blocks, Rows<float> to) const;
  void add_lora(int64_t index, Projection part, const Span& blocks, const Activations& arrays, Rows<float> to) const;
  void gate_up(int64_t index, const Span& blocks, const Place& next, const Activations& arrays) const;
  void finish_h(int64_t index, const Activations& arrays, bool for_down) const;
  void down(int64_t index, const Span& blocks, const Place& next, const Activations& arrays) const;
  void whole_expert(int64_t index, const Activations& arrays, bool with_down) const;
  void reserve_tokens();
  void run_plan(const TensorView* out, const FiniteCheck* finite);

  const Engine& engine_;
  const RoutedCall& call_;
  const Routing& routing_;
  RetainedChunk* const keep_;
  const Arithmetic arithmetic_;
  const int64_t rank_;
  const bool with_lora_in_, with_lora_down_;
  Operand tokens_;     // int8: a token is quantized once, not for each of its experts
  Activations all_{};  // of all pairs, where threads share an expert
  Rows<float> y_;      // the experts' outputs, a row a pair
};

}  // namespace kt
