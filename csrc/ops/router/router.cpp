#include "ops/router/router.h"

#include <algorithm>

#include "threads/pool.h"

namespace kt {

namespace {

void run_rows(const DenseEngine& engine, const TensorView& logits, bool normalises, const TensorView& weights,
              const TensorView& ids, bool given) {
  const RouterRows whole{.first_row = 0,
                         .rows = logits.shape[0],
                         .experts = logits.shape[1],
                         .top_k = weights.shape[1],
                         .logits = matrix_of(logits),
                         .normalises = normalises,
                         .weights = weights.as<float>(),
                         .ids = ids.as<int32_t>(),
                         .given = given};
  if (whole.rows == 0 || whole.top_k == 0) return;
  constexpr int64_t kTaskLogits = 1 << 14;
  run_ranges(whole.rows, std::max<int64_t>(kTaskLogits / whole.experts, 1), engine.num_threads,
             [&](int64_t first, int64_t count) {
               RouterRows part = whole;
               part.first_row = first;
               part.rows = count;
               engine.kernels().choose_experts(part);
             });
}

}  // namespace

void choose_experts(const DenseEngine& engine, const TensorView& logits, bool normalises, const TensorView& weights,
                    const TensorView& ids) {
  run_rows(engine, logits, normalises, weights, ids, false);
}

void weigh_experts(const DenseEngine& engine, const TensorView& logits, bool normalises, const TensorView& ids,
                   const TensorView& weights) {
  run_rows(engine, logits, normalises, weights, ids, true);
}

}  // namespace kt
