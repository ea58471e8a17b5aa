// The choice of experts (kernels/dense.h, RouterRows), cut between the pool's threads.
#pragma once

#include "ops/dense/dense.h"

namespace kt {

// weights [T, K] float32 and ids [T, K] int32 from logits [T, E], float32 or bf16: K <= E. weights and ids are
// contiguous. A token's result depends on its own logits only. Shapes fit (checked in bind).
void choose_experts(const DenseEngine& engine, const TensorView& logits, bool normalises, const TensorView& weights,
                    const TensorView& ids);

// The weights of the experts `ids` [T, K], which are read: each in [0, E). Where they are those that `choose_experts`
// chooses, in its order, the weights have its bits.
void weigh_experts(const DenseEngine& engine, const TensorView& logits, bool normalises, const TensorView& ids,
                   const TensorView& weights);

}  // namespace kt
