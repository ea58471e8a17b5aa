// What forward and backward of the gated delta rule share: the rows that the rule reads, computed for one key head of
// one sequence.
#pragma once

#include <algorithm>
#include <cmath>

#include "ops/delta/gated_delta.h"

namespace kt {

constexpr int64_t kMostTaps = 8;
constexpr double kLengthEpsilon = 1e-6;  // of queries' and keys' squared length, as Hugging Face's l2norm

inline float element(const TensorView& view, int64_t offset) {
  if (view.dtype == DType::kF32) return view.as<const float>()[offset];
  return __builtin_bit_cast(float, static_cast<uint32_t>(view.as<const uint16_t>()[offset]) << 16);
}

inline void load_floats(const Tiles& tiles, const TensorView& view, int64_t offset, int64_t count, float* to) {
  if (view.dtype == DType::kBf16) {
    tiles.widen(view.as<const uint16_t>() + offset, count, to);
  } else {
    std::copy_n(view.as<const float>() + offset, count, to);
  }
}

inline void store_floats(const Tiles& tiles, const float* from, int64_t count, const TensorView& view, int64_t offset) {
  if (view.dtype == DType::kBf16) {
    tiles.narrow(from, count, view.as<uint16_t>() + offset);
  } else {
    std::copy_n(from, count, view.as<float>() + offset);
  }
}

// 1 / sqrt(sum of squares + epsilon), with lane l of the columns l, l + 16, ..., then halves.
inline float inverse_length(const float* row, int64_t count) {
  float lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    for (int64_t l = 0; l < 16; ++l) lanes[l] += row[i + l] * row[i + l];
  }
  for (int64_t l = 0; i + l < count; ++l) lanes[l] += row[i + l] * row[i + l];
  for (int64_t half = 8; half > 0; half /= 2) {
    for (int64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(lanes[0]) + kLengthEpsilon));
}

// The channels of one key head and of the value heads that read it, side by side: query, key, values.
struct DeltaChannels {
  explicit DeltaChannels(const DeltaShape& shape, int64_t key_head)
      : key_size(shape.key_size), values(shape.group() * shape.value_size) {
    const int64_t of_queries = shape.key_heads * key_size;
    first[0] = key_head * key_size;
    first[1] = of_queries + first[0];
    first[2] = 2 * of_queries + key_head * values;
  }

  int64_t width() const { return 2 * key_size + values; }
  // use(part, first channel, channels, offset within the row)
  template <class Use>
  void each(Use&& use) const {
    use(first[0], key_size, int64_t{0});
    use(first[1], key_size, key_size);
    use(first[2], values, 2 * key_size);
  }

  int64_t key_size, values;
  int64_t first[3];
};

// The filter of these channels, tap after tap: [W][width].
inline void load_filter(const DeltaCall& call, const DeltaChannels& channels, float* to) {
  const int64_t taps = call.filter.shape[1], width = channels.width();
  channels.each([&](int64_t channel, int64_t count, int64_t at) {
    for (int64_t c = 0; c < count; ++c) {
      for (int64_t j = 0; j < taps; ++j)
        to[j * width + at + c] = element(call.filter, (channel + c) * call.filter.strides[0] + j);
    }
  });
}

// Row t of x, of these channels.
inline void load_input(const Tiles& tiles, const DeltaCall& call, const DeltaChannels& channels, int64_t t, float* to) {
  channels.each([&](int64_t channel, int64_t count, int64_t at) {
    load_floats(tiles, call.x, t * call.x.strides[0] + channel, count, to + at);
  });
}

// sum over taps j of filter[j] * rows[j], tap after tap.
inline void convolve(const float* filter, const float* rows, int64_t taps, int64_t width, float* to) {
  for (int64_t c = 0; c < width; ++c) to[c] = filter[c] * rows[c];
  for (int64_t j = 1; j < taps; ++j) {
    for (int64_t c = 0; c < width; ++c) to[c] += filter[j * width + c] * rows[j * width + c];
  }
}

// 1 / length of a token's query and key, before they have the length 1.
struct InverseLengths {
  float query, key;
};

inline float score_scaling(int64_t key_size) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(key_size)));
}

// Of one token: `window` [W][width], its inputs and those before it, filtered into `filtered`; then what the rule reads
// of it, into `row`, which may be `filtered`. `sigmoids` [width] is scratch.
inline InverseLengths prepare_row(const Tiles& tiles, const DeltaChannels& channels, const float* filter,
                                  const float* window, int64_t taps, float* filtered, float* sigmoids, float* row) {
  const int64_t width = channels.width(), K = channels.key_size;
  convolve(filter, window, taps, width, filtered);
  tiles.sigmoid(filtered, width, sigmoids);
  for (int64_t c = 0; c < width; ++c) row[c] = filtered[c] * sigmoids[c];
  const InverseLengths inverse{.query = inverse_length(row, K), .key = inverse_length(row + K, K)};
  const float of_query = inverse.query * score_scaling(K);
  for (int64_t k = 0; k < K; ++k) row[k] *= of_query;
  for (int64_t k = 0; k < K; ++k) row[K + k] *= inverse.key;
  return inverse;
}

struct DeltaGates {
  float decay, strength;
  double by_a;  // the derivative of the decay for a
};

inline double sigmoid_of(double x) { return x >= 0 ? 1.0 / (1.0 + std::exp(-x)) : std::exp(x) / (1.0 + std::exp(x)); }

inline DeltaGates gates_of(const DeltaCall& call, int64_t t, int64_t head) {
  const double rate = std::exp(static_cast<double>(element(call.log_rate, head)));
  const double raw = static_cast<double>(element(call.a, t * call.a.strides[0] + head)) +
                     static_cast<double>(element(call.bias, head));
  const double soft = raw > 30.0 ? raw : std::log1p(std::exp(raw));  // NaN stays NaN
  const double decay = std::exp(-rate * soft);
  const double strength = sigmoid_of(static_cast<double>(element(call.b, t * call.b.strides[0] + head)));
  return {static_cast<float>(decay), static_cast<float>(strength), -rate * sigmoid_of(raw) * decay};
}

// Decays and strengths of row t of x, of `group` value heads from `head` on.
inline void load_gates(const DeltaCall& call, int64_t t, int64_t head, int64_t group, float* decays, float* strengths) {
  for (int64_t i = 0; i < group; ++i) {
    const DeltaGates gates = gates_of(call, t, head + i);
    decays[i] = gates.decay;
    strengths[i] = gates.strength;
  }
}

}  // namespace kt
