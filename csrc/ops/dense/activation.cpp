#include "ops/dense/activation.h"

#include <algorithm>

#include "threads/plan.h"

namespace kt {
namespace {

constexpr Activation kSilu{};
constexpr int64_t kPart = 512;              // elements widened at a time
constexpr int64_t kTaskElements = 1 << 15;  // of a task, about
constexpr int64_t kAloneBelow = 1 << 15;    // elements: waking other threads takes longer than the work

void row_of_bf16(const Tiles& tiles, const uint16_t* gate, const uint16_t* up, int64_t count, uint16_t* out) {
  float gates[kPart], ups[kPart], h[kPart];
  for (int64_t first = 0; first < count; first += kPart) {
    const int64_t part = std::min(kPart, count - first);
    tiles.widen(gate + first, part, gates);
    tiles.widen(up + first, part, ups);
    tiles.activate(kSilu, gates, ups, part, h);
    tiles.narrow(h, part, out + first);
  }
}

template <class T>
T* row(const TensorView& view, int64_t index) {
  return view.as<T>() + index * view.strides[0];
}

// Widens a part of a row, or copies it.
void load(const Tiles& tiles, const TensorView& view, int64_t m, int64_t first, int64_t count, float* to) {
  if (view.dtype == DType::kBf16) {
    tiles.widen(row<const uint16_t>(view, m) + first, count, to);
  } else {
    std::copy_n(row<const float>(view, m) + first, count, to);
  }
}

void store(const Tiles& tiles, const float* from, const TensorView& view, int64_t m, int64_t first, int64_t count) {
  if (view.dtype == DType::kBf16) {
    tiles.narrow(from, count, row<uint16_t>(view, m) + first);
  } else {
    std::copy_n(from, count, row<float>(view, m) + first);
  }
}

// Runs `compute(m)` for all rows, in the pool where there are enough of them.
template <class Compute>
void for_each_row(const DenseEngine& engine, int64_t rows, int64_t cols, const Compute& compute) {
  Plan plan;
  plan.num_threads = rows * cols < kAloneBelow ? 1 : engine.num_threads;
  Stage stage = stage_of(0, 1);
  stage.spans[0] = {0, rows};
  stage.at_once = std::max<int64_t>(kTaskElements / cols, 1);
  plan.stages.push_back(stage);
  run(plan, [&](int, const Range& range) {
    for (int64_t m = range.first; m < range.first + range.count; ++m) compute(m);
  });
}

}  // namespace

void silu_and_multiply(const DenseEngine& engine, const TensorView& gate, const TensorView& up, const TensorView& out) {
  const int64_t rows = gate.shape[0], cols = gate.shape[1];
  if (rows == 0 || cols == 0) return;
  for_each_row(engine, rows, cols, [&](int64_t m) {
    if (gate.dtype == DType::kBf16) {
      row_of_bf16(engine.tiles, row<const uint16_t>(gate, m), row<const uint16_t>(up, m), cols, row<uint16_t>(out, m));
    } else {
      engine.tiles.activate(kSilu, row<const float>(gate, m), row<const float>(up, m), cols, row<float>(out, m));
    }
  });
}

void silu_and_multiply_backward(const DenseEngine& engine, const SwigluGradient& gradient) {
  const int64_t rows = gradient.gate.shape[0], cols = gradient.gate.shape[1];
  if (rows == 0 || cols == 0) return;
  for_each_row(engine, rows, cols, [&](int64_t m) {
    float gates[kPart], ups[kPart], by_out[kPart];
    for (int64_t first = 0; first < cols; first += kPart) {
      const int64_t part = std::min(kPart, cols - first);
      load(engine.tiles, gradient.gate, m, first, part, gates);
      load(engine.tiles, gradient.up, m, first, part, ups);
      load(engine.tiles, gradient.by_out, m, first, part, by_out);
      engine.tiles.activate_backward(kSilu, gates, ups, by_out, 1.0f, part);
      store(engine.tiles, gates, gradient.by_gate, m, first, part);
      store(engine.tiles, ups, gradient.by_up, m, first, part);
    }
  });
}

namespace {

// Calls use(gates, first, x, count) for parts of row m, with the sigmoid of each part's element in `gates`. `each`
// elements have one gate.
template <class Use>
void with_sigmoids(const Tiles& tiles, const TensorView& gate, const TensorView& x, int64_t m, int64_t each,
                   Use&& use) {
  float gates[kPart], values[kPart], sigmoids[kPart];
  const int64_t cols = x.shape[1];
  for (int64_t first = 0; first < cols; first += kPart) {
    const int64_t count = std::min(kPart, cols - first);
    const int64_t first_gate = first / each, last_gate = (first + count - 1) / each;
    load(tiles, gate, m, first_gate, last_gate - first_gate + 1, gates);
    tiles.sigmoid(gates, last_gate - first_gate + 1, gates);
    for (int64_t i = 0; i < count; ++i) sigmoids[i] = gates[(first + i) / each - first_gate];
    load(tiles, x, m, first, count, values);
    use(sigmoids, first, values, count);
  }
}

}  // namespace

void sigmoid_and_multiply(const DenseEngine& engine, const TensorView& gate, const TensorView& x,
                          const TensorView& out) {
  const int64_t rows = x.shape[0], cols = x.shape[1];
  if (rows == 0 || cols == 0) return;
  for_each_row(engine, rows, cols, [&](int64_t m) {
    const auto multiply = [&](const float* sigmoids, int64_t first, float* values, int64_t count) {
      for (int64_t i = 0; i < count; ++i) values[i] *= sigmoids[i];
      store(engine.tiles, values, out, m, first, count);
    };
    with_sigmoids(engine.tiles, gate, x, m, cols / gate.shape[1], multiply);
  });
}

void sigmoid_and_multiply_backward(const DenseEngine& engine, const SigmoidGradient& gradient) {
  const int64_t rows = gradient.x.shape[0], cols = gradient.x.shape[1];
  if (rows == 0 || cols == 0) return;
  const int64_t each = cols / gradient.gate.shape[1];
  for_each_row(engine, rows, cols, [&](int64_t m) {
    double sum = 0;
    const auto backward = [&](const float* sigmoids, int64_t first, float* values, int64_t count) {
      float by_out[kPart];
      load(engine.tiles, gradient.by_out, m, first, count, by_out);
      for (int64_t i = 0; i < count; ++i) {
        sum += static_cast<double>(by_out[i]) * values[i];
        by_out[i] *= sigmoids[i];
        if ((first + i + 1) % each != 0) continue;
        const auto by_gate = static_cast<float>(sum * sigmoids[i] * (1.0 - sigmoids[i]));
        store(engine.tiles, &by_gate, gradient.by_gate, m, (first + i) / each, 1);
        sum = 0;
      }
      store(engine.tiles, by_out, gradient.by_x, m, first, count);
    };
    with_sigmoids(engine.tiles, gradient.gate, gradient.x, m, each, backward);
  });
}

}  // namespace kt
