// Where the tensors of one expert matrix lie in a checkpoint: found by name, types and shapes checked, nothing read.
#pragma once

#include <string>
#include <vector>

#include "weights/checkpoint/checkpoint.h"
#include "weights/packed.h"
#include "weights/scheme.h"

namespace kt {

// A tensor, or the part of a fused one from `first` (an element) on.
struct TensorPart {
  std::string name;
  Checkpoint::Tensor tensor{};
  int64_t first = 0;

  bool present() const { return tensor.entry != nullptr; }
  // "FILE: tensor 'NAME'"
  std::string where() const { return tensor.file->path() + ": tensor '" + name + "'"; }
};

struct MatrixSource {
  TensorPart codes, scales, zeros, group_index, shape;  // the last three not in every scheme
  int64_t first_row = 0;  // of a fused matrix, within its expert: where its blocks of scales begin to count
};

// `expert`'s matrix `part`, rows x cols of `shape`.
Status locate(const Checkpoint& checkpoint, const std::string& prefix, const Scheme& scheme, ExpertShape shape,
              int64_t expert, Projection part, MatrixSource* source);

}  // namespace kt
