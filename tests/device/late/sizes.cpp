#include "sizes.h"

#include <c10/core/DefaultDtype.h>

namespace late {

namespace {

using c10::IValue;
constexpr size_t kMostKnown = 100000;

class Writer {
 public:
  std::string text;

  template <typename T>
  void number(T value) {
    text.append(reinterpret_cast<const char*>(&value), sizeof value);
  }

  template <typename List>
  void numbers(char kind, const List& list) {
    text.push_back(kind);
    number(list.size());
    for (const auto value : list) number(value);
  }

  void tensor(const at::Tensor& tensor) {
    text.push_back(tensor.defined() ? 't' : 'u');
    if (!tensor.defined()) return;
    number(tensor.scalar_type());
    number(tensor.device().type());
    number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
    number(tensor.is_conj());
    number(tensor.is_neg());
    numbers('s', tensor.sizes());
    numbers('s', tensor.strides());
  }

  // False: a kind of argument that has no place here.
  bool value(const IValue& value) {
    if (value.isNone() || value.isGenerator()) {
      text.push_back('n');
    } else if (value.isTensor()) {
      tensor(value.toTensor());
    } else if (value.isInt()) {
      text.push_back('i');
      number(value.toInt());
    } else if (value.isDouble()) {
      text.push_back('d');
      number(value.toDouble());
    } else if (value.isBool()) {
      text.push_back(value.toBool() ? 'y' : 'z');
    } else if (value.isString()) {
      numbers('c', value.toStringView());
    } else if (value.isDevice()) {
      text.push_back('p');
      number(value.toDevice().type());
    } else if (value.isIntList()) {
      numbers('l', value.toIntVector());
    } else if (value.isDoubleList()) {
      numbers('f', value.toDoubleVector());
    } else if (value.isBoolList()) {
      text.push_back('b');
      for (const bool one : value.toBoolList()) text.push_back(one ? 'y' : 'z');
    } else if (value.isTensorList()) {
      text.push_back('[');
      for (const at::Tensor& one : value.toTensorVector()) tensor(one);
      text.push_back(']');
    } else if (value.isOptionalTensorList()) {
      text.push_back('(');
      for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector()) tensor(one.value_or(at::Tensor()));
      text.push_back(')');
    } else {
      return false;
    }
    return true;
  }
};

}  // namespace

std::string signature(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  Writer writer;
  writer.number(&op.schema());
  writer.number(c10::get_default_dtype_as_scalartype());
  for (const IValue& argument : arguments) {
    if (!writer.value(argument)) return "";
  }
  return writer.text;
}

Sizes& Sizes::get() {
  static Sizes* sizes = new Sizes;  // never destroyed: tensors outlive static destructors
  return *sizes;
}

const torch::jit::Stack* Sizes::find(const std::string& signature) {
  std::lock_guard lock(mutex_);
  const auto found = known_.find(signature);
  return found == known_.end() ? nullptr : &found->second;
}

void Sizes::add(const std::string& signature, const torch::jit::Stack& results) {
  std::lock_guard lock(mutex_);
  if (!signature.empty() && known_.size() < kMostKnown) known_.emplace(signature, results);
}

}  // namespace late
