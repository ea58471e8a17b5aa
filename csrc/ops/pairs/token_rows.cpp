#include "ops/pairs/token_rows.h"

#include <algorithm>
#include <cstring>

#include "base/scratch.h"

namespace kt {

void widen_row(const Tiles& tiles, const TensorView& matrix, int64_t token, float* values) {
  const int64_t at = token * matrix.strides[0], cols = matrix.shape[1];
  if (matrix.dtype == DType::kBf16) {
    tiles.widen(matrix.as<uint16_t>() + at, cols, values);
  } else {
    std::memcpy(values, matrix.as<float>() + at, static_cast<size_t>(cols) * sizeof(float));
  }
}

void combine_pairs(const Tiles& tiles, const Routing& routing, Rows<const float> rows, bool weighted, int64_t token,
                   const TensorView& out) {
  static thread_local Scratch scratch;
  const int64_t cols = out.shape[1], at = (routing.first_token + token) * out.strides[0];
  float* sum = out.dtype == DType::kBf16 ? scratch.reserve<float>(cols) : out.as<float>() + at;
  std::fill(sum, sum + cols, 0.0f);
  for (int64_t position = 0; position < routing.top_k; ++position) {
    const int64_t pair = routing.pair_of[static_cast<size_t>(token * routing.top_k + position)];
    if (pair < 0) continue;
    const float factor = weighted ? routing.weight[static_cast<size_t>(pair)] : 1.0f;
    tiles.add_scaled(rows.row(pair), factor, cols, sum);
  }
  if (out.dtype == DType::kBf16) tiles.narrow(sum, cols, out.as<uint16_t>() + at);
}

}  // namespace kt
