#include "step/rows.h"

#include <algorithm>

#include "base/bf16.h"

namespace kt {

TensorView contiguous_view(void* data, DType dtype, std::initializer_list<int64_t> shape) {
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.ndim = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape);
  int64_t dense = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    view.strides[i] = dense;
    dense *= view.shape[i];
  }
  return view;
}

TensorView columns_of(const TensorView& matrix, int64_t first, int64_t cols) {
  TensorView columns = matrix;
  columns.data = element_of(matrix, 0, first);
  columns.shape[1] = cols;
  return columns;
}

TensorView heads_of(const TensorView& matrix, int64_t first, int64_t heads, int64_t size, int64_t distance) {
  TensorView view = contiguous_view(element_of(matrix, 0, first), matrix.dtype, {matrix.shape[0], heads, size});
  view.strides[0] = matrix.strides[0];
  view.strides[1] = distance;
  return view;
}

bool are_finite(const void* data, DType dtype, int64_t count) {
  if (dtype == DType::kBf16) {
    const auto* values = static_cast<const uint16_t*>(data);
    return std::all_of(values, values + count, bf16_is_finite);
  }
  const auto* values = static_cast<const float*>(data);
  return std::all_of(values, values + count, float_is_finite);
}

bool StepRows::begin(int64_t tokens) {
  need_.add(static_cast<size_t>(tokens));
  bool is_freed = false;
  if (++steps_ % kCallsInWindow == 0) {
    is_freed = room_ > 2 * need_.most();
    if (is_freed) free();
    need_.end_window();
  }
  room_ = std::max(room_, static_cast<size_t>(tokens));
  tokens_ = tokens;
  return is_freed;
}

TensorView StepRows::matrix(RowsOf name, DType dtype, int64_t cols) {
  return contiguous_view(reserve<uint8_t>(name, std::max<int64_t>(tokens_ * cols * dtype_bytes(dtype), 1)), dtype,
                         {tokens_, cols});
}

void StepRows::free() {
  for (AlignedBuffer& buffer : buffers_) buffer = AlignedBuffer();
  room_ = 0;
}

int64_t StepRows::bytes() const {
  size_t bytes = 0;
  for (const AlignedBuffer& buffer : buffers_) bytes += buffer.bytes();
  return static_cast<int64_t>(bytes);
}

}  // namespace kt
