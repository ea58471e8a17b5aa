#include "ops/dense/norm_backward.h"

#include <algorithm>

#include "base/scratch.h"
#include "threads/pool.h"

namespace kt {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kTaskElements = 1 << 16;

template <class T>
T* row(const TensorView& view, int64_t index) {
  return view.as<T>() + index * view.strides[0];
}

void widen(const Tiles& tiles, const TensorView& view, int64_t index, int64_t count, float* to) {
  if (view.dtype == DType::kBf16) {
    tiles.widen(row<const uint16_t>(view, index), count, to);
  } else {
    std::copy_n(row<const float>(view, index), count, to);
  }
}

// g *= weight; returns the sum of g * x, with lane l of the columns l, l + 16, ..., then halves.
float weigh(const float* weight, const float* x, int64_t count, float* g) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) {
      g[i + l] *= weight[i + l];
      lanes[l] += g[i + l] * x[i + l];
    }
  }
  for (int64_t l = 0; i + l < count; ++l) {
    g[i + l] *= weight[i + l];
    lanes[l] += g[i + l] * x[i + l];
  }
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

}  // namespace

void rms_norm_backward(const DenseEngine& engine, const NormGradient& gradient) {
  const int64_t rows = gradient.x.shape[0], cols = gradient.x.shape[1];
  if (rows == 0 || cols == 0) return;
  const OperationScope scope;
  const int64_t at_once = std::max<int64_t>(kTaskElements / cols, 1);
  run_ranges(rows, at_once, engine.num_threads, [&](int64_t first, int64_t count) {
    static thread_local Scratch scratch;
    float *weight = scratch.reserve<float>(3 * cols), *x = weight + cols, *g = x + cols;
    const TensorView& w = gradient.weight;
    if (w.dtype == DType::kBf16) {
      engine.tiles.widen(w.as<const uint16_t>(), cols, weight);
    } else {
      std::copy_n(w.as<const float>(), cols, weight);
    }
    for (int64_t m = first; m < first + count; ++m) {
      widen(engine.tiles, gradient.x, m, cols, x);
      widen(engine.tiles, gradient.by_out, m, cols, g);
      const float inverse = gradient.inverse.as<const float>()[m];
      const float mean = weigh(weight, x, cols, g) / static_cast<float>(cols) * (inverse * inverse);
      for (int64_t i = 0; i < cols; ++i) g[i] = (g[i] - x[i] * mean) * inverse;
      if (gradient.by_x.dtype == DType::kBf16) {
        engine.tiles.narrow(g, cols, row<uint16_t>(gradient.by_x, m));
      } else {
        std::copy_n(g, cols, row<float>(gradient.by_x, m));
      }
    }
  });
}

}  // namespace kt
