// The steps that forward and backward share. Each works on all pairs of a Routing, cut into tasks by expert and by
// blocks of columns; how many threads take the tasks changes no result.
#pragma once

#include "base/memory.h"
#include "ops/call.h"
#include "ops/routing.h"
#include "threads/pool.h"

namespace kt {

// Row strides of per-pair arrays: columns padded as the packed layout wants, padding zero. One cache line more, so that
// the rows of a register tile do not all fall into the same sets of the first-level cache.
struct Strides {
  explicit Strides(const ExpertLayer& layer)
      : hidden(layer.in_shape().padded_cols() + 16), inner(layer.out_shape().padded_cols() + 16) {}
  int64_t hidden, inner;
};

// Below this many multiply-adds, waking other threads takes longer than the work.
inline constexpr int64_t kAloneBelow = 1 << 20;

// Runs body(task) on the engine's threads, or on this one alone when `multiply_adds` is little.
template <class Body>
void for_each_task(const Engine& engine, int64_t num_tasks, int64_t multiply_adds, Body&& body) {
  ThreadPool::instance().run(num_tasks, multiply_adds < kAloneBelow ? 1 : engine.num_threads, body);
}

// Per-pair rows of a [T, H] matrix, widened to float32.
void gather_rows(const Engine& engine, const Routing& routing, const TensorView& matrix, int64_t ld, float* rows);
void gather_bf16_rows(const Engine& engine, const Routing& routing, const TensorView& matrix, int64_t ld,
                      uint16_t* rows);

// rows_out = scaling * A rows_in for every group that has this projection.
void lora_low(const Engine& engine, const Routing& routing, const RoutedCall& call, Projection projection,
              const float* rows_in, int64_t ld_in, float* low, int64_t ld_low);

// Activations of the gate and up products: float32 always, bfloat16 where the kernels multiply it as it is.
struct GateUpInput {
  const float* x = nullptr;
  const uint16_t* x_bf16 = nullptr;
  const float* low[2] = {nullptr, nullptr};  // gate, up
  int64_t ld_low = 0;
};

// h = silu(gate) * up. Where `keep_gate` and `keep_up` are given, gate and up are left there.
void gate_up(const Engine& engine, const Routing& routing, const RoutedCall& call, const GateUpInput& input, float* h,
             float* keep_gate, float* keep_up);

// y = W_down h + LoRA.
void down(const Engine& engine, const Routing& routing, const RoutedCall& call, const float* h, const float* low,
          int64_t ld_low, float* y);

// rows_out[m, first .. first + count) (+)= rows_in[m] W[:, first ...], for one expert's rows.
void multiply_transposed(const Tiles& tiles, const PackedMatrix& matrix, int64_t rows, const float* in, int64_t ld_in,
                         int64_t first, int64_t count, float* out, int64_t ld_out, bool accumulate);

// The longest run of tokens whose per-pair scratch stays within a fixed budget; at least one.
int64_t tokens_at_once(const RoutedCall& call, int64_t floats_per_pair);

// out[t] = sum over positions, in their order, of factor * rows[pair]; factor 1 unless `weighted`.
void combine(const Engine& engine, const Routing& routing, const float* rows, int64_t ld, bool weighted,
             const TensorView& out);

}  // namespace kt
