#include "ops/pairs/token_rows.h"

#include <algorithm>
#include <cstring>

#include "base/scratch.h"
#include "threads/pool.h"

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

Status combine_rows(const Tiles& tiles, int num_threads, const PairRows& call, const TensorView& out) {
  constexpr int64_t kTokensInTask = 16;
  const OperationScope scope;
  const int64_t num_tokens = call.row_of.shape[0], top_k = call.row_of.shape[1], num_rows = call.rows.shape[0];
  Routing routing;
  routing.num_tokens = num_tokens;
  routing.top_k = top_k;
  routing.weight.assign(static_cast<size_t>(num_rows), 0.0f);
  for (int64_t token = 0; token < num_tokens; ++token) {
    for (int64_t position = 0; position < top_k; ++position) {
      const int64_t row = call.row_of.as<int64_t>()[token * call.row_of.strides[0] + position];
      if (row < -1 || row >= num_rows)
        return invalid_value("row_of[" + std::to_string(token) + ", " + std::to_string(position) + "] is " +
                             std::to_string(row) + "; allowed: -1 to " + std::to_string(num_rows - 1));
      routing.pair_of.push_back(row);
      if (row >= 0)
        routing.weight[static_cast<size_t>(row)] = call.weights.as<float>()[token * call.weights.strides[0] + position];
    }
  }
  const Rows<const float> rows{call.rows.as<float>(), call.rows.strides[0]};
  run_ranges(num_tokens, kTokensInTask, num_threads, [&](int64_t first, int64_t count) {
    for (int64_t token = first; token < first + count; ++token) combine_pairs(tiles, routing, rows, true, token, out);
  });
  return {};
}

}  // namespace kt
