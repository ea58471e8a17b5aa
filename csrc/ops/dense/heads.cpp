#include "ops/dense/heads.h"

#include "base/scratch.h"
#include "threads/plan.h"

namespace kt {
namespace {

// Tokens in a task. Each task reads its head's weight once, which the L2 cache holds.
constexpr int64_t kTaskTokens = 128;
static_assert(kTaskTokens % kDenseRowUnit == 0);
// Below this many multiply-adds, waking other threads takes longer than the work.
constexpr int64_t kAloneBelow = 1 << 20;

// A head's matrix of the tokens from `token` on: x [T, N, K] or out [T, N, O].
RowMajor tokens_of(const TensorView& heads, int64_t token, int64_t head) {
  const int64_t first = token * heads.strides[0] + head * heads.strides[1];
  return {.data = heads.as<char>() + first * dtype_bytes(heads.dtype),
          .stride = heads.strides[0],
          .bf16 = heads.dtype == DType::kBf16};
}

RowMajor weight_of(const TensorView& weight, int64_t head) {
  return {.data = weight.as<char>() + head * weight.strides[0] * dtype_bytes(weight.dtype),
          .stride = weight.strides[1],
          .bf16 = weight.dtype == DType::kBf16};
}

}  // namespace

void linear_heads(const DenseEngine& engine, const TensorView& x, const TensorView& weight, const TensorView& out) {
  const int64_t tokens = x.shape[0], heads = x.shape[1], inner = x.shape[2], cols = weight.shape[1];
  if (tokens == 0 || heads == 0 || cols == 0) return;
  const OperationScope scope;
  Plan plan;
  plan.num_threads = tokens * heads * inner * cols < kAloneBelow ? 1 : engine.num_threads;
  Stage stage = stage_of(0, heads);
  stage.spans[0] = {0, tokens};
  stage.at_once = kTaskTokens;
  plan.stages.push_back(stage);
  run(plan, [&](int, const Range& range) {
    multiply_here(engine, {.first_row = 0,
                           .rows = range.count,
                           .first_col = 0,
                           .cols = cols,
                           .inner = inner,
                           .x = tokens_of(x, range.first, range.item),
                           .w = weight_of(weight, range.item),
                           .y = tokens_of(out, range.first, range.item)});
  });
}

}  // namespace kt
