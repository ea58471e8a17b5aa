// Tensors of the step's tests.
#pragma once

#include <functional>

#include "checks.h"
#include "reference.h"

namespace kt_test {

// A contiguous tensor of float32 or bf16; by default absent.
class Tensor {
 public:
  Tensor() = default;
  Tensor(std::vector<int64_t> shape, bool bf16, float value) : shape_(std::move(shape)), bf16_(bf16) {
    const int64_t count = std::accumulate(shape_.begin(), shape_.end(), int64_t{1}, std::multiplies<>());
    wide_.assign(static_cast<size_t>(bf16 ? 0 : count), value);
    narrow_.assign(static_cast<size_t>(bf16 ? count : 0), kt::float_to_bf16(value));
  }

  bool present() const { return !shape_.empty(); }
  bool bf16() const { return bf16_; }
  int64_t count() const { return static_cast<int64_t>(bf16_ ? narrow_.size() : wide_.size()); }
  int64_t cols() const { return present() ? shape_.back() : 0; }
  double operator[](int64_t i) const {
    const auto at = static_cast<size_t>(i);
    return bf16_ ? kt::bf16_to_float(narrow_[at]) : wide_[at];
  }
  void set(int64_t i, float value) {
    const auto at = static_cast<size_t>(i);
    if (bf16_) {
      narrow_[at] = kt::float_to_bf16(value);
    } else {
      wide_[at] = value;
    }
  }
  const void* row(int64_t index) const {
    const auto first = static_cast<size_t>(index * cols());
    return bf16_ ? static_cast<const void*>(narrow_.data() + first) : wide_.data() + first;
  }
  void copy_row(int64_t index, const Tensor& from, int64_t from_row) {
    std::memcpy(const_cast<void*>(row(index)), from.row(from_row), row_bytes());
  }
  bool same_row(int64_t index, const Tensor& other, int64_t other_index) const {
    return std::memcmp(row(index), other.row(other_index), row_bytes()) == 0;
  }
  bool operator==(const Tensor& other) const {  // of bits
    if (shape_ != other.shape_ || count() == 0) return shape_ == other.shape_;
    return std::memcmp(row(0), other.row(0), static_cast<size_t>(count()) * (bf16_ ? 2 : 4)) == 0;
  }
  kt::TensorView view() const {
    return present() ? tensor_view(row(0), bf16_ ? kt::DType::kBf16 : kt::DType::kF32, shape_) : kt::TensorView{};
  }

 private:
  size_t row_bytes() const { return static_cast<size_t>(cols()) * (bf16_ ? 2 : 4); }

  std::vector<int64_t> shape_;
  bool bf16_ = false;
  std::vector<float> wide_;
  std::vector<uint16_t> narrow_;
};

inline Row row_of(const Tensor& matrix, int64_t index) {
  Row row;
  for (int64_t k = 0; k < matrix.cols(); ++k) row.push_back(matrix[index * matrix.cols() + k]);
  return row;
}

}  // namespace kt_test
