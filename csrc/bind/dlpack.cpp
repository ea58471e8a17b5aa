#include "bind/dlpack.h"

#include <algorithm>

#include "base/overlap.h"

namespace kt {
namespace {

// The C structures of DLPack 0.x, which are its ABI.
struct DLDevice {
  int32_t device_type, device_id;
};
struct DLDataType {
  uint8_t code, bits;
  uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
constexpr int32_t kCpu = 1, kCudaHost = 3;
constexpr uint8_t kInt = 0, kFloat = 2, kBfloat = 4;

DType dtype_of(const DLDataType& type) {
  if (type.lanes != 1) return DType::kOther;
  if (type.code == kFloat && type.bits == 32) return DType::kF32;
  if (type.code == kBfloat && type.bits == 16) return DType::kBf16;
  if (type.code == kInt && type.bits == 32) return DType::kI32;
  if (type.code == kInt && type.bits == 64) return DType::kI64;
  return DType::kOther;
}

std::string wanted_shape(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i)
    text += (i ? ", " : "") + (shape[i] < 0 ? std::string("any") : std::to_string(shape[i]));
  return text + "]";
}

std::string text_of(const NamedView& named) {
  if (named.slot < 0) return named.name;
  return named.name + ("slots[" + std::to_string(named.slot) + "].") + named.part;
}

void check(const TensorView& view, const TensorRule& rule) {
  const auto fail = [&](const std::string& what) { throw BindError{"invalid_value", std::string(rule.name) + what}; };
  if (std::find(rule.dtypes.begin(), rule.dtypes.end(), view.dtype) == rule.dtypes.end()) {
    std::string allowed;
    for (const DType dtype : rule.dtypes) allowed += (allowed.empty() ? "" : " or ") + std::string(dtype_name(dtype));
    fail(" has dtype " + std::string(dtype_name(view.dtype)) + "; allowed: " + allowed);
  }
  bool matches = view.ndim == static_cast<int>(rule.shape.size());
  for (int i = 0; matches && i < view.ndim; ++i) {
    const int64_t wanted = rule.shape[static_cast<size_t>(i)];
    matches = wanted < 0 || wanted == view.shape[i];
  }
  if (!matches) fail(" has shape " + shape_text(view) + "; expected " + wanted_shape(rule.shape));
  const bool is_empty = std::find(view.shape, view.shape + view.ndim, 0) != view.shape + view.ndim;
  int64_t dense = 1;
  for (int i = view.ndim - 1; i >= 0 && !is_empty; --i) {  // strides of no elements say nothing
    const bool must = rule.contiguous || i == view.ndim - 1;
    if (must && view.shape[i] > 1 && view.strides[i] != dense) {
      fail(rule.contiguous ? " is not contiguous" : " is not contiguous in its last dimension");
    }
    dense *= view.shape[i];
  }
  if (rule.written && overlaps_itself(view)) {
    std::string strides;
    for (int i = 0; i < view.ndim; ++i) strides += (i ? ", " : "") + std::to_string(view.strides[i]);
    fail(" is written, but elements of it lie in the same memory: shape " + shape_text(view) + ", strides [" + strides +
         "] (an expanded tensor?)");
  }
}

}  // namespace

TensorView view_of(const pybind11::handle& capsule, const TensorRule& rule) {
  if (capsule.is_none()) throw BindError{"invalid_value", std::string(rule.name) + " is missing"};
  auto* tensor = static_cast<DLTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (tensor == nullptr) {
    PyErr_Clear();
    throw BindError{"invalid_value", std::string(rule.name) + " is not a DLPack capsule"};
  }
  if (tensor->device.device_type != kCpu && tensor->device.device_type != kCudaHost) {
    throw BindError{"invalid_value", std::string(rule.name) + " is not in CPU memory"};
  }
  if (tensor->ndim < 1 || tensor->ndim > TensorView::kMaxDims) {
    throw BindError{"invalid_value", std::string(rule.name) + " has " + std::to_string(tensor->ndim) +
                                         " dimensions; expected " + std::to_string(rule.shape.size())};
  }
  TensorView view;
  view.data = static_cast<char*>(tensor->data) + tensor->byte_offset;
  view.dtype = dtype_of(tensor->dtype);
  view.ndim = tensor->ndim;
  int64_t dense = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    view.shape[i] = tensor->shape[i];
    view.strides[i] = tensor->strides ? tensor->strides[i] : dense;
    dense *= view.shape[i];
  }
  check(view, rule);
  return view;
}

void check_disjoint(const std::vector<NamedView>& written, const std::vector<NamedView>& read) {
  for (size_t i = 0; i < written.size(); ++i) {
    const auto check_pair = [&](const NamedView& other) {
      if (share_memory(written[i].view, other.view))
        throw BindError{"invalid_value", text_of(written[i]) + " is written, but shares memory with " + text_of(other)};
    };
    std::for_each(read.begin(), read.end(), check_pair);
    std::for_each(written.begin(), written.begin() + static_cast<std::ptrdiff_t>(i), check_pair);
  }
}

}  // namespace kt
