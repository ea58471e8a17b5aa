// The arguments of one call on a layer. The caller owns all tensors; a call writes only to the results.
#pragma once

#include <vector>

#include "base/views.h"
#include "kernels/tiles.h"
#include "weights/packed.h"

namespace kt {

// y += scaling * B (A x) for one projection of all experts: a [E, R, in], b [E, out, R], float32 or bfloat16, last
// dimension contiguous, others at any stride. Both or neither are present.
struct LoraPair {
  TensorView a, b;
  bool present() const { return a.present() && a.shape[1] > 0; }
  int64_t rank() const { return present() ? a.shape[1] : 0; }
};

// `dropout`: the probability that an element of A's input is zeroed; the other elements are divided by 1 - dropout.
// `seed` selects the elements (dropout.h), by the numbers of token and expert. Where the call has a part of a larger
// one's tokens and experts, `tokens` has the numbers of its rows there, and `first_expert` is that of its expert 0.
struct LoraSlot {
  LoraPair pairs[kNumProjections];
  float scaling = 1.0f;
  float dropout = 0.0f;
  uint64_t seed = 0;
  TensorView tokens;  // [T] int64; absent: 0 to T - 1
  int64_t first_expert = 0;
};

inline int64_t token_number(const LoraSlot& slot, int64_t row) {
  return slot.tokens.present() ? slot.tokens.as<int64_t>()[row * slot.tokens.strides[0]] : row;
}

struct RoutedCall {
  TensorView x;            // [T, H] float32 or bfloat16
  TensorView ids;          // [T, K] int32 or int64; -1: not routed
  TensorView weights;      // [T, K] float32
  TensorView token_slots;  // [T] int32, -1: base only; absent: all base
  std::vector<LoraSlot> slots;
};

// The results of backward. Gradients of a slot are float32 and contiguous, and are accumulated.
struct RoutedGradients {
  TensorView x;        // [T, H], type of the call's x, or float32
  TensorView weights;  // [T, K] float32
  std::vector<LoraSlot> slots;
};

// Instruction set and threads of a call.
struct Engine {
  const ExpertLayer& layer;
  const Tiles& tiles;
  int num_threads;
};

// How a call multiplies; see kernels/tiles.h.
enum class Arithmetic { kFloat, kBf16, kInt8 };

// float32 activations: exact products. bfloat16 activations: quantized to int8 for integer weights; otherwise
// multiplied as bf16 where the instruction set can; otherwise widened to float32.
inline Arithmetic arithmetic_of(const Engine& engine, const RoutedCall& call) {
  if (call.x.dtype != DType::kBf16) return Arithmetic::kFloat;
  if (engine.layer.integer()) return Arithmetic::kInt8;
  return engine.tiles.multiply_bf16 ? Arithmetic::kBf16 : Arithmetic::kFloat;
}

}  // namespace kt
