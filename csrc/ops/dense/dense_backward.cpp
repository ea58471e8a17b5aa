#include "ops/dense/dense_backward.h"

#include <algorithm>

#include "base/scratch.h"
#include "threads/plan.h"

namespace kt {
namespace {

// Rows of by_out in a task, and adjacent strips of columns of the weight, which share cache lines.
constexpr int64_t kTaskRows = 240, kTaskStrips = 4;
// Below this many multiply-adds, waking other threads takes longer than the work.
constexpr int64_t kAloneBelow = 1 << 20;

template <class T>
Rows<T> rows_from(const TensorView& view, int64_t row, int64_t col) {
  return Rows<T>{view.as<T>(), view.strides[0]}.from(row, col);
}

struct Part {
  int64_t row, rows, col, cols;
};

// The sums of a part, [rows][kPairCols].
class Sums {
 public:
  Sums(const DenseEngine& engine, const TensorView& by_out, const TensorView& weight)
      : tiles_(engine.tiles), by_out_(by_out), weight_(weight) {
    static thread_local Scratch scratch;
    sums_ = scratch.reserve<float>(kTaskRows * kPairCols + (kTaskRows + kPairCols) * kPairInner);
    left_ = sums_ + kTaskRows * kPairCols;
    right_ = left_ + kTaskRows * kPairInner;
  }

  void add(const Part& part, int64_t first, int64_t inner) {
    if (by_out_.dtype == DType::kF32) {
      const Rows<const float> a = rows_from<const float>(by_out_, part.row, first);
      return multiply(part, inner, a, rows_from<const float>(weight_, first, part.col), first > 0);
    }
    const Rows<const uint16_t> a = rows_from<const uint16_t>(by_out_, part.row, first),
                               b = rows_from<const uint16_t>(weight_, first, part.col);
    if (tiles_.pair_product) {
      return tiles_.pair_product({.rows = part.rows,
                                  .cols = part.cols,
                                  .inner = inner,
                                  .a = a,
                                  .b = b,
                                  .c = {sums_, kPairCols},
                                  .accumulate = first > 0});
    }
    for (int64_t m = 0; m < part.rows; ++m) tiles_.widen(a.row(m), inner, left_ + m * kPairInner);
    for (int64_t n = 0; n < inner; ++n) tiles_.widen(b.row(n), part.cols, right_ + n * kPairCols);
    multiply(part, inner, {left_, kPairInner}, {right_, kPairCols}, first > 0);
  }

  void write(const Part& part, const TensorView& to) const {
    for (int64_t m = 0; m < part.rows; ++m) {
      const float* row = sums_ + m * kPairCols;
      if (to.dtype == DType::kBf16) {
        tiles_.narrow(row, part.cols, rows_from<uint16_t>(to, part.row + m, part.col).data);
      } else {
        std::copy_n(row, part.cols, rows_from<float>(to, part.row + m, part.col).data);
      }
    }
  }

 private:
  void multiply(const Part& part, int64_t inner, Rows<const float> a, Rows<const float> b, bool accumulate) const {
    tiles_.product({.rows = part.rows,
                    .cols = part.cols,
                    .inner = inner,
                    .a = a.data,
                    .a_row = a.ld,
                    .a_col = 1,
                    .b = b,
                    .c = {sums_, kPairCols},
                    .accumulate = accumulate});
  }

  const Tiles& tiles_;
  const TensorView &by_out_, &weight_;
  float *sums_, *left_, *right_;
};

// The matrix [M, K] of a head, of a tensor [M, N, K]; `view` itself where it has no heads.
TensorView head_of(const TensorView& view, int64_t head, int heads_dim) {
  if (view.ndim == 2) return view;
  TensorView matrix = view;
  const int rows_dim = 1 - heads_dim;
  matrix.ndim = 2;
  matrix.shape[0] = view.shape[rows_dim], matrix.strides[0] = view.strides[rows_dim];
  matrix.shape[1] = view.shape[2], matrix.strides[1] = view.strides[2];
  matrix.data = view.as<char>() + head * view.strides[heads_dim] * dtype_bytes(view.dtype);
  return matrix;
}

// All tensors with a dimension for heads, or none of them.
void backward_of_heads(const DenseEngine& engine, int64_t heads, const TensorView& by_out, const TensorView& weight,
                       const TensorView& by_x) {
  const TensorView shape = head_of(weight, 0, 0);
  const int64_t rows = by_out.shape[0], inner = shape.shape[0], cols = shape.shape[1];
  if (rows == 0 || cols == 0 || heads == 0) return;
  const int64_t blocks = (rows + kTaskRows - 1) / kTaskRows;
  const OperationScope scope;
  Plan plan;
  plan.num_threads = heads * rows * cols * inner < kAloneBelow ? 1 : engine.num_threads;
  Stage stage = stage_of(0, heads * blocks);
  stage.spans[0] = {0, (cols + kPairCols - 1) / kPairCols};
  stage.at_once = kTaskStrips;
  plan.stages.push_back(stage);
  run(plan, [&](int, const Range& range) {
    const int64_t head = range.item / blocks, first_row = range.item % blocks * kTaskRows;
    const TensorView from = head_of(by_out, head, 1), matrix = head_of(weight, head, 0), to = head_of(by_x, head, 1);
    Sums sums(engine, from, matrix);
    for (int64_t strip = range.first; strip < range.first + range.count; ++strip) {
      Part part{.row = first_row, .rows = 0, .col = strip * kPairCols, .cols = 0};
      part.rows = std::min(kTaskRows, rows - part.row);
      part.cols = std::min(kPairCols, cols - part.col);
      for (int64_t first = 0; first < std::max<int64_t>(inner, 1); first += kPairInner)
        sums.add(part, first, std::min(kPairInner, inner - first));
      sums.write(part, to);
    }
  });
}

}  // namespace

void linear_backward(const DenseEngine& engine, const TensorView& by_out, const TensorView& weight,
                     const TensorView& by_x) {
  backward_of_heads(engine, 1, by_out, weight, by_x);
}

void linear_heads_backward(const DenseEngine& engine, const TensorView& by_out, const TensorView& weight,
                           const TensorView& by_x) {
  backward_of_heads(engine, by_out.shape[1], by_out, weight, by_x);
}

}  // namespace kt
