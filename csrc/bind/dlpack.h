// Reads the tensors that Python hands over as DLPack capsules (https://dmlc.github.io/dlpack, C API, version 0.x
// "dltensor" capsules). The capsule stays the caller's: a view is valid while the Python object is alive.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

#include "base/views.h"

namespace kt {

// Thrown inside the binding only; becomes a Python exception with (kind, message).
struct BindError {
  const char* kind;
  std::string message;
};

// What a tensor must be. A size of -1 allows any.
struct TensorRule {
  const char* name;
  std::vector<DType> dtypes;
  std::vector<int64_t> shape;
  bool contiguous = false;  // wholly; the last dimension must be contiguous in any case
  bool written = false;     // no two elements may lie in the same memory, as they do after expand
};

TensorView view_of(const pybind11::handle& capsule, const TensorRule& rule);

// A tensor of a call and its name for messages: `name`, or of a slot's tensor "NAMEslots[SLOT].PART".
struct NamedView {
  const char* name;
  TensorView view;
  int slot = -1;
  const char* part = "";
};

// Throws where a tensor of `written` shares memory with another of them or with one of `read`. Absent tensors are fine.
void check_disjoint(const std::vector<NamedView>& written, const std::vector<NamedView>& read);

}  // namespace kt
