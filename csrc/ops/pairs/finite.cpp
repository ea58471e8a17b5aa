#include "ops/pairs/finite.h"

#include <algorithm>
#include <cassert>
#include <string>

#include "base/bf16.h"

namespace kt {
namespace {

constexpr int64_t kPartElements = 1 << 15;

int64_t rows_in_part(const TensorView& matrix) {
  return std::max<int64_t>(1, kPartElements / std::max<int64_t>(1, matrix.shape[1]));
}
int64_t parts_of(const TensorView& matrix) {
  return (matrix.shape[0] + rows_in_part(matrix) - 1) / rows_in_part(matrix);
}

// Index of the first value that is not finite, or -1.
int64_t find_bad(const uint16_t* row, int64_t count) {
  unsigned bad = 0;
  for (int64_t i = 0; i < count; ++i) bad |= static_cast<unsigned>((row[i] & 0x7f80u) == 0x7f80u);
  return bad ? std::find_if(row, row + count, [](uint16_t v) { return !bf16_is_finite(v); }) - row : -1;
}

int64_t find_bad(const float* row, int64_t count) {
  float zero = 0.0f;  // x * 0 is NaN for NaN and Inf only
  for (int64_t i = 0; i < count; ++i) zero += row[i] * 0.0f;
  return zero == 0.0f ? -1 : std::find_if(row, row + count, [](float v) { return !float_is_finite(v); }) - row;
}

int64_t find_bad(const TensorView& matrix, int64_t row) {
  const int64_t at = row * matrix.strides[0];
  return matrix.dtype == DType::kBf16 ? find_bad(matrix.as<uint16_t>() + at, matrix.shape[1])
                                      : find_bad(matrix.as<float>() + at, matrix.shape[1]);
}

}  // namespace

Status check_finite(const TensorView& matrix, const char* name) {
  for (int64_t row = 0; row < matrix.shape[0]; ++row) {
    const int64_t bad = find_bad(matrix, row);
    if (bad < 0) continue;
    return {StatusCode::kNumerics,
            std::string(name) + "[" + std::to_string(row) + ", " + std::to_string(bad) + "] is NaN or Inf"};
  }
  return {};
}

FiniteCheck::FiniteCheck(std::initializer_list<Matrix> matrices) : num_matrices_(matrices.size()) {
  assert(matrices.size() <= kMostMatrices);
  std::copy(matrices.begin(), matrices.end(), matrices_);
  for (const Matrix& matrix : matrices) num_parts_ += parts_of(*matrix.values);
}

bool FiniteCheck::is_small() const {
  int64_t elements = 0;
  for (const Matrix& matrix : matrices()) elements += matrix.values->shape[0] * matrix.values->shape[1];
  return elements <= kPartElements;
}

Status FiniteCheck::all() const {
  for (const Matrix& matrix : matrices()) KT_RETURN_IF_ERROR(check_finite(*matrix.values, matrix.name));
  return {};
}

void FiniteCheck::check_part(int64_t part) const {
  for (const Matrix& matrix : matrices()) {
    const int64_t parts = parts_of(*matrix.values), rows = rows_in_part(*matrix.values);
    if (part >= parts) {
      part -= parts;
      continue;
    }
    const int64_t end = std::min(matrix.values->shape[0], (part + 1) * rows);
    for (int64_t row = part * rows; row < end; ++row) {
      if (find_bad(*matrix.values, row) >= 0) throw NotFinite();
    }
    return;
  }
}

}  // namespace kt
