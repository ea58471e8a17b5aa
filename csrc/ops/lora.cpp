#include "ops/lora.h"

#include <algorithm>

#include "base/bf16.h"
#include "base/scratch.h"

namespace kt {
namespace {

// Rows [row, row + rows) x columns [col, col + cols) of one expert's adapter matrix, in float32.
// `transposed`: out[c * ld + r], else out[r * ld + c].
struct Part {
  int64_t row, rows, col, cols;
};

template <class T, class Widen>
void widen(const T* from, int64_t row_stride, const Part& part, bool transposed, float* out, int64_t ld,
           Widen to_float) {
  for (int64_t r = 0; r < part.rows; ++r) {
    const T* source = from + (part.row + r) * row_stride + part.col;
    if (transposed) {
      for (int64_t c = 0; c < part.cols; ++c) out[c * ld + r] = to_float(source[c]);
    } else {
      for (int64_t c = 0; c < part.cols; ++c) out[r * ld + c] = to_float(source[c]);
    }
  }
}

const float* widened(const TensorView& tensor, int64_t expert, const Part& part, bool transposed, int64_t ld) {
  static thread_local Scratch scratch;
  float* out = scratch.reserve<float>((transposed ? part.cols : part.rows) * ld);
  const int64_t base = expert * tensor.strides[0];
  if (tensor.dtype == DType::kBf16) {
    widen(tensor.as<uint16_t>() + base, tensor.strides[1], part, transposed, out, ld, bf16_to_float);
  } else {
    widen(tensor.as<float>() + base, tensor.strides[1], part, transposed, out, ld, [](float value) { return value; });
  }
  return out;
}

}  // namespace

void lora_down(const Tiles& tiles, const LoraSlot& slot, Projection projection, int64_t expert, int64_t rows,
               const float* x, int64_t ldx, float* low, int64_t ld) {
  const LoraPair& pair = slot.pairs[projection];
  if (!pair.present()) return;
  const int64_t rank = pair.rank(), in = pair.a.shape[2], at = expert * pair.a.strides[0];
  const bool bf16 = pair.a.dtype == DType::kBf16;
  tiles.row_product({rows, rank, in, x, ldx, bf16 ? nullptr : pair.a.as<float>() + at,
                     bf16 ? pair.a.as<uint16_t>() + at : nullptr, pair.a.strides[1], slot.scaling, low, ld});
}

void lora_up(const Tiles& tiles, const LoraSlot& slot, Projection projection, int64_t expert, int64_t rows,
             const float* low, int64_t ld, int64_t first, int64_t count, float* y, int64_t ldy) {
  const LoraPair& pair = slot.pairs[projection];
  if (!pair.present() || count <= 0) return;
  const float* b = widened(pair.b, expert, {first, count, 0, pair.rank()}, true, count);
  tiles.product({rows, count, pair.rank(), low, ld, 1, b, count, y, ldy, true});
}

void lora_up_backward(const Tiles& tiles, const LoraSlot& slot, Projection projection, int64_t expert, int64_t rows,
                      const float* grad, int64_t ldg, float* low_grad, int64_t ld) {
  const LoraPair& pair = slot.pairs[projection];
  if (!pair.present()) return;
  // B is transposed once: its rows are then as long as the gradient's rows, and the product runs along both.
  const int64_t rank = pair.rank(), out = pair.b.shape[1];
  const float* b = widened(pair.b, expert, {0, out, 0, rank}, true, out);
  tiles.row_product({rows, rank, out, grad, ldg, b, nullptr, out, slot.scaling, low_grad, ld});
}

void lora_down_backward(const Tiles& tiles, const LoraSlot& slot, Projection projection, int64_t expert, int64_t rows,
                        const float* low_grad, int64_t ld, int64_t first, int64_t count, float* x_grad, int64_t ldx) {
  const LoraPair& pair = slot.pairs[projection];
  if (!pair.present() || count <= 0) return;
  const float* a = widened(pair.a, expert, {0, pair.rank(), first, count}, false, count);
  tiles.product({rows, count, pair.rank(), low_grad, ld, 1, a, count, x_grad, ldx, true});
}

void lora_weight_gradients(const Tiles& tiles, const LoraPair& into, int64_t expert, int64_t rows, const float* x,
                           int64_t ldx, const float* grad, int64_t ldg, const float* low, const float* low_grad,
                           int64_t ld) {
  if (!into.present()) return;
  const int64_t rank = into.rank(), in = into.a.shape[2], out = into.b.shape[1];
  float* a = into.a.as<float>() + expert * into.a.strides[0];
  float* b = into.b.as<float>() + expert * into.b.strides[0];
  tiles.product({rank, in, rows, low_grad, 1, ld, x, ldx, a, into.a.strides[1], true});
  tiles.product({out, rank, rows, grad, 1, ldg, low, ld, b, into.b.strides[1], true});
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
