// Whether elements of tensors lie in the same memory.
#pragma once

#include "base/views.h"

namespace kt {

// True if two elements of the tensor may share bytes, as after torch.Tensor.expand. Exact where the stride of each
// dimension exceeds the extent of all smaller dimensions, as in views of one dense tensor; true for other strides.
bool overlaps_itself(const TensorView& tensor);

// True if an element of `one` shares a byte with an element of `other`; two column blocks of one matrix do not. Also
// true if the search takes too long, which only strides that do not nest can cause.
bool share_memory(const TensorView& one, const TensorView& other);

}  // namespace kt
