// What one call on a layer takes. The tensors stay the caller's and are only read, but for the results.
#pragma once

#include <vector>

#include "base/views.h"
#include "kernels/tiles.h"
#include "weights/packed.h"

namespace kt {

enum Projection { kGate = 0, kUp = 1, kDown = 2 };
inline constexpr int kNumProjections = 3;
inline constexpr const char* kProjectionNames[] = {"gate", "up", "down"};

// y += scaling * B (A x) for one projection of all experts: a [E, R, in], b [E, out, R], float32 or bfloat16, last
// dimension contiguous, others at any stride. Both or neither are present.
struct LoraPair {
  TensorView a, b;
  bool present() const { return a.present() && a.shape[1] > 0; }
  int64_t rank() const { return present() ? a.shape[1] : 0; }
};

struct LoraSlot {
  LoraPair pairs[kNumProjections];
  float scaling = 1.0f;
};

struct RoutedCall {
  TensorView x;            // [T, H] float32 or bfloat16
  TensorView ids;          // [T, K] int32 or int64; -1: not routed
  TensorView weights;      // [T, K] float32
  TensorView token_slots;  // [T] int32, -1: base only; absent: all base
  std::vector<LoraSlot> slots;
};

// Where gradients go. Those of a slot are float32 and contiguous, and are added to what is there.
struct RoutedGradients {
  TensorView x;        // [T, H], type of the call's x
  TensorView weights;  // [T, K] float32
  std::vector<LoraSlot> slots;
};

// Instruction set and threads of a call.
struct Engine {
  const ExpertLayer& layer;
  const Tiles& tiles;
  int num_threads;
};

}  // namespace kt
