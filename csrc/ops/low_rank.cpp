#include "ops/low_rank.h"

#include <algorithm>

#include "base/scratch.h"
#include "threads/plan.h"

namespace kt {
namespace {

// Rows and columns of a task of `linear_added`: its sums stay in the L2 cache until they are rounded.
constexpr int64_t kTaskRows = 64, kTaskCols = 512;
static_assert(kTaskRows % kDenseRowUnit == 0);
// Columns of a task of `inner_product`, and rows that are widened at a time.
constexpr int64_t kUnitCols = 128, kPartRows = 64;
// Below this many multiply-adds, waking other threads takes longer than the work.
constexpr int64_t kAloneBelow = 1 << 20;

RowMajor rows_from(const TensorView& view, int64_t row) {
  return {.data = view.as<char>() + row * view.strides[0] * dtype_bytes(view.dtype),
          .stride = view.strides[0],
          .bf16 = view.dtype == DType::kBf16};
}

// `count` elements of a row from `col` on, as floats; in `buffer` unless they lie in memory as floats.
const float* floats_of(const Tiles& tiles, const TensorView& view, int64_t row, int64_t col, int64_t count,
                       float* buffer) {
  const int64_t first = row * view.strides[0] + col;
  if (view.dtype == DType::kF32) return view.as<const float>() + first;
  tiles.widen(view.as<const uint16_t>() + first, count, buffer);
  return buffer;
}

// sums *= alpha, += base; then rounded to a row of `out`.
void finish_row(const Tiles& tiles, float alpha, const TensorView& base, const TensorView& out, int64_t row,
                int64_t col, int64_t count, float* sums) {
  float buffer[kTaskCols];
  for (int64_t i = 0; i < count; ++i) sums[i] *= alpha;
  if (base.present()) {
    const float* added = floats_of(tiles, base, row, col, count, buffer);
    for (int64_t i = 0; i < count; ++i) sums[i] += added[i];
  }
  const int64_t first = row * out.strides[0] + col;
  if (out.dtype == DType::kBf16) {
    tiles.narrow(sums, count, out.as<uint16_t>() + first);
  } else {
    std::copy_n(sums, count, out.as<float>() + first);
  }
}

}  // namespace

void linear_added(const DenseEngine& engine, const TensorView& x, const TensorView& weight, float alpha,
                  const TensorView& base, const TensorView& out) {
  const int64_t rows = x.shape[0], cols = weight.shape[0], inner = x.shape[1];
  if (rows == 0 || cols == 0) return;
  const ScratchUse in_use;
  Plan plan;
  plan.num_threads = rows * cols * inner < kAloneBelow ? 1 : engine.num_threads;
  Stage stage = stage_of(0, (rows + kTaskRows - 1) / kTaskRows);
  stage.spans[0] = {0, cols};
  stage.at_once = kTaskCols;
  plan.stages.push_back(stage);
  run(plan, [&](int, const Range& range) {
    static thread_local Scratch scratch;
    const int64_t first = range.item * kTaskRows, count = std::min(kTaskRows, rows - first);
    float* sums = scratch.reserve<float>(kTaskRows * kTaskCols);
    multiply_here(engine, {.first_row = 0,
                           .rows = count,
                           .first_col = 0,
                           .cols = range.count,
                           .inner = inner,
                           .x = rows_from(x, first),
                           .w = rows_from(weight, range.first),
                           .y = {.data = sums, .stride = kTaskCols, .bf16 = false}});
    for (int64_t m = 0; m < count; ++m)
      finish_row(engine.tiles, alpha, base, out, first + m, range.first, range.count, sums + m * kTaskCols);
  });
}

void inner_product(const DenseEngine& engine, const TensorView& a, const TensorView& b, float alpha,
                   const TensorView& out) {
  const int64_t rows = a.shape[0], rank = a.shape[1], cols = b.shape[1];
  if (rank == 0 || cols == 0) return;
  const ScratchUse in_use;
  Plan plan;
  plan.num_threads = rows * rank * cols < kAloneBelow ? 1 : engine.num_threads;
  Stage stage = stage_of(0, 1);
  stage.spans[0] = {0, cols};
  stage.at_once = kUnitCols;
  plan.stages.push_back(stage);
  run(plan, [&](int, const Range& range) {
    static thread_local Scratch scratch;
    float *sums = scratch.reserve<float>(rank * kUnitCols + kPartRows * (rank + kUnitCols)),
          *left = sums + rank * kUnitCols, *right = left + kPartRows * rank;
    std::fill(sums, sums + rank * kUnitCols, 0.0f);
    for (int64_t first = 0; first < rows; first += kPartRows) {
      const int64_t count = std::min(kPartRows, rows - first);
      for (int64_t m = 0; m < count; ++m) {
        float *l = left + m * rank, *r = right + m * kUnitCols;
        const float* from = floats_of(engine.tiles, a, first + m, 0, rank, l);
        if (from != l) std::copy_n(from, rank, l);
        from = floats_of(engine.tiles, b, first + m, range.first, range.count, r);
        if (from != r) std::copy_n(from, range.count, r);
      }
      engine.tiles.product({.rows = rank,
                            .cols = range.count,
                            .inner = count,
                            .a = left,
                            .a_row = 1,
                            .a_col = rank,
                            .b = {right, kUnitCols},
                            .c = {sums, kUnitCols},
                            .accumulate = true});
    }
    for (int64_t r = 0; r < rank; ++r) {
      float* to = out.as<float>() + r * cols + range.first;
      for (int64_t i = 0; i < range.count; ++i) to[i] = alpha * sums[r * kUnitCols + i];
    }
  });
}

}  // namespace kt
