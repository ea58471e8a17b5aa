// Low-rank products for the pairs of one (expert, slot) group: y += scaling * B (A x).
//
// `lora_down` reads A in place. The other products widen a part of A or B to float32 in the thread's scratch, in the
// orientation that lets a product run along contiguous memory. `low` holds scaling * A x: [pairs, rank]. The work grows
// with the group's pairs: an adapter that no token uses costs nothing.
#pragma once

#include "base/rows.h"
#include "base/status.h"
#include "ops/pairs/call.h"
#include "ops/pairs/routing.h"

namespace kt {

// The factors A and B of one projection of an expert, and how many rows they are applied to.
struct LoraFactors {
  const Tiles& tiles;
  const LoraSlot& slot;
  Projection projection;
  int64_t expert;
  int64_t rows;  // of every operand: the group's pairs

  const LoraPair& pair() const { return slot.pairs[projection]; }
};

// low[m, :] = scaling * A x[m]
void lora_down(const LoraFactors& factors, Rows<const float> x, Rows<float> low);

// y[m, j] += (B low[m])[columns.first + j] for j < columns.count
void lora_up(const LoraFactors& factors, Rows<const float> low, ColumnRange columns, Rows<float> y);

// low_grad[m, :] = scaling * (B^T grad[m]), the gradient of A x
void lora_up_backward(const LoraFactors& factors, Rows<const float> grad, Rows<float> low_grad);

// x_grad[m, j] += (A^T low_grad[m])[columns.first + j] for j < columns.count
void lora_down_backward(const LoraFactors& factors, Rows<const float> low_grad, ColumnRange columns,
                        Rows<float> x_grad);

// Of the forward products low = scaling * A x and y = B low: their inputs x and low, and the gradients `grad` of y and
// `low_grad` of A x.
struct LoraOperands {
  Rows<const float> x, grad, low, low_grad;
};

// Adds the gradients of A (low_grad^T x) and B (grad^T low) to `into`, whose slot holds gradients.
void lora_weight_gradients(const LoraFactors& into, const LoraOperands& operands);

// Refuses an adapter of a gate for experts without one.
Status check_adapters(const ExpertMlp& mlp, const std::vector<LoraSlot>& slots);

// Largest rank among the slots for one projection.
int64_t max_rank(const std::vector<LoraSlot>& slots, Projection projection);
int64_t max_rank_of_all(const std::vector<LoraSlot>& slots);

}  // namespace kt
