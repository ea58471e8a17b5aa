// A tensor that does not own its memory: pointer, element type, shape, strides in elements.
#pragma once

#include <cstdint>
#include <string>

namespace kt {

enum class DType { kF32, kBf16, kI32, kI64, kOther };

inline const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float32";
    case DType::kBf16:
      return "bfloat16";
    case DType::kI32:
      return "int32";
    case DType::kI64:
      return "int64";
    default:
      return "an unsupported type";
  }
}

inline int64_t dtype_bytes(DType dtype) { return dtype == DType::kI64 ? 8 : dtype == DType::kBf16 ? 2 : 4; }

struct TensorView {
  static constexpr int kMaxDims = 4;

  void* data = nullptr;
  DType dtype = DType::kOther;
  int ndim = 0;
  int64_t shape[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};

  bool present() const { return ndim > 0; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

inline std::string shape_text(const TensorView& tensor) {
  std::string text = "[";
  for (int i = 0; i < tensor.ndim; ++i) text += (i ? ", " : "") + std::to_string(tensor.shape[i]);
  return text + "]";
}

}  // namespace kt
