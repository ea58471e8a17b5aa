#include "ops/experts/lora.h"

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

constexpr int64_t kLine = 16;  // floats of a cache line

// Elements [0, count) of a column of `from`, widened.
template <class T, class Widen>
inline void widen_column(Rows<const T> from, int64_t count, float* to, Widen to_float) {
  for (int64_t r = 0; r < count; ++r) to[r] = to_float(*from.row(r));
}

// A transposed part is written by whole cache lines: 16 rows of `from` at a time, column by column.
template <class T, class Widen>
void widen(Rows<const T> from, const Part& part, Rows<float> out, Widen to_float) {
  const Rows<const T> source = from.from(part.row, part.col);
  if (!part.transposed) {
    for (int64_t r = 0; r < part.rows; ++r) {
      for (int64_t c = 0; c < part.cols; ++c) out.row(r)[c] = to_float(source.row(r)[c]);
    }
    return;
  }
  int64_t r = 0;
  for (; r + kLine <= part.rows; r += kLine) {
    for (int64_t c = 0; c < part.cols; ++c) widen_column(source.from(r, c), kLine, out.row(c) + r, to_float);
  }
  for (int64_t c = 0; c < part.cols; ++c) widen_column(source.from(r, c), part.rows - r, out.row(c) + r, to_float);
}

// The matrix of one expert in a stack of matrices.
template <class T>
Rows<T> matrix_of(const TensorView& stack, int64_t expert) {
  return {stack.as<T>() + expert * stack.strides[0], stack.strides[1]};
}

// In the thread's scratch, until the next call. Rows lie a line further apart than they are long: rows a power of two
// apart would fall into the same sets of the L1 cache.
Rows<const float> widened(const TensorView& stack, int64_t expert, const Part& part) {
  static thread_local Scratch scratch;
  const int64_t rows = part.transposed ? part.cols : part.rows, cols = part.transposed ? part.rows : part.cols;
  const int64_t ld = round_up(cols, kLine) + kLine;
  const Rows<float> out{scratch.reserve<float>(rows * ld), ld};
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
  constexpr int64_t kColumnsAtOnce = 256;  // of rank 16, these columns of B stay in the L1 cache
  const LoraPair& pair = factors.pair();
  const int64_t rank = pair.rank();
  if (!pair.present()) return;
  for (int64_t first = 0; first < columns.count; first += kColumnsAtOnce) {
    const int64_t count = std::min(kColumnsAtOnce, columns.count - first);
    const Part part{.row = columns.first + first, .rows = count, .col = 0, .cols = rank, .transposed = true};
    factors.tiles.product({.rows = factors.rows,
                           .cols = count,
                           .inner = rank,
                           .a = low.data,
                           .a_row = low.ld,
                           .a_col = 1,
                           .b = widened(pair.b, factors.expert, part),
                           .c = y.from(0, first),
                           .accumulate = true});
  }
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

Status check_adapters(const ExpertMlp& mlp, const std::vector<LoraSlot>& slots) {
  for (size_t i = 0; i < slots.size() && !mlp.has_gate(); ++i) {
    if (slots[i].pairs[kGate].a.present())
      return invalid_value("slots[" + std::to_string(i) + "] adapts gate, but the experts of this layer have no gate");
  }
  return {};
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
