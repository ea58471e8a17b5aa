// Dropout on the input of a low-rank product: in training LoRA's x is zero at random places and larger at the others.
//
// The mask is a function of the slot's seed, the token, its expert, the projection and the column. Chunks, threads and
// other pairs do not affect the mask, so backward computes the same one. The mask is never stored.
#pragma once

#include "base/rows.h"
#include "ops/pairs/call.h"
#include "ops/pairs/routing.h"

namespace kt {

// The input rows of one projection for the pairs of one (expert, slot) group; row 0 is pair `group.begin`.
class Dropout {
 public:
  Dropout(const LoraSlot& slot, Projection projection, const Routing& routing, const PairRange& group)
      : slot_(slot), projection_(projection), routing_(routing), group_(group) {}

  // A copy [rows, x.ld] of x with dropout in its first `cols` columns and zeros in the others; x itself without
  // dropout. The copy lies in the thread's scratch, which the next call with the same projection overwrites.
  Rows<const float> dropped(Rows<const float> x, int64_t cols) const;

  // y[m, j] += grad[m, j] * mask[m, columns.first + j] for j < columns.count; `grad` is the gradient of the dropped x.
  void add_masked(Rows<const float> grad, ColumnRange columns, Rows<float> y) const;

  bool active() const { return slot_.dropout > 0.0f; }

 private:
  uint64_t key(int64_t row) const;

  const LoraSlot& slot_;
  const Projection projection_;
  const Routing& routing_;
  const PairRange& group_;
};

}  // namespace kt
