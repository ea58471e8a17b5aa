#include "ops/dense/low_rank.h"

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
// Heads of a task of LoRA on heads, and columns of the latent space.
constexpr int64_t kTaskHeads = 4, kLatentCols = 128;
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

RowMajor from_row(RowMajor matrix, int64_t row) {
  matrix.data = static_cast<char*>(matrix.data) + row * matrix.stride * (matrix.bf16 ? 2 : 4);
  return matrix;
}

// The same for any number of rows and columns.
void compute_blocks(const DenseEngine& engine, const Part& whole, const TensorView& base, const TensorView& out) {
  for (int64_t row = 0; row < whole.rows; row += kTaskRows) {
    for (int64_t col = 0; col < whole.cols; col += kTaskCols) {
      Part part = whole;
      part.row += row;
      part.rows = std::min(kTaskRows, whole.rows - row);
      part.col += col;
      part.cols = std::min(kTaskCols, whole.cols - col);
      part.x = from_row(whole.x, row);
      part.w = from_row(whole.w, col);
      compute(engine, part, base, out);
    }
  }
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

template <class T>
RowMajor transposed_of(const RowMajor& matrix, int64_t rows, int64_t cols) {
  static thread_local Scratch scratch;
  T* to = scratch.reserve<T>(rows * cols);
  for (int64_t r = 0; r < rows; ++r) {
    const T* from = matrix.row<const T>(r);
    for (int64_t c = 0; c < cols; ++c) to[c * rows + r] = from[c];
  }
  return {.data = to, .stride = rows, .bf16 = matrix.bf16};
}

// A copy of a matrix [rows, cols], transposed; until the thread's next one.
RowMajor transposed(const RowMajor& matrix, int64_t rows, int64_t cols) {
  return matrix.bf16 ? transposed_of<uint16_t>(matrix, rows, cols) : transposed_of<float>(matrix, rows, cols);
}

// Of heads [T, N, size] the matrix [T, size] of one, and the matrix [T * N, size] of all.
TensorView head_of(const TensorView& heads, int64_t head) {
  TensorView matrix = heads;
  matrix.data = heads.as<char>() + head * heads.strides[1] * dtype_bytes(heads.dtype);
  matrix.ndim = 2;
  matrix.shape[1] = heads.shape[2];
  matrix.strides[1] = 1;
  return matrix;
}

TensorView rows_of_heads(const TensorView& heads) {
  TensorView matrix = head_of(heads, 0);
  matrix.shape[0] = heads.shape[0] * heads.shape[1];
  matrix.strides[0] = heads.strides[1];
  return matrix;
}

// Of each adapter's rows `count` units, `at_once` in a task.
Stage units_of(int step, const std::vector<LowRankRows>& rows, int64_t count, int64_t at_once) {
  Stage stage = stage_of(step, static_cast<int64_t>(rows.size()));
  stage.spans[0] = {0, count};
  stage.at_once = at_once;
  return stage;
}

// Rows [row, row + rows) of x times `cols` rows of w.
Part part_of(const TensorView& x, int64_t row, int64_t rows, int64_t inner, const RowMajor& w, int64_t cols,
             float alpha) {
  return {.row = row, .rows = rows, .col = 0, .cols = cols, .inner = inner, .x = from(x, row), .w = w, .alpha = alpha};
}

// LoRA on the heads of latent attention. The kernels multiply rows by rows, so b_key and a are transposed for the
// query: of each a task's share, once.
class HeadAdapters {
 public:
  HeadAdapters(const DenseEngine& engine, const TensorView& x, const LowRankPool& pool,
               const std::vector<LowRankRows>& rows, const TensorView& low, const TensorView& out)
      : engine_(engine),
        x_(x),
        low_(low),
        out_(out),
        pool_(pool),
        rows_(rows),
        heads_(x.shape[1]),
        inner_(x.shape[2]),
        cols_(out.shape[2]),
        head_rows_(pool.b.shape[1] / heads_) {}

  void add_to_queries() const {
    run_both(units_of(kUp, rows_, cols_, kLatentCols), [&](int step, const LowRankRows& some, const Range& range) {
      step == kDown ? query_down(some, range) : query_up(some, range);
    });
  }

  void add_to_outputs() const {
    run_both(units_of(kUp, rows_, heads_, kTaskHeads), [&](int step, const LowRankRows& some, const Range& range) {
      step == kDown ? output_down(some, range) : output_up(some, range);
    });
  }

 private:
  template <class Body>
  void run_both(const Stage& up, Body&& body) const {
    if (rows_.empty()) return;
    int64_t ranks = 0;
    for (const LowRankRows& some : rows_) ranks += some.rows * some.rank;
    const OperationScope scope;
    Plan plan;
    plan.num_threads = ranks * heads_ * (inner_ + cols_) < kAloneBelowAwake ? 1 : engine_.num_threads;
    plan.stages.push_back(units_of(kDown, rows_, heads_, kTaskHeads));
    plan.stages.push_back(up);
    run(plan, [&](int step, const Range& range) { body(step, rows_[static_cast<size_t>(range.item)], range); });
  }

  // Some heads.
  void query_down(const LowRankRows& some, const Range& range) const {
    for (int64_t head = range.first; head < range.first + range.count; ++head) {
      const RowMajor w = transposed(from_slot(pool_.b, some.slot, head * head_rows_), inner_, some.rank);
      compute_blocks(engine_, part_of(head_of(x_, head), some.first, some.rows, inner_, w, some.rank, 1.0f), {},
                     head_of(low_, head));
    }
  }

  // Some columns of all heads.
  void query_up(const LowRankRows& some, const Range& range) const {
    RowMajor a = from_slot(pool_.a, some.slot, 0);
    a.data = static_cast<char*>(a.data) + range.first * dtype_bytes(pool_.a.dtype);
    const TensorView out = rows_of_heads(out_);
    Part part = part_of(rows_of_heads(low_), some.first * heads_, some.rows * heads_, some.rank,
                        transposed(a, some.rank, range.count), range.count, some.scaling);
    part.col = range.first;
    compute_blocks(engine_, part, out, out);
  }

  // As many rows of all heads as the range's heads have.
  void output_down(const LowRankRows& some, const Range& range) const {
    const int64_t first = some.first * heads_ + range.first * some.rows;
    const RowMajor w = from_slot(pool_.a, some.slot, 0);
    compute_blocks(engine_, part_of(rows_of_heads(x_), first, range.count * some.rows, inner_, w, some.rank, 1.0f), {},
                   rows_of_heads(low_));
  }

  // Some heads.
  void output_up(const LowRankRows& some, const Range& range) const {
    for (int64_t head = range.first; head < range.first + range.count; ++head) {
      const TensorView out = head_of(out_, head);
      const RowMajor w = from_slot(pool_.b, some.slot, (head + 1) * head_rows_ - cols_);
      compute_blocks(engine_, part_of(head_of(low_, head), some.first, some.rows, some.rank, w, cols_, some.scaling),
                     out, out);
    }
  }

  const DenseEngine& engine_;
  const TensorView &x_, &low_, &out_;
  const LowRankPool& pool_;
  const std::vector<LowRankRows>& rows_;
  const int64_t heads_, inner_, cols_, head_rows_;  // head_rows_: of b
};

}  // namespace

