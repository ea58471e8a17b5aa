#include "ops/pairs/dropout.h"

#include <algorithm>

#include "base/scratch.h"

namespace kt {
namespace {

constexpr uint64_t kStep = 0x9e3779b97f4a7c15u;

// The finalizer of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// 24 of the bits against the probability in units of 2^-24.
struct Mask {
  explicit Mask(float dropout)
      : limit(static_cast<uint64_t>(static_cast<double>(dropout) * (1 << 24))), kept(1.0f / (1.0f - dropout)) {}
  float at(uint64_t key, int64_t column) const {
    return (mixed(key + (static_cast<uint64_t>(column) + 1) * kStep) >> 40) < limit ? 0.0f : kept;
  }
  const uint64_t limit;
  const float kept;
};

}  // namespace

uint64_t Dropout::key(int64_t row) const {
  const auto token =
      static_cast<uint64_t>(token_number(slot_, routing_.token[static_cast<size_t>(group_.begin + row)]));
  const auto expert = static_cast<uint64_t>(slot_.first_expert + group_.expert);
  const uint64_t of_token = mixed(slot_.seed + (token + 1) * kStep);
  return mixed(of_token + expert * kNumProjections + static_cast<uint64_t>(projection_));
}

Rows<const float> Dropout::dropped(Rows<const float> x, int64_t cols) const {
  if (!active()) return x;
  static thread_local Scratch buffers[kNumProjections];
  const Mask mask(slot_.dropout);
  const int64_t rows = group_.size();
  const Rows<float> out{buffers[projection_].reserve<float>(rows * x.ld), x.ld};
  for (int64_t m = 0; m < rows; ++m) {
    const uint64_t of_row = key(m);
    for (int64_t j = 0; j < cols; ++j) out.row(m)[j] = x.row(m)[j] * mask.at(of_row, j);
    std::fill(out.row(m) + cols, out.row(m + 1), 0.0f);
  }
  return out;
}

void Dropout::add_masked(Rows<const float> grad, ColumnRange columns, Rows<float> y) const {
  const Mask mask(slot_.dropout);
  for (int64_t m = 0; m < group_.size(); ++m) {
    const uint64_t of_row = key(m);
    for (int64_t j = 0; j < columns.count; ++j) y.row(m)[j] += grad.row(m)[j] * mask.at(of_row, columns.first + j);
  }
}

}  // namespace kt
