#include "ops/lora.h"

#include <algorithm>

#include "base/bf16.h"
#include "base/scratch.h"

namespace kt {
namespace {

// Rows [row, row + rows) x columns [col, col + cols) of one expert's adapter matrix. In float32 a transposed part has
// `cols` rows of `rows` elements, another one `rows` rows of `cols`.
struct Part {
  int64_t row, rows, col, cols;
  bool transposed;
};

template <class T, class Widen>
void widen(Rows<const T> from, const Part& part, Rows<float> out, Widen to_float) {
  for (int64_t r = 0; r < part.rows; ++r) {
    const T* source = from.row(part.row + r) + part.col;
    if (part.transposed) {
      for (int64_t c = 0; c < part.cols; ++c) out.row(c)[r] = to_float(source[c]);
    } else {
      for (int64_t c = 0; c < part.cols; ++c) out.row(r)[c] = to_float(source[c]);
    }
  }
}

// The matrix of one expert in a stack of matrices.
template <class T>
Rows<T> matrix_of(const TensorView& stack, int64_t expert) {
  return {stack.as<T>() + expert * stack.strides[0], stack.strides[1]};
}

// In the thread's scratch, until the next call.
Rows<const float> widened(const TensorView& stack, int64_t expert, const Part& part) {
  static thread_local Scratch scratch;
  const Rows<float> out{scratch.reserve<float>(part.rows * part.cols), part.transposed ? part.rows : part.cols};
  if (stack.dtype == DType::kBf16) {
    widen<uint16_t>(matrix_of<uint16_t>(stack, expert), part, out, bf16_to_float);
  } else {
    widen<float>(matrix_of<float>(stack, expert), part, out, [](float value) { return value; });
  }
  return out;
}

}  // namespace

void lora_down(const LoraFactors& factors, Rows<const float> x, Rows<float> low) {
  const LoraPair& pair = factors.pair();
  if (!pair.present()) return;
  RowProduct product{.rows = factors.rows,
                     .cols = pair.rank(),
                     .inner = pair.a.shape[2],
                     .a = x,
                     .factor = factors.slot.scaling,
                     .c = low};
  if (pair.a.dtype == DType::kBf16) {
    product.b_bf16 = matrix_of<uint16_t>(pair.a, factors.expert);
  } else {
    product.b = matrix_of<float>(pair.a, factors.expert);
  }
  factors.tiles.row_product(product);
}

void lora_up(const LoraFactors& factors, Rows<const float> low, ColumnRange columns, Rows<float> y) {
  const LoraPair& pair = factors.pair();
  const int64_t rank = pair.rank();
  if (!pair.present() || columns.count <= 0) return;
  const Part part{.row = columns.first, .rows = columns.count, .col = 0, .cols = rank, .transposed = true};
  factors.tiles.product({.rows = factors.rows,
                         .cols = columns.count,
                         .inner = rank,
                         .a = low.data,
                         .a_row = low.ld,
                         .a_col = 1,
                         .b = widened(pair.b, factors.expert, part),
                         .c = y,
                         .accumulate = true});
}

void lora_up_backward(const LoraFactors& factors, Rows<const float> grad, Rows<float> low_grad) {
  const LoraPair& pair = factors.pair();
  if (!pair.present()) return;
  // B is transposed once: its rows are then as long as the gradient's rows, and the product runs along both.
  const int64_t rank = pair.rank(), out = pair.b.shape[1];
  factors.tiles.row_product(
      {.rows = factors.rows,
       .cols = rank,
       .inner = out,
       .a = grad,
       .b = widened(pair.b, factors.expert, {.row = 0, .rows = out, .col = 0, .cols = rank, .transposed = true}),
       .factor = factors.slot.scaling,
       .c = low_grad});
}

void lora_down_backward(const LoraFactors& factors, Rows<const float> low_grad, ColumnRange columns,
                        Rows<float> x_grad) {
  const LoraPair& pair = factors.pair();
  const int64_t rank = pair.rank();
  if (!pair.present() || columns.count <= 0) return;
  const Part part{.row = 0, .rows = rank, .col = columns.first, .cols = columns.count, .transposed = false};
  factors.tiles.product({.rows = factors.rows,
                         .cols = columns.count,
                         .inner = rank,
                         .a = low_grad.data,
                         .a_row = low_grad.ld,
                         .a_col = 1,
                         .b = widened(pair.a, factors.expert, part),
                         .c = x_grad,
                         .accumulate = true});
}

void lora_weight_gradients(const LoraFactors& into, const LoraOperands& operands) {
  const LoraPair& pair = into.pair();
  if (!pair.present()) return;
  const int64_t rank = pair.rank();
  const auto& [x, grad, low, low_grad] = operands;
  into.tiles.product({.rows = rank,
                      .cols = pair.a.shape[2],
                      .inner = into.rows,
                      .a = low_grad.data,
                      .a_row = 1,
                      .a_col = low_grad.ld,
                      .b = x,
                      .c = matrix_of<float>(pair.a, into.expert),
                      .accumulate = true});
  into.tiles.product({.rows = pair.b.shape[1],
                      .cols = rank,
                      .inner = into.rows,
                      .a = grad.data,
                      .a_row = 1,
                      .a_col = grad.ld,
                      .b = low,
                      .c = matrix_of<float>(pair.b, into.expert),
                      .accumulate = true});
}

int64_t max_rank(const std::vector<LoraSlot>& slots, Projection projection) {
  int64_t rank = 0;
  for (const LoraSlot& slot : slots) rank = std::max(rank, slot.pairs[projection].rank());
  return rank;
}

int64_t max_rank_of_all(const std::vector<LoraSlot>& slots) {
  return std::max({max_rank(slots, kGate), max_rank(slots, kUp), max_rank(slots, kDown)});
}

}  // namespace kt
