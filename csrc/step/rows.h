// The rows between the operations of a step, one for each token, and views of them.
#pragma once

#include <initializer_list>

#include "base/memory.h"
#include "base/scratch.h"
#include "base/views.h"

namespace kt {

// A view of contiguous memory.
TensorView contiguous_view(void* data, DType dtype, std::initializer_list<int64_t> shape);

// Columns [first, first + cols) of a matrix.
TensorView columns_of(const TensorView& matrix, int64_t first, int64_t cols);

// `heads` heads of `size` columns, the first from column `first` on, the others `distance` columns after one another:
// [T, heads, size].
TensorView heads_of(const TensorView& matrix, int64_t first, int64_t heads, int64_t size, int64_t distance);

// An element of a matrix.
inline void* element_of(const TensorView& matrix, int64_t row, int64_t col = 0) {
  return matrix.as<char>() + (row * matrix.strides[0] + col) * dtype_bytes(matrix.dtype);
}

inline int64_t integer_at(const TensorView& integers, int64_t index) {
  return integers.as<const int64_t>()[index * integers.strides[0]];
}

// Whether none of `count` elements, float32 or bf16, is NaN or Inf.
bool are_finite(const void* data, DType dtype, int64_t count);

// Which rows. Each has a buffer of its own.
enum class RowsOf {
  kHidden,
  kResidual,
  kNormed,
  kProjected,
  kQueries,
  kAbsorbed,
  kAttended,
  kOutputs,
  kAttentionParts,
  kGateUp,
  kGated,
  kShared,
  kWide,
  kLogits,
  kWeights,
  kIds,
  kLowRank,
  kWeighed,
  kIndexQueries,
  kIndexKeys,
  kIndexWeights,
  kChosen,
  kOutputGates,
  kSharedGate,
  kDeltaGates,
  kAllHeads,
  kDeltaRows,
  kOwnEmbedded,
  kEmbedded,
  kCount
};

// Memory for the largest batch of recent steps. As other scratch, it is freed after two to three windows of steps
// (base/scratch.h) that needed less than half of it.
class StepRows {
 public:
  // Begins a step: what an earlier step has written is lost. True: memory was freed, for recent steps needed much less.
  bool begin(int64_t tokens);
  int64_t tokens() const { return tokens_; }

  // [tokens, cols]. A later call with this name gives the same memory, with its contents unless it has to grow.
  TensorView matrix(RowsOf name, DType dtype, int64_t cols);
  template <class T>
  T* reserve(RowsOf name, int64_t count) {
    return buffers_[static_cast<int>(name)].reserve<T>(count);
  }

  void free();
  int64_t bytes() const;

 private:
  AlignedBuffer buffers_[static_cast<int>(RowsOf::kCount)];
  int64_t tokens_ = 0, steps_ = 0;
  RecentNeed need_;  // of tokens, by step
  size_t room_ = 0;  // most tokens since the buffers were freed
};

}  // namespace kt
