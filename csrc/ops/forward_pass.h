// The forward pass of one run of tokens: the steps, and two ways to order them (schedule.h).
#pragma once

#include "ops/finite.h"
#include "ops/operand.h"
#include "ops/retained.h"
#include "ops/schedule.h"

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
  struct Rows {
    Operand x, h;
    float* low[kNumProjections];
  };
  struct Buffers;

  Rows reserve(Buffers* buffers, int64_t pairs) const;
  Rows rows_of(const PairRange& run) const;
  Rows own_rows() const;
  float* low_of(const Rows& rows, const PairRange& run, Projection part) const;

  void prepare_token(int64_t token);
  void load(const PairRange& run, const Rows& rows) const;
  void load_expert(int64_t index, const Rows& rows) const;
  void low(int64_t index, Projection part, const Operand& input, const Rows& rows) const;
  void gate_up(int64_t index, int64_t block, int64_t blocks, const Rows& rows) const;
  void finish_h(int64_t index, const Rows& rows, bool for_down) const;
  void down(int64_t index, int64_t block, int64_t blocks, const Rows& rows) const;
  void whole_expert(int64_t index, const Rows& rows, bool with_down) const;
  void combine(int64_t token, const TensorView& out) const;
  void reserve_tokens();
  void run_plan(const TensorView* out, const FiniteCheck* finite);

  const Engine& engine_;
  const RoutedCall& call_;
  const Routing& routing_;
  RetainedChunk* const keep_;
  const Arithmetic arithmetic_;
  const int64_t rank_;
  const bool with_lora_in_, with_lora_down_;
  const int64_t ld_y_;
  Operand tokens_;  // int8: a token is quantized once, not for each of its experts
  Rows all_{};      // of all pairs, where threads share an expert
  float* y_ = nullptr;
};

// out[t] = sum over positions, in their order, of factor * rows[pair]; factor 1 unless `weighted`.
void combine_pairs(const Engine& engine, const Routing& routing, const float* rows, int64_t ld, bool weighted,
                   int64_t token, const TensorView& out);

// values [count] of row `token` of a float32 or bf16 matrix, as float32.
void widen_row(const Tiles& tiles, const TensorView& matrix, int64_t token, float* values);

}  // namespace kt
