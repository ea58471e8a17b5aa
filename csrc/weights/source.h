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
  TensorPart codes, scales, zeros, group_index, shape, global;  // the last four not in every scheme
  TensorPart bias;                                              // absent where the experts have none
  // Of a fused matrix, within its expert: row r is the stored row first_row + r * row_step of stored_rows. The parts
  // `codes` and `bias` begin at first_row.
  int64_t first_row = 0, row_step = 1, stored_rows = 0;
};

// `expert`'s matrix `part` of the table.
Status locate(const Checkpoint& checkpoint, const std::string& prefix, const Scheme& scheme, const ExpertTable& table,
              int64_t expert, Projection part, MatrixSource* source);

// The biases of a matrix, of one or of all experts. `wanted`: their shape.
Status locate_bias(const Checkpoint& checkpoint, const std::string& name, const std::vector<int64_t>& wanted,
                   TensorPart* bias);

}  // namespace kt
