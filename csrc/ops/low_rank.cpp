#include "ops/low_rank.h"

#include <algorithm>

#include "base/scratch.h"
#include "threads/plan.h"

namespace kt {
namespace {

constexpr int kDown = 0, kUp = 1;

// Rows and columns of a task of `compute`: its sums stay in the L2 cache until they are rounded.
constexpr int64_t kTaskRows = kMostLowRankRows, kTaskCols = 512;
static_assert(kTaskRows % kDenseRowUnit == 0);
// Columns of a task of `low`: few, for they are long sums.
constexpr int64_t kDownCols = 64;
// Columns of a task of `inner_product`, and rows that are widened at a time.
constexpr int64_t kUnitCols = 128, kPartRows = 64;
// Below this many multiply-adds, waking other threads takes longer than the work.
constexpr int64_t kAloneBelow = 1 << 20;
// The same where the threads are awake already, in a step.
constexpr int64_t kAloneBelowAwake = 1 << 16;

// A matrix from one of its elements on.
RowMajor from(const TensorView& view, int64_t row, int64_t col = 0) {
  return {.data = view.as<char>() + (row * view.strides[0] + col) * dtype_bytes(view.dtype),
          .stride = view.strides[0],
          .bf16 = view.dtype == DType::kBf16};
}

// The matrix in a slot of a pool, from one of its rows on.
RowMajor from_slot(const TensorView& pool, int64_t slot, int64_t row) {
  return {.data = pool.as<char>() + (slot * pool.strides[0] + row * pool.strides[1]) * dtype_bytes(pool.dtype),
          .stride = pool.strides[1],
          .bf16 = pool.dtype == DType::kBf16};
}

// `count` elements of a row from `col` on, as floats; in `buffer` unless they lie in memory as floats.
const float* floats_of(const Tiles& tiles, const TensorView& view, int64_t row, int64_t col, int64_t count,
                       float* buffer) {
  const int64_t first = row * view.strides[0] + col;
  if (view.dtype == DType::kF32) return view.as<const float>() + first;
  tiles.widen(view.as<const uint16_t>() + first, count, buffer);
  return buffer;
}

// Rows [row, row + rows) and columns [col, col + cols) of out = base + alpha * x W^T, at most kTaskRows and kTaskCols.
// x begins with the first of these rows; w, a row of W, with that of the first of these columns.
struct Part {
  int64_t row, rows, col, cols;
  int64_t inner;
  RowMajor x, w;
  float alpha;
};

// sums *= alpha, += base; then rounded to a row of `out`.
void finish_row(const Tiles& tiles, const Part& part, const TensorView& base, const TensorView& out, int64_t row,
                float* sums) {
  float buffer[kTaskCols];
  for (int64_t i = 0; i < part.cols; ++i) sums[i] *= part.alpha;
  if (base.present()) {
    const float* added = floats_of(tiles, base, row, part.col, part.cols, buffer);
    for (int64_t i = 0; i < part.cols; ++i) sums[i] += added[i];
  }
  const int64_t first = row * out.strides[0] + part.col;
  if (out.dtype == DType::kBf16) {
    tiles.narrow(sums, part.cols, out.as<uint16_t>() + first);
  } else {
    std::copy_n(sums, part.cols, out.as<float>() + first);
  }
}

void compute(const DenseEngine& engine, const Part& part, const TensorView& base, const TensorView& out) {
  static thread_local Scratch scratch;
  float* sums = scratch.reserve<float>(kTaskRows * kTaskCols);
  multiply_here(engine, {.first_row = 0,
                         .rows = part.rows,
                         .first_col = 0,
                         .cols = part.cols,
                         .inner = part.inner,
                         .x = part.x,
                         .w = part.w,
                         .y = {.data = sums, .stride = kTaskCols, .bf16 = false}});
  for (int64_t m = 0; m < part.rows; ++m) finish_row(engine.tiles, part, base, out, part.row + m, sums + m * kTaskCols);
}

// Columns [first, first + count) of low = scaling * x A^T.
void multiply_down(const DenseEngine& engine, const TensorView& x, const LowRankPool& pool, const LowRankRows& rows,
                   const Range& range, const TensorView& low) {
  const int64_t cols = std::min(range.count, pool.parts * rows.rank - range.first);
  if (cols <= 0) return;  // other rows have a higher rank
  compute(engine,
          {.row = rows.first,
           .rows = rows.rows,
           .col = range.first,
           .cols = cols,
           .inner = x.shape[1],
           .x = from(x, rows.first),
           .w = from_slot(pool.a, rows.slot, range.first),
           .alpha = rows.scaling},
          {}, low);
}

// Columns [first, first + count) of out += low B^T, part by part.
void multiply_up(const DenseEngine& engine, const TensorView& low, const LowRankPool& pool, const LowRankRows& rows,
                 const Range& range, const TensorView& out) {
  int64_t begin = 0;
  for (int part = 0; part < pool.parts; begin = pool.ends[part++]) {
    const int64_t first = std::max(begin, range.first), last = std::min(pool.ends[part], range.first + range.count);
    if (first >= last) continue;
    compute(engine,
            {.row = rows.first,
             .rows = rows.rows,
             .col = first,
             .cols = last - first,
             .inner = rows.rank,
             .x = from(low, rows.first, part * rows.rank),
             .w = from_slot(pool.b, rows.slot, first),
             .alpha = 1.0f},
            out, out);
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
    const int64_t first = range.item * kTaskRows;
    compute(engine,
            {.row = first,
             .rows = std::min(kTaskRows, rows - first),
             .col = range.first,
             .cols = range.count,
             .inner = inner,
             .x = from(x, first),
             .w = from(weight, range.first),
             .alpha = alpha},
            base, out);
  });
}

void add_low_rank(const DenseEngine& engine, const TensorView& x, const LowRankPool& pool,
                  const std::vector<LowRankRows>& rows, const TensorView& low, const TensorView& out) {
  if (rows.empty()) return;
  const int64_t cols = out.shape[1];
  int64_t highest = 0, products = 0;
  for (const LowRankRows& some : rows) {
    highest = std::max(highest, some.rank);
    products += some.rows * some.rank * (pool.parts * x.shape[1] + cols);
  }
  const ScratchUse in_use;
  Plan plan;
  plan.num_threads = products < kAloneBelowAwake ? 1 : engine.num_threads;
  Stage down = stage_of(kDown, static_cast<int64_t>(rows.size())), up = down;
  down.spans[0] = {0, pool.parts * highest};
  down.at_once = kDownCols;
  up.step = kUp;
  up.spans[0] = {0, cols};
  up.at_once = kTaskCols;
  plan.stages = {down, up};
  run(plan, [&](int step, const Range& range) {
    const LowRankRows& some = rows[static_cast<size_t>(range.item)];
    if (step == kDown) {
      multiply_down(engine, x, pool, some, range, low);
    } else {
      multiply_up(engine, low, pool, some, range, out);
    }
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
