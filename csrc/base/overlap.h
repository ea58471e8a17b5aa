// Whether elements of tensors lie in the same memory.
#pragma once

#include "base/views.h"

namespace kt {

// Two elements of one tensor may lie in the same bytes, as after torch.Tensor.expand. Exact where each dimension steps
// over the whole of the smaller ones, as views of one dense tensor do; true for other strides.
bool overlaps_itself(const TensorView& tensor);

// Some element of one shares a byte with some element of the other: column blocks of one matrix do not. True also where
// that takes too long to tell, which needs strides that do not nest.
bool share_memory(const TensorView& one, const TensorView& other);

}  // namespace kt
