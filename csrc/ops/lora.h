// Low-rank products for the pairs of one (expert, slot) group: y += scaling * B (A x).
//
// `lora_down` reads A in place. The other products widen a part of A or B to float32 in the thread's scratch, in the
// orientation that lets a product run along contiguous memory. `low` arrays hold scaling * A x: [pairs, rank], row
// stride `ld`. The work grows with the group's pairs: an adapter that no token uses costs nothing.
#pragma once

#include "ops/call.h"
#include "ops/routing.h"

namespace kt {

// low[m, :] = scaling * A x[m]
void lora_down(const Tiles& tiles, const LoraSlot& slot, Projection projection, int64_t expert, int64_t rows,
               const float* x, int64_t ldx, float* low, int64_t ld);

// y[m, j] += (B low[m])[first + j] for j < count
void lora_up(const Tiles& tiles, const LoraSlot& slot, Projection projection, int64_t expert, int64_t rows,
             const float* low, int64_t ld, int64_t first, int64_t count, float* y, int64_t ldy);

// low_grad[m, :] = scaling * (B^T grad[m]), the gradient of A x
void lora_up_backward(const Tiles& tiles, const LoraSlot& slot, Projection projection, int64_t expert, int64_t rows,
                      const float* grad, int64_t ldg, float* low_grad, int64_t ld);

// x_grad[m, j] += (A^T low_grad[m])[first + j] for j < count
void lora_down_backward(const Tiles& tiles, const LoraSlot& slot, Projection projection, int64_t expert, int64_t rows,
                        const float* low_grad, int64_t ld, int64_t first, int64_t count, float* x_grad, int64_t ldx);

// Adds the gradients of A (low_grad^T x) and B (grad^T low) of one expert to `into`.
void lora_weight_gradients(const Tiles& tiles, const LoraPair& into, int64_t expert, int64_t rows, const float* x,
                           int64_t ldx, const float* grad, int64_t ldg, const float* low, const float* low_grad,
                           int64_t ld);

// Largest rank among the slots for one projection.
int64_t max_rank(const std::vector<LoraSlot>& slots, Projection projection);
int64_t max_rank_of_all(const std::vector<LoraSlot>& slots);

}  // namespace kt
