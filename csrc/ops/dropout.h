// Dropout of what a low-rank product reads: LoRA's x is zero at random places in training, and larger at the others.
//
// Which places these are follows from the slot's seed, the token, its expert, the projection and the column alone: not
// from chunks, threads or the other pairs, and backward finds them again. The mask is never in memory.
#pragma once

#include "ops/call.h"
#include "ops/routing.h"

namespace kt {

// Rows of one projection of the pairs of one (expert, slot) group; the first of them is pair `group.begin`.
class Dropout {
 public:
  Dropout(const LoraSlot& slot, Projection projection, const Routing& routing, const PairRange& group)
      : slot_(slot), projection_(projection), routing_(routing), group_(group) {}

  // A copy [rows, ld] of x [rows, ldx] with its first `cols` columns dropped, the rest zero; x itself without dropout.
  // In memory of the thread that the next call with the same projection takes again.
  const float* dropped(const float* x, int64_t ldx, int64_t cols) const;

  // y[m, j] += (mask * grad)[m, first + j] for j < count: `grad` is by the dropped x.
  void add_masked(const float* grad, int64_t ldg, int64_t first, int64_t count, float* y, int64_t ldy) const;

  bool active() const { return slot_.dropout > 0.0f; }

 private:
  uint64_t key(int64_t row) const;

  const LoraSlot& slot_;
  const Projection projection_;
  const Routing& routing_;
  const PairRange& group_;
};

}  // namespace kt