void linear_added(const DenseEngine& engine, const TensorView& x, const TensorView& weight, float alpha,
                  const TensorView& base, const TensorView& out) {
  const int64_t rows = x.shape[0], cols = weight.shape[0], inner = x.shape[1];
  if (rows == 0 || cols == 0) return;
  const OperationScope scope;
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
  const OperationScope scope;
  Plan plan;
  plan.num_threads = products < kAloneBelowAwake ? 1 : engine.num_threads;
  Stage down = stage_of(kDown, static_cast<int64_t>(rows.size())), up = down;
  down.spans[0] = {0, pool.parts * highest};
  down.at_once = kDownCols;
  up.step = kUp;
  up.spans[0] = {0, cols};
  up.at_once = kTaskCols;
  plan.stages.push_back(down);
  plan.stages.push_back(up);
  run(plan, [&](int step, const Range& range) {
    const LowRankRows& some = rows[static_cast<size_t>(range.item)];
    if (step == kDown) {
      multiply_down(engine, x, pool, some, range, low);
    } else {
      multiply_up(engine, low, pool, some, range, out);
    }
  });
}

void add_low_rank_queries(const DenseEngine& engine, const TensorView& x, const LowRankPool& pool,
                          const std::vector<LowRankRows>& rows, const TensorView& low, const TensorView& out) {
  HeadAdapters(engine, x, pool, rows, low, out).add_to_queries();
}

void add_low_rank_outputs(const DenseEngine& engine, const TensorView& x, const LowRankPool& pool,
                          const std::vector<LowRankRows>& rows, const TensorView& low, const TensorView& out) {
  HeadAdapters(engine, x, pool, rows, low, out).add_to_outputs();
}

void inner_product(const DenseEngine& engine, const TensorView& a, const TensorView& b, float alpha,
                   const TensorView& out) {
  const int64_t rows = a.shape[0], rank = a.shape[1], cols = b.shape[1];
  if (rank == 0 || cols == 0) return;
  const OperationScope scope;
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
