#include "ops/dense/activation.h"

#include <algorithm>

#include "threads/plan.h"

namespace kt {
namespace {

constexpr int64_t kPart = 512;              // elements widened at a time
constexpr int64_t kTaskElements = 1 << 15;  // of a task, about
constexpr int64_t kAloneBelow = 1 << 15;    // elements: waking other threads takes longer than the work

void row_of_bf16(const Tiles& tiles, const uint16_t* gate, const uint16_t* up, int64_t count, uint16_t* out) {
  float gates[kPart], ups[kPart], h[kPart];
  for (int64_t first = 0; first < count; first += kPart) {
    const int64_t part = std::min(kPart, count - first);
    tiles.widen(gate + first, part, gates);
    tiles.widen(up + first, part, ups);
    tiles.swiglu(gates, ups, part, h);
    tiles.narrow(h, part, out + first);
  }
}

template <class T>
T* row(const TensorView& view, int64_t index) {
  return view.as<T>() + index * view.strides[0];
}

}  // namespace

void silu_and_multiply(const DenseEngine& engine, const TensorView& gate, const TensorView& up, const TensorView& out) {
  const int64_t rows = gate.shape[0], cols = gate.shape[1];
  if (rows == 0 || cols == 0) return;
  Plan plan;
  plan.num_threads = rows * cols < kAloneBelow ? 1 : engine.num_threads;
  Stage stage = stage_of(0, 1);
  stage.spans[0] = {0, rows};
  stage.at_once = std::max<int64_t>(kTaskElements / cols, 1);
  plan.stages.push_back(stage);
  run(plan, [&](int, const Range& range) {
    for (int64_t m = range.first; m < range.first + range.count; ++m) {
      if (gate.dtype == DType::kBf16) {
        row_of_bf16(engine.tiles, row<const uint16_t>(gate, m), row<const uint16_t>(up, m), cols,
                    row<uint16_t>(out, m));
      } else {
        engine.tiles.swiglu(row<const float>(gate, m), row<const float>(up, m), cols, row<float>(out, m));
      }
    }
  });
}

}  // namespace kt
